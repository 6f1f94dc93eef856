"""One forward of a model's backbone on new tokens, with keys and values cached by slot: :class:`CachedBackbone`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torchrl_llm.modules import lm
from torchrl_llm.modules.hf._kv_cache import SlotCache


class CachedBackbone:
    """The backbone of a model, as it is now: another is to be made when modules of the model are exchanged.

    Args:
        model: a causal language model of transformers, or a ``PeftModel`` around one.
        cache: where keys and values are.
    """

    def __init__(self, model: nn.Module, cache: SlotCache) -> None:
        self._decoder = lm.backbone(model)
        self._argument = lm.cache_argument(self._decoder)
        self._dtype = lm.embedding_of(model).dtype
        self._cache = cache

    def read(
        self,
        ids: Tensor,
        positions: Tensor,
        *,
        width: int,
        windows: Mapping[str, int | None],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Read new tokens, and write their keys and values.

        Args:
            ids: ``[m, q]`` int64.
            positions: ``[m, q]`` int64, the column of each token; negative for padding, if q > 1.
            width: the columns of the cache that are seen.
            windows: how far back the layers of each kind see, in tokens; ``None``: to the beginning.
            rows: ``[m]`` int64, the rows of the cache; ``None``: rows 0 to m - 1.

        Returns:
            hidden states ``[m, H]`` of the last column.
        """
        self._cache.aim(positions, width=width, rows=rows)
        if positions.shape[1] > 1:
            positions = positions.clamp(min=0)
        out = self._decoder(
            input_ids=ids,
            position_ids=positions,
            attention_mask=_masks(positions, width, windows, self._dtype),
            use_cache=True,
            **{self._argument: self._cache},
        )
        return out.last_hidden_state[:, -1]


def _masks(
    positions: Tensor, width: int, windows: Mapping[str, int | None], dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Additive masks ``[m, 1, q, width]``: a token sees its own column, those before, and no further than its window."""
    columns, positions = torch.arange(width, device=positions.device), positions[:, None, :, None]
    behind, masks = columns > positions, {}
    for kind, window in windows.items():
        hidden = behind if window is None else behind | (columns <= positions - window)
        masks[kind] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
    # A single kind goes in as a tensor: models that do not tell kinds apart do not know the dictionary.
    return masks if len(masks) > 1 else next(iter(masks.values()))
