"""What a chat template shows of earlier answers: :class:`TemplateView`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torchrl_llm.envs.contexts import ContextRule, Span, Thought, ids_of, selected
from torchrl_llm.envs.response import Response
from torchrl_llm.envs.template_probe import not_append_only
from torchrl_llm.envs.template_properties import TemplateProperties
from torchrl_llm.rendering import ChatTemplateError, Message, Renderer, Role

_MOST = 2**14  # conversations that are remembered
_BEHIND = "\n\n"  # a thought
_SPACES = "\n \t\r"
_TURNS = 4


class TemplateView:
    """What a chat template writes before each earlier answer of a conversation, in the place of
    what the prompt opened and what was thought there.

    Found out by rendering a conversation of the same form, in which everything can be found again:
    which answers keep their thought depends on the roles of the messages and on where thoughts are.

    Args:
        render: the template.
        properties: what it does.

    Attributes:
        stripped: the white space that the template strips before an earlier answer, for
            ``str.lstrip``; ``None``: all.

    Raises:
        ChatTemplateError: of a call, the template does something else to earlier answers.

    Examples:
        >>> from torchrl_llm.envs.template_probe import probe_template
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> template = byte_tokenizer().chat_template.replace("message['content']", "message['content'].split('</think>\\n\\n')[-1]")
        >>> render = Renderer(byte_tokenizer(chat_template=template))
        >>> view = TemplateView(render, probe_template(render, ()))
        >>> view(("user", "user", "user"), ("some", "none"))
        ('', None)
    """

    def __init__(self, render: Renderer, properties: TemplateProperties) -> None:
        self._render, self._properties = render, properties
        self.stripped = self._stripped()
        self._known: dict[tuple[tuple[Role, ...], tuple[Thought, ...]], tuple[str | None, ...]] = {}

    def __call__(self, roles: tuple[Role, ...], thoughts: tuple[Thought, ...]) -> tuple[str | None, ...]:
        """What stands before each answer of a conversation.

        Args:
            roles: of the messages, one more than there are answers.
            thoughts: of each answer.

        Returns:
            For each answer the text; ``None``: what was there as it was given.
        """
        if (written := self._known.get((roles, thoughts))) is None:
            if len(self._known) == _MOST:
                self._known.clear()
            written = self._known[roles, thoughts] = self._written(roles, thoughts)
        return written

    def _stripped(self) -> str | None:
        thinks = self._properties.closes is not None or not self._properties.opens
        plain = self._before(_answered(0), thinks)
        found = [space for space in _SPACES if self._before(f"{space}{_answered(0)}", thinks) == plain]
        return None if found == [*_SPACES] else "".join(found)

    def _before(self, answer: str, thinks: bool) -> str:
        found = self._properties
        messages = [Message("user", _asked(0)), self.answer(answer, _thought(0) if thinks else None)]
        for i in range(1, _TURNS):  # some keep what the latest answers thought
            messages += [Message("user", _asked(i)), self.answer(_answered(i), _thought(i) if thinks else None)]
        messages.append(Message("user", _asked(_TURNS)))
        opening = self._render(messages).partition(_asked(0))[2].partition(_answered(0))[0]
        return opening.removeprefix(found.first.after.removesuffix(found.opens))

    def _written(self, roles: tuple[Role, ...], thoughts: tuple[Thought, ...]) -> tuple[str | None, ...]:
        found = self._properties
        messages = [Message(found.role(roles[0]), _asked(0))]
        for i, thought in enumerate(thoughts):
            answer = self.answer(_answered(i), {"none": None, "empty": "", "some": _thought(i)}[thought])
            messages += [answer, Message(found.role(roles[i + 1]), _asked(i + 1))]
        _, _, text = self._render(messages).partition(_asked(0))
        written: list[str | None] = []
        for i, thought in enumerate(thoughts):
            frame, follows = found.frames[roles[i]] if i else found.first, found.frames[roles[i + 1]]
            opening, answered, text = text.partition(_answered(i))
            closing, asked, text = text.partition(_asked(i + 1))
            prompt = frame.after.removesuffix(found.opens)
            if not (answered and asked and opening.startswith(prompt) and closing == follows.before):
                wrote = (opening + answered + closing)[-80:]
                raise not_append_only(self._render, f"it writes {wrote!r} of turn {i}, later on", keep=True)
            shown = opening.removeprefix(prompt)
            if thought != "none" and found.thinking_field is None:
                shown = shown.removesuffix(_BEHIND.lstrip(self.stripped))  # it is the answer's own
            shown = shown.removesuffix(found.header)  # the answer has it too
            # An empty one is written as the template writes it, whatever white space it had.
            kept = {"none": shown == found.opens, "empty": False, "some": _thought(i) in shown}[thought]
            written.append(None if kept else shown)
        return tuple(written)

    def answer(self, text: str, thought: str | None = None) -> Message:
        """An answer as a message, with a thought or without."""
        if (field := self._properties.thinking_field) is not None and thought is not None:
            return Message("assistant", text, {field: thought})
        return Message("assistant", self.text(text, thought))

    def text(self, text: str, thought: str | None = None) -> str:
        """An answer as text, with a thought or without."""
        opening, closing = self._properties.thinks
        return text if thought is None else f"{opening}\n{thought}\n{closing}{_BEHIND}{text}"


def _asked(i: int) -> str:
    return f"[q{i}]"


def _answered(i: int) -> str:
    return f"[a{i}]"


def _thought(i: int) -> str:
    return f"[t{i}]"


class Formats(Protocol):
    """What a trial asks of a :class:`~torchrl_llm.envs.ChatFormatter`."""

    tokenizer: Any
    properties: TemplateProperties
    rule: ContextRule
    stop_ids: tuple[int, ...]

    def encode_answer(self, text: str) -> tuple[int, ...]: ...

    def first_spans(self, message: str) -> list[Span]: ...

    def decode(self, response: Sequence[int]) -> Response: ...

    def turn_spans(
        self, response: Sequence[int], message: str, turn: int, *, role: Role, said: Response | None
    ) -> list[Span]: ...

    def answer(self, text: str, *, role: Role) -> tuple[int, ...]: ...

    def written_before(self, roles: tuple[Role, ...], thoughts: tuple[Thought, ...]) -> Any: ...


def follows_template(formatter: Formats, render: Renderer, view: TemplateView) -> bool:
    """Whether the contexts of a formatter are the template's own rendering, in conversations with
    and without thoughts, through messages and the output of tools, and with every text in an answer
    at which the template may cut it."""
    found, thought = formatter.properties, "Half, or\n\ntwo."
    ways: list[tuple[str | None, ...]]
    if found.opens and found.closes is None:
        ways = [(None, None, None)]  # the prompt has an empty thought
    elif found.opens:
        ways = [(thought,) * 3]  # an answer without a thought is not one
    else:
        ways = [(thought,) * 3, (None,) * 3, (None, thought, None)]
    trials = [(roles, [*zip(("4", "It is\n7.", "12"), way, strict=True)]) for roles in _ROLES for way in ways]
    # A special token is not text that an answer has.
    texts = [text for text in found.texts if {*formatter.stop_ids}.isdisjoint(formatter.encode_answer(text))]
    answers = [f"{edge}5\n{text} 6 {text}\n\n7{edge}" for text in texts for edge in [text.strip()]]
    answers += [f"{opening}\n5\n{closing}\n\n6" for opening, closing in found.pairs if closing != found.thinks[1]]
    trials += [(("user", "user"), [(answer, thought)]) for answer in answers for thought in {ways[0][0], ways[-1][0]}]
    return all(_follows(formatter, render, view, *trial) for trial in trials)


_ROLES: list[tuple[Role, ...]] = [("user",) * 4, ("user", "tool", "tool", "user")]


def _follows(
    formatter: Formats,
    render: Renderer,
    view: TemplateView,
    roles: Sequence[Role],
    answers: Sequence[tuple[str, str | None]],
) -> bool:
    own = formatter.properties.role
    asked = [Message(own(role), f"Add {i},\nplease.") for i, role in enumerate(roles)]
    spans, messages = formatter.first_spans(asked[0].content), asked[:1]
    for turn, (text, thought) in enumerate(answers):
        message, role = view.answer(text, thought), roles[turn + 1]
        response = formatter.answer(view.text(text, thought), role=role)
        said = formatter.decode(response)
        spans += formatter.turn_spans(response, asked[turn + 1].content, turn, role=role, said=said)
        messages += [message, asked[turn + 1]]
        if thought and formatter.properties.thinks[1] not in formatter.tokenizer.decode(response):
            return False  # it writes a thought in another way than a model does
        try:
            expected = formatter.tokenizer.encode(render(messages), add_special_tokens=False)
            found = ids_of(selected([formatter.rule], spans, formatter))
        except ChatTemplateError:
            return False
        if formatter.tokenizer.decode(found) != formatter.tokenizer.decode(expected):
            return False
    return True
