"""Conversion of episodes to rows: :func:`rows_from_episodes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.episode import Episode

_Row = dict[keys.NestedKey, npt.NDArray[Any]]


class TurnViewError(ValueError):
    """A batch of turns that is not one whole episode a row, does not fit, or whose ids collide."""


class HistoryRewrittenError(ValueError):
    """A context does not continue the one before it token for token, so that training would not see
    what was sampled."""

    @classmethod
    def at(cls, episode_id: int, turn: int) -> HistoryRewrittenError:
        """The error for a turn of an episode."""
        return cls(
            f"Episode {episode_id}, turn {turn}: the context and response of this turn are not a prefix of what follows, so "
            "an environment or its formatter rewrote history (a template that drops earlier reasoning, a sliding window, ids "
            "encoded again from text). Contexts must only grow: context_{t+1} = context_t + response_t + feedback_t, unless "
            f"{keys.SEGMENT!r} counts a cut of the context."
        )


def rows_from_episodes(
    episodes: Sequence[Episode],
    *,
    max_model_len: int | None = None,
    max_turns: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> TensorDict:
    """Finished episodes as rows ``[B]`` of the row view, on the CPU.

    A row is the whole context up to the last feedback, as far as that fits. Where the context was
    cut and rebuilt on the way (``GEMEnv(overflow="slide")``), a row holds the segments one after
    the other, with one column of padding between them: a gap in ``attention_mask``. So nothing is
    trained on with a context that the policy did not see (:mod:`torchrl_llm.modules.segments`).
    The columns of turns are at :func:`~torchrl_llm.turn_columns.row_key`; all episodes have the
    same.

    Rows take about 29 bytes a token; no larger tensor is made on the way.

    Args:
        episodes: B finished episodes.
        max_model_len: width ``L`` of the rows; default the longest row.
        max_turns: width ``T`` of the per-turn keys; default the most turns.
        dtype: of the floats.

    Raises:
        TurnViewError: an episode does not fit, occurs twice, or different tasks share a group.
        HistoryRewrittenError: the context does not hold a response where it was sampled.

    Examples:
        >>> from torchrl_llm.episode import Turn
        >>> episode = Episode(0, episode_id=7, group_id=7, env_id=0, rewards=[1.0])
        >>> episode.add(Turn(2, 0, np.array([5]), np.array([-0.5]), np.array([0])))
        >>> episode.end(np.array([3, 4, 5, 6]), keys.StopReason.WON, terminated=True, truncated=False, success=True)
        >>> rows = rows_from_episodes([episode])
        >>> rows["tokens"].tolist(), rows["turn_ids"].tolist(), rows["turn", "reward"].tolist()
        ([[3, 4, 5, 6]], [[-1, -1, 0, -1]], [[1.0]])
    """
    longest = max((episode.length for episode in episodes), default=0)
    most = max((len(episode.turns) for episode in episodes), default=0)
    width, num_turns = fitting_shape(longest, most, max_model_len, max_turns)
    rows = _empty_rows(len(episodes), width, num_turns, dtype)
    if any(episode.task_id is None for episode in episodes):
        # With the fill value, episodes without an id would count as one task, -1.
        del rows[keys.TASK_ID]
    rows |= _empty_columns(episodes, num_turns, dtype)
    arrays = {key: value.numpy() for key, value in rows.items()}
    for i, episode in enumerate(episodes):
        row = {key: value[i : i + 1].reshape(-1) for key, value in arrays.items()}  # views
        _write_tokens(row, episode)
        _write_turns(row, episode)
    result = TensorDict(rows, batch_size=[len(episodes)])
    fault = F.episode_fault(result[keys.EPISODE_ID])
    fault = fault or F.group_fault(*(result[key] for key in (keys.GROUP_ID, keys.ENV_ID, keys.TOKENS, keys.TURN_IDS)))
    if fault is not None:
        raise TurnViewError(fault)
    return result


def fitting_shape(longest: int, most: int, max_model_len: int | None, max_turns: int | None) -> tuple[int, int]:
    """Width and number of turns of rows whose longest has ``longest`` tokens and that have up to
    ``most`` turns."""
    width, num_turns = max_model_len or longest, max_turns or most
    if longest > width or most > num_turns:
        raise TurnViewError(
            f"Rows of up to {most} turns and {longest} tokens do not fit into max_turns={num_turns} and "
            f"max_model_len={width}. Give TurnsToSequence the limits of the environment."
        )
    return width, num_turns


def _empty_rows(size: int, width: int, num_turns: int, dtype: torch.dtype) -> dict[keys.NestedKey, Tensor]:
    shapes = {"row": (size,), "turn": (size, num_turns), "token": (size, width)}
    return {
        name: torch.full(shapes[spec.axis], spec.fill, dtype=dtype if spec.dtype.is_floating_point else spec.dtype)
        for name, spec in keys.ROW_VIEW.items()
        if spec.writer == "sequence"
    }


def _empty_columns(episodes: Sequence[Episode], num_turns: int, dtype: torch.dtype) -> dict[keys.NestedKey, Tensor]:
    """The columns beside those that all turns have."""
    given = {name: type(values[0]) for episode in episodes for name, values in episode.columns.items()}
    dtypes = {name: dtype if kind is float else torch.int64 for name, kind in given.items()}
    return {keys.row_key(name): torch.zeros(len(episodes), num_turns, dtype=each) for name, each in dtypes.items()}


def _write_tokens(row: _Row, episode: Episode) -> None:
    """Write the segments, and what belongs to the responses in them."""
    starts = np.cumsum([0, *(len(context) + 1 for context in episode.contexts)])
    # strict=False: starts has one more, where another segment would begin.
    for start, context in zip(starts, episode.contexts, strict=False):
        row[keys.TOKENS][start : start + len(context)] = context
        row[keys.ATTENTION_MASK][start : start + len(context)] = True
    for number, turn in enumerate(episode.turns):
        start = starts[turn.segment] + turn.start
        place = slice(start, start + len(turn.tokens))
        if not np.array_equal(row[keys.TOKENS][place], turn.tokens):
            raise HistoryRewrittenError.at(episode.episode_id, number)
        row[keys.TURN_IDS][place] = number
        row[keys.POLICY_VERSION][place] = turn.versions
        row[keys.SAMPLE_LOG_PROB][place] = turn.log_probs


def _write_turns(row: _Row, episode: Episode) -> None:
    count = len(episode.turns)
    for name, values in ((keys.REWARD, episode.rewards), *episode.columns.items()):
        row[keys.row_key(name)][:count] = values
    row[keys.TURN_MASK][:count] = True
    for name in (keys.TERMINATED, keys.TRUNCATED, keys.SUCCESS, keys.STOP_REASON):
        row[keys.row_key(name)][count - 1] = getattr(episode, name)
    for name in (keys.EPISODE_ID, keys.GROUP_ID, keys.ENV_ID, keys.TASK_ID):
        if name in row:
            row[name][0] = getattr(episode, name)
