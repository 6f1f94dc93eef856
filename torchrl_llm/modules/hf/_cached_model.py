"""A causal language model that caches keys and values by slot: :class:`CachedModel`.

Decides which tokens are computed, in which forward, and whether the cache is still valid. Beside it
in this folder: ``policy`` samples, ``_step`` makes a forward, ``_kv_cache`` stores, ``_self_check``
compares with the model's own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_llm.modules import lm
from torchrl_llm.modules.adapters import FusedLora, use_adapter
from torchrl_llm.modules.base_products import has_narrow_base_products
from torchrl_llm.modules.engine import ContextLengthError
from torchrl_llm.modules.hf._family import attention_windows
from torchrl_llm.modules.hf._head import sampling_head
from torchrl_llm.modules.hf._kv_cache import SlotCache
from torchrl_llm.modules.hf._step import CachedBackbone
from torchrl_llm.modules.kernels import attention_kernels
from torchrl_llm.modules.prefixes import Ints, common_prefix, first_equal

_BORROW = 32  # tokens that are worth copying from another row instead of computing them
_SPLIT = 16  # columns of padding that are worth another forward
_MAX_TOKENS = 8192  # most tokens in one forward
_MAX_MASK = 2**25  # most elements in one attention mask
_BUCKET = {"cpu": 1}  # by kind of device: a CPU has nothing to gain from shapes that repeat
_BUCKET_ELSEWHERE = 128
_SAMPLE = 16  # elements of each parameter that the staleness check reads


class CachedModel:
    """Logits of the next token for many slots, computing only tokens that a slot's cache does not
    hold.

    Use: inside :meth:`session`, one :meth:`prefill`, then any number of :meth:`step` and
    :meth:`permute`, then :meth:`remember`. An error in between drops the cache.

    Args:
        model: a causal language model of transformers, or a ``PeftModel`` around one.
        adapter: the LoRA adapter to run under; ``None``: the model itself, adapters off.
        bucket: steps see a multiple of so many columns; ``None``: 1 on a CPU, elsewhere 128.
    """

    def __init__(self, model: nn.Module, *, adapter: str | None = None, bucket: int | None = None) -> None:
        self.model = model
        self.adapter = adapter
        self._bucket = bucket
        self.cache = SlotCache()
        self._fingerprint: tuple[Any, Tensor] | None = None
        self._fused: FusedLora | None = None
        self._backbone: Any = None
        self._logits: Any = None
        config = lm.causal_lm(model).config.get_text_config()
        self._windows = attention_windows(config)
        self.max_positions = lm.max_positions(config)
        # Inference mode is faster, but rope variants that rewrite their own buffers would leave
        # inference tensors there.
        self._no_graph = torch.no_grad if lm.moving_ropes(model) else torch.inference_mode

    def __getstate__(self) -> dict[str, Any]:
        # Fused layers, and the functions of the model that a session looks up, cannot be pickled.
        return self.__dict__ | dict.fromkeys(("_fingerprint", "_fused", "_backbone", "_logits"))

    @property
    def device(self) -> torch.device:
        """The device of token ids."""
        return lm.embedding_of(self.model).device

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that the model computes in."""
        return torch.bfloat16 if has_narrow_base_products(self.model) else lm.embedding_of(self.model).dtype

    @property
    def bucket(self) -> int:
        """Steps see a multiple of so many columns, so that few shapes occur, each many times."""
        return self._bucket or _BUCKET.get(self.device.type, _BUCKET_ELSEWHERE)

    def _in_buckets(self, columns: int) -> int:
        return -(-columns // self.bucket) * self.bucket

    def drop(self) -> None:
        """Drop all contexts and free their memory."""
        self.cache.drop()
        self._fingerprint = self._fused = self._logits = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Evaluation mode, no gradients, the right adapter; the cache is dropped if the weights are
        new.

        Afterwards each module has its own training flag back, and the model its active adapter.
        """
        try:
            with (
                lm.training_flags(self.model.modules(), False),
                self._no_graph(),
                use_adapter(self.model, self.adapter),
                attention_kernels(),
            ):
                self._backbone = CachedBackbone(self.model)
                # A forward of the scorer may have left dynamic RoPE at the scaling of a longer
                # input.
                lm.reset_ropes(lm.backbone(self.model))
                # Before fusing and packing: stale weights drop the fused layers and the packed head
                # too.
                self._drop_if_stale()
                self._logits = self._logits or sampling_head(self.model)
                self._fused = self._fused or FusedLora(self.model, adapter=self.adapter)
                with self._fused.in_place():
                    yield
        except BaseException:
            self.drop()  # half-written rows
            raise

    def _drop_if_stale(self) -> None:
        # PyTorch has no public counter of in-place changes but `_version`. It misses fused
        # optimizers and writes to `.data`, hence the sampled elements.
        parameters, device = list(self.model.parameters()), self.device
        exact = [(id(p), p._version, p.data_ptr()) for p in parameters]
        samples = [p.detach().flatten()[:: max(1, p.numel() // _SAMPLE)] for p in parameters]
        # float64 holds the values of every other float dtype exactly.
        sampled = torch.cat([x.to(device, torch.float64) for x in samples])
        if self._fingerprint is None or self._fingerprint[0] != exact or not torch.equal(self._fingerprint[1], sampled):
            self.drop()
            self._fingerprint = exact, sampled

    def prefill(self, prompts: Ints, lengths: Ints, *, slots: Ints, room: int) -> Tensor:
        """Read the prompts. Afterwards row i of the cache is row i of the batch.

        Args:
            prompts: ``[n, L]`` ids, right-padded.
            lengths: ``[n]``, >= 1.
            slots: ``[n]``, distinct.
            room: tokens that may follow.

        Returns:
            logits ``[n, V]`` of the token after each prompt.

        Raises:
            ContextLengthError: the longest prompt and ``room`` more tokens are more than the
                model's positions.
        """
        n, longest = len(slots), int(lengths.max())
        if longest + room > self.max_positions:
            raise ContextLengthError(
                f"A prompt of {longest} tokens and a response of up to {room} are more than the {self.max_positions} "
                "positions of the model. Lower max_model_len or max_output_tokens, or take a model with more positions."
            )
        prompts = prompts[:, :longest]
        self.cache.arrange(slots, self._in_buckets(longest + room))
        # One token is always computed: the logits after a prompt are not cached.
        limit = np.minimum(self.cache.lengths[:n], lengths - 1)
        held = common_prefix(self.cache.tokens[:n, :longest], prompts, limit)
        leader = first_equal(prompts, lengths)
        leaders = np.unique(leader)
        held = self._share(prompts, lengths, held, leaders)
        hidden: dict[int, Tensor] = {}
        for rows in _buckets(leaders, lengths - held):
            for row, state in zip(rows.tolist(), self._read(prompts, held, lengths, rows), strict=True):
                hidden[row] = state
        followers = np.flatnonzero(leader != np.arange(n))
        self.cache.copy(leader[followers], followers, longest)
        logits = self._logits(torch.stack([hidden[row] for row in leaders]))
        return logits[torch.from_numpy(np.searchsorted(leaders, leader)).to(logits.device)]

    def step(self, ids: Tensor, positions: Tensor, *, width: int) -> Tensor:
        """Append one token to each of the first ``k`` rows.

        Args:
            ids: ``[k]`` int64.
            positions: ``[k]`` int64, the number of tokens before each.
            width: more than the largest position.

        Returns:
            logits ``[k, V]`` of the token after it.
        """
        # Columns behind a token are masked, whatever they hold.
        width = self._in_buckets(width)
        return self._logits(self._forward(ids.unsqueeze(-1), positions.unsqueeze(-1), width=width))

    def permute(self, source: Ints) -> None:
        """Row i of the first ``len(source)`` rows becomes what row ``source[i]`` was."""
        rest = np.arange(len(source), len(self.cache.slots))
        self.cache.permute(np.concatenate([source, rest]))

    def remember(self, prompts: Ints, lengths: Ints, responses: Ints, ends: Ints) -> None:
        """Record what the first rows hold: the prompts, and the responses up to the last token but
        one.

        Args:
            prompts: ``[n, L]``.
            lengths: ``[n]``.
            responses: ``[n, A]``.
            ends: ``[n]``, tokens of each response.
        """
        n, width = prompts.shape
        self.cache.tokens[:n, :width] = prompts
        columns = lengths[:, None] + np.arange(responses.shape[1])
        np.put_along_axis(self.cache.tokens[:n], columns, responses, axis=1)
        # The last token of a response was sampled and never read, so it has no keys and values.
        self.cache.lengths[:n] = lengths + ends - 1

    # Prefill: what to read, and reading it.

    def _share(self, prompts: Ints, lengths: Ints, held: Ints, rows: Ints) -> Ints:
        """Fill rows with prefixes that other rows hold, or that several of them share; returns the
        new ``held``."""
        held = self._borrow(prompts, lengths, held, rows)
        fresh = rows[lengths[rows] - 1 - held[rows] >= _BORROW]
        if len(fresh) < 2:
            return held
        first = fresh[:1]
        common = int(common_prefix(prompts[first], prompts[fresh], lengths[fresh] - 1).min())
        if common - int(held[fresh].max()) < _BORROW:
            return held
        ends = np.full_like(lengths, common)
        self._read(prompts, held, ends, first)
        held = held.copy()
        held[first] = common
        self.cache.tokens[first, :common] = prompts[first, :common]
        return self._borrow(prompts, lengths, held, fresh)

    def _borrow(self, prompts: Ints, lengths: Ints, held: Ints, rows: Ints) -> Ints:
        """Copy to each of ``rows`` the longest prefix of its prompt that any row holds, where that
        saves enough."""
        n, longest = prompts.shape
        available = self.cache.lengths.copy()
        available[:n] = held
        result, pairs = held.copy(), []
        for row in rows[lengths[rows] - 1 - held[rows] >= _BORROW].tolist():
            start, prompt = int(held[row]), prompts[row]
            donors = np.flatnonzero((available > start) & (self.cache.tokens[:, start] == prompt[start]))
            if not len(donors):
                continue
            limit = np.minimum(available[donors], lengths[row] - 1)
            prefix = common_prefix(self.cache.tokens[donors, :longest], prompt[None], limit)
            if prefix.max() - start >= _BORROW:
                result[row] = prefix.max()
                pairs.append((int(donors[prefix.argmax()]), row))
        if pairs:
            source, target = np.array(pairs, np.int64).T
            self.cache.copy(source, target, int(result[target].max()))
            for row in target:
                self.cache.tokens[row, : result[row]] = prompts[row, : result[row]]
        return result

    def _read(self, prompts: Ints, held: Ints, ends: Ints, rows: Ints) -> Tensor:
        """Compute tokens ``held`` to ``ends`` of the prompts of ``rows`` ``[m]``.

        The windows end together, so that the last column belongs to every row's last token: a row
        with fewer tokens to read than the others reads some again, and padding where its prompt
        does not reach so far back.

        Returns:
            hidden states ``[m, H]`` of the last tokens.
        """
        count, longest = int((ends - held)[rows].max()), int(ends[rows].max())
        chunk = max(1, min(count, _MAX_TOKENS, _MAX_MASK // longest))
        height = max(1, min(_MAX_TOKENS // chunk, _MAX_MASK // (chunk * longest)))
        parts = []
        for part in (rows[i : i + height] for i in range(0, len(rows), height)):
            positions = (ends[part] - count)[:, None] + np.arange(count)
            ids = np.take_along_axis(prompts[part], positions.clip(0), axis=1)
            place = None if part[0] == 0 and part[-1] == len(part) - 1 else self._put(part)
            for start in range(0, count, chunk):
                window = slice(start, start + chunk)
                width = longest - count + min(start + chunk, count)
                state = self._forward(
                    self._put(ids[:, window]), self._put(positions[:, window]), width=width, rows=place
                )
            parts.append(state)
        return torch.cat(parts)

    def _put(self, array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _forward(self, ids: Tensor, positions: Tensor, *, width: int, rows: Tensor | None = None) -> Tensor:
        """Run the backbone on new tokens ``[m, q]``; negative positions are padding. Returns
        ``[m, H]``, last column."""
        return self._backbone.read(self.cache, ids, positions, width=width, windows=self._windows, rows=rows)


def _buckets(rows: Ints, missing: Ints) -> list[Ints]:
    """Split ``rows`` so that none of them reads mostly what it has read, or padding: long prompts,
    short feedback."""
    buckets: list[list[int]] = []
    for row in sorted(rows.tolist(), key=lambda row: -missing[row]):
        most = missing[buckets[-1][0]] if buckets else 0
        if not buckets or (2 * missing[row] < most and most - missing[row] > _SPLIT):
            buckets.append([])
        buckets[-1].append(row)
    return [np.sort(np.array(bucket, np.int64)) for bucket in buckets]
