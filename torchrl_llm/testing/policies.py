"""Policies without a model, for tests, examples and benchmarks: :class:`ScriptedPolicy`,
:class:`SleepingPolicy`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_llm.modules.policy import Generation, SamplingConfig, TurnPolicy, TurnRequest, TurnResponse
from torchrl_llm.utils.fingerprint import fingerprint

Script = Callable[[int, int, str], str]


class ScriptedPolicy(TurnPolicy):
    """Says what a function tells it to.

    Args:
        script: maps ``(episode_id, turn, context)`` to the text of the response.
        tokenizer: encodes the response and decodes the context.
        max_output_tokens: width of the response; longer texts are cut. Default 32.
        log_prob: written for every token; default -1.0.
        end_turn: append the tokenizer's EOS token if there is room; default True.
        read_context: decode the context for the script; ``False`` (default) passes ``""``.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> policy = ScriptedPolicy(lambda episode, turn, context: "hi", tokenizer=byte_tokenizer(), max_output_tokens=4)
        >>> one = torch.ones(1, dtype=torch.int64)
        >>> policy.generate(one.view(1, 1), one, one, one, slots=one, greedy=False).tokens.tolist()
        [[74, 75, 2, 0]]
    """

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_output_tokens: int = 32,
        log_prob: float = -1.0,
        end_turn: bool = True,
        read_context: bool = False,
    ) -> None:
        super().__init__(SamplingConfig(max_output_tokens=max_output_tokens))
        self.script = script
        self.tokenizer = tokenizer
        self.log_prob = log_prob
        self.end_turn = end_turn
        self.read_context = read_context

    def fingerprint(self) -> str:
        """Also of the script."""
        return fingerprint((super().fingerprint(), self.script))

    def generate(
        self, prompt: Tensor, lengths: Tensor, turn: Tensor, episode_id: Tensor, *, slots: Tensor, greedy: bool
    ) -> Generation:
        """Ask the script for every live slot; see :meth:`TurnPolicy.generate`."""
        width = self.sampling.max_output_tokens
        tokens = torch.zeros(len(lengths), width, dtype=torch.int64)
        sizes = []
        rows = zip(episode_id.tolist(), turn.tolist(), prompt.tolist(), lengths.tolist(), strict=True)
        for i, (episode, k, ids, length) in enumerate(rows):
            context = self.tokenizer.decode(ids[:length]) if self.read_context else ""
            response = self.tokenizer.encode(self.script(episode, k, str(context)), add_special_tokens=False)
            response = [*response, self.tokenizer.eos_token_id][:width] if self.end_turn else response[:width]
            tokens[i, : len(response)] = torch.tensor(response)
            sizes.append(len(response))
        return Generation(tokens, torch.tensor(sizes), torch.full(tokens.shape, self.log_prob))


class SleepingPolicy(ScriptedPolicy):
    """An engine of fixed speed that batches continuously: a step takes the same time for any number
    of requests.

    Each :meth:`poll` sleeps, and adds a token to every response that is not finished; those that
    are come back. It has weights of its own as far as collectors are concerned: each token carries
    the version at its step.

    Args:
        script: see :class:`ScriptedPolicy`.
        seconds_per_step: how long a step takes; default 0.01.
        kwargs: see :class:`ScriptedPolicy`.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> policy = SleepingPolicy(lambda *_: "hi", tokenizer=byte_tokenizer(), seconds_per_step=0.001)
        >>> policy.submit(TurnRequest(0, np.array([5, 6]), episode_id=0, turn=0))
        >>> [[response.tokens.tolist() for response in policy.poll()] for _ in range(3)]
        [[], [], [[74, 75, 2]]]
    """

    owns_weights = True

    def __init__(self, script: Script, *, seconds_per_step: float = 0.01, **kwargs: Any) -> None:
        super().__init__(script, **kwargs)
        self.seconds_per_step = seconds_per_step
        self._running: dict[int, tuple[npt.NDArray[np.int64], list[int]]] = {}

    @property
    def pending(self) -> int:
        """Number of requests that are not answered yet."""
        return len(self._running)

    def submit(self, request: TurnRequest) -> None:
        """Ask for one turn."""
        ((_, tokens, _, _),) = self._answer([request], greedy=request.greedy)
        self._running[request.slot] = tokens, []

    def cancel(self, slots: Sequence[int] | None = None) -> None:
        """Forget the requests of ``slots`` (default: all)."""
        for slot in list(self._running) if slots is None else slots:
            self._running.pop(slot, None)

    def poll(self) -> list[TurnResponse]:
        """Take a step; return the responses that it finished."""
        time.sleep(self.seconds_per_step)
        for _, versions in self._running.values():
            versions.append(self.policy_version)
        finished = {slot: response for slot, response in self._running.items() if len(response[1]) == len(response[0])}
        self.cancel(list(finished))
        return [
            TurnResponse(slot, tokens, np.full(len(tokens), self.log_prob, np.float32), np.array(versions))
            for slot, (tokens, versions) in finished.items()
        ]
