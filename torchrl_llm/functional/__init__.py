"""The maths of turn-level reinforcement learning: pure functions on tensors.

Everything here is vectorized, keeps no state, samples nothing and accumulates in float32 or wider.
``B`` episodes, ``T`` turns, ``L`` tokens. ``turn_ids [B, L]`` is -1 wherever a token is not an
action, and the action mask is always ``turn_ids >= 0``. Entries off a mask are never read: they may
hold anything, NaN included.

The modules: ``turns`` (between tokens and turns), ``edges`` (their first and last tokens),
``returns``, ``credit`` (advantages with a critic), ``statistics`` (normalization over a batch),
``diagnostics`` (metrics without a gradient), ``groups`` (scores relative to other episodes),
``states`` (turns compared in the states that they share), ``units`` (rows that count as one),
``surrogate`` (what is maximized, and how tokens are weighted) and ``ids`` (whether episode and
group ids are consistent). No TensorDict appears here:
:mod:`torchrl_llm.objectives.estimators` and :mod:`torchrl_llm.objectives.loss` read and write them.
"""

from torchrl_llm.functional import (
    credit,
    diagnostics,
    edges,
    groups,
    ids,
    returns,
    states,
    statistics,
    surrogate,
    turns,
    units,
)
from torchrl_llm.functional.credit import *  # noqa: F403 (each module lists its names, once)
from torchrl_llm.functional.diagnostics import *  # noqa: F403
from torchrl_llm.functional.edges import *  # noqa: F403
from torchrl_llm.functional.groups import *  # noqa: F403
from torchrl_llm.functional.ids import *  # noqa: F403
from torchrl_llm.functional.returns import *  # noqa: F403
from torchrl_llm.functional.states import *  # noqa: F403
from torchrl_llm.functional.statistics import *  # noqa: F403
from torchrl_llm.functional.surrogate import *  # noqa: F403
from torchrl_llm.functional.turns import *  # noqa: F403
from torchrl_llm.functional.units import *  # noqa: F403

__all__ = [
    *(*credit.__all__, *diagnostics.__all__, *edges.__all__, *groups.__all__, *ids.__all__, *returns.__all__),
    *(*states.__all__, *statistics.__all__, *surrogate.__all__, *turns.__all__, *units.__all__),
]
