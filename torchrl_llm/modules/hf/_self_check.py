"""A :class:`CachedModel` that compares itself with the model's own forward:
:class:`CheckedModel`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_llm.modules import lm
from torchrl_llm.modules.checks import FAILURES, UnsupportedModelError, declared_windows, name_of, probe_ids
from torchrl_llm.modules.engine import ContextLengthError
from torchrl_llm.modules.hf._cached_model import CachedModel
from torchrl_llm.modules.hf._family import ADVICE, check_family
from torchrl_llm.modules.hf._step import compiled_step
from torchrl_llm.modules.kernels import float32_products
from torchrl_llm.modules.prefixes import Ints

_MORE = 5  # tokens that a comparison adds to its rows


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
        width, windows = self._in_buckets(width), self._windows
        logits = self._logits(compiled_step(self._backbone, self.cache, ids, positions, width=width, windows=windows))
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
        declared = self._windows
        for windows in (declared, dict.fromkeys(declared)):
            self._windows = windows
            self.cache.drop()
            gaps, tolerance = self._gaps(lengths)
            self.cache.drop()
            # Wrong masks spoil the rows beyond the window. In half precision the experts of a
            # mixture may tip over at some token, which is no fault of the cache.
            worst = gaps.max() if lm.is_full_precision(self.dtype) else gaps.quantile(0.75)
            if bool(worst <= tolerance):
                return True
        self._windows = declared
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
