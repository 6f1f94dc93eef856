"""Collectors of whole episodes: :class:`TurnCollector`; :class:`AsyncTurnCollector`, without a
barrier between turns; :class:`RayTurnCollector`, on workers; :class:`SelfPlayCollector`, of games
of several players; :class:`RecordedCollector`, of episodes that were collected before.
:func:`branch` continues episodes from the middle; :class:`Trees` are what is trained on all that
comes of it.

Environments and policies come from :mod:`torchrl_llm.envs` and :mod:`torchrl_llm.modules`; rows are
made in :mod:`torchrl_llm.data`.
"""

from torchrl_llm.collectors.adaptive import adapt_mixture
from torchrl_llm.collectors.async_turn import AsyncTurnCollector
from torchrl_llm.collectors.branching import Branches, ReplayError, StateValues, branch, value_states
from torchrl_llm.collectors.collector import EpisodeCollector
from torchrl_llm.collectors.ray_turn import RayTurnCollector, WorkerLostError
from torchrl_llm.collectors.recorded import RecordedCollector
from torchrl_llm.collectors.self_play import SelfPlayCollector
from torchrl_llm.collectors.trees import Trees
from torchrl_llm.collectors.turn import TurnCollector

__all__ = [
    "AsyncTurnCollector",
    "Branches",
    "EpisodeCollector",
    "RayTurnCollector",
    "RecordedCollector",
    "ReplayError",
    "SelfPlayCollector",
    "StateValues",
    "Trees",
    "TurnCollector",
    "WorkerLostError",
    "adapt_mixture",
    "branch",
    "value_states",
]
