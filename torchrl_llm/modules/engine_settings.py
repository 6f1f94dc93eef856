"""The settings of what samples: :class:`EngineSettings`, which answers what a run asks about its
engine, and :class:`CustomSettings`, for an engine that settings name.

Those of the package's engines stand beside them (:mod:`torchrl_llm.modules.hf.settings`,
:mod:`torchrl_llm.modules.vllm.settings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.modules.sampling import SamplingConfig
from torchrl_llm.utils.named import find_named, make_named
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.utils.sections import Alternative


@dataclass(kw_only=True)
class EngineSettings(Alternative):
    """What samples the responses.

    A subclass is all that a run knows of its engine. ``config`` are the settings of the run,
    :class:`~torchrl_llm.runs.RunSettings`, with these among them.
    """

    named_by = "policy"

    owns_weights: ClassVar[bool] = True
    """Whether it has weights of its own, which are brought to it after every update."""

    description: ClassVar[str]
    """What it is, in the words of ``torchrl-llm doctor``."""

    requires: ClassVar[tuple[str, ...]] = ()
    """Packages that it needs, each of an extra of the same name."""

    not_sharded: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}
    """What does not work with sharded weights (FSDP2): setting -> values, and what is expected in
    their place."""

    memory_settings: ClassVar[tuple[str, str]]
    """The settings of its share of a GPU's memory, and of the number of its GPUs; of engines with
    :meth:`memory`."""

    @property
    def sleeps(self) -> bool:
        """Whether it gives its memory to the trainer during updates."""
        return False

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of an engine, as far as it is known."""
        return 1

    def sync_options(self) -> dict[str, Any]:
        """Options of its :class:`~torchrl_llm.weight_update.EngineWeightSync`."""
        return {}

    def problems(self, config: Any) -> Iterator[str]:
        """What is wrong with these settings beside the run's others, and what to do."""
        yield from ()

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Further checks of ``torchrl-llm doctor``: names, and functions that return what is found
        or raise what is wrong."""
        yield from ()

    def make_policy(
        self, config: Any, path: str, tokenizer: Any, sampling: SamplingConfig, *, device: Any, processes: int = 1
    ) -> TurnPolicy:
        """An engine with weights of its own.

        Args:
            path: of the model.
            device: of the trainer, if it is in this process; ``None`` on a worker of Ray.
            processes: training processes.

        Raises:
            ConfigError: there can be none with these settings.
        """
        raise NotImplementedError

    def offload(self, models: Any) -> Callable[[], AbstractContextManager[None]]:
        """The context of the trainer while it samples.

        Args:
            models: the trainer's :class:`~torchrl_llm.modules.ActorCritic`.
        """
        return nullcontext

    def serves_adapter(self, config: Any) -> bool:
        """Whether it serves the adapter beside the base model; else it gets whole weights."""
        return False

    def weights_dtype(self, config: Any) -> str:
        """The dtype of its weights; "auto" stands for half precision."""
        return config.model.dtype

    def memory(self, config: Any, device: torch.device, card: int | None = None) -> int:
        """Bytes of the trainer's ``device`` that it takes for itself while it is awake; 0 where
        there is none on that GPU.

        Args:
            card: bytes of the GPU's memory; ``None``: as PyTorch finds them.
        """
        return 0


@dataclass(kw_only=True)
class CustomSettings(EngineSettings):
    """An engine of one's own, which gets the weights after every update."""

    known_as = "custom"
    description = "an engine of your own"

    engine_class: str | None = None
    """What makes the engine, a TurnPolicy with weights of its own, as "package.module:Name": it is
    called with the path of the model, the tokenizer, the sampling settings, seed= and
    engine_options, on workers on Ray too."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of engine_class."""

    def problems(self, config: Any) -> Iterator[str]:
        if self.engine_class is None:
            yield 'policy="custom" needs engine_class, what makes the engine: "package.module:Name".'
        if "seed" in self.engine_options:
            yield "engine_options has seed, which is a setting of its own: leave it out."

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "engine_class", lambda: self._find() and str(self.engine_class)

    def _find(self) -> Any:
        return find_named("engine_class", str(self.engine_class), "a TurnPolicy, or a function that returns one")

    def make_policy(self, config: Any, path: str, tokenizer: Any, sampling: SamplingConfig, **place: Any) -> TurnPolicy:
        name, given = str(self.engine_class), (path, tokenizer, sampling)
        options = {"seed": config.trainer.seed, **self.engine_options}
        engine = make_named("engine_class", name, self._find(), *given, **options)
        if not (isinstance(engine, TurnPolicy) and engine.owns_weights):
            raise ConfigError(
                f"engine_class={name!r} made a {type(engine).__name__}; expected a TurnPolicy with owns_weights = True."
            )
        return engine
