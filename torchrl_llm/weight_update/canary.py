"""The canary: whether an engine computes what the trained model computes, on a few fixed prompts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm.modules.adapters import use_adapter
from torchrl_llm.modules.hf import HFPolicy
from torchrl_llm.modules.lm import causal_lm, hidden_states, lm_logits
from torchrl_llm.weight_update.errors import WeightSyncError, part

_TOP = 8
"""Log-probs compared per prompt: those of the likeliest tokens."""
_names = count()


@dataclass(frozen=True)
class Canary:
    """What a trained model says to a few fixed prompts: the log-probs of the next token.

    The prompts are longer than two blocks of a prefix cache, and the same each time: an engine that uses keys and values
    computed with earlier weights is found out, as is one that has other weights. A change of the weights that moves these
    log-probs by less than the tolerance is not seen.

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
        cls,
        model: nn.Module,
        adapter: str | None,
        *,
        temperature: float,
        prompts: int = 2,
        length: int = 33,
        seed: int = 0,
    ) -> Canary:
        """Ask the model.

        Args:
            model: the trained model.
            adapter: under which it is trained, or ``None``.
            temperature: of the policy's sampling.
            prompts: how many; 0: nothing is asked, and every check passes.
            length: of each, in tokens.
            seed: of the prompts.
        """
        size = causal_lm(model).get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(size, (prompts, length), generator=generator)
        log_probs = _model_log_probs(model, adapter, ids, temperature) if prompts else torch.zeros(0, size)
        return cls(ids, log_probs, temperature)

    def check(self, policy: Any, tolerance: float | None = None) -> float:
        """The largest difference to what a policy says, in nats; NaN without prompts.

        Args:
            policy: a ``VLLMPolicy`` or an ``HFPolicy``.
            tolerance: the largest difference that passes, in nats, meant over the likeliest tokens of a prompt; default 1e-3
                for a policy that computes in float32 or wider, else 0.1.

        Raises:
            WeightSyncError: it is above the tolerance.
        """
        if not len(self.prompts):
            return float("nan")
        exact = policy.dtype in (torch.float32, torch.float64)
        tolerance = tolerance or (1e-3 if exact else 0.1)
        with part("the canary"):
            if isinstance(policy, HFPolicy):
                theirs = _model_log_probs(policy.model, policy.adapter, self.prompts, self.temperature)
                tokens = theirs.topk(min(_TOP, theirs.shape[-1])).indices
                log_probs = theirs.gather(-1, tokens)
            else:
                tokens, log_probs = _engine_log_probs(policy, self.prompts, self.temperature)
            difference = float((log_probs - self.log_probs.gather(-1, tokens)).abs().mean(-1).max())
        if not difference <= tolerance:
            raise WeightSyncError(
                f"The canary found that the engine does not compute what the trained model does: on {len(self.prompts)} "
                f"fixed prompts their log-probs differ by {difference:.3g} nats, where {tolerance:.3g} is the most. "
                "The weights did not arrive, or contexts computed with earlier weights are in use."
            )
        return difference


def canary_length(policy: Any) -> int:
    """Tokens of a prompt for the engine of a ``VLLMPolicy``: two blocks of its prefix cache and one."""
    config = policy.llm.llm_engine.vllm_config
    return min(2 * config.cache_config.block_size + 1, config.model_config.max_model_len - 1)


def _engine_log_probs(policy: Any, prompts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The likeliest next tokens ``[n, k]`` after ``prompts`` ``[n, L]`` and their log-probs. Turns in flight go on."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    params = SamplingParams(
        temperature=temperature, max_tokens=1, logprobs=_TOP, seed=0, ignore_eos=True, detokenize=False
    )
    engine = policy.llm.llm_engine
    names = [f"canary-{next(_names)}" for _ in prompts]
    for name, prompt in zip(names, prompts.tolist(), strict=True):
        engine.add_request(name, tokens_input(prompt), params, lora_request=policy.lora_request)
    found: dict[str, dict[int, Any]] = {}
    while len(found) < len(names):
        for output in policy.step():
            if output.request_id in names and output.finished:
                found[output.request_id] = output.outputs[0].logprobs[0]
    # The sampled token may come on top of the likeliest ones.
    best = [sorted(found[name].items(), key=lambda item: item[1].rank)[:_TOP] for name in names]
    tokens = torch.tensor([[token for token, _ in row] for row in best])
    return tokens, torch.tensor([[entry.logprob for _, entry in row] for row in best])


@torch.no_grad()
def _model_log_probs(model: nn.Module, adapter: str | None, prompts: Tensor, temperature: float) -> Tensor:
    """Log-probs ``[n, V]`` of the next token, float32."""
    device = causal_lm(model).get_input_embeddings().weight.device
    with use_adapter(model, adapter):
        logits = lm_logits(model, hidden_states(model, prompts.to(device))[:, -1])
    return (logits.float() / temperature).log_softmax(-1).cpu()
