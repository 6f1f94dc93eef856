"""Calls of tools are read in the form in which the template writes them.

The templates are a few lines each, in the styles of families of models; those that packages ship
are in tests/real_templates.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from torchrl_llm.envs.tool_calls import BadCall, ToolCall, find_call_form
from torchrl_llm.rendering import Renderer
from torchrl_llm.testing.tokenizers import byte_tokenizer

CHAT = (
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{calls}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
EACH = "{% for call in m.tool_calls %}{% set call = call.function %}"
# Qwen2.5, Qwen3-Coder, GLM, Mistral (a list, and names apart), DeepSeek, Llama 3.1, LFM2, harmony
STYLES = {
    "json": EACH + '\n<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}",
    "tags": EACH + "\n<tool_call>\n<function={{ call.name }}>\n{% for k, v in call.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "keys": EACH + "\n<tool_call>{{ call.name }}\n{% for k, v in call.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "list": "{% if m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}{{ {'name': call.function.name, "
    "'arguments': call.function.arguments, 'id': call.id} | tojson }}{{ ', ' if not loop.last }}{% endfor %}]{% endif %}",
    "names": EACH + "[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}{% endfor %}",
    "section": "{% if m.tool_calls %}<|calls|>" + EACH + "<|call|>function<|sep|>{{ call.name }}\n```json\n"
    "{{ call.arguments | tojson }}\n```<|/call|>{{ '\n' if not loop.last }}{% endfor %}<|/calls|>{% endif %}",
    "bare": EACH + '{{ raise_exception("one") if m.tool_calls | length > 1 }}{"name": "{{ call.name }}", '
    '"parameters": {{ call.arguments | tojson }}}{% endfor %}',
}  # fmt: skip
HEADER = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role != 'assistant' %}<|message|>{{ m.content }}<|end|>{% else %}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %} to=functions.{{ call.name }}<|channel|>commentary json"
    "<|message|>{{ call.arguments | tojson }}<|call|>{% else %}<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TEMPLATES = {name: CHAT.format(calls=calls) for name, calls in STYLES.items()} | {"header": HEADER}
TOKENS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|calls|>",
    "<|/calls|>",
    "<|call|>",
    "<|/call|>",
    "<|sep|>",
]
TOKENS += ["<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|end|>"]
SINGLE = ("bare", "header")
NEED_TOKENS = ("header", "section")
TOOLS = [
    {"name": name, "parameters": {"properties": {"text": {"type": "string"}, "number": {"type": "integer"}}}}
    for name in ("add", "search.web", "a-b_2")
]


def tokenizer_of(template, *, tokens=True):
    tokenizer = byte_tokenizer(chat_template=template)
    if tokens:
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOKENS])
    return tokenizer


FORMS = {name: find_call_form(Renderer(tokenizer_of(text))) for name, text in TEMPLATES.items()}
AS_TEXT = {
    name: find_call_form(Renderer(tokenizer_of(text, tokens=False)))
    for name, text in TEMPLATES.items()
    if name not in NEED_TOKENS
}

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Co"]) | st.just("\n"), max_size=20)
plain = texts.filter(lambda text: "</" not in text and text == text.strip())
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6, allow_subnormal=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
arguments = st.fixed_dictionaries(
    {},
    optional={"text": plain, "number": st.integers(-99, 99), "other": values.filter(lambda v: not isinstance(v, str))},
)
calls = st.lists(
    st.builds(ToolCall, st.sampled_from([tool["name"] for tool in TOOLS]), arguments), min_size=1, max_size=3
)


@pytest.fixture(params=TEMPLATES)
def name(request):
    return request.param


class TestForms:
    @pytest.mark.parametrize("forms", [FORMS, AS_TEXT], ids=["tokens", "text"])
    @settings(max_examples=25, deadline=None)
    @given(calls=calls)
    def test_what_is_written_is_read(self, forms, calls):
        for name, form in forms.items():
            said = calls[:1] if name in SINGLE else calls
            assert form.parse(form.write(said), TOOLS) == tuple(said), name

    def test_what_is_written_is_the_templates_own(self, name):
        form, said = FORMS[name], [ToolCall("add", {"text": "a\nb", "number": 7, "other": [1, {"c": None}]})]
        said += [] if name in SINGLE else [ToolCall("add", {})]
        message = [
            {"id": f"call0000{i}", "type": "function", "function": call._asdict()} for i, call in enumerate(said)
        ]
        rendered = tokenizer_of(TEMPLATES[name]).apply_chat_template(
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": message}],
            tokenize=False,
        )
        assert form.write(said)
        assert form.write(said) in rendered

    def test_ids_are_read_as_text_is(self, name):
        form, tokenizer = FORMS[name], tokenizer_of(TEMPLATES[name])
        written = form.write([ToolCall("add", {"text": "Größe <b> \U0001f642"})])
        assert form.parse(tokenizer.encode(written), TOOLS) == (ToolCall("add", {"text": "Größe <b> \U0001f642"}),)

    def test_what_spells_a_token_is_text(self, name):
        if name in SINGLE:
            pytest.skip("no token opens a call")
        written = FORMS[name].write([ToolCall("add", {"number": 1})])
        spelled = byte_tokenizer().encode(written)
        assert byte_tokenizer().decode(spelled) == written
        assert FORMS[name].parse(spelled) == ()

    def test_an_answer_without_a_call_has_none(self, name):
        for said in ("", "It is 7.", 'The "name" is a {"key": 1}.', "to=functions.add is how I would call it."):
            assert FORMS[name].parse(said) == ()

    def test_a_cut_call_is_a_bad_one(self, name):
        written = FORMS[name].write([ToolCall("add", {"number": 1})])
        for end in ("}", "</parameter>", "</arg_value>"):
            if end in written:
                (bad,) = FORMS[name].parse(written[: written.index(end)])
                assert isinstance(bad, BadCall)
                assert bad.text
                assert bad.reason.endswith(".")

    def test_a_bad_call_is_no_reason_to_lose_the_others(self, name):
        if name in ("list", *SINGLE):
            pytest.skip("it has one JSON value")
        form = FORMS[name]
        first, last = form.write([ToolCall("add", {"number": 1})]), form.write([ToolCall("add", {"number": 2})])
        for broken in (
            first.replace("add", ""),
            first[:-1],
            first.replace("1", "{", 1) if name == "json" else first[:-2],
        ):
            cut, good = form.parse(broken + last, TOOLS)
            assert isinstance(cut, BadCall)
            assert good == ToolCall("add", {"number": 2})

    def test_templates_without_calls_have_no_form(self):
        assert find_call_form(Renderer(byte_tokenizer())) is None

    def test_calls_have_text_before_them(self):
        assert FORMS["json"].parse("Let me see." + FORMS["json"].write([ToolCall("add", {})])) == (ToolCall("add", {}),)

    def test_text_that_opens_calls_stands_at_the_beginning_of_a_line(self):
        written = AS_TEXT["json"].write([ToolCall("add", {})]).strip()
        assert AS_TEXT["json"].parse(f"Well.\n{written}") == (ToolCall("add", {}),)
        assert AS_TEXT["json"].parse(f"I would write {written}") == ()


class TestValues:
    def test_those_between_tags_have_the_declared_type(self):
        said = "<tool_call>\n<function=add>\n<parameter=text>\n7\n</parameter>\n<parameter=number>\n7\n</parameter>\n</function>\n</tool_call>"
        assert FORMS["tags"].parse(said, TOOLS) == (ToolCall("add", {"text": "7", "number": 7}),)

    @pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"', "[" * 5000, "1" * 5000])
    def test_what_json_does_not_have_is_refused(self, value):
        said = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {value}}}}}\n</tool_call>'
        (bad,) = FORMS["json"].parse(said)
        assert isinstance(bad, BadCall)
        json.dumps(bad.reason, ensure_ascii=False).encode()

    @pytest.mark.parametrize(
        "schema", [{"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}]
    )
    @pytest.mark.parametrize(("written", "value"), [("12345", "12345"), ("true", "true"), ("null", None), ("a", "a")])
    def test_an_optional_text_may_have_digits(self, schema, written, value):
        form = FORMS["tags"]
        said = form.write([ToolCall("add", {"text": "PLACE"})]).replace("PLACE", written)
        tool = {"name": "add", "parameters": {"properties": {"text": schema}}}
        assert form.parse(said, [tool]) == (ToolCall("add", {"text": value}),)

    def test_a_schema_may_say_nothing_of_arguments(self):
        said = FORMS["json"].write([ToolCall("add", {"a": 1})])
        assert FORMS["json"].parse(said, [{"name": "add", "parameters": {"properties": None}}])

    def test_arguments_under_another_name_are_not_left_out(self):
        (bad,) = FORMS["json"].parse('<tool_call>\n{"name": "add", "parameters": {"number": 1}}\n</tool_call>')
        assert bad.reason == "The call has no 'arguments'."
        (call,) = FORMS["json"].parse('<tool_call>\n{"name": "add"}\n</tool_call>')
        assert call == ToolCall("add", {})

    @pytest.mark.parametrize(
        ("written", "calls"),
        [
            ("[add(\n a=1)]", (ToolCall("add", {"a": 1}),)),
            ("[add(a=1),\n add(a=2)]", (ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2}))),
            ("[add(a=true)]", None),
            ("[add(a=b.c)]", None),
        ],
    )
    def test_pythons_calls(self, written, calls):
        calls_of = (
            "{% if m.tool_calls %}<call>["
            + EACH
            + (
                "{{ call.name }}({% for k, v in call.arguments.items() %}{{ k }}="
                "{{ '\"' ~ v | replace('\"', '\\\\\"') ~ '\"' if v is string else v }}{{ ', ' if not loop.last }}{% endfor %})"
                "{{ ', ' if not loop.last }}{% endfor %}]</call>{% endif %}"
            )
        )
        form = find_call_form(Renderer(tokenizer_of(CHAT.format(calls=calls_of))))
        found = form.parse(form.write([ToolCall("add", {})]).replace("[add()]", written))
        if calls is not None:
            assert found == calls
        else:
            assert "values are strings" in found[0].reason
            assert " at 0x" not in found[0].reason  # a replay would say something else

    @pytest.mark.parametrize(
        "call", ['{"name": 7, "arguments": {}}', '{"arguments": {}}', "7", "[]", '{"name": "add", "arguments": [1]}']
    )
    def test_what_is_no_call_is_refused(self, call):
        found = FORMS["json"].parse(f"<tool_call>\n{call}\n</tool_call>")
        assert isinstance(found[0], BadCall)

    def test_keys_come_in_any_order(self):
        said = '<tool_call> {"arguments":{"a":1},"name":"add"} </tool_call>'
        assert FORMS["json"].parse(said) == (ToolCall("add", {"a": 1}),)


class TestHeader:
    def test_its_parts_come_in_any_order(self):
        said = '<|channel|>commentary to=functions.add <|message|>{"a": 1}'
        assert FORMS["header"].parse(said) == (ToolCall("add", {"a": 1}),)

    def test_it_ends_by_a_token_of_its_own(self):
        assert FORMS["header"].end == "<|call|>"
        assert FORMS["json"].end is None
