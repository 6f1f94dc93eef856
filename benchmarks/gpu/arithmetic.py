"""Floating-point operations of a model for each token, and the rates of GPUs' data sheets: measured
shares of them (``speed``) and assumed ones (``capacity``) are of the same numbers."""

from typing import Any

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12}
"""Operations a second on dense products in bfloat16, by what the GPU's name has in it, from the
data sheets."""


def token_operations(model: Any, *, context: float, acted: float, backward: int = 0) -> float:
    """Floating-point operations of a token in a forward, or in a forward and its backward.

    A layer's products are 2 for each weight in a forward, as many again in a backward for the
    gradients of its inputs, and again for the gradients of its weights if they train. What gradient
    checkpointing computes again, norms, and the embedding, which is read, are not counted.

    Args:
        model: a causal language model, on any device; adapters are not counted.
        context: tokens that a token attends to, on average.
        acted: share of the tokens whose logits are computed.
        backward: 0 for a forward alone, 2 with LoRA, 4 where all weights train.
    """
    config, names = model.config.get_text_config(), ("lora_", "embed", "lm_head")
    named = model.named_parameters()
    weights = sum(p.numel() for name, p in named if p.ndim == 2 and not any(part in name for part in names))
    weights += model.get_output_embeddings().weight.numel() * acted
    attention = 4 * config.num_hidden_layers * config.hidden_size * context
    return (2 + backward) * weights + (3 if backward else 1) * attention
