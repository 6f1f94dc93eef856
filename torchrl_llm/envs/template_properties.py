"""What a chat template does, as one object: :class:`TemplateProperties`; and answers as it writes them: :func:`write_answer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torchrl_llm.rendering import Message, Renderer, Role

Pair = tuple[str, str]


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
        frames: the frames of later messages, by their role. That of ``"tool"`` is the user's if the template has no tool role.
        opens: the tail of the generation prompt that belongs to the answer: the thought that it opens, such as ``<think>\\n``, or
            an empty one. ``""``: there is none.
        closes: the token that closes what ``opens`` leaves open; ``None``: it is closed, or empty.
        writes: what the template writes between the generation prompt and a plain answer, such as an empty thought, or what closes
            the one that ``opens`` has; a model writes that itself.
        pairs: opening and closing tokens that may enclose thinking.
        thinking_field: the field of a message that holds its thinking, such as ``reasoning_content``; ``None``: the content does.
        trims_answers: whether the template strips the white space around an answer.
        tail: what the template writes behind the last answer.
        has_tool_role: whether it has a frame of its own for the output of tools.
        shows_date: whether it shows today's date.
    """

    first: Frame
    frames: Mapping[Role, Frame]
    opens: str = ""
    closes: str | None = None
    writes: str = ""
    pairs: tuple[Pair, ...] = ()
    thinking_field: str | None = None
    trims_answers: bool = False
    tail: str = ""
    has_tool_role: bool = False
    shows_date: bool = False


def write_answer(render: Renderer, found: TemplateProperties, text: str) -> str:
    """An answer in the form in which the template writes it as the last message, behind the generation prompt.

    So it is trimmed where the template trims it, what the prompt has opened is taken off its beginning, and what the template adds
    (an empty thought, a space) is added.

    Args:
        render: the template.
        found: what it does.
        text: the answer, with its thinking if it has some.

    Returns:
        The text behind the prompt, without the token that ends the answer; ``text`` itself if the template writes the last answer
        behind something else than its generation prompt.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> from torchrl_llm.envs import ChatFormatter
        >>> template = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
        >>> tokenizer = byte_tokenizer(chat_template=template)
        >>> write_answer(Renderer(tokenizer), ChatFormatter(tokenizer).properties, " 5\\n")
        '5'
    """
    question = Message("user", "q")
    prompt = render([question])
    last = render([question, Message("assistant", text)], prompt=False)
    if not (last.startswith(prompt) and last.endswith(found.tail)):
        return text
    return last.removeprefix(prompt).removesuffix(found.tail)
