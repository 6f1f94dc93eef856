"""Conversations to text, through the chat template of a tokenizer: :class:`Renderer`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from string import ascii_letters
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes

__all__ = ["ChatTemplateError", "Message", "MissingChatTemplateError", "Renderer", "text_constants"]

Role = Literal["user", "tool"]

# What transformers passes to every template, and Jinja's own names.
_SUPPLIED = frozenset(
    [
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "raise_exception",
        "strftime_now",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "sep_token",
        "cls_token",
        "mask_token",
        "range",
        "dict",
        "lipsum",
        "cycler",
        "joiner",
        "namespace",
    ]
)
_TRIAL = "q0\n0."
_CLOCK = "strftime_now"
_DIRECTIVE = re.compile(
    r"%[-_0^#+]*\d*:*[EO]?[A-Za-z]"
)  # of the C library's strftime, with its flags, width and modifiers


class Message(NamedTuple):
    """One message of a conversation.

    Attributes:
        role: who wrote it.
        content: its text.
        fields: further fields, such as ``reasoning_content`` or ``tool_calls``.
    """

    role: str
    content: str
    fields: Mapping[str, Any] = MappingProxyType({})


class ChatTemplateError(ValueError):
    """The tokenizer's chat template cannot be used."""


class MissingChatTemplateError(ChatTemplateError):
    """The tokenizer has no chat template."""


class Renderer:
    """A tokenizer's chat template as a function from messages to text.

    Some templates want the content of a message as text, some as a list of parts. One conversation
    is tried to find out.

    Args:
        tokenizer: a transformers tokenizer.
        system_prompt: text of a system message in front; ``None``: there is none.
        chat_template_kwargs: passed on to the template.
        today: the date that the template gets as today's; ``None``: that of the clock, at each
            call.

    Attributes:
        source: the text of the template.
        parts: whether contents are given as ``[{"type": "text", "text": ...}]``.

    Raises:
        MissingChatTemplateError: the tokenizer has no template.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> Renderer(byte_tokenizer())([Message("user", "Guess.")])
        '<|im_start|>user\\nGuess.<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        today: date | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise MissingChatTemplateError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template. Set tokenizer.chat_template (in a "
                'run the setting chat_template), for example to torchrl_llm.envs.CHATML, or pass template="raw" for a base model.'
            )
        self.tokenizer = tokenizer
        self.kwargs = dict(chat_template_kwargs or {})
        self.source = _source(tokenizer, self.kwargs)
        if today is not None and _CLOCK in self.source:
            self.kwargs["chat_template"] = _clock(today, self.source + str(self.kwargs)) + self.source
        self._system = [Message("system", system_prompt)] if system_prompt is not None else []
        self.parts = False
        self.parts = self._wants_parts()

    def __call__(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        """The text of a conversation.

        Args:
            messages: the messages behind the system prompt.
            prompt: whether the assistant's next turn is opened.

        Raises:
            ChatTemplateError: the template refuses the conversation, or needs what it was not
                given.
        """
        whole = [self._as_dict(*message) for message in [*self._system, *messages]]
        try:
            return str(
                self.tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=prompt, **self.kwargs)
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ChatTemplateError(self._refusal(whole, error)) from error

    def shows_date(self) -> bool:
        """Whether the template writes today's date into a conversation: it renders another text on
        another day."""
        if _CLOCK not in self.source:
            return False
        question, kwargs = [*self._system, Message("user", _TRIAL)], {**self.kwargs, "chat_template": self.source}
        # Two days that differ in all that a date has.
        first, second = (
            Renderer(self.tokenizer, chat_template_kwargs=kwargs, today=date(*day))(question)
            for day in ((2001, 2, 3), (2019, 12, 31))
        )
        return first != second

    def _as_dict(self, role: str, content: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": content}] if self.parts else content, **fields}

    def _wants_parts(self) -> bool:
        """Whether the template leaves text out, or fails on it, and writes the same content as
        parts."""
        if self._shows_trial():
            return False
        self.parts = True
        return self._shows_trial()

    def _shows_trial(self) -> bool:
        try:
            return _TRIAL in self([Message("user", _TRIAL)])
        except ChatTemplateError:
            return False

    def _refusal(self, messages: list[dict[str, Any]], error: Exception) -> str:
        roles = [message["role"] for message in messages]
        told = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        advice = ["give the tokenizer another template (in a run, with the setting chat_template)"]
        if roles[0] == "system":
            advice.insert(0, "if it knows no system role, put the system prompt into the environment's first message")
        wanted = sorted(_variables(self.source) - _SUPPLIED - self.kwargs.keys())
        # One that a template merely asks for is no reason to refuse, so they are named where it
        # failed by itself, and not in its own words: raise_exception is a plain TemplateError.
        if wanted and type(error) is not TemplateError:
            named = ", ".join(wanted)
            advice.insert(0, f"pass what it lacks as chat_template_kwargs (it reads {named}, which are not given)")
        return (
            f"The chat template of the tokenizer {self.tokenizer.name_or_path!r} refuses a conversation with the roles "
            f"{roles}: {told}. To mend it, {', or '.join(advice)}."
        )


def _clock(today: date, spells: str) -> str:
    """The definition of ``strftime_now`` for a day that does not end, to stand before a template.

    Args:
        today: the day.
        spells: text that has the formats in it. What is put together elsewhere is known with one
            flag at most.
    """
    # transformers gives templates no other functions than its own, so it is a macro: each directive
    # is replaced by its value. The line break behind it is not part of the template's text, as
    # transformers sets Jinja's trim_blocks.
    now = datetime(today.year, today.month, today.day)
    spelled = [f"%{flag}{letter}" for flag in ("", *"-_0^#") for letter in ascii_letters] + _DIRECTIVE.findall(spells)
    values = json.dumps([[each, now.strftime(each)] for each in dict.fromkeys(spelled)])
    return (
        f'{{%- macro {_CLOCK}(format) -%}}{{%- for part in format.split("%%") -%}}{{%- set shown = namespace(text=part) -%}}'
        f"{{%- for each in {values} -%}}{{%- set shown.text = shown.text.replace(each[0], each[1]) -%}}{{%- endfor -%}}"
        '{{ "%" if not loop.first }}{{ shown.text }}{%- endfor -%}{%- endmacro %}\n'
    )


def _source(tokenizer: Any, kwargs: Mapping[str, Any]) -> str:
    """The text of the template that ``apply_chat_template`` takes: a tokenizer may have several, by
    name."""
    return str(tokenizer.get_chat_template(kwargs.get("chat_template"), tools=kwargs.get("tools")))


def text_constants(source: str) -> list[str]:
    """The texts that a template's expressions hold, each once: among them are those at which it
    splits messages.

    Examples:
        >>> text_constants("Hi {{ m.content.split('</' ~ 'plan>')[-1] }}")
        ['</', '</plan>', 'plan>']
    """
    tree, found = _parsed(source), set()
    for node in () if tree is None else tree.find_all((nodes.Const, nodes.Concat, nodes.Add)):
        try:
            value = node.as_const()
        except nodes.Impossible:
            continue
        found |= {value} if isinstance(value, str) else set()
    return sorted(found)


def _variables(source: str) -> set[str]:
    """The names that a template reads and does not set."""
    tree = _parsed(source)
    return set() if tree is None else meta.find_undeclared_variables(tree)


def _parsed(source: str) -> nodes.Template | None:
    # The one tag that transformers adds marks what an assistant said.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)
    try:
        return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError:
        return None
