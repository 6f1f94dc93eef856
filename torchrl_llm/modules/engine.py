"""The seam between what samples responses and everything else: the :class:`InferenceEngine` protocol.

Collectors ask an engine for turns, weight syncs bring it trained weights, evaluations do the first only. All of them know
this protocol, and none knows an engine's class. :class:`~torchrl_llm.modules.TurnPolicy` implements it on top of one method,
``generate``; :mod:`torchrl_llm.modules.hf` and :mod:`torchrl_llm.modules.vllm` are the engines of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig
from torch import Tensor

from torchrl_llm.modules.sampling import SamplingConfig


class ContextLengthError(ValueError):
    """Prompt and response together are longer than the model's positions."""


class NonFiniteLogitsError(FloatingPointError):
    """The model's logits are NaN or infinite: there is no distribution to sample from."""


class EngineError(RuntimeError):
    """The engine failed, or its weights are unknown: nothing may be sampled from it."""


class WeightSyncError(RuntimeError):
    """The trained weights did not get into the engine, or not all of them; the message names the step that failed.

    The engine may hold a mixture of old and new weights, or keys and values computed with the old ones. It refuses to
    sample until a sync succeeds.
    """


@contextmanager
def sync_step(name: str) -> Iterator[None]:
    """Turn every error of one step of a weight sync into a :class:`WeightSyncError` that names the step.

    Examples:
        >>> with sync_step("loading the weights"):
        ...     1 / 0
        Traceback (most recent call last):
            ...
        torchrl_llm.modules.engine.WeightSyncError: The weight sync failed in loading the weights: ZeroDivisionError...
    """
    try:
        yield
    except WeightSyncError:
        raise
    except Exception as error:
        raise WeightSyncError(f"The weight sync failed in {name}: {type(error).__name__}: {error}") from error


class TurnRequest(NamedTuple):
    """One turn to be answered.

    Attributes:
        slot: names the request until it is answered, and the cache of its episode between turns; a small int.
        prompt: ``[l]`` ids of the whole context, l >= 1.
        episode_id, turn: the key of the sampling noise.
        greedy: take the likeliest token instead of sampling.
    """

    slot: int
    prompt: npt.NDArray[np.int64]
    episode_id: int
    turn: int
    greedy: bool = False


class TurnResponse(NamedTuple):
    """The answer to a :class:`TurnRequest`.

    Attributes:
        slot: of the request.
        tokens: ``[m]`` int64, m >= 1; the stop id is included.
        log_probs: ``[m]`` float32, under the distribution really sampled from.
        versions: ``[m]`` int64, the weights that each token was sampled with.
    """

    slot: int
    tokens: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]


class InferenceEngine(Protocol):
    """Samples single turns, and takes in trained weights.

    One weight sync is :func:`torchrl_llm.weight_update.update_engine`: inside :meth:`exclusive`, first :meth:`load` inside
    :meth:`updating`, then :meth:`log_probs` for the parity check.

    Attributes:
        sampling: how responses are sampled, with the ids that end them (``sampling.stop_ids``).
        policy_version: the version of the weights, stamped on every token.
        concurrent: whether the engine has weights of its own, so that a thread may sample while others train.
        exact: whether a scorer computes the very log-probs that the engine records.
        dtype: of the weights; it decides how far the parity check may be off.
        serves_adapters: whether :meth:`load` takes a LoRA adapter beside the base weights.
        loads_base: whether a sync sends the base weights before the first adapter. False: the engine has the trainer's.
        check_length: tokens of a prompt of the parity check; more than two blocks of a prefix cache, so that stale blocks
            are found.
        pending: number of requests that are not answered yet.
    """

    sampling: SamplingConfig
    policy_version: int
    concurrent: bool
    loads_base: bool
    check_length: int

    @property
    def exact(self) -> bool: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def serves_adapters(self) -> bool: ...
    @property
    def pending(self) -> int: ...

    def submit(self, request: TurnRequest) -> None:
        """Ask for one turn. No two requests may share a slot at a time."""

    def poll(self) -> list[TurnResponse]:
        """Take one step, and return the answers that are finished, in any order."""

    def cancel(self, slots: Sequence[int] | None = None) -> None:
        """Drop the requests of ``slots`` (default: all); they are never answered."""

    def exclusive(self) -> AbstractContextManager[None]:
        """The engine for this thread alone."""

    def updating(self, version: int) -> AbstractContextManager[None]:
        """Around :meth:`load`: nothing is sampled inside. Afterwards no cached context is used again, and tokens carry
        ``version``. After an error inside, the engine refuses to sample until an update succeeds."""

    def load(
        self, tensors: Iterable[tuple[str, Tensor]], lora: LoraConfig | None = None, *, method: str = "auto"
    ) -> None:
        """Replace the weights: of the whole model, or with ``lora`` those of the adapter with these settings."""

    def choose_method(self, method: str, *, adapter: bool, unserved: str | None) -> tuple[str, str]:
        """How weights get in, and why so: ``method``, or for ``"auto"`` the fastest that is correct."""

    def log_probs(self, prompts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """The likeliest next tokens ``[n, k]`` after ``prompts`` ``[n, L]``, and their log-probs ``[n, k]``."""

    def invalidate(self, reason: str) -> None:
        """Refuse to sample until a weight sync succeeds."""

    def weights_changed(self, version: int | None = None) -> None:
        """Say that the weights are new: later tokens carry ``version``, by default the next one."""

    def sleep(self, level: int = 1) -> None:
        """Give the accelerator's memory to the trainer, until :meth:`wake_up` or the next update."""

    def wake_up(self) -> None:
        """Take the memory back."""

    def drop_cache(self) -> None:
        """Forget the contexts computed so far. Costs time at the next turn, never correctness."""

    def close(self) -> None:
        """Free the engine."""
