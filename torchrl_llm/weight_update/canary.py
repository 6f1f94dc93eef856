"""The canary: whether an engine computes what the trained model computes, on a few fixed prompts."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm.modules.adapters import use_adapter
from torchrl_llm.modules.lm import causal_lm, hidden_states, lm_logits
from torchrl_llm.weight_update.errors import WeightSyncError, part

_TOP = 8
"""Log-probs compared per prompt: those of the likeliest tokens."""
_names = count()


class Canary:
    """Fixed prompts, on which the log-probs of the next token are compared.

    They are longer than two blocks of the prefix cache, and the same each time: an engine that uses keys and values
    computed with earlier weights is found out, as is one that has other weights. A change of the weights that moves these
    log-probs by less than :attr:`tolerance` is not seen.

    Args:
        policy: a ``VLLMPolicy``.
        model: the trained model.
        adapter: under which it is trained, or ``None``.
        prompts: how many.
        tolerance: the largest difference that passes, in nats, meant over the likeliest tokens of a prompt; default 1e-3 for
            an engine in float32, else 0.1.
        seed: of the prompts.
    """

    def __init__(
        self,
        policy: Any,
        model: nn.Module,
        adapter: str | None,
        *,
        prompts: int = 2,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> None:
        config = policy.llm.llm_engine.vllm_config
        length = min(2 * config.cache_config.block_size + 1, config.model_config.max_model_len - 1)
        size = causal_lm(model).get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(seed)
        self.prompts = torch.randint(size, (prompts, length), generator=generator)
        self.tolerance = tolerance or (1e-3 if config.model_config.dtype == torch.float32 else 0.1)
        self.policy, self.model, self.adapter = policy, model, adapter

    def check(self) -> float:
        """The largest difference, in nats.

        Raises:
            WeightSyncError: it is above the tolerance.
        """
        temperature = self.policy.sampling.temperature
        with part("the canary"):
            tokens, log_probs = _engine_log_probs(self.policy, self.prompts, temperature)
            expected = _model_log_probs(self.model, self.adapter, self.prompts, temperature).gather(-1, tokens)
        difference = float((log_probs - expected).abs().mean(-1).max())
        if not difference <= self.tolerance:
            raise WeightSyncError(
                f"The canary found that the engine does not compute what the trained model does: on {len(self.prompts)} "
                f"fixed prompts their log-probs differ by {difference:.3g} nats, where {self.tolerance:.3g} is the most. "
                "The weights did not arrive, or contexts computed with earlier weights are in use."
            )
        return difference


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
