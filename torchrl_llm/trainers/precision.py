"""In which precision a run computes and keeps its weights: :func:`mixed_precision`, :func:`warn_of_half_weights`.

What loads weights in float32 where all of them train is :func:`torchrl_llm.modules.load_actor_critic`.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch
from transformers import AutoConfig

from torchrl_llm.trainers.config import RunConfig

logger = logging.getLogger(__name__)

MixedPrecision = Literal["no", "bf16", "fp16"]

_AUTOCAST: dict[str, MixedPrecision] = {"bfloat16": "bf16", "float16": "fp16"}


def mixed_precision(config: RunConfig, path: str) -> MixedPrecision:
    """The autocast of the forward passes of training, as accelerate names it.

    Where all weights train they are kept in float32, and ``config.dtype`` says in what they compute.

    Args:
        config: the settings.
        path: of the model, whose configuration says what ``dtype="auto"`` is.
    """
    if config.mixed_precision is not None:
        return config.mixed_precision
    if config.lora_r:
        return "no"
    dtype: object = config.dtype
    if dtype == "auto":
        dtype = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code).dtype
    return _AUTOCAST.get(str(dtype).removeprefix("torch."), "no")


def warn_of_half_weights(optimizer: torch.optim.Optimizer) -> None:
    """Say so if an optimizer of PyTorch's steps weights narrower than float32, which lose most of its steps to rounding.

    Optimizers of other packages may keep float32 copies themselves.
    """
    kind = type(optimizer)
    narrow = {
        str(parameter.dtype)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.is_floating_point() and torch.finfo(parameter.dtype).bits < 32
    }
    if narrow and kind.__module__.startswith("torch.optim"):
        logger.warning(
            "%s steps %s weights without a float32 copy: at usual learning rates rounding takes all but a few of its steps. "
            "load_actor_critic keeps float32 weights (the default, master_weights=True); mixed precision computes in half.",
            kind.__name__, " and ".join(sorted(narrow)),
        )  # fmt: skip
