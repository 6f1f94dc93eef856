"""A collector of TorchRL's own, as a training loop sees it: :class:`StockCollector`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torchrl.collectors import BaseCollector, Collector

from torchrl_llm.collectors.collector import EpisodeCollector, base_env
from torchrl_llm.envs import GEMEnv


class StockCollector:
    """What the loop assumes of a collector of TorchRL's own: one task a group, and weights that are
    never stale.

    Its attributes are what the loop asks of a collector; an
    :class:`~torchrl_llm.collectors.EpisodeCollector` has its own.
    """

    batch_size: int | None = None
    group_size, max_staleness = 1, 0
    runs_here = logprobs_match_trainer = True
    background = True  # as one with a thread, it cannot go back to its state before a rollout
    interruptible: Any = None
    texts: Mapping[int, str] = MappingProxyType({})  # its batches are tensors, which hold no texts

    def __init__(self, env_names: tuple[str, ...] = ()) -> None:
        self.env_names = env_names

    @classmethod
    def of(cls, collector: BaseCollector) -> StockCollector:
        """For a collector of TorchRL's; one of several processes does not show its environment, nor
        the names of a mixture."""
        env = base_env(collector.env) if isinstance(collector, Collector) else None
        return cls(env.names if isinstance(env, GEMEnv) else ())

    def metrics(self) -> dict[str, float]:
        """None."""
        return {}


def loop_view(collector: BaseCollector) -> Any:
    """The collector itself, if it is an :class:`~torchrl_llm.collectors.EpisodeCollector`; else a
    :class:`StockCollector` for it."""
    return collector if isinstance(collector, EpisodeCollector) else StockCollector.of(collector)
