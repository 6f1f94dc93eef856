"""The interface of engines that sample responses: the :class:`InferenceEngine` protocol.

Collectors and evaluations ask an engine for turns, weight syncs load trained weights into it. All
of them use this protocol, and none depends on an engine's class.
:class:`~torchrl_llm.modules.TurnPolicy` implements it on top of one method, ``generate``;
:mod:`torchrl_llm.modules.hf` and :mod:`torchrl_llm.modules.vllm` are the engines of this package.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig
from torch import Tensor

from torchrl_llm.modules.sampling import SamplingConfig

NamedTensors = Iterable[tuple[str, Tensor]]

RETRIES = 3
"""Times that an engine samples a turn again, each with other noise, because a token's log-prob was
not finite."""


class ContextLengthError(ValueError):
    """Prompt and response together are longer than the model's positions."""


class NonFiniteLogitsError(FloatingPointError):
    """The model's logits are NaN or infinite: there is no distribution to sample from."""


class EngineError(RuntimeError):
    """The engine failed, or its weights are unknown: nothing may be sampled from it."""


class WeightSyncError(RuntimeError):
    """The trained weights were not loaded into the engine, or not all of them; the message names
    the step that failed.

    The engine may hold a mixture of old and new weights, or keys and values computed with the old
    ones. It refuses to sample until a sync succeeds.
    """


@contextmanager
def sync_step(name: str) -> Iterator[None]:
    """Turn every error of one step of a weight sync into a :class:`WeightSyncError` that names the
    step.

    Examples:
        >>> with sync_step("loading the weights"):
        ...     1 / 0
        Traceback (most recent call last):
            ...
        torchrl_llm.modules.engine.WeightSyncError: The weight sync failed in loading the weights: ZeroDivisionError...
    """
    try:
        yield
    # The innermost step has named the failure.
    except WeightSyncError:
        raise
    except Exception as error:
        raise WeightSyncError(f"The weight sync failed in {name}: {type(error).__name__}: {error}") from error


class TurnRequest(NamedTuple):
    """A request for the response of one turn.

    Attributes:
        slot: names the request until it is answered, and the cache of its episode between turns; a
            small int.
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
    """Samples single turns, and loads trained weights.

    One weight sync is :func:`torchrl_llm.weight_update.update_engine`: inside :meth:`exclusive`,
    first :meth:`load` inside :meth:`updating`, then :meth:`log_probs` for the parity check.

    The defaults describe an engine without weights of its own. A class that derives from it
    implements :meth:`submit`, :meth:`poll`, :meth:`cancel` and :attr:`pending`.

    Attributes:
        sampling: how responses are sampled, with the ids that end them (``sampling.stop_ids``).
        policy_version: the version of the weights, stamped on every token; :meth:`weights_changed`
            raises it by one.
        owns_weights: whether the engine has weights of its own, so that a thread may sample while
            others train.
        loads_base: whether a sync sends the base weights before the first adapter. False: the
            engine has the trainer's.
        check_length: tokens of a prompt of the parity check; more than two blocks of a prefix
            cache, so that stale blocks are found.
        methods: the ways to load weights.
    """

    sampling: SamplingConfig
    policy_version: int = 0
    owns_weights: bool = False
    loads_base: bool = False
    check_length: int = 33  # two blocks of 16 tokens, vLLM's default size, and one token
    methods: tuple[str, ...] = ("adapter", "whole")
    _broken: str | None = None

    # ---------------------------------------- turns

    @property
    @abstractmethod
    def pending(self) -> int:
        """Number of requests that are not answered yet."""

    @abstractmethod
    def submit(self, request: TurnRequest) -> None:
        """Request one turn. No two requests may share a slot at a time."""

    @abstractmethod
    def poll(self) -> list[TurnResponse]:
        """Take one step, and return the answers that are finished, in any order."""

    @abstractmethod
    def cancel(self, slots: Sequence[int] | None = None) -> None:
        """Drop the requests of ``slots`` (default: all); they are never answered."""

    @property
    def stop_ids(self) -> tuple[int, ...] | None:
        """The ids that end a response; ``None``: not known."""
        return self.sampling.stop_ids

    @property
    def logprobs_match_trainer(self) -> bool:
        """Whether a scorer at the same temperature computes the same log-probs that this policy
        records."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.float32

    def drop_cache(self) -> None:
        """Drop the contexts computed so far; the next turn encodes its own again. The base class
        holds none."""

    def close(self) -> None:
        """Free the engine. The base class drops its cache."""
        self.drop_cache()

    # ---------------------------------------- weights

    @property
    def serves_adapters(self) -> bool:
        """Whether :meth:`load` takes a LoRA adapter beside the base weights."""
        return False

    def exclusive(self) -> AbstractContextManager[None]:
        """The engine for this thread alone. The base class is used by one thread at a time."""
        return nullcontext()

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Enter it around :meth:`load`: later tokens carry ``version``; after an error the engine
        refuses to sample until an update succeeds."""
        # First, and undone only at the end: also after an interrupt half way nothing is sampled
        # from mixed weights.
        self.invalidate("a weight sync began and did not end well. Sync again before sampling.")
        yield
        self.weights_changed(version)
        self.validate()

    def load(self, tensors: NamedTensors, lora: LoraConfig | None = None, *, method: str = "auto") -> None:
        """Replace the weights. Called inside :meth:`updating`.

        Args:
            tensors: of the whole model under transformers' names, ``lm_head.weight`` included also
                where it is tied; or of an adapter under the names of its files.
            lora: the adapter's settings.
            method: one of :attr:`methods`.

        Raises:
            TypeError: the policy takes no weights.
            WeightSyncError: they do not fit, or were not all loaded.
        """
        raise TypeError(self._no_weights("load()"))

    def log_probs(self, prompts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """The likeliest next tokens ``[n, k]`` after ``prompts`` ``[n, L]`` and their log-probs
        ``[n, k]``, on the CPU."""
        raise TypeError(self._no_weights("log_probs()"))

    def _no_weights(self, method: str) -> str:
        return (
            f"{type(self).__name__} takes no trained weights: it has no {method}. Use HFPolicy, VLLMPolicy, or an engine that "
            "implements torchrl_llm.modules.InferenceEngine."
        )

    def choose_method(self, method: str, *, adapter: bool, unserved: str | None) -> tuple[str, str]:
        """The method by which weights are loaded, and the reason for it.

        Args:
            method: one of :attr:`methods`, or ``"auto"``: the fastest that is correct.
            adapter: whether a LoRA adapter is trained.
            unserved: what of its settings keeps it from being served beside the base weights;
                ``None``: nothing.

        Raises:
            ValueError: the method cannot be used here.
        """
        if method != "auto":
            if method not in self.methods:
                raise ValueError(f"method={method!r}: expected 'auto' or one of {self.methods}.")
            return method, "it was asked for"
        if adapter and self.serves_adapters and unserved is None:
            return "adapter", "the engine serves LoRA adapters"
        return "whole", "the engine takes the weights of the whole model"

    def weights_changed(self, version: int | None = None) -> None:
        """Notify the engine of new weights: later tokens carry ``version``, by default the next
        ``policy_version``."""
        self.policy_version = self.policy_version + 1 if version is None else version

    def invalidate(self, reason: str) -> None:
        """Refuse to sample from now on: the weights are unknown, or the engine is dead."""
        self._broken = reason

    def validate(self) -> None:
        """Sample again after :meth:`invalidate`."""
        self._broken = None

    def check_usable(self) -> None:
        """Raise unless the engine can sample; called before each request.

        Raises:
            EngineError: the weights are unknown, or the engine is dead.
        """
        if self._broken is not None:
            raise EngineError(f"{type(self).__name__} cannot be used: {self._broken}")

    def sleep(self, level: int = 1) -> None:
        """Give the accelerator's memory to the trainer. The base class holds none."""

    def wake_up(self) -> None:
        """Take the memory back."""
