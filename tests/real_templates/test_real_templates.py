"""Every chat template of the packages that ship some: its own text, or a sentence that says what it
does.

``make test-templates`` installs the packages; ``TEMPLATE_TABLE=1`` writes the table of
docs/templates.md.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from sources import TOOL, Template, real_tokenizers, templates, tokenizer_for
from transformers import PreTrainedTokenizerBase

from torchrl_llm.envs import AsTemplate, ChatFormatter, ChatTemplateError, NotAppendOnlyError
from torchrl_llm.envs.template_probe import Contexts
from torchrl_llm.envs.tool_calls import ToolCall, find_call_form
from torchrl_llm.rendering import Message, Renderer

pytestmark = [
    pytest.mark.templates,
    pytest.mark.skipif(
        "REAL_TEMPLATES" not in os.environ, reason="needs packages with chat templates: make test-templates"
    ),
]

FOUND = templates() if os.environ.get("REAL_TEMPLATES") else []
PAGE = Path(__file__).parents[2] / "docs" / "templates.md"
BEGIN, END = "<!-- table of make test-templates: begin -->", "<!-- end -->"

# What a refusal names, and how a table says it.
PROPERTIES = {
    "it drops thinking from earlier answers": "drops thinking",
    "which its generation prompt writes, out of earlier answers": "leaves out what its prompt opens",
    "before an answer, which its generation prompt leaves out": "lets the model write a header",
    "it changes answers with": "changes answers",
    "it refuses answers with": "refuses answers with some tokens",
    "after the last assistant message only": "ends only its last answer by a token",
    "makes several messages of one answer": "several messages an answer (harmony)",
    "pass what it lacks as chat_template_kwargs": "needs variables",
}
# What users name first, of which none may be refused.
ACCEPTED = """gptoss qwen3 qwen3_5_think qwen3_6 glm4moe deepseek_r1_distill nemotron_3_nano gemma4_v5 lfm2_2_5 cohere cohere2 gemma gemma3 lfm2 lfm2_v2 llama3 llama3_1 llama3_2 phi3 phi3_5 qwen2_5 qwen3_instruct_2507 qwen2_5_vl
qwen3_vl idefics3 smolvlm llava_next qwen3_8 qwen3_training qwen3_5_think_training qwen3_6_training deepseek_r1_distill_training"""
# Templates whose calls cannot be read, and why.
UNREAD = {
    "gemma": "names of arguments without quotes",
    "Kimi-K3": "tokens that plain answers have too",
    "Kimi-K2-": "refused by the sandbox",
    "MiniMax-M3": "values in tags of their own",
    "MiniCPM5": "text in CDATA sections",
    "functionary-medium-v3.2": "text that is no markup opens a call",
}
# They write the first of several calls, or refuse them.
SINGLE = r"llama3_|Llama-3|gptoss|gpt-oss|GigaChat3"
CALLS = [
    ToolCall("add", {"key": 'Say "x", or <b>\nof 7 & 8.', "number": 7, "items": [1, "b"], "flag": False}),
    ToolCall("add_all", {}),
    ToolCall("add", {"key": "2"}),
]
TYPED = {"name": "add", "parameters": {"properties": {"key": {"type": "string"}}}}
QUESTIONS = ["Add 2 and 2.", " \n And 3?\n\n", "Once\nmore: {{ 5 }}", "  Good."]
ANSWERS = ["4", "It is\n7.", "12"]
PADDED = [" 4\n\n", "\n It is\n7. ", "12 "]
HALF = "Half of it."


def property_of(told: object) -> str:
    return next((short for said, short in PROPERTIES.items() if said in str(told)), "unnamed")


def made(
    template: Template, tokenizer: PreTrainedTokenizerBase, contexts: Contexts
) -> ChatFormatter | ChatTemplateError:
    try:
        return ChatFormatter(tokenizer, contexts=contexts, chat_template_kwargs=template.kwargs)
    except ChatTemplateError as error:
        return error


@cache
def outcome(index: int, contexts: Contexts) -> ChatFormatter | ChatTemplateError:
    """What becomes of a template on a byte-level tokenizer."""
    return made(FOUND[index], tokenizer_for(FOUND[index]), contexts)


def with_thought(formatter: ChatFormatter, answer: str, pair: tuple[str, str]) -> tuple[str, Message]:
    """An answer with a thought as text, and as the message that it is to the template."""
    found = formatter.properties
    if found.thinking_field and pair[1] == found.closes:
        return f"{found.opens}{HALF}\n{pair[1]}\n\n{answer}", Message("assistant", answer, {found.thinking_field: HALF})
    text = f"{pair[0]}\n{HALF}\n{pair[1]}\n\n{answer}"
    return text, Message("assistant", text)


def conversations(formatter: ChatFormatter) -> dict[str, tuple[str, list[tuple[str, Message]]]]:
    """By name, the role of the messages between and the answers, as text and as messages."""
    found = formatter.properties
    plain = {"plain": ANSWERS, "white space": PADDED}
    chosen = {
        name: ("user", [(text, Message("assistant", text)) for text in answers]) for name, answers in plain.items()
    }
    if isinstance(formatter.rule, AsTemplate):
        del chosen["white space"]  # Qwen3 strips more of a last answer than of an earlier one
    if found.closes:  # an answer without a thought is not one
        chosen = {}
    for pair in found.pairs:
        if found.closes in (None, pair[1]) and not (found.opens and not found.closes):
            chosen[f"thinking {pair[0]}"] = ("user", [with_thought(formatter, answer, pair) for answer in ANSWERS])
    if chosen:
        chosen["tools"] = ("tool", next(iter(chosen.values()))[1])
    return chosen


def contexts(formatter: ChatFormatter, role: str, answers: list[str]) -> list[list[int]]:
    """What is trained on at each turn."""
    spans = formatter.first_spans(QUESTIONS[0])
    seen = [[*formatter.start(QUESTIONS[0])]]
    for i, answer in enumerate(answers):
        follows = role if i + 2 < len(QUESTIONS) else "user"
        response = formatter.answer(answer, role=follows)
        said = formatter.decode(response)
        spans += formatter.turn_spans(response, QUESTIONS[i + 1], i, role=follows, said=said)
        seen.append([i for span in formatter.rule(spans, formatter, sys.maxsize) for i in span.ids])
    return seen


def check(formatter: ChatFormatter) -> None:
    """Every context of a few conversations is the template's own rendering of the conversation so
    far."""
    tokenizer, render = (
        formatter.tokenizer,
        Renderer(formatter.tokenizer, chat_template_kwargs=formatter.chat_template_kwargs),
    )
    for name, (role, answers) in conversations(formatter).items():
        own = "tool" if role == "tool" and formatter.properties.has_tool_role else "user"
        roles = ["user", own, own, "user"]
        asked = [Message(r, question) for r, question in zip(roles, QUESTIONS, strict=True)]
        messages = [
            message for pair in zip(asked, [said for _, said in answers], strict=False) for message in pair
        ] + asked[-1:]
        for turn, ids in enumerate(contexts(formatter, role, [text for text, _ in answers])):
            expected = tokenizer.encode(render(messages[: 2 * turn + 1]), add_special_tokens=False)
            assert tokenizer.decode(ids) == tokenizer.decode(expected), f"{name}, turn {turn}"


@pytest.mark.parametrize("index", range(len(FOUND)), ids=[f"{t.package}-{t}" for t in FOUND])
class TestTemplates:
    def test_it_is_followed_or_refused_by_name(self, index):
        found = outcome(index, "template")
        if isinstance(found, ChatFormatter):
            check(found)
        else:
            assert property_of(found) != "unnamed", found
            assert ('contexts="append"' in str(found)) == isinstance(found, NotAppendOnlyError)

    def test_what_is_kept_all_the_same_begins_and_goes_on_as_the_template(self, index):
        """Under contexts="append" the first prompt and each message are the template's, and each
        answer ends once."""
        found = outcome(index, "append")
        if isinstance(found, ChatTemplateError):
            # harmony's: what the model wrote last is no part of the conversation
            cannot = "several messages an answer (harmony)", "needs variables", "ends only its last answer by a token"
            assert property_of(found) in cannot, found
            assert "contexts=" not in str(found)
            return
        tokenizer, render = found.tokenizer, Renderer(found.tokenizer, chat_template_kwargs=found.chat_template_kwargs)
        asked, reply = Message("user", "Add."), Message("user", "Good.")
        ids, response = found.start("Add."), found.tokenizer.encode("4", add_special_tokens=False)
        response = [*response, *found.end_of_turn_ids[:1]]
        feedback = found.feedback(response, "Good.")
        assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(render([asked]), add_special_tokens=False))
        whole = render([asked, Message("assistant", "4"), reply])
        end = found.properties.frames["user"].end or ""
        assert whole.endswith(end + tokenizer.decode(feedback)), (whole, tokenizer.decode(feedback))

    def test_a_real_vocabulary_is_no_different(self, index):
        template, expected = FOUND[index], outcome(index, "template")
        for tokenizer in real_tokenizers(template):
            found = made(template, tokenizer, "template")
            assert type(found) is type(expected)
            if isinstance(found, ChatFormatter):
                check(found)


@pytest.mark.parametrize("index", range(len(FOUND)), ids=[f"{t.package}-{t}" for t in FOUND])
def test_calls_of_tools_are_read_as_they_are_written(index):
    template = FOUND[index]
    tokenizer = tokenizer_for(template)
    render = Renderer(tokenizer, chat_template_kwargs={**template.kwargs, "tools": [TOOL]})
    form, calls = find_call_form(render), CALLS[:1] if re.search(SINGLE, template.name) else CALLS
    if form is None:
        unread = any(name in template.name for name in UNREAD)
        assert unread or not shows_calls(render), template.text[-2000:]
        return
    written = form.write(calls)
    assert form.parse(written, [TYPED]) == tuple(calls)
    assert form.parse(tokenizer.encode(written, add_special_tokens=False), [TYPED]) == tuple(calls)
    assert form.parse("It is 7.") == ()


def shows_calls(render: Renderer) -> bool:
    call = {"id": "call00000", "type": "function", "function": {"name": "shown", "arguments": {}}}
    try:
        return "shown" in render([Message("user", "q"), Message("assistant", "", {"tool_calls": [call]})])
    except ChatTemplateError:
        return False


def test_no_way_out_by_refusing():
    by_name = {str(template): i for i, template in enumerate(FOUND) if template.package == "trl"}
    refused = {
        name: str(outcome(by_name[name], "template"))
        for name in ACCEPTED.split()
        if not isinstance(outcome(by_name[name], "template"), ChatFormatter)
    }
    assert not refused


# ---------------------------------------- the table


def row(index: int) -> str:
    template, strict, kept = FOUND[index], outcome(index, "template"), outcome(index, "append")
    if isinstance(strict, ChatTemplateError):
        told = f"refused: {property_of(strict)}"
    elif strict.properties.rewrites is None:
        told = "yes"
    else:
        told = f"followed: {property_of(strict.properties.rewrites)}"
    if isinstance(kept, ChatTemplateError):
        return f"| {template.package} | {template} | {told} | no | | |"
    ends = dict.fromkeys(frame.end for frame in kept.properties.frames.values() if frame.end)
    shown = [" ".join(map(_code, ends)), _code(kept.properties.opens)]
    return f"| {template.package} | {template} | {told} | yes | {shown[0]} | {shown[1]} |"


def _code(text: str) -> str:
    escaped = text.replace("\n", "\\n").replace("|", "\\|")
    return f"`{escaped}`" if text else ""


def table() -> str:
    """A row for each template, and for each of its switches that changes what becomes of it."""
    head = (
        '| package | template | appends | `contexts="append"` | ends an answer | opens |\n|---|---|---|---|---|---|\n'
    )
    rows, results = [], {}
    for index, template in enumerate(FOUND):
        result = row(index).split("|")[3:]
        if not template.kwargs or result != results[template.package, template.name]:
            rows.append(row(index))
        results.setdefault((template.package, template.name), result)
    return head + "\n".join(rows) + "\n"


def test_the_page_has_the_table():
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    shown, _, after = rest.partition(END)
    if os.environ.get("TEMPLATE_TABLE"):
        PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n{END}{after}")
        print(table())
    else:
        assert shown.strip() == table().strip(), "make test-templates TABLE=1 writes it"


def test_every_package_is_there():
    assert {template.package for template in FOUND} == {"trl", "mistral-common", "llama.cpp"}
