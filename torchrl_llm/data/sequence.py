"""Conversion of turns to rows: :class:`TurnsToSequence` and :func:`turns_to_rows`.

For TorchRL's own collectors and ``env.rollout``, which collect an episode as ``[T]`` turns that
each repeat the whole context; training takes it as one row. Turns that do not form whole episodes
are refused. Keys: :mod:`torchrl_llm.keys`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_llm import keys, turn_columns
from torchrl_llm.data.batching import pad_rows, row_sizes
from torchrl_llm.data.rows import HistoryRewrittenError, TurnViewError, fitting_shape, rows_from_episodes
from torchrl_llm.episode import Episode, Turn

_IDS = (keys.EPISODE_ID, keys.GROUP_ID, keys.ENV_ID)
_SAMPLED = (keys.RESPONSE, keys.RESPONSE_LOG_PROBS, keys.POLICY_VERSION)
_FLAGS = (keys.TERMINATED, keys.TRUNCATED, keys.SUCCESS)
_NEXT_PROMPT: Any = ("next", *keys.PROMPT)
_NEXT_LENGTH: Any = ("next", *keys.PROMPT_LENGTH)
_NEEDED: tuple[Any, ...] = (keys.PROMPT, keys.PROMPT_LENGTH, *_SAMPLED, keys.RESPONSE_MASK, keys.TURN, *_IDS)
_NEEDED += (_NEXT_PROMPT, _NEXT_LENGTH, *(("next", key) for key in (keys.REWARD, *_FLAGS, keys.STOP_REASON)))


class TurnsToSequence(Transform):
    """Replay-buffer transform: turns ``[B, T]`` become rows ``[B]`` in ``extend``; samples are not
    changed.

    See :func:`turns_to_rows`. Rows, which the collectors of this library deliver, are only padded.
    A storage of fixed shape (``LazyTensorStorage``) needs ``max_model_len``, and ``max_turns``
    where batches differ in their number of turns.

    Args:
        max_model_len: width ``L`` of the rows; ``None``: the longest row of each batch.
        max_turns: width ``T`` of the per-turn keys; ``None``: as collected.

    Raises:
        TurnViewError: see :func:`turns_to_rows`; or rows are wider than that.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(
        ...     storage=LazyTensorStorage(8), transform=TurnsToSequence(max_model_len=16, max_turns=4), batch_size=2)
    """

    def __init__(self, *, max_model_len: int | None = None, max_turns: int | None = None) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self.max_model_len = max_model_len
        self.max_turns = max_turns

    # TorchRL's buffers call _inv_call() when they are written, and forward() on each sample.
    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not is_row_view(tensordict):
            return turns_to_rows(tensordict, max_model_len=self.max_model_len, max_turns=self.max_turns)
        if tensordict.ndim == 0:  # a single row, as TorchRL's ``add`` writes it
            return self._inv_call(tensordict.unsqueeze(0))[0]
        return pad_rows(tensordict, *fitting_shape(*row_sizes(tensordict), self.max_model_len, self.max_turns))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the sample unchanged."""
        return tensordict


def turns_to_rows(
    turns: TensorDictBase, *, max_model_len: int | None = None, max_turns: int | None = None
) -> TensorDictBase:
    """Collapse whole episodes of turns ``[B, T]`` into rows ``[B']``, one episode a row.

    Of several workers, as TorchRL's ``ParallelEnv`` and ``SerialEnv`` stack them (``[W, N, T]``),
    ``B = W * N``. Turns count as played where ``("collector", "mask")`` (if present) is True and
    ``prompt_length > 0``; episodes without any are dropped, hence ``B' <= B``. The columns of the
    turns come along (:class:`~torchrl_llm.keys.TurnColumn`), those that an environment declares if
    they have one element a turn; other keys of an environment do not. How rows look:
    :func:`~torchrl_llm.data.rows_from_episodes`.

    Args:
        turns: the turn view of :mod:`torchrl_llm.keys`, time in the last dimension; one whole
            episode along it, its turns first.
        max_model_len: width ``L`` of the rows; ``None``: the longest row.
        max_turns: width ``T`` of the per-turn keys; ``None``: as given.

    Returns:
        The row view, all tensors on the device of ``turns``.

    Raises:
        TurnViewError: keys are missing, no turn was played, a row holds several episodes, part of
            one, or more than fits; an episode occurs twice, or different tasks share a group.
        HistoryRewrittenError: ``context_{t+1} = context_t + response_t + feedback_t`` does not
            hold.

    Examples:
        >>> from tensordict import TensorDict
        >>> zero, token = torch.zeros(1, 1, 1, dtype=torch.int64), torch.tensor([[[5]]])
        >>> flags = {name: token == 5 for name in ("terminated", "success")}
        >>> turns = TensorDict({
        ...     "tokens": {"prompt": torch.tensor([[[3, 4, 0, 0]]]), "prompt_length": zero + 2, "response": token,
        ...                "response_mask": token == 5, "log_probs": torch.tensor([[[-0.5]]])},
        ...     "turn": zero, "episode_id": zero + 7, "group_id": zero, "env_id": zero, "policy_version": zero,
        ...     "next": {"tokens": {"prompt": torch.tensor([[[3, 4, 5, 6]]]), "prompt_length": zero + 4},
        ...              "reward": torch.ones(1, 1, 1), "truncated": token == 0, "stop_reason": zero + 1, **flags},
        ... }, batch_size=[1, 1])
        >>> rows = turns_to_rows(turns)
        >>> rows["tokens"].tolist(), rows["turn_ids"].tolist(), rows["turn", "reward"].tolist()
        ([[3, 4, 5, 6]], [[-1, -1, 0, -1]], [[1.0]])
    """
    _check_keys(turns)
    turns = turns.flatten(0, -2) if turns.ndim > 2 else turns
    played = turns[keys.PROMPT_LENGTH].squeeze(-1) > 0
    if keys.COLLECTOR_MASK in turns.keys(include_nested=True):
        played = played & turns[keys.COLLECTOR_MASK].view(played.shape)
    if len(turns) and not played.any():
        raise TurnViewError(
            "No turn of the batch was played: all slots idle. A GEMEnv with on_done='idle' starts new episodes when the whole "
            "environment is reset: give TorchRL's Collector reset_at_each_iter=True (and frames_per_batch = slots * "
            "max_turns), or make the environment with on_done='refill'."
        )
    kept = played.any(-1)
    if not bool(kept.all()):
        turns, played = turns[kept], played[kept]
    _check_episodes(turns, played)
    episodes = new_episodes(turns[:, 0])
    for turn, there in enumerate(played.T):
        chosen = there.nonzero().flatten()
        record_turns([episodes[i] for i in chosen.tolist()], turns[chosen, turn])
    _check_continuity(turns, played)
    floats = (turns[keys.RESPONSE_LOG_PROBS].dtype, turns["next", keys.REWARD].dtype, torch.float32)
    dtype, max_turns = reduce(torch.promote_types, floats), max_turns or played.shape[1]
    rows = rows_from_episodes(episodes, max_model_len=max_model_len, max_turns=max_turns, dtype=dtype)
    return rows if turns.device is None else rows.to(turns.device)


def new_episodes(steps: TensorDictBase) -> list[Episode]:
    """The episodes that ``n`` slots ``[n]`` of the turn view begin, without a turn."""
    columns = [steps[name].flatten().tolist() for name in _IDS]
    task_id = steps.get(keys.TASK_ID, None)
    columns.append([None] * len(steps) if task_id is None else task_id.flatten().tolist())
    return [Episode(-1, *ids) for ids in zip(*columns, strict=True)]


def record_turns(episodes: Sequence[Episode], steps: TensorDictBase) -> None:
    """Add a turn to each of ``n`` episodes.

    Args:
        episodes: the episode of each slot.
        steps: ``[n]`` of the turn view: a step of each, with its response and ``"next"``.

    Raises:
        HistoryRewrittenError: the next context does not begin with the context and the response.
    """
    if not episodes:
        return
    read = {key: steps[key] for key in _NEEDED if key != ("next", keys.REWARD)}
    uncut = torch.zeros_like(steps[keys.TURN])
    read |= {key: steps.get(key, uncut) for key in (keys.SEGMENT, ("next", keys.SEGMENT))}
    # NumPy has no bfloat16.
    arrays = {key: (x.float() if x.dtype is torch.bfloat16 else x).numpy(force=True) for key, x in read.items()}
    columns = {
        keys.REWARD: steps["next", keys.REWARD],
        **turn_columns.declared_columns(steps["next"].get("extra", None)),
    }
    values = {name: column.flatten().tolist() for name, column in columns.items() if column.numel() == len(episodes)}
    for i, episode in enumerate(episodes):
        _record_turn(episode, {key: value[i] for key, value in arrays.items()})
        episode.record({name: column[i] for name, column in values.items()})


def _record_turn(episode: Episode, step: dict[Any, np.ndarray[Any, Any]]) -> None:
    start, size = int(step[keys.PROMPT_LENGTH][0]), int(step[keys.RESPONSE_MASK].sum())
    segment, next_segment = int(step[keys.SEGMENT][0]), int(step["next", keys.SEGMENT][0])
    terminated, truncated, success = (bool(step["next", key][0]) for key in _FLAGS)
    context, following = step[keys.PROMPT][:start], step[_NEXT_PROMPT][: int(step[_NEXT_LENGTH][0])]
    # Copies: the step's tensors are as wide as the widest context, and a view would keep them
    # alive.
    tokens, log_probs, versions = (step[key][:size].copy() for key in _SAMPLED)
    cut = (
        segment != next_segment
    )  # also at the end of an episode, so that its last context has all of the last feedback
    if not cut and not np.array_equal(following[: start + size], np.concatenate([context, tokens])):
        raise HistoryRewrittenError.at(episode.episode_id, len(episode.turns))
    episode.add(Turn(start, segment, tokens, log_probs, versions))
    if cut:
        episode.end_segment(context)
    if terminated or truncated:
        reason = int(step["next", keys.STOP_REASON][0])
        episode.end(following.copy(), reason, terminated=terminated, truncated=truncated, success=success)


def is_row_view(batch: TensorDictBase) -> bool:
    """Whether a batch is in the row view: there ``"tokens"`` is a leaf, in the turn view a nested
    tensordict.

    Examples:
        >>> from tensordict import TensorDict
        >>> [is_row_view(TensorDict({name: torch.zeros(1, 2)}, [1])) for name in (keys.TOKENS, keys.PROMPT)]
        [True, False]
    """
    # A set, because tensordict's own membership test ignores leaves_only.
    return keys.TOKENS in set(batch.keys(leaves_only=True))


def _check_keys(turns: TensorDictBase) -> None:
    if is_row_view(turns):
        raise TurnViewError(
            "The batch is in the row view already: leave turns_to_rows out after this library's collectors."
        )
    present = turns.keys(include_nested=True)
    missing = [key for key in _NEEDED if key not in present]
    if missing or turns.ndim < 2:
        raise TurnViewError(
            f"Expected turns of batch size [B, T] (or [workers, B, T]) with the keys of the turn view; given batch size "
            f"{list(turns.batch_size)}, missing {missing}. A collector must not drop the next observation "
            "(compact_obs=False), and a policy must be a TurnPolicy or write the same keys."
        )


def _check_episodes(turns: TensorDictBase, played: Tensor) -> None:
    """One whole episode a row, its turns first and in order, its responses contiguous."""
    turn, episode = turns[keys.TURN].squeeze(-1), turns[keys.EPISODE_ID].squeeze(-1)
    count = torch.arange(played.shape[1], device=played.device)
    ends = (turns["next", keys.TERMINATED] | turns["next", keys.TRUNCATED]).squeeze(-1)
    mask = turns[keys.RESPONSE_MASK]
    size, last = mask.sum(-1, keepdim=True), played.sum(-1, keepdim=True) - 1
    segment = turns.get(keys.SEGMENT, torch.zeros_like(turns[keys.TURN])).squeeze(-1)
    resets = segment - torch.nn.functional.pad(segment[:, :-1], (1, 0))
    faults = {
        "holds turns of several episodes": played & (episode != episode[:, :1]),
        "has a gap between its turns, or does not begin with turn 0": played & (turn != count),
        "has turns that follow an idle step": played & (count > last),
        "ends before its episode does (neither terminated nor truncated)": (count == last) & ~ends,
        "goes on after its episode has ended": played & (count < last) & ends,
        "has a response_mask with a gap": played & (mask != (_columns(mask) < size)).any(-1),
        "skips a segment, or goes back to one": played & ((resets < 0) | (resets > (count > 0).long())),
    }
    # One transfer from the device for all checks.
    found = torch.stack([fault.any() for fault in faults.values()]).tolist()
    for (message, fault), is_fault in zip(faults.items(), found, strict=True):
        if is_fault:
            row, step = fault.nonzero()[0].tolist()
            raise TurnViewError(
                f"Row {row} (episode {int(episode[row, 0])}) {message}, at step {step}. Expected one whole episode a "
                "row, as TurnCollector delivers it, or a collector whose finished slots idle until the batch is complete."
            )


def _check_continuity(turns: TensorDictBase, played: Tensor) -> None:
    """The context of a turn is what the turn before it ended with."""
    before, after = turns[_NEXT_PROMPT][:, :-1], turns[keys.PROMPT][:, 1:]
    length = turns[keys.PROMPT_LENGTH][:, 1:]
    wrong = ((before != after) & (_columns(after) < length)).any(-1)
    wrong |= (turns[_NEXT_LENGTH][:, :-1] != length).squeeze(-1)
    wrong &= played[:, 1:]
    if bool(wrong.any()):
        row, turn = wrong.nonzero()[0].tolist()
        raise HistoryRewrittenError.at(int(turns[keys.EPISODE_ID][row, 0]), turn)


def _columns(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], device=x.device)
