"""No randomness in forwards: :func:`disable_randomness`, and training mode only where checkpointing needs it.

The log-probs of a row must be the same whenever they are compared, and a recomputation must repeat its forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# transformers keeps probabilities as bare numbers too: attention_dropout, attn_pdrop, layerdrop, drop_path_rate.
_PROBABILITY = re.compile(r"dropout|pdrop|layerdrop|drop_path|drop_prob")
# These are read in training mode only. PhiMoE's router_jitter_noise is none of them: its routing needs it in any mode.
_JITTER = {"jitter_noise", "input_jitter_noise", "moe_jitter_eps"}


def disable_randomness(model: nn.Module) -> None:
    """Set every dropout probability, layer drop and jitter inside ``model``, and in its configurations, to 0."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        _silence(module, vars(module), jitter=True)
    for config in configs.values():
        _silence(config, vars(config) if hasattr(config, "__dict__") else {}, jitter=False)


def _silence(owner: Any, fields: dict[str, Any], *, jitter: bool) -> None:
    for name, value in list(fields.items()):
        if isinstance(value, float) and (_PROBABILITY.search(name) or (jitter and name in _JITTER)):
            setattr(owner, name, 0.0)


@contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    """Training mode for the modules that checkpoint, and for nothing inside them.

    transformers checkpoints activations in training mode only. What else that mode does (dropout, jitter, random routing) is
    done by the modules inside, which stay in evaluation mode, in the forward as in its recomputation.
    """
    switched = [m for m in model.modules() if vars(m).get("gradient_checkpointing", False) and not m.training]
    try:
        for module in switched:
            module.training = True
        yield
    finally:
        for module in switched:
            module.training = False
