"""One forward of a model's backbone on new tokens, with keys and values cached by slot:
:class:`CachedBackbone`.

:func:`compiled_step` is the one of a sampled token through ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor, nn

from torchrl_llm.modules import lm
from torchrl_llm.modules.hf._kv_cache import SlotCache, mark_sizes

_MAX_GRAPHS = 64  # two for each model, and for each precision of float32 products


class DecodeCompilationError(RuntimeError):
    """``torch.compile`` failed on the forward of a sampled token."""


class CachedBackbone:
    """The backbone of a model, as it is now: another is to be made when modules of the model are
    exchanged.

    Args:
        model: a causal language model of transformers, or a ``PeftModel`` around one.
        windows: how far back the layers of each kind see, in tokens; ``None``: to the beginning.
    """

    def __init__(self, model: nn.Module, windows: Mapping[str, int | None]) -> None:
        self._windows = windows
        self._decoder = lm.backbone(model)
        self._argument = lm.cache_argument(self._decoder)
        self._dtype = lm.embedding_of(model).dtype

    def read(
        self, cache: SlotCache, ids: Tensor, positions: Tensor, *, width: int, rows: Tensor | None = None
    ) -> Tensor:
        """Read new tokens, and write their keys and values.

        Args:
            cache: where keys and values are.
            ids: ``[m, q]`` int64.
            positions: ``[m, q]`` int64, the column of each token; negative for padding, if q > 1.
            width: the columns of the cache that are seen.
            rows: ``[m]`` int64, the rows of the cache; ``None``: rows 0 to m - 1.

        Returns:
            hidden states ``[m, H]`` of the last column.
        """
        cache.aim(positions, width=width, rows=rows)
        if positions.shape[1] > 1:
            positions = positions.clamp(min=0)
        masks, past = self._masks(positions, width), {self._argument: cache}
        out = self._decoder(input_ids=ids, position_ids=positions, attention_mask=masks, use_cache=True, **past)
        return out.last_hidden_state[:, -1]

    def _masks(self, positions: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """Additive masks ``[m, 1, q, width]``: a token sees its own column, those before, and no
        further than its window."""
        columns, positions = torch.arange(width, device=positions.device), positions[:, None, :, None]
        behind, masks = columns > positions, {}
        for kind, window in self._windows.items():
            hidden = behind if window is None else behind | (columns <= positions - window)
            masks[kind] = torch.zeros_like(hidden, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        # A single kind goes in as a tensor: models that do not tell kinds apart do not know the
        # dictionary.
        return masks if len(masks) > 1 else next(iter(masks.values()))


def compiled_step(backbone: CachedBackbone, cache: SlotCache, ids: Tensor, positions: Tensor, *, width: int) -> Tensor:
    """:meth:`CachedBackbone.read` of one token of each of the first rows, compiled when it is first
    called.

    Rows, columns and width are symbols, so there is one graph for a single row and one for all
    larger numbers of rows.

    Args:
        backbone: the model's.
        cache: with keys and values of all layers.
        ids: ``[k]`` int64.
        positions: ``[k]`` int64.
        width: as in :meth:`CachedBackbone.read`.

    Returns:
        hidden states ``[k, H]``.

    Raises:
        DecodeCompilationError: PyTorch's compiler fails.
    """
    # One new tensor, since graphs depend on strides too. The width is the size of another: an int
    # would be a constant at first.
    tokens, columns = torch.stack([ids, positions]), torch.arange(width, device=ids.device)
    mark_sizes(columns, 0)
    mark_sizes(tokens, 1)
    try:
        # PyTorch's own limit is 8, beyond which fullgraph=True raises.
        with torch.compiler.config.patch(recompile_limit=_MAX_GRAPHS):  # type: ignore[attr-defined]
            return _compiled()(backbone, cache.first(len(ids)), tokens, columns)
    except (
        torch._dynamo.exc.TorchDynamoException,
        torch.fx.experimental.symbolic_shapes.ConstraintViolationError,
    ) as error:
        raise DecodeCompilationError(
            "compile_decode=True: torch.compile failed on the forward of a sampled token. Set compile_decode to false; or mend "
            "what it needs, which on a CPU is a C++ compiler (g++, or the environment variable CXX). It said: "
            f"{type(error).__name__}: {error}"
        ) from error


@cache
def _compiled() -> Callable[..., Tensor]:
    """:func:`_step`, compiled. Made late, because it imports PyTorch's compiler, which takes
    seconds."""
    # A graph break is an error: a silent fall back to eager would look like a slow success.
    return torch.compile(_step, fullgraph=True)


def _step(backbone: CachedBackbone, cache: SlotCache, tokens: Tensor, columns: Tensor) -> Tensor:
    """``tokens`` are ids and positions ``[2, k]``, ``columns`` ``[width]``."""
    ids, positions = tokens.unsqueeze(-1)
    return backbone.read(cache, ids, positions, width=columns.shape[0])
