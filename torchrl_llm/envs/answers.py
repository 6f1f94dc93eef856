"""Answers that nobody sampled, in the form in which the chat template writes them:
:class:`AnswerForm`.

Demonstrations, scripted players and worked examples give plain text. It has to continue the
generation prompt as a sampled response does: what the prompt holds already is not written twice,
and the rest is what the template itself writes for such a message.
"""

from __future__ import annotations

from typing import Literal

from torchrl_llm.envs.template_properties import TemplateProperties
from torchrl_llm.rendering import ChatTemplateError, Message, Renderer

MissingThinking = Literal["refuse", "empty"]

_QUESTION = Message("user", "q")


class MissingThinkingError(ValueError):
    """An answer that does not close the thought which the prompt has opened, or thinks where the
    prompt has closed it."""


class AnswerForm:
    """From the text of an answer to what follows the generation prompt, without the token that ends
    it.

    The answer is rendered as the last message of a conversation. What the template writes behind
    its prompt counts, if that is the answer but for white space and an empty thought before it.
    Where it is not (a template that drops thinking from every answer), the text counts as it is
    given, trimmed where the template trims.

    Args:
        render: the template; ``None``: messages are joined as they are.
        properties: what the template does.
        missing_thinking: see :class:`~torchrl_llm.envs.ChatFormatter`.

    Examples:
        >>> from torchrl_llm.envs.template_probe import probe_template
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> template = byte_tokenizer().chat_template.replace("assistant\\n{% endif %}", "assistant\\n<think>\\n{% endif %}")
        >>> render = Renderer(byte_tokenizer(chat_template=template))
        >>> form = AnswerForm(render, probe_template(render, ()), "empty")
        >>> form("<think>\\n2 and 2.\\n</think>\\n\\n4"), form("4")
        ('2 and 2.\\n</think>\\n\\n4', '\\n</think>\\n\\n4')
    """

    def __init__(
        self, render: Renderer | None, properties: TemplateProperties, missing_thinking: MissingThinking = "refuse"
    ) -> None:
        self._render, self._properties, self._missing = render, properties, missing_thinking
        self._prompt = "" if render is None else render([_QUESTION])

    def __call__(self, text: str) -> str:
        """What follows the prompt.

        Raises:
            MissingThinkingError: the prompt opens a thought, and the answer does not close it; or
                the prompt has an empty thought, and the answer has another one, or closes one.
        """
        said = self._continued(text)
        return self._as_written(said) or self._trimmed(said)

    def beginning(self, text: str) -> str:
        """What follows the prompt if an answer begins with ``text``, and the policy continues it:
        it may leave a thought open.

        Raises:
            MissingThinkingError: it is neither a beginning of the thought that the prompt opens,
                nor does it close it.
        """
        begun = self._without_opening(text)
        if not text or (self._properties.closes is not None and begun != text):
            return begun
        return self._continued(text)

    def is_open(self, begun: str) -> bool:
        """Whether a thought is open where the answer has begun with ``begun``."""
        opening, closing = self._properties.thinks
        if self._properties.closes is None:
            return begun.lstrip().startswith(opening) and closing not in begun
        return closing not in begun

    # ---------------------------------------- what the prompt holds

    def _continued(self, text: str) -> str:
        """The text, or what it lacks of the prompt's thought and itself; what the prompt holds is
        taken off."""
        opens, (opening, closing) = self._properties.opens, self._properties.thinks
        said = self._without_opening(text)
        thinks = text.lstrip().startswith(opening)
        if self._properties.closes is None:
            if opens and said == text and (thinks or closing in said):
                raise MissingThinkingError(
                    f"The answer {text[:80]!r} thinks, and its prompt ends with the empty thought {opens!r}: leave the thought out."
                )
            return said
        if closing in said:
            return said
        if self._missing == "refuse" or thinks:
            empty = ', or set missing_thinking="empty", which closes the thought before such answers'
            raise MissingThinkingError(
                f"The answer {text[:80]!r} lacks {closing!r}, and its prompt ends with the open thought {opens!r}: give its thought "
                f"too, up to {closing!r}{'' if thinks else empty}."
            )
        # What closes the prompt's thought at once, also where the template does not show it.
        closed = self._properties.writes or (f"\n{closing}\n\n" if opens.endswith("\n") else closing)
        return closed + (text.strip() if self._properties.trims_answers else text)

    def _without_opening(self, text: str) -> str:
        """The text without what the prompt holds of it: the thought that it opens, or an empty
        one."""
        opens, begun = self._properties.opens, text.lstrip()
        opening = "" if self._properties.closes is None else self._properties.thinks[0]
        held = next(filter(begun.startswith, filter(None, (opens, opens.strip(), opening))), None)
        return text if held is None else begun.removeprefix(held)

    # ---------------------------------------- what the template writes

    def _as_written(self, said: str) -> str | None:
        """What the template writes behind its prompt for an answer; ``None``: something else, or
        nothing."""
        if self._render is None:
            return None
        tail = self._properties.tail
        try:
            last = self._render([_QUESTION, self._message(said)], prompt=False)
        except ChatTemplateError:
            return None
        if not (last.startswith(self._prompt) and last.endswith(tail)):
            return None
        written = last.removeprefix(self._prompt).removesuffix(tail)
        expected = {_squashed(said), _squashed(self._properties.writes + said)}
        return written if _squashed(written) in expected or self._has_header(written, said) else None

    def _has_header(self, written: str, said: str) -> bool:
        """Whether the template writes the same thought and the same answer, and a header of its own
        between them."""
        thought, closed, answer = said.partition(self._properties.thinks[1])
        whole, begin, end = map(_squashed, (written, thought + closed, answer))
        return bool(closed and end) and whole.startswith(begin) and whole.removeprefix(begin).endswith(end)

    def _message(self, said: str) -> Message:
        """The message whose answer this is, with its thought where the template reads thoughts."""
        field, (opening, closing) = self._properties.thinking_field, self._properties.thinks
        whole = (self._properties.opens if self._properties.closes is not None else "") + said
        thought, closed, answer = whole.lstrip().removeprefix(opening).partition(closing)
        if field is None or not closed or not whole.lstrip().startswith(opening):
            return Message("assistant", whole)
        return Message("assistant", answer.lstrip(), {field: thought.strip()})

    def _trimmed(self, said: str) -> str:
        if not self._properties.trims_answers:
            return said
        # The white space before an answer that continues a thought is the thought's.
        return said.rstrip() if self._properties.closes is not None else said.strip()


def _squashed(text: str) -> str:
    return "".join(text.split())
