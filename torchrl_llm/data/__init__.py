"""Conversations as data: rows out of turns, batches out of rows."""

from torchrl_llm.data.agilerl import rows_from_agilerl
from torchrl_llm.data.batching import apply_in_micro_batches, cat_rows, micro_batches, minibatches, padding_share
from torchrl_llm.data.interop import MC_ADVANTAGE_KEYS, GRPOActor, RowsAsTrajectories, ScoredTokens, to_grpo_keys
from torchrl_llm.data.rows import HistoryRewrittenError, TurnViewError, rows_from_episodes
from torchrl_llm.data.selection import informative, overlong, penalise_overlong
from torchrl_llm.data.sequence import TurnsToSequence, turns_to_rows

__all__ = [
    "MC_ADVANTAGE_KEYS",
    "GRPOActor",
    "HistoryRewrittenError",
    "RowsAsTrajectories",
    "ScoredTokens",
    "TurnViewError",
    "TurnsToSequence",
    "apply_in_micro_batches",
    "cat_rows",
    "informative",
    "micro_batches",
    "minibatches",
    "overlong",
    "padding_share",
    "penalise_overlong",
    "rows_from_agilerl",
    "rows_from_episodes",
    "to_grpo_keys",
    "turns_to_rows",
]
