"""What :class:`~torchrl_llm.modules.hf.HFPolicy` reads of a model before any forward: whether it
refuses its family, and its windows."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn

from torchrl_llm.modules import lm
from torchrl_llm.modules.checks import UnsupportedModelError, name_of, unusual_layers
from torchrl_llm.modules.prefix_attention import ATTENTION

ADVICE = "Use a vLLM policy for this model, or another model."
_ATTENTION = ("sdpa", "eager", ATTENTION)


def check_family(model: nn.Module) -> None:
    """Refuse models whose layers keep something else than keys and values by position."""
    causal = lm.causal_lm(model)
    config = causal.config.get_text_config()
    lengthens = any(each.is_prompt_learning for each in getattr(model, "peft_config", {}).values())
    problems = {
        str(unusual_layers(causal)): unusual_layers(causal),
        "is an encoder-decoder": causal.config.is_encoder_decoder,
        "attends in chunks": getattr(config, "attention_chunk_size", None) is not None,
        "has a prompt-learning adapter, which lengthens every prompt": lengthens,
        "takes no position_ids": "position_ids" not in signature(lm.backbone(model).forward).parameters,
    }
    if problem := next((problem for problem, found in problems.items() if found), None):
        raise UnsupportedModelError(
            f"{name_of(causal)} {problem}; HFPolicy needs attention layers with keys and values by position. {ADVICE}"
        )
    # transformers 5 has a public setter of the implementation, and no public getter.
    implementation = config._attn_implementation
    if implementation not in _ATTENTION:
        raise UnsupportedModelError(
            f"{name_of(causal)} uses attn_implementation={implementation!r}, which takes no ready-made mask; HFPolicy expects "
            "'sdpa' or 'eager'. Load the model with attn_implementation='sdpa', which runs flash attention on a GPU where no mask "
            "is needed, or sample with a vLLM policy."
        )


def attention_windows(config: Any) -> dict[str, int | None]:
    """How far back the layers of each kind see; ``None``: to the beginning."""
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [default]
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))}
