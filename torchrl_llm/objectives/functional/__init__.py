"""The maths of turn-level reinforcement learning: pure functions on tensors.

Everything here is vectorized, keeps no state, draws no random number and accumulates in float32 or wider. ``B``
episodes, ``T`` turns, ``L`` tokens. ``turn_ids [B, L]`` is -1 wherever a token is not an action, and the action
mask is always ``turn_ids >= 0``. Entries off a mask are never read: they may hold anything, NaN included.

Six modules: ``turns`` (between tokens and turns), ``credit`` (returns, advantages), ``normalize``, ``surrogate`` (what is
maximized, and how tokens are weighted), ``statistics`` (metrics without a gradient) and ``ids`` (whether episode and group ids
are consistent). No TensorDict appears here: :mod:`torchrl_llm.objectives.estimators` and
:mod:`torchrl_llm.objectives.loss` read and write them.
"""

from torchrl_llm.objectives.functional._common import check_choice, importance_ratio
from torchrl_llm.objectives.functional.credit import (
    discount,
    episode_return,
    overlong_penalty,
    token_gae,
    token_rewards,
    turn_gae,
    turn_returns,
    turn_vtrace,
)
from torchrl_llm.objectives.functional.ids import episode_fault, group_fault
from torchrl_llm.objectives.functional.normalize import (
    SPREAD_TOLERANCE,
    group_relative,
    masked_whiten,
    rebn,
    standardize,
)
from torchrl_llm.objectives.functional.normalize import Baseline as Baseline
from torchrl_llm.objectives.functional.normalize import Partial as Partial
from torchrl_llm.objectives.functional.normalize import Scale as Scale
from torchrl_llm.objectives.functional.statistics import effective_sample_size, explained_variance
from torchrl_llm.objectives.functional.surrogate import KLKind as KLKind
from torchrl_llm.objectives.functional.surrogate import RatioLevel as RatioLevel
from torchrl_llm.objectives.functional.surrogate import RatioReduction as RatioReduction
from torchrl_llm.objectives.functional.surrogate import SamplerCorrection as SamplerCorrection
from torchrl_llm.objectives.functional.surrogate import WeightKind as WeightKind
from torchrl_llm.objectives.functional.surrogate import (
    cispo_objective,
    clipped_objective,
    kl_estimate,
    loss_weights,
    pool_log_ratio,
    sampler_weights,
)
from torchrl_llm.objectives.functional.turns import ValueReduction as ValueReduction
from torchrl_llm.objectives.functional.turns import (
    count_turns,
    turn_first,
    turn_last,
    turn_lengths,
    turn_mean,
    turn_reduce,
    turn_sum,
    turn_to_token,
)

__all__ = [
    "SPREAD_TOLERANCE",
    "check_choice",
    "cispo_objective",
    "clipped_objective",
    "count_turns",
    "discount",
    "effective_sample_size",
    "episode_fault",
    "episode_return",
    "explained_variance",
    "group_fault",
    "group_relative",
    "importance_ratio",
    "kl_estimate",
    "loss_weights",
    "masked_whiten",
    "overlong_penalty",
    "pool_log_ratio",
    "rebn",
    "sampler_weights",
    "standardize",
    "token_gae",
    "token_rewards",
    "turn_first",
    "turn_gae",
    "turn_last",
    "turn_lengths",
    "turn_mean",
    "turn_reduce",
    "turn_returns",
    "turn_sum",
    "turn_to_token",
    "turn_vtrace",
]
