"""Policies without a model, for tests and examples: :class:`ScriptedPolicy`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_llm.modules.policy import Generation, SamplingConfig, TurnPolicy

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
            said = self.tokenizer.encode(self.script(episode, k, str(context)), add_special_tokens=False)
            said = [*said, self.tokenizer.eos_token_id][:width] if self.end_turn else said[:width]
            tokens[i, : len(said)] = torch.tensor(said)
            sizes.append(len(said))
        return Generation(tokens, torch.tensor(sizes), torch.full(tokens.shape, self.log_prob))
