"""Calls of tools in responses: :class:`ToolCall`, and :class:`CallForm`, which reads them in the
form in which the chat template writes them.

No template is known by its name. A message with calls of made-up tools is rendered, and what stands
around names, keys and values is the form. There are four kinds: JSON that has the name and the
arguments, a name with JSON behind it (also where the name is in a header, as harmony's), tags
around the name and each key and value, and Python's call expressions. A form counts if it reads
back calls with values of all kinds as the template writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchrl_llm.envs.tool_arguments import kinds_of
from torchrl_llm.envs.tool_call_kinds import (
    ARGUMENTS,
    ID,
    KINDS,
    MARK,
    MASK,
    MASKS,
    NAME,
    Around,
    MalformedError,
    Reader,
    common_prefix,
    common_suffix,
)
from torchrl_llm.rendering import ChatTemplateError, Message, Renderer
from torchrl_llm.stops import control_tokens, token_pattern

_QUESTION, _ANSWER = "[q0]", "[a0]"


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        name: of the tool.
        arguments: by name; values are those of JSON.
    """

    name: str
    arguments: Mapping[str, Any]


class BadCall(NamedTuple):
    """What begins as a call and is none.

    Attributes:
        text: what was written.
        reason: what is wrong with it, for the policy.
    """

    text: str
    reason: str


def as_json(calls: Sequence[ToolCall | BadCall]) -> str:
    """Calls as a list of JSON, with the fields of their classes; the empty text if there are none.

    Examples:
        >>> as_json([ToolCall("add", {"a": 1}), BadCall("<call>add", "It is no JSON.")])
        '[{"name": "add", "arguments": {"a": 1}}, {"text": "<call>add", "reason": "It is no JSON."}]'
    """
    return json.dumps([call._asdict() for call in calls], ensure_ascii=False) if calls else ""


_ONE = ToolCall(NAME, ARGUMENTS)
_TWO = ToolCall("tooltwo", ARGUMENTS)
_VALUES = {"key_a": 'Say "x" & y,\nor <z>.', "key_b": 7, "key_c": [1, "b"], "key_d": {"e": [2.5]}, "key_e": True}
_TRIALS = [
    [_ONE],
    [ToolCall("toolone", {})],
    [ToolCall("tool_two", {"key_a": "one, two"})],
    [ToolCall("toolone", _VALUES)],
    [ToolCall("toolone", {"key_b": 1}), ToolCall("tooltwo", {}), ToolCall("toolone", {"key_a": "c", "key_b": 2})],
]


class CallForm:
    """How a chat template writes calls of tools, and how they are read.

    What opens a call is often a control token of the vocabulary. Then that token alone opens one:
    the same characters, spelled by other tokens, are text. Where it is text, it counts at the
    beginning of a line or behind another call; where a call has no mark (Llama 3.1 writes JSON
    alone), at the beginning of the answer.

    Values that a template writes without quotes, between tags, are those of the declared type of
    the parameter: text for a string, JSON for others; text where they are not JSON.

    Attributes:
        end: the control token that ends an answer with calls, where other answers end otherwise,
            such as harmony's ``<|call|>``; ``None``: they end alike.
        tokens: the control tokens that calls are written with.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> calls = "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}"
        >>> template = "{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}" + calls + "<|im_end|>\\n{% endfor %}"
        >>> form = find_call_form(Renderer(byte_tokenizer(chat_template=template)))
        >>> form.write([ToolCall("add", {"a": 1})])
        '<call>{"name": "add", "arguments": {"a": 1}}</call>'
        >>> form.parse('Well.\\n<call>{"name": "add", "arguments": {"a": 1}}</call>')
        (ToolCall(name='add', arguments={'a': 1}),)
    """

    def __init__(self, probe: _Probe, reader: Reader, mark: str, end: str) -> None:
        self._probe, self._reader, self._end = probe, reader, end
        self._marked = bool(mark)
        self._is_token = MASK.match(mark) is not None
        self._mark = re.compile(re.escape(mark) if self._is_token else rf"(?:^|[\n{MASKS}])[ \t]*(?={re.escape(mark)})")
        self._again = re.compile(rf"\s*(?={re.escape(mark)})")
        tokens = MASK.findall(end)
        usual = any(token in probe.tail for token in tokens)
        self.end: str | None = probe.masks.plain(tokens[-1]) if tokens and not usual else None
        written = probe.written([_ONE]).removesuffix(end)
        self.tokens = frozenset(map(probe.masks.plain, MASK.findall(written)))

    def write(self, calls: Sequence[ToolCall], text: str = "") -> str:
        """What the template writes behind the generation prompt, without the end of the answer.

        Args:
            calls: at least one.
            text: of the answer before the calls. Default: none.

        Raises:
            ChatTemplateError: the template refuses them.
        """
        written = self._probe.written(calls, text)
        return self._probe.masks.plain(written.removesuffix(self._end))

    def parse(
        self, response: str | Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[ToolCall | BadCall, ...]:
        """The calls in an answer, in order.

        Args:
            response: the ids of an answer, or its text, in which what spells a control token is
                one.
            tools: JSON schemas, for the types of values that stand between tags. Default: none is
                known.
        """
        return self.parse_masked(self.masked(response), tools)

    def masked(self, response: str | Sequence[int]) -> str:
        """The text of a response, with a character of its own for each control token."""
        masks = self._probe.masks
        return masks.of_text(response) if isinstance(response, str) else masks.of_ids(response)

    def parse_masked(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[ToolCall | BadCall, ...]:
        """As :meth:`parse`, of what :meth:`masked` returned, or a part of it."""
        found: list[ToolCall | BadCall] = []
        at, plain = self._next(text, 0, behind_call=False), self._probe.masks.plain
        while at is not None:
            try:
                calls, end = self._reader.read(text, at, _types(tools))
                found += [ToolCall(plain(name), plain(arguments)) for name, arguments in calls]
                following = self._next(text, end, behind_call=True)
            except MalformedError as error:
                following = self._next(text, at + 1, behind_call=False)
                found.append(BadCall(plain(text[at:following]), str(error)))
            at = following
        return tuple(found)

    def _next(self, text: str, at: int, *, behind_call: bool) -> int | None:
        """Where the next call begins."""
        if not self._marked:
            return 0 if at == 0 and self._reader.begins(text) else None
        behind = self._again.match(text, at) if behind_call else None
        found = behind or self._mark.search(text, at)
        if found is None:
            return None
        return found.end() if behind or not self._is_token else found.start()

    def follows(self) -> bool:
        """Whether it reads back what the template writes."""
        trials = [trial for trial in _TRIALS if len(trial) == 1 or self._reader.several]
        texts = ("", "Well.") if self._is_token else ("",)
        return all(self._reads_back(trial, text) for trial in trials for text in texts)

    def _reads_back(self, trial: Sequence[ToolCall], text: str) -> bool:
        try:
            written = self._probe.written(trial, text)
        except ChatTemplateError:
            return bool(text)  # some (Mistral's second and third) take text or calls
        return self.parse_masked(written, _TRIAL_TOOLS) == tuple(trial)


def find_call_form(render: Renderer) -> CallForm | None:
    """The form in which a chat template writes calls; ``None``: it writes none, or in none of the
    forms that can be read.

    Args:
        render: the template, with the tools among its ``chat_template_kwargs`` if it needs them.
    """
    try:
        probe = _Probe(render)
        one = probe.written([_ONE])
    except ChatTemplateError:
        return None
    for kind in KINDS:
        form = _form_of(probe, kind, one)
        if form is not None and form.follows():
            return form
    return None


def _types(tools: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Any]:
    functions = [tool.get("function", tool) for tool in tools]
    return {
        (function["name"], name): kinds_of(schema)
        for function in functions
        for name, schema in ((function.get("parameters") or {}).get("properties") or {}).items()
    }


def _trial_tool(name: str) -> dict[str, Any]:
    return {"name": name, "parameters": {"properties": {"key_a": {"type": "string"}}}}


_TRIAL_TOOLS = [_trial_tool(name) for name in ("toolone", "tooltwo", "tool_two")]


# ---------------------------------------- what the template writes


class _Masks:
    """A character for each control token, so that a token is not what spells it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokens = {i: str(token) for i, token in control_tokens(tokenizer).items()}
        self._of_name = {name: chr(0xF0000 + i) for i, name in enumerate(dict.fromkeys(tokens.values()))}
        self._of_id = {i: self._of_name[name] for i, name in tokens.items()}
        self._names = {mask: name for name, mask in self._of_name.items()}
        self._pattern = token_pattern(self._of_name)

    def of_text(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._of_name[found.group()], MASK.sub("\ufffd", text))

    def of_ids(self, ids: Sequence[int]) -> str:
        return "".join(self._pieces(ids))

    def _pieces(self, ids: Sequence[int]) -> Iterator[str]:
        run: list[int] = []
        for i in [*map(int, ids), None]:
            if i is not None and i not in self._of_id:
                run.append(i)
                continue
            text = self._tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            yield MASK.sub("\ufffd", text)
            run = []
            if i is not None:
                yield self._of_id[i]

    def plain(self, value: Any) -> Any:
        """A text, or what holds texts, with tokens as they are spelled."""
        if isinstance(value, str):
            return MASK.sub(lambda found: self._names.get(found.group(), found.group()), value)
        if isinstance(value, Mapping):
            return {self.plain(name): self.plain(each) for name, each in value.items()}
        return [self.plain(each) for each in value] if isinstance(value, list) else value


class _Probe:
    """A template that writes calls.

    Attributes:
        masks: of its tokenizer.
        plain: what it writes for a plain answer, from the end of the question on.
        tail: what of it is behind the answer.
    """

    def __init__(self, render: Renderer) -> None:
        self._render, self.masks, self._as_text = render, _Masks(render.tokenizer), False
        self.plain = self._behind_question(Message("assistant", _ANSWER))
        self.tail = self.plain.rpartition(_ANSWER)[2]
        try:
            one = self._behind_question(self._message([_ONE]))
        except ChatTemplateError:
            self._as_text = True  # some take arguments as text
            one = self._behind_question(self._message([_ONE]))
        self._lead = common_prefix(self.plain.partition(_ANSWER)[0], one)

    def written(self, calls: Sequence[ToolCall], text: str = "") -> str:
        """The masked text of an answer with calls, behind what stands before any answer."""
        return self._behind_question(self._message(calls, text)).removeprefix(self._lead)

    def _behind_question(self, answer: Message) -> str:
        return self.masks.of_text(
            self._render([Message("user", _QUESTION), answer], prompt=False).rpartition(_QUESTION)[2]
        )

    def _message(self, calls: Sequence[ToolCall], text: str = "") -> Message:
        return Message("assistant", text, {"tool_calls": [self._as_dict(i, *call) for i, call in enumerate(calls)]})

    def _as_dict(self, i: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        given = json.dumps(arguments, ensure_ascii=False) if self._as_text else dict(arguments)
        return {"id": f"{ID}{i % 10}", "type": "function", "function": {"name": name, "arguments": given}}


def _around(probe: _Probe, one: str, span: Any) -> Around | None:
    """What stands around a call whose own part ``span`` finds in a text."""
    found = span(one, NAME)
    if found is None:
        return None
    before, last = one[: found[0]], one[found[1] :]
    try:
        two = probe.written([_ONE, _TWO])
    except ChatTemplateError:
        two = one
    first, second = span(two, NAME), span(two, _TWO.name)
    if first is None or second is None:
        return Around(before, "", last, several=False)
    between = two[first[1] : second[0]]  # nothing if one list has both
    opening = common_suffix(before, between)
    if not MARK.search(opening):  # several stand behind one mark
        end = common_suffix(last, probe.tail)
        return Around(before, last.removesuffix(end), end, several=True)
    after = common_prefix(last, between).rstrip("<[/")
    return Around(opening, after, last.removeprefix(after), several=True)


def _form_of(probe: _Probe, kind: Any, one: str) -> CallForm | None:
    around = _around(probe, one, kind.span)
    if around is None:
        return None
    marks = [mark for mark in MARK.findall(around.before) if mark not in probe.plain]
    mark = marks[0] if marks else ""
    reader = kind.of(one, around._replace(before=around.before[around.before.index(mark) :]))
    return None if reader is None else CallForm(probe, reader, mark, around.end)
