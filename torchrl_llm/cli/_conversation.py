"""A conversation with a loaded model, streamed as text: :class:`Conversation`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

import numpy as np

from torchrl_llm.envs import ChatFormatter
from torchrl_llm.envs.contexts import Span, ids_of, selected
from torchrl_llm.modules.engine import TurnRequest
from torchrl_llm.runs.saved import LoadedModel


class ConversationFullError(ValueError):
    """The next response might not fit into the context."""


class Conversation:
    """Messages and responses in turn, in the contexts that training would have.

    Args:
        loaded: the model.
        greedy: take the likeliest token.
    """

    def __init__(self, loaded: LoadedModel, *, greedy: bool = False) -> None:
        self.loaded, self.greedy = loaded, greedy
        self.number = -1
        self.reset()

    def reset(self) -> None:
        """Begin another one, with other sampling noise."""
        self.number += 1
        self._spans: list[Span] = []
        self._context: list[int] = []
        self._response: list[int] = []
        self._turn = 0

    def reply(self, message: str) -> Generator[str]:
        """The model's response to a message, piece by piece. What has come when the iterator is
        closed counts as the response.

        Raises:
            ConversationFullError: message and response do not fit; the conversation stays as it is.
        """
        formatter = self.loaded.formatter
        if self._spans:
            said = formatter.decode(self._response)
            new = formatter.turn_spans(self._response, message, self._turn - 1, said=said)
        else:
            new = formatter.first_spans(message)
        spans, response = [*self._spans, *new], list[int]()
        prompt = ids_of(selected([formatter.rule], spans, formatter))
        limit, room = self.loaded.config.env.max_model_len, self.loaded.config.sampling.max_output_tokens
        if len(prompt) + room > limit:
            raise ConversationFullError(
                f"The conversation would have {len(prompt)} tokens and a response of up to max_output_tokens={room}; "
                f"max_model_len={limit}."
            )
        request = TurnRequest(0, np.array(prompt), self.number, self._turn, self.greedy)
        try:
            yield from text_of(formatter, self.loaded.policy.stream(request), response)
        finally:
            if response:
                self._spans, self._context, self._response = spans, [*prompt, *response], response
                self._turn += 1


def text_of(formatter: ChatFormatter, tokens: Iterable[int], seen: list[int]) -> Generator[str]:
    """The text of a response while it is sampled, without its end token.

    Args:
        formatter: decodes as for an environment.
        tokens: the ids, one by one.
        seen: gets them.
    """
    shown = ""
    for token in tokens:
        seen.append(token)
        text = formatter.decode(seen)
        # The bytes of a character may be spread over several tokens, the first of which decode to
        # this sign.
        if not text.endswith("\ufffd"):
            yield from _rest(shown, text)
            shown = text
    yield from _rest(shown, formatter.decode(seen))


def _rest(shown: str, text: str) -> Sequence[str]:
    return [text[len(shown) :]] if len(text) > len(shown) else []
