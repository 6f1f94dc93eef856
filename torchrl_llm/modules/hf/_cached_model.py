"""A causal language model that caches keys and values by slot: :class:`CachedModel`; and
:class:`CheckedModel`, which is one that was compared with the model's own forward.

Decides which tokens are computed, in which forward, and whether the cache is still valid. Beside it
in this folder: ``policy`` samples, ``_step`` makes a forward, ``_kv_cache`` stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_llm.modules import lm
from torchrl_llm.modules.adapters import FusedLora, use_adapter
from torchrl_llm.modules.base_products import has_narrow_base_products
from torchrl_llm.modules.checks import FAILURES, UnsupportedModelError, declared_windows, name_of, probe_ids
from torchrl_llm.modules.engine import ContextLengthError
from torchrl_llm.modules.hf._family import ADVICE, attention_windows, check_family
from torchrl_llm.modules.hf._head import sampling_head
from torchrl_llm.modules.hf._kv_cache import SlotCache
from torchrl_llm.modules.hf._step import CachedBackbone, compiled_step
from torchrl_llm.modules.kernels import attention_kernels, float32_products
from torchrl_llm.modules.prefixes import Ints, common_prefix, first_equal

_BORROW = 32  # tokens that are worth copying from another row instead of computing them
_SPLIT = 16  # columns of padding that are worth another forward
_MAX_TOKENS = 8192  # most tokens in one forward
_MAX_MASK = 2**25  # most elements in one attention mask
_BUCKET = {"cpu": 1}  # by kind of device: a CPU has nothing to gain from shapes that repeat
_BUCKET_ELSEWHERE = 128
_SAMPLE = 16  # elements of each parameter that the staleness check reads
_MORE = 5  # tokens that a comparison adds to its rows


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
        self.bucket = bucket or 1
        """Steps see a multiple of so many columns, so that few shapes occur, each many times."""
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
                self._backbone = CachedBackbone(self.model, self._windows)
                # The model may have been moved; to ask at every step would slow it.
                self.bucket = self._bucket or _BUCKET.get(self.device.type, _BUCKET_ELSEWHERE)
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
        buckets = _buckets(leaders, lengths - held)
        states = torch.cat([self._read(prompts, held, lengths, rows) for rows in buckets])
        followers = np.flatnonzero(leader != np.arange(n))
        self.cache.copy(leader[followers], followers, longest)
        in_order = torch.from_numpy(np.argsort(np.concatenate(buckets))).to(states.device)
        logits = self._logits(states[in_order])
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
                new = (self._put(x[:, window]) for x in (ids, positions))
                state = self._forward(*new, width=width, rows=place)
            parts.append(state)
        return torch.cat(parts)

    def _put(self, array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _forward(self, ids: Tensor, positions: Tensor, *, width: int, rows: Tensor | None = None) -> Tensor:
        """Run the backbone on new tokens ``[m, q]``; negative positions are padding. Returns
        ``[m, H]``, last column."""
        return self._backbone.read(self.cache, ids, positions, width=width, rows=rows)


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


class CheckedModel(CachedModel):
    """Refuses a model, or a context, that has other logits with keys and values cached by slot than
    without.

    A few tokens are compared when it is made, and rows longer than an attention window of the
    configuration when the first context is. Each compiled step is compared with the same one
    without the compiler when it is first made.

    Args:
        model: see :class:`CachedModel`; so are ``adapter`` and ``bucket``.
        compile_decode: compile the forward of a sampled token.

    Raises:
        UnsupportedModelError: see :class:`torchrl_llm.modules.hf.HFPolicy`.
        ContextLengthError: as there (from :meth:`prefill`).
        DecodeCompilationError: as there (from :meth:`step`).
    """

    def __init__(
        self, model: nn.Module, *, adapter: str | None = None, bucket: int | None = None, compile_decode: bool = False
    ) -> None:
        check_family(model)
        super().__init__(model, adapter=adapter, bucket=bucket)
        # Windows are tried out when the first context is longer: at 4096 tokens that takes as long
        # as a long prompt.
        config = lm.causal_lm(model).config.get_text_config()
        self._untried = [window for window in declared_windows(config) if window < self.max_positions]
        self._limit = float("inf")
        self._compiles = compile_decode
        self._compared: set[bool] = set()
        self._check_forward()

    def __getstate__(self) -> dict[str, Any]:
        # A copy may be for another process, which compiles for itself.
        return super().__getstate__() | {"_compared": set()}

    def prefill(self, prompts: Ints, lengths: Ints, *, slots: Ints, room: int) -> Tensor:
        """See :meth:`CachedModel.prefill`; raises ContextLengthError beyond a window that is not
        computed rightly, too."""
        longest = int(lengths.max())
        self._try_windows(longest + room)
        if longest + room > self._limit:
            raise ContextLengthError(
                f"A prompt of {longest} tokens and a response of up to {room} are more than the window of {self._limit} "
                f"tokens of {name_of(lm.causal_lm(self.model))}, beyond which it has other logits with keys and values cached by "
                f"slot than without, so log-probs would be wrong. Lower max_model_len or max_output_tokens. {ADVICE}"
            )
        return super().prefill(prompts, lengths, slots=slots, room=room)

    def step(self, ids: Tensor, positions: Tensor, *, width: int) -> Tensor:
        """See :meth:`CachedModel.step`; raises UnsupportedModelError where the compiled one
        differs, too."""
        if not self._compiles:
            return super().step(ids, positions, width=width)
        several = len(ids) > 1  # a single row has a graph of its own
        # Here and not when the model is made: a graph holds for a precision of float32 products,
        # which a run sets later.
        expected = None if several in self._compared else super().step(ids, positions, width=width)
        width = self._in_buckets(width)
        logits = self._logits(compiled_step(self._backbone, self.cache, ids, positions, width=width))
        # Of weights that have diverged the policy says so itself.
        if expected is not None and bool(torch.isfinite(expected).all()):
            self._check_step(logits, expected)
            self._compared.add(several)
        return logits

    def _check_step(self, found: Tensor, expected: Tensor) -> None:
        gaps = (found.float() - expected.float()).abs().amax(-1)
        # TF32 differs by 1e-3. In half precision the experts of a mixture may tip over at some
        # token.
        exact = lm.is_full_precision(self.dtype)
        worst = gaps.max() if exact else gaps.quantile(0.75)
        # also where it is NaN
        if not bool(worst <= (1e-2 if exact else 3e-2) * max(1.0, float(expected.abs().max()))):
            raise UnsupportedModelError(
                f"{name_of(lm.causal_lm(self.model))} has other logits with the compiled forward of a sampled token than without "
                f"(largest difference {float(gaps.max()):.3g}), so log-probs would be wrong. Set compile_decode to false."
            )

    def _try_windows(self, longest: int) -> None:
        """Compare with the model's own forward beyond every window that a context of ``longest``
        tokens is the first to exceed."""
        passed = [window for window in self._untried if window < longest <= self.max_positions]
        if not passed:
            return
        # the comparison itself exceeds some of them
        rest, self._untried = self._untried[len(passed) :], []
        try:
            with float32_products("highest"):
                failed = [window for window in passed if not self._check_window(window)]
        finally:
            self._untried = rest
        self._limit = min([self._limit, *failed])

    def _check_forward(self) -> None:
        """Compare with the model's own forward on two short rows; a default bucket that the model
        does not bear becomes 1."""
        try:
            self._compare()
        except UnsupportedModelError:
            if self.bucket == 1 or self._bucket is not None:
                raise
            # GPTNeo's forward takes the last column that is seen for the newest token of every row.
            self._bucket = 1
            self._compare()

    def _compare(self) -> None:
        """Compare cached, padded, stepwise computation with the model's own forward on two short
        rows."""
        name = name_of(lm.causal_lm(self.model))
        with self.session(), float32_products("highest"):
            try:
                gaps, tolerance = self._gaps([3, 2], own_forward=True)
            except FAILURES as error:
                raise UnsupportedModelError(
                    f"{name} fails in a forward with keys and values cached by slot: {error} {ADVICE}"
                ) from error
        self.drop()
        if not bool((gaps <= tolerance).all()):  # also where a gap is NaN
            raise UnsupportedModelError(
                f"{name} has other logits with keys and values cached by slot than without (largest difference "
                f"{float(gaps.max()):.3g}), so log-probs would be wrong. {ADVICE}"
            )

    def _check_window(self, window: int) -> bool:
        """Whether contexts longer than ``window`` are computed as the model's own forward does.

        A window of the configuration that the model's forward does not apply (Moshi's) is dropped.
        """
        longest = int(min(window + 4, self.max_positions - _MORE))
        lengths = [longest, longest - 2, max(1, window // 2), 2]
        declared = dict(self._windows)
        for windows in (declared, dict.fromkeys(declared)):
            self._windows.update(windows)  # which the backbone of the session reads
            self.cache.drop()
            gaps, tolerance = self._gaps(lengths)
            self.cache.drop()
            # Wrong masks spoil the rows beyond the window. In half precision the experts of a
            # mixture may tip over at some token, which is no fault of the cache.
            worst = gaps.max() if lm.is_full_precision(self.dtype) else gaps.quantile(0.75)
            if bool(worst <= tolerance):
                return True
        self._windows.update(declared)
        return False

    def _gaps(self, lengths: Sequence[int], *, own_forward: bool = False) -> tuple[Tensor, float]:
        """Differences of logits ``[n, 3]`` after a prompt, one more token, and a second prompt; and
        the tolerance."""
        n, sizes = len(lengths), np.array(lengths, np.int64)
        ids = probe_ids(self.model, n, max(lengths) + _MORE).cpu().numpy()
        ends = np.stack([sizes, sizes + 1, sizes + _MORE], axis=1)
        expected = []
        for row, end in zip(ids, ends, strict=True):
            tokens = self._put(row[None, : end[-1]])
            # with a cache of its own, so that a compiled model compiles nothing for it
            if own_forward:
                expected.append(lm.causal_lm(self.model)(input_ids=tokens).logits[0, end - 1])
            else:  # without the logits of a long row
                hidden = lm.backbone(self.model)(input_ids=tokens, use_cache=False).last_hidden_state
                expected.append(self._logits(hidden[0, end - 1]))
        slots, following = np.arange(n), np.take_along_axis(ids, sizes[:, None] + np.arange(2), axis=1)
        found = [self.prefill(ids, sizes, slots=slots, room=1)]
        found.append(super().step(self._put(following[:, 0]), self._put(sizes), width=max(lengths) + 1))
        self.remember(ids[:, : max(lengths)], sizes, following, np.full(n, 2))
        found.append(self.prefill(ids, sizes + _MORE, slots=slots, room=0))
        wanted = torch.stack(expected).float()
        gaps = (torch.stack(found, dim=1).float() - wanted).abs().amax(-1)
        return gaps, (1e-4 if lm.is_full_precision(self.dtype) else 3e-2) * max(1.0, float(wanted.abs().max()))
