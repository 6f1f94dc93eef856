"""Rows from episodes or turns, and batches of rows."""

from torchrl_llm.data.batching import (
    apply_in_micro_batches,
    cat_rows,
    micro_batches,
    minibatches,
    padding_share,
    spaced_rows,
    zero_weight_rows,
)
from torchrl_llm.data.interop import MC_ADVANTAGE_KEYS, GRPOActor, RowsAsTrajectories, ScoredTokens, to_grpo_keys
from torchrl_llm.data.rows import HistoryRewrittenError, TurnViewError, rows_from_episodes
from torchrl_llm.data.selection import nonzero_variance, overlong, penalize_overlong
from torchrl_llm.data.sequence import TurnsToSequence, is_row_view, turns_to_rows
from torchrl_llm.data.transcripts import TranscriptError, episode_from_messages, read_transcripts

__all__ = [
    "MC_ADVANTAGE_KEYS",
    "GRPOActor",
    "HistoryRewrittenError",
    "RowsAsTrajectories",
    "ScoredTokens",
    "TranscriptError",
    "TurnViewError",
    "TurnsToSequence",
    "apply_in_micro_batches",
    "cat_rows",
    "episode_from_messages",
    "is_row_view",
    "micro_batches",
    "minibatches",
    "nonzero_variance",
    "overlong",
    "padding_share",
    "penalize_overlong",
    "read_transcripts",
    "rows_from_episodes",
    "spaced_rows",
    "to_grpo_keys",
    "turns_to_rows",
    "zero_weight_rows",
]
