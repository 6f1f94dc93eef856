"""Which kernel PyTorch chooses for ``scaled_dot_product_attention`` on an H100."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend

_HALF = (torch.bfloat16, torch.float16)
_ORDER = ("cudnn", "flash", "efficient", "math")
_NAMES = {
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.MATH.value: "math",
}
_USUAL_ORDER = torch._C._get_sdp_priority_order()


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
    **_: Any,
) -> str | None:
    """The kernel; ``None`` if those that are enabled (:func:`torch.nn.attention.sdpa_kernel`)
    cannot compute it.

    The rules follow PyTorch 2.11 and later on compute capability 9.0 with cuDNN 9.16 to 9.22
    (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``), for dense tensors: cuDNN is
    preferred to the others there.
    """
    tensors = query, key, value
    half = query.dtype in _HALF
    same_types = query.dtype == key.dtype == value.dtype
    heads = query.shape[1] % key.shape[1] == 0 if enable_gqa else query.shape[1] == key.shape[1]
    fused = (
        all(each.dim() == 4 and each.shape[-2] and each.stride(-1) == 1 for each in tensors)
        and (attn_mask is None or attn_mask.stride(-1) == 1 or attn_mask.shape[-1] == 1)
        and (query.shape[0] == key.shape[0] and key.shape[:2] == value.shape[:2] and heads and same_types)
    )
    widths, alignment = (query.shape[-1], value.shape[-1]), 8 if half else 4
    able = {
        "cudnn": fused and half and _has_fitting_mask(query, key, attn_mask) and key.shape[-2] != 1
        and all(width <= 128 and width % 8 == 0 for width in widths) and (dropout_p * 16).is_integer(),
        "flash": fused and half and attn_mask is None and len({*widths}) == 1 and widths[0] <= 256
        and not (is_causal and query.shape[-2] != key.shape[-2]),
        "efficient": fused and (half or query.dtype == torch.float32) and all(width % alignment == 0 for width in widths)
        and query.shape[1] == key.shape[1],
        "math": True,
    }  # fmt: skip
    enabled = {
        "cudnn": cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled(),
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return next((kernel for kernel in _order() if able[kernel] and enabled[kernel]), None)


def _order() -> tuple[str, ...]:
    order = torch._C._get_sdp_priority_order()
    # As it is until somebody sets another one: a build for CPUs does not put cuDNN first.
    return _ORDER if order == _USUAL_ORDER else tuple(_NAMES[each] for each in order if each in _NAMES)


def _has_fitting_mask(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    if mask is None:
        return True
    sizes = *query.shape[:2], query.shape[-2], key.shape[-2]
    fits = all(given in (1, size) for given, size in zip(mask.shape[::-1], sizes[::-1], strict=False))
    return mask.dim() in (2, 4) and fits and not mask.requires_grad
