"""The log-prob parity check: whether an engine computes what the trained model computes, on a few
fixed prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchrl_llm.modules.engine import InferenceEngine, WeightSyncError, sync_step
from torchrl_llm.modules.kernels import float32_products
from torchrl_llm.modules.lm import embedding_of, is_full_precision
from torchrl_llm.modules.scorer import next_log_probs


@dataclass(frozen=True)
class ParityCheck:
    """The log-probs of a trained model for the next token after a few fixed prompts.

    The prompts are longer than two blocks of a prefix cache, and the same each time: an engine that
    uses keys and values computed with earlier weights fails, as does one that has other weights. A
    change of the weights that moves these log-probs by less than the tolerance is not detected.

    Attributes:
        prompts: ``[n, L]`` int64.
        log_probs: ``[n, V]`` float32.
        temperature: that the logits were divided by.
    """

    prompts: Tensor
    log_probs: Tensor
    temperature: float

    @classmethod
    def of(
        cls, model: nn.Module, adapter: str | None, *, temperature: float, prompts: int = 2, length: int = 33
    ) -> ParityCheck:
        """Compute the log-probs of a model.

        Args:
            model: the trained model.
            adapter: under which it is trained, or ``None``.
            temperature: of the policy's sampling.
            prompts: how many; 0: no forward runs, and every check passes.
            length: of each, in tokens.
        """
        size = embedding_of(model).shape[0]
        ids = torch.randint(size, (prompts, length), generator=torch.Generator().manual_seed(0))
        with float32_products("highest"):
            log_probs = next_log_probs(model, adapter, ids, temperature) if prompts else torch.zeros(0, size)
        return cls(ids, log_probs, temperature)

    def check(self, engine: InferenceEngine, tolerance: float | None = None) -> float:
        """The largest difference to what an engine computes, in nats; NaN without prompts.

        Args:
            engine: computes the log-probs of its likeliest tokens.
            tolerance: the largest difference that passes, in nats, the mean over the likeliest
                tokens of a prompt; default 1e-3 for an engine that computes in float32 or wider,
                else 0.1.

        Raises:
            WeightSyncError: it is above the tolerance.
        """
        if not len(self.prompts):
            return float("nan")
        # Measured with vLLM: the right weights differ by 1e-6 in float32 and by up to 2e-2 in
        # bfloat16; keys and values of earlier weights, or an old head, by 0.5 and more.
        if tolerance is None:
            tolerance = 1e-3 if is_full_precision(engine.dtype) else 0.1
        with sync_step("the parity check"), float32_products("highest"):
            tokens, log_probs = engine.log_probs(self.prompts, self.temperature)
            difference = float((log_probs - self.log_probs.gather(-1, tokens)).abs().mean(-1).max())
        # Not ">": the difference may be NaN.
        if not difference <= tolerance:
            raise WeightSyncError(
                f"The parity check found that the engine does not compute what the trained model does: on {len(self.prompts)} "
                f"fixed prompts their log-probs differ by {difference:.3g} nats, where {tolerance:.3g} is the most. "
                "The weights did not arrive, or contexts computed with earlier weights are in use."
            )
        return difference
