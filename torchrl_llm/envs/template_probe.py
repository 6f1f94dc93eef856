"""What a chat template does, found out by rendering conversations: :func:`probe_template`.

No template is known by its name. The probe renders conversations of up to four turns whose contents
it can find again, and reads the template's own text off between them:

- *Frames*: what stands around a message, by its role. It must be the same for each message.
- *The end of an answer* (:func:`torchrl_llm.stops.answer_end`): the first control token behind it.
  Where the template writes it with the next message only, it may be another one for each role.
- *What the generation prompt opens*, such as ``<think>\\n``: its tail, from the first token of a
  pair that encloses thinking.
- *Pairs of tokens* that might enclose thinking: all opening and closing ones in the template's
  source (:func:`marker_pairs`).
- *Texts* of the template at which it may cut answers, such as "Answer:": all that its expressions
  hold.
- *Whether it rewrites*: an answer is written in the form in which the template itself writes it as
  the last message (with the thought that the prompt opened, if any), plain, with a thought within
  each pair, and with thoughts around each text. Then messages are added, and the answer must stay
  as it is. The thought of the prompt is part of the message's content, or in a field of its own if
  the template reads it there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from torchrl_llm.envs.response import THINKING, Pair
from torchrl_llm.envs.template_properties import Frame, TemplateProperties
from torchrl_llm.rendering import ChatTemplateError, Message, Renderer, text_constants
from torchrl_llm.stops import answer_end, token_pattern

Contexts = Literal["template", "append"]
"""How earlier turns look to later ones: as the template shows them, or as they were ("append").
Where it only appends both are the same."""

# the fewest with two messages between the first and the last, which must be rendered alike
_TURNS = 4
_THOUGHT = "hm, h0"
_DROPS = "it drops thinking from earlier answers"
_MARKER = re.compile(r"<[^<>\s'\"{}%(),]{1,40}>|\[/?[A-Z][A-Z_]+\]|\[/[a-z_]+\]|◁[^◁▷\s]{1,40}▷")
_OPENED_BY = {"end": ("start", "begin"), "close": ("open",), "suffix": ("prefix",)}
# Fields of a message that servers put thinking into.
_THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class NotAppendOnlyError(ChatTemplateError):
    """The chat template rewrites messages that were already rendered."""


def probe_template(render: Renderer, control: Collection[str], *, appends: bool = False) -> TemplateProperties:
    """Find out what a chat template does.

    Args:
        render: the template.
        control: the tokenizer's control tokens.
        appends: whether contexts only grow, whatever the template does to earlier answers.

    Raises:
        NotAppendOnlyError: the text that the template puts around a message depends on the message
            or its place.
        ChatTemplateError: the template refuses a conversation, or an answer is more than one
            message to it.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> found = probe_template(Renderer(byte_tokenizer()), ["<|im_start|>", "<|im_end|>"])
        >>> found.frames["user"].before, found.frames["user"].end
        ('<|im_end|>\\n<|im_start|>user\\n', '<|im_end|>')
    """
    return _Probe(render, control).properties(appends)


def not_append_only(render: Renderer, reason: str, *, keep: bool = False) -> NotAppendOnlyError:
    """The error for a template that cannot be followed.

    Args:
        render: the template.
        reason: what it does.
        keep: whether contexts can be kept as they were sampled all the same.
    """
    way_out = 'keep what was sampled all the same (contexts="append"), ' if keep else ""
    return NotAppendOnlyError(
        f"The chat template of the tokenizer {render.tokenizer.name_or_path!r} is not append-only: {reason}. What it shows of "
        f"earlier turns cannot be made of sampled ids. Either {way_out}give the tokenizer a template that keeps every message "
        "(tokenizer.chat_template, in a run the setting chat_template; for example torchrl_llm.envs.CHATML), or pass "
        'template="raw".'
    )


def marker_pairs(source: str, control: Collection[str]) -> list[Pair]:
    """The pairs of an opening and a closing marker of which a template spells at least one;
    ``<think>`` always.

    Args:
        source: the template's text.
        control: the tokenizer's control tokens.

    Examples:
        >>> marker_pairs("<tool_call> <|channel>", ["</tool_call>", "<channel|>"])
        [('<think>', '</think>'), ('<|channel>', '<channel|>'), ('<tool_call>', '</tool_call>')]
    """
    spelled = {*_MARKER.findall(source), *(token for token in control if token in source)}
    known = spelled | {*control}
    pairs = {(opening, closing) for closing in known for opening in _openings(closing)} - {THINKING}
    found = sorted(pair for pair in pairs if spelled & {*pair} and (pair[0] in known or pair[1] in spelled))
    return [THINKING, *reversed(found)]


def _openings(closing: str) -> Iterator[str]:
    """The markers that ``closing`` would close."""
    if "/" in closing:
        yield closing.replace("/", "", 1)
    if bar := re.fullmatch(r"<([^|>]+)\|>", closing):
        yield f"<|{bar[1]}>"
    for end, begins in _OPENED_BY.items():
        for case in (str.lower, str.upper, str.capitalize):
            if case(end) in closing:
                yield from (closing.replace(case(end), case(begin)) for begin in begins)


def _asked(i: int) -> str:
    # Quotes, brackets and a line break: a template that escapes or rewrites contents shows here.
    return f'{{q{i}: "<&>\\\n{i}"}}'


def _answered(i: int) -> str:
    # Blank lines too, which some templates collapse.
    return f'a{i}: "<&>\\\n\n\n{i}."'


_QUESTION, _ANSWER, _REPLY = Message("user", _asked(0)), Message("assistant", _answered(0)), Message("user", _asked(1))


def _difference(before: str, longer: str) -> tuple[int, str]:
    """Where a longer rendering differs from the one before, and how, as an error shows it."""
    at = next((i for i, (a, b) in enumerate(zip(before, longer, strict=False)) if a != b), len(longer))
    shown = f"once a message is added, it renders {longer[at : at + 50]!r} where {before[at : at + 50]!r} stood before"
    return at, shown


class _Said(NamedTuple):
    """A response, and the message that it is in a conversation."""

    response: str
    message: Message


class _Probe:
    def __init__(self, render: Renderer, control: Collection[str]) -> None:
        self.render, self.control = render, control
        self.tokens = token_pattern(control)
        self._followed = render([_QUESTION, _ANSWER, _REPLY])
        self._prompt = render([_QUESTION])
        closed = render([_QUESTION], prompt=False)
        generation_prompt = self._prompt.removeprefix(closed) if self._prompt.startswith(closed) else ""
        # What the template writes before a plain answer, behind the generation prompt.
        added = self._followed.removeprefix(self._prompt) if self._followed.startswith(self._prompt) else ""
        self._writes = added.partition(_answered(0))[0]
        # The pairs that may stand within an answer: not the pairs of the template around messages.
        around = self._prompt.rpartition(_asked(0))[2].removesuffix(generation_prompt)
        around += self._followed.rpartition(_asked(1))[0].rpartition(_answered(0))[2]
        pairs = marker_pairs(render.source, control)
        self._pairs = [pair for pair in pairs if not any(marker in around for marker in pair)]
        at = [i for pair in self._pairs for marker in pair if (i := generation_prompt.find(marker)) >= 0]
        self._opens = generation_prompt[min(at) :] if at else ""
        opened = self._unclosed(self._opens)
        self._closes = None if opened is None else opened[1]
        self._last = render([_QUESTION, _ANSWER], prompt=False)  # ends with an answer

    def properties(self, appends: bool) -> TemplateProperties:
        self._check_one_message()
        field, rewrites = self._thinking_field("user")
        first, user = self._frames("user")
        if self._ends_once is not None:
            rewrites = f"it writes {self._ends_once!r} after the last assistant message only"
        rewrites = rewrites or (None if appends else self._cuts(field))
        tool = self._tool_frame(appends or rewrites is not None)
        return TemplateProperties(
            first,
            {"user": user, "tool": tool or user},
            opens=self._opens,
            closes=self._closes,
            writes=self._writes,
            pairs=tuple(self._pairs),
            thinks=(thinks := self._thinks()),
            thinking_label=self._label(thinks[0]),
            thinking_field=field,
            thinking_fields=tuple(
                name for name in _THINKING_FIELDS if name in self._fields or name in self.render.source
            ),
            trims_answers=self._trims_answers(),
            tail=self._last.rpartition(_answered(0))[2],
            has_tool_role=tool is not None,
            between_tools=None if tool is None else self._between_tools(tool),
            shows_date=self.render.shows_date(),
            ends_once=self._ends_once,
            header=self._writes if self._message_of_thought else "",
            rewrites=rewrites,
            texts=tuple(self._texts()),
        )

    # ---------------------------------------- around an answer

    def _unclosed(self, text: str) -> Pair | None:
        """The last pair that a text opens and does not close."""
        pairs = [pair for pair in self._pairs if text.rfind(pair[0]) > text.rfind(pair[1])]
        return max(pairs, key=lambda pair: text.rfind(pair[0]), default=None)

    @cached_property
    def _ends_once(self) -> str | None:
        """The control token that ends the last answer, and none that is followed."""
        end = answer_end(self.control, self._last, "", _answered(0), _asked(1))
        behind = self._followed.rpartition(_asked(1))[0].rpartition(_answered(0))[2]
        return None if end is None or end in self.tokens.findall(behind) else end

    @cached_property
    def _message_of_thought(self) -> Pair | None:
        """What stands around a thought that is a message of its own before the answer's, up to the
        header of the answer; ``None``: thoughts are none."""
        end = self._ends_once or answer_end(self.control, "", self._followed, _answered(0), _asked(1))
        for field, text in self._fields.items():
            before, _, behind = text.removeprefix(self._prompt).partition(_THOUGHT)
            closing = behind.partition(_answered(0))[0]
            rest = closing.removesuffix(self._writes)
            # Sampling must not stop at the end of the thought.
            if rest != closing and self.tokens.search(rest) and self._end_of_thought(field) != end:
                return before, rest
        return None

    def _thinks(self) -> Pair:
        if self._message_of_thought is not None:
            return self._message_of_thought
        opened = [pair for pair in self._pairs if pair[0] in self._opens]
        fields = [pair for text in self._fields.values() if (pair := self._unclosed(text.partition(_THOUGHT)[0]))]
        known = [self._unclosed(self._opens), *opened, *fields]
        found = next((pair for pair in known if pair is not None), None)
        return found or next(filter(self._is_dropped, self._pairs), THINKING)

    def _label(self, opening: str) -> str:
        """What the template spells behind the marker that opens a thought, as a line of its own."""
        spelled = {*re.findall(rf"{re.escape(opening)}(\w+)(?:\\n|\n)", self.render.source)}
        return spelled.pop() if len(spelled) == 1 else ""

    def _is_dropped(self, pair: Pair) -> bool:
        """Whether the template leaves out what stands within a pair before an earlier answer."""
        said = Message("assistant", f"{pair[0]}{_THOUGHT}{pair[1]}{_answered(0)}")
        text = self._rendered([_QUESTION, said, _REPLY])
        return _THOUGHT not in text and _answered(0) in text

    def _rendered(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        """As ``render``; empty where the template refuses the messages."""
        try:
            return self.render(messages, prompt=prompt)
        except ChatTemplateError:
            return ""

    def _trims_answers(self) -> bool:
        padded = self.render([_QUESTION, Message("assistant", f" \n{_answered(0)}\n "), _REPLY])
        return f" \n{_answered(0)}\n " not in padded and _answered(0) in padded

    def _check_one_message(self) -> None:
        """Refuse templates whose answers are several messages, each with a header that the model
        writes itself."""
        end = answer_end(self.control, "", self._followed, _answered(0), _asked(1))
        written, within = self.tokens.findall(self._writes), {marker for pair in self._pairs for marker in pair}
        thought_ends = [self._end_of_thought(field) for field in self._fields]
        around = [] if end is None else [*_openings(end)]
        header = [token for token in written if token not in within and token not in around]
        apart = self._message_of_thought is not None
        if end is not None and not apart and (end in (*written, *thought_ends) or (header and not any(thought_ends))):
            raise ChatTemplateError(
                f"The chat template of the tokenizer {self.render.tokenizer.name_or_path!r} makes several messages of one answer: "
                f"the model writes {self._writes!r} itself before its answer, and {end!r}, which ends the answer, ends its "
                "thinking too, so that sampling would stop there. Such templates (harmony) are not supported: use another model, or "
                "another chat template if the model knows one."
            )

    @cached_property
    def _fields(self) -> dict[str, str]:
        """The fields of a message whose thinking the template shows, with the last answer's text
        for each."""
        answers = {field: _ANSWER._replace(fields={field: _THOUGHT}) for field in _THINKING_FIELDS}
        shown = {field: self._rendered([_QUESTION, answer], prompt=False) for field, answer in answers.items()}
        return {field: text for field, text in shown.items() if _THOUGHT in text}

    def _end_of_thought(self, field: str) -> str | None:
        """The first control token behind a thought that is given in a field."""
        end = self.tokens.search(self._fields[field].rpartition(_THOUGHT)[2].partition(_answered(0))[0])
        return None if end is None else end.group()

    # ---------------------------------------- whether it appends

    def _thinking_field(self, role: str) -> tuple[str | None, str | None]:
        """The field in which a response's thinking is kept (``None``: the content), and how the
        template rewrites answers."""
        reasons = []
        for field in (None, *self._fields):
            reason = self._rewrites(role, field)
            if reason is None:
                return field, None
            reasons.append(reason)
        return None, next((reason for reason in reasons if reason.startswith(_DROPS)), reasons[0])

    def _rewrites(self, role: str, field: str | None) -> str | None:
        """What the template does to answers once messages are added; ``None``: nothing."""
        # Where the prompt has an empty thought, answers have none.
        closed = "" if self._closes else self._opens
        for pair in [*(pair for pair in self._pairs if pair[1] not in closed), None]:
            try:
                said = [self._said(_answered(i), pair, field) for i in range(_TURNS - 1)]
                renderings = self._render_turns(role, [message for _, message in said])
            except ChatTemplateError as error:
                if pair is None:
                    raise
                return f"it refuses answers with {pair[0]!r} and {pair[1]!r}: {error}"
            for i, (shorter, longer) in enumerate(pairwise(renderings)):
                if not longer.startswith(shorter + said[i].response):
                    return self._what_it_rewrites(shorter + said[i].response, longer, _answered(i), pair)
        return None

    def _cuts(self, field: str | None) -> str | None:
        """What the template does to answers that hold a text of its own, such as "Answer:";
        ``None``: nothing."""
        for text in self._texts():
            edge = text.strip()  # white space there is another matter: some templates trim answers
            answer = f"{edge}{_THOUGHT} {text} {_answered(0)} {text} {_THOUGHT}{edge}"
            try:
                said = self._said(answer, None, field)
                followed = self.render([_QUESTION, said.message, _REPLY])
            except ChatTemplateError:
                continue
            before = self._prompt + said.response
            # A control token is not text that a model writes: a template may take it out of
            # messages.
            dropped = followed.count(_THOUGHT) < said.response.count(_THOUGHT)
            if dropped or not (followed.startswith(before) or self.tokens.search(text)):
                return f"it changes answers with {text!r}: {_difference(before, followed)[1]}"
        return None

    def _texts(self) -> list[str]:
        """The texts at which the template may cut a message, but for markers of pairs, which are
        tried as such."""
        markers = {marker for pair in self._pairs for marker in pair}
        given = (value for name, value in self.render.kwargs.items() if name != "chat_template")
        texts = sorted({*text_constants(self.render.source), *(value for value in given if isinstance(value, str))})
        return [text for text in texts if text.strip() and not any(marker in text for marker in markers)]

    def _said(self, answer: str, pair: Pair | None, field: str | None) -> _Said:
        """An answer, with a thought within ``pair``, in the form in which the template writes it as
        the last message."""
        opens, thought = self._opens * bool(self._closes), f"\n{_THOUGHT}\n{{}}\n\n"
        own = self._unclosed(self._fields[field].partition(_THOUGHT)[0]) if field else None
        response = thought.format(self._closes).lstrip() if opens else ""
        within = pair[0] + thought.format(pair[1]) if pair is not None and pair[1] != self._closes else ""
        message = Message("assistant", opens + response + within + answer)
        if field is not None and own is not None and (opens or pair == own):
            message = Message("assistant", within * (pair != own) + answer, {field: _THOUGHT})
        response += within
        last = self.render([_QUESTION, message], prompt=False)
        written, found, _ = last.removeprefix(self._prompt).rpartition(answer)
        kept = written.count(_THOUGHT) == response.count(_THOUGHT)
        kept = kept and (field is not None or not within or all(marker in written for marker in pair or ()))
        if not (last.startswith(self._prompt) and found and kept):
            return _Said(response + answer, message)
        if not message.fields:
            # White space before an answer is the template's own, and no part of the message.
            space = "" if self._writes.strip() else self._writes
            message = Message("assistant", opens + written.removeprefix(space) + found)
        return _Said(written + found, message)

    def _what_it_rewrites(self, before: str, longer: str, answer: str, pair: Pair | None) -> str:
        """The name of what a template does to earlier answers, with what shows it."""
        at, shown = _difference(before, longer)
        if answer not in longer:
            return shown
        if _THOUGHT in before[at:] and _THOUGHT not in longer[at:]:
            return f"{_DROPS}: {shown}"
        if self._opens and not longer.startswith(self._prompt):
            return f"it leaves {self._opens!r}, which its generation prompt writes, out of earlier answers: {shown}"
        if self._writes:
            return f"it writes {self._writes!r} before an answer, which its generation prompt leaves out: {shown}"
        if pair is not None:
            return f"it changes answers with {pair[0]!r} and {pair[1]!r}: {shown}"
        return shown

    # ---------------------------------------- frames

    def _tool_frame(self, appends: bool) -> Frame | None:
        """The frame of tool output; ``None``: the template has no such role, or rewrites answers
        before it, and not before other messages, unless contexts only grow.

        A template that writes all roles it does not know as another one makes a system message, or
        an answer, of tool output.
        """
        try:
            if not appends and self._thinking_field("tool")[1] is not None:
                return None
            tool = self._frames("tool")[1]
        except ChatTemplateError:
            # A tool role that is refused, or not append-only, is none that can be used.
            return None
        others = filter(None, map(self._frame_or_none, ("system", "assistant")))
        return None if any(tool[:2] == other[:2] for other in others) else tool

    def _between_tools(self, tool: Frame) -> str | None:
        """What stands between two messages of tools; ``None``: what stands around them is another
        than around one."""
        results = [Message("tool", _asked(i)) for i in (1, 2)]
        text = self._rendered([_QUESTION, _ANSWER, *results]).rpartition(_answered(0))[2]
        before, _, text = text.partition(_asked(1))
        between, found, after = text.partition(_asked(2))
        return between if found and (before, after) == (tool.before, tool.after) else None

    def _frame_or_none(self, role: str) -> Frame | None:
        try:
            return self._frames(role)[1]
        except ChatTemplateError:
            return None

    def _frames(self, role: str) -> tuple[Frame, Frame]:
        """The frames of the first and of later messages, checked on conversations of up to four
        turns."""
        renderings = self._render_turns(role, [Message("assistant", _answered(i)) for i in range(_TURNS - 1)])
        frames = [self._frame_of(rendering, i) for i, rendering in enumerate(renderings)]
        # The closing user message of a tool probe has a frame of its own.
        first, *later, _ = frames
        if len({*later}) > 1:
            raise not_append_only(
                self.render, f"it renders {later[0].before!r} before one message, {later[-1].before!r} before another"
            )
        return first, later[0]._replace(end=self._end(role, later[0]))

    def _render_turns(self, role: str, answers: Sequence[Message]) -> list[str]:
        """The prompt of each turn."""
        roles = ["user", *[role] * (_TURNS - 2), "user"]
        # White space on both sides shows whether the template trims contents.
        asked = [Message(name, f" \n{_asked(i)}\n ") for i, name in enumerate(roles)]
        messages = [message for pair in zip(asked, answers, strict=False) for message in pair] + asked[-1:]
        return [self.render(messages[: 2 * turn + 1]) for turn in range(_TURNS)]

    def _frame_of(self, rendering: str, turn: int) -> Frame:
        question, answer = _asked(turn), _answered(turn - 1) if turn else ""
        before, found, after = rendering.rpartition(question)
        _, answered, before = before.rpartition(answer) if answer else ("", "-", before)
        padded = before.endswith(" \n"), after.startswith("\n ")
        if not answered:
            raise not_append_only(self.render, f"it leaves out the answer before the message {question!r}")
        if not found or padded[0] != padded[1]:
            raise not_append_only(self.render, f"it does not render the message {question!r} as it is")
        return Frame(before[:-2], after[2:]) if padded[0] else Frame(before, after, trims=True)

    def _end(self, role: str, frame: Frame) -> str | None:
        """The control token with which the template closes an answer before a message of this
        role."""
        followed = self.render([_QUESTION, _ANSWER, Message(role, _asked(1))])
        end = answer_end(self.control, self._last, followed, _answered(0), _asked(1))
        return end if end in self.tokens.findall(frame.before) else None
