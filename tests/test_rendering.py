"""Conversations as text: today's date, which the clock says, or another day for a run."""

from __future__ import annotations

import datetime

import pytest
from transformers.utils import chat_template_utils

from torchrl_llm.envs import ChatFormatter
from torchrl_llm.rendering import Message, Renderer
from torchrl_llm.testing.tokenizers import byte_tokenizer
from torchrl_llm.utils.options import ConfigError

BODY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DATED = {
    "llama 3": "{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    '        {%- set date_string = strftime_now("%d %b %Y") %}\n    {%- else %}\n'
    '        {%- set date_string = "26 Jul 2024" %}\n    {%- endif %}\n{%- endif %}\nToday: {{ date_string }}\n' + BODY,
    "a macro": "{% macro day(f) %}{{ strftime_now(f) }}{% endmacro %}{{ day('%A, %-d. %B %y, week %V') }}" + BODY,
    "white space first": "\n\n  {% set d = strftime_now('%Y-%m-%d') %}  {{ d[:4] | int - 1 }}{{ d[4:] }}\n" + BODY,
    "indented": "  {% if true %}\n  {{ strftime_now('%%d is 100%%, %c %x %X %j %U %H:%M:%S') }}{% endif %}" + BODY,
    "a loop": "{% for m in messages %}{{ strftime_now(m.role[:0] ~ '%Y') }}{% endfor %}" + BODY,
}
# Every directive that may stand in a format, put together at run time where it has one flag at
# most.
FLAGGED = [
    "%f",
    "%^b",
    "%#Z",
    "%Ey",
    "%Od",
    "%EY",
    "%10d",
    "%_5e",
    "%-^B",
    "%0e",
    "%:z",
    "%+4Y",
    "%s",
    "%Q",
    "%%f",
    "100%",
]
ASKED = [Message("user", "Guess."), Message("assistant", "5"), Message("user", "Higher.")]
DAY = datetime.date(2024, 2, 29)


def set_clock(monkeypatch, day):
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(day.year, day.month, day.day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


class TestDate:
    @pytest.mark.parametrize("name", DATED)
    def test_another_day_is_rendered_as_the_clock_would(self, name, monkeypatch):
        tokenizer = byte_tokenizer(chat_template=DATED[name])
        render = Renderer(tokenizer, today=DAY)
        set_clock(monkeypatch, DAY)
        expected = Renderer(tokenizer)(ASKED)
        set_clock(monkeypatch, datetime.date(2031, 7, 1))
        assert Renderer(tokenizer)(ASKED) != expected
        assert render(ASKED) == expected

    @pytest.mark.parametrize("given", ["the template", "its arguments"])
    def test_every_directive_comes_out(self, given):
        spelled = f"{{% set formats = {FLAGGED} %}}" if given == "the template" else ""
        template = "{% for f in formats %}{{ strftime_now(f) }}|{% endfor %}{{ strftime_now('%' ~ '^' ~ 'a') }}" + BODY
        kwargs = {"formats": FLAGGED} if given == "its arguments" else {}
        render = Renderer(byte_tokenizer(chat_template=spelled + template), today=DAY, chat_template_kwargs=kwargs)
        day = datetime.datetime(DAY.year, DAY.month, DAY.day)
        assert render(ASKED).partition("<|im_start|>")[0].split("|") == [day.strftime(f) for f in [*FLAGGED, "%^a"]]

    @pytest.mark.parametrize("name", DATED)
    def test_it_is_found_out_whether_a_template_shows_it(self, name):
        assert Renderer(byte_tokenizer(chat_template=DATED[name])).shows_date()

    @pytest.mark.parametrize(
        ("template", "kwargs"),
        [
            (BODY, {}),
            (DATED["llama 3"], {"date_string": "26 Jul 2024"}),
            ("{% if tools %}{{ strftime_now('%Y') }}{% endif %}" + BODY, {}),
        ],
    )
    def test_or_does_not(self, template, kwargs):
        tokenizer = byte_tokenizer(chat_template=template)
        render = Renderer(tokenizer, chat_template_kwargs=kwargs)
        assert not render.shows_date()
        assert Renderer(tokenizer, chat_template_kwargs=kwargs, today=DAY)(ASKED) == render(ASKED)
        assert ChatFormatter(tokenizer, chat_template_kwargs=kwargs, template_date="2024-02-29").template_date is None

    def test_a_formatter_keeps_the_day_on_which_it_was_made(self, monkeypatch):
        tokenizer = byte_tokenizer(chat_template=DATED["llama 3"])
        formatter = ChatFormatter(tokenizer)
        assert formatter.template_date == datetime.date.today().isoformat()
        before = formatter.start("Guess.")
        set_clock(monkeypatch, datetime.date(2031, 7, 1))
        assert formatter.start("Guess.") == before
        again = ChatFormatter(tokenizer, template_date=formatter.template_date)
        assert again.start("Guess.") == before
        assert tokenizer.decode(ChatFormatter(tokenizer, template_date="2024-02-29").start("?")).startswith(
            "Today: 29 Feb 2024\n"
        )

    @pytest.mark.parametrize("text", ["29 Feb 2024", "2023-02-29", "", "today"])
    def test_what_is_no_day_is_refused(self, text):
        with pytest.raises(ConfigError, match=f"template_date is {text!r}; expected a day, such as '2026-11-25'"):
            ChatFormatter(byte_tokenizer(), template_date=text)
