"""What a chat template does, as one object: :class:`TemplateProperties`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torchrl_llm.envs.response import THINKING, Pair
from torchrl_llm.rendering import Role


class Frame(NamedTuple):
    """The template's text around one message.

    Attributes:
        before: from the end of the last message's content to the start of this one's.
        after: from the end of this message's content to where the assistant starts to write.
        trims: whether the template strips the whitespace around the content.
        end: the control token in ``before`` that ends the assistant's answer; ``None``: text does.
    """

    before: str
    after: str
    trims: bool = False
    end: str | None = None

    @property
    def closing(self) -> str:
        """The text between an answer and the token that ends it, such as a line break."""
        return "" if self.end is None else self.before.partition(self.end)[0]


@dataclass(frozen=True)
class TemplateProperties:
    """What :func:`torchrl_llm.envs.template_probe.probe_template` found out.

    Attributes:
        first: the frame of the first message.
        frames: the frames of later messages, by their role. The frame of ``"tool"`` is the user's
            if the template has no tool role.
        opens: the tail of the generation prompt that belongs to the answer: the thought that it
            opens, such as ``<think>\\n``, or an empty one. ``""``: there is none.
        closes: the token that closes what ``opens`` leaves open; ``None``: it is closed, or empty.
        writes: what the template writes between the generation prompt and a plain answer, such as
            an empty thought, or what closes the one that ``opens`` has; a model writes that itself.
        pairs: opening and closing tokens that may enclose thinking.
        thinks: the pair that does: the one that the prompt opens, or that the template writes
            around a thought of a message, or that it drops with what is in it; else
            ``("<think>", "</think>")``.
        thinking_label: the line that the template writes behind the opening one, such as Gemma 4's
            ``thought``; it is no part of the thought's text.
        thinking_field: the field of a message that holds its thinking, such as
            ``reasoning_content``; ``None``: the content does.
        thinking_fields: all that it reads.
        trims_answers: whether the template strips the white space around an answer.
        tail: what the template writes behind the last answer.
        has_tool_role: whether it has a frame of its own for the output of tools.
        between_tools: what it writes between two messages of tools behind one answer; ``None``:
            there is one at most.
        shows_date: whether it shows today's date.
        ends_once: the control token that ends the last answer and no earlier one, such as harmony's
            ``<|return|>``; ``None``: all end alike.
        header: where an answer may be several messages, what the model writes before the last,
            such as ``<|channel|>final<|message|>``; it is no part of the answer's text.
        rewrites: what it does to earlier answers once messages are added; ``None``: nothing.
        texts: those that its expressions hold, at which it may cut answers.
    """

    first: Frame
    frames: Mapping[Role, Frame]
    opens: str = ""
    closes: str | None = None
    writes: str = ""
    pairs: tuple[Pair, ...] = ()
    thinks: Pair = THINKING
    thinking_label: str = ""
    thinking_field: str | None = None
    thinking_fields: tuple[str, ...] = ()
    trims_answers: bool = False
    tail: str = ""
    has_tool_role: bool = False
    between_tools: str | None = None
    shows_date: bool = False
    ends_once: str | None = None
    header: str = ""
    rewrites: str | None = None
    texts: tuple[str, ...] = ()

    def role(self, role: Role) -> Role:
        """The role under which a message is rendered."""
        return role if self.has_tool_role else "user"
