"""Float32 products as a GPU computes them where PyTorch's precision of them is not "highest":
:class:`TF32`."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_FACTORS = {
    _ATEN.mm.default: (0, 1),
    _ATEN.bmm.default: (0, 1),
    _ATEN.addmm.default: (1, 2),
    # In inference mode these two are not taken apart.
    _ATEN.linear.default: (0, 1),
    _ATEN.matmul.default: (0, 1),
}


class TF32(TorchDispatchMode):
    """Rounds the factors of float32 products to 10 bits, where the precision of PyTorch is not
    "highest"."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        factors = _FACTORS.get(func, ()) if torch.backends.cuda.matmul.fp32_precision == "tf32" else ()
        args = [_rounded(x) if i in factors else x for i, x in enumerate(args)]
        return func(*args, **(kwargs or {}))


def _rounded(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        return x
    bits = x.detach().contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
