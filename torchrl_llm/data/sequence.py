"""From turns to rows: :class:`TurnsToSequence` and :func:`turns_to_rows`.

A conversation is collected as ``[T]`` turns that each repeat the whole context, and trained on as one row. Here the one
becomes the other, and nothing passes that was not played as it stands. Keys of both views: :mod:`torchrl_llm.keys`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_llm import keys
from torchrl_llm.objectives import functional as F
from torchrl_llm.segments import Segments

_TURN_KEYS = {
    keys.TURN_REWARD: keys.REWARD,
    keys.TURN_TERMINATED: keys.TERMINATED,
    keys.TURN_TRUNCATED: keys.TRUNCATED,
    keys.TURN_SUCCESS: keys.SUCCESS,
    keys.TURN_STOP_REASON: keys.STOP_REASON,
}
_ID_KEYS = (keys.EPISODE_ID, keys.GROUP_ID, keys.ENV_ID)


class TurnViewError(ValueError):
    """A batch of turns that is not one whole episode a row, or whose ids collide."""


class HistoryRewrittenError(ValueError):
    """A context does not continue the one before it token for token: what was sampled is not what would be trained on."""


class TurnsToSequence(Transform):
    """Replay-buffer transform: turns ``[B, T]`` become rows ``[B]`` in ``extend``; samples pass as they are.

    See :func:`turns_to_rows`, which does the work. Rows that are written again pass unchanged. A storage of fixed
    shape (``LazyTensorStorage``) needs ``max_model_len``, and ``max_turns`` where batches differ in their number of turns.

    Args:
        max_model_len: width ``L`` of the rows; ``None``: that of the longest row of each batch.
        max_turns: width ``T`` of the per-turn keys; ``None``: as collected.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(
        ...     storage=LazyTensorStorage(8), transform=TurnsToSequence(max_model_len=16, max_turns=4), batch_size=2)
    """

    def __init__(self, *, max_model_len: int | None = None, max_turns: int | None = None) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self.max_model_len = max_model_len
        self.max_turns = max_turns

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if keys.is_row_view(tensordict):
            return tensordict
        return turns_to_rows(tensordict, max_model_len=self.max_model_len, max_turns=self.max_turns)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Samples pass as they are."""
        return tensordict


class _Turns(NamedTuple):
    """The numbers of turns ``[S, T]`` that place them in their segments ``[S, L]``; mostly a segment is a whole row."""

    played: Tensor  # [S, T] bool
    start: Tensor  # [S, T] context length = place of the response's first token
    size: Tensor  # [S, T] tokens of the response
    last: Tensor  # [S] index of the last turn
    final: Tensor  # [S] bool, whether the episode ends with it
    length: Tensor  # [S] tokens of the segment


def turns_to_rows(
    turns: TensorDictBase, *, max_model_len: int | None = None, max_turns: int | None = None
) -> TensorDict:
    """Collapse whole episodes of turns ``[B, T]`` into rows ``[B']``, one conversation a row.

    Turns count as played where ``("collector", "mask")`` (if present) is True and ``prompt_length > 0``; episodes
    without any are dropped, hence ``B' <= B``. A row is the last context, the last response and the feedback to it as
    far as it fits, that is ``("next", "tokens", "prompt")`` of the last turn; off-action entries of ``turn_ids`` and
    ``policy_version`` are -1, of ``sample_log_prob`` 0.

    Where ``"segment"`` says that the context was made anew (``GEMEnv(overflow="slide")``), a row holds the segments one
    after the other, each up to its last response, with one column of padding between them: a gap in ``attention_mask``.
    So nothing is trained on with a context that the policy did not see; see :mod:`torchrl_llm.segments`.

    Args:
        turns: the turn view of :mod:`torchrl_llm.keys`, one whole episode a row, its turns first.
        max_model_len: width ``L`` of the rows; ``None``: the longest row.
        max_turns: width ``T`` of the per-turn keys; ``None``: as given.

    Returns:
        The row view, all tensors on the device of ``turns``.

    Raises:
        TurnViewError: keys are missing, no turn was played, a row holds several episodes, part of one, or more than fits; an
            episode is there twice, or different tasks share a group.
        HistoryRewrittenError: ``context_{t+1} = context_t + response_t + feedback_t`` does not hold.

    Examples:
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
    played = turns[keys.PROMPT_LENGTH].squeeze(-1) > 0
    if keys.COLLECTOR_MASK in turns.keys(include_nested=True):
        played = played & turns[keys.COLLECTOR_MASK].view(played.shape)
    if len(turns) and not played.any():
        raise TurnViewError(
            "No turn of the batch was played: all slots idle. A GEMEnv with on_done='idle' deals again when the whole "
            "environment is reset: give TorchRL's Collector reset_at_each_iter=True (and frames_per_batch = slots * "
            "max_turns), or make the environment with on_done='refill'."
        )
    kept = played.any(-1)
    if not bool(kept.all()):
        turns, played = turns[kept], played[kept]
    _check_episodes(turns, played)
    row, parts, places = _segments(turns, played)
    tokens = _final_context(parts, places)
    _check_history(parts, places, tokens)
    segments = Segments.place(row, places.length, len(turns))
    most = int(played.sum(-1).max()) if len(played) else 0
    width, num_turns = max_model_len or segments.shape[1], max_turns or played.shape[1]
    if segments.shape[1] > width or most > num_turns:
        raise TurnViewError(
            f"An episode of {most} turns and one of {segments.shape[1]} tokens do not fit into max_turns={num_turns} and "
            f"max_model_len={width}. Give TurnsToSequence the limits of the environment."
        )
    ids = _ID_KEYS if turns.get(keys.TASK_ID, None) is None else (*_ID_KEYS, keys.TASK_ID)
    result = _per_turn(turns, played, num_turns) | {name: turns[name][:, 0, 0] for name in ids}
    for key, value in _per_token(parts, places, _fit(tokens, segments.width)).items():
        fill = keys.row_fill(key)
        result[key] = _fit(segments.join(value, fill=fill) if len(row) > len(turns) else value, width, fill=fill)
    rows = TensorDict(result, batch_size=turns.shape[:1], device=turns.device)
    _check_ids(rows)
    return rows


def _segments(turns: TensorDictBase, played: Tensor) -> tuple[Tensor, TensorDictBase, _Turns]:
    """The row of each segment ``[S]``, its turns ``[S, T]`` and their places; mostly a segment is a whole row."""
    row = torch.arange(len(turns), device=played.device)
    final = torch.ones_like(row, dtype=torch.bool)
    number = turns.get(keys.SEGMENT, None)
    if number is not None and bool(number.any()):
        number = number.squeeze(-1).masked_fill(~played, 0)
        count = number.amax(-1) + 1
        row = row.repeat_interleave(count)
        index = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
        final = index == count[row] - 1
        turns, played = turns[row], played[row] & (number[row] == index.unsqueeze(-1))
    start = turns[keys.PROMPT_LENGTH].squeeze(-1)
    size = turns[keys.RESPONSE_MASK].sum(-1)
    last = torch.where(played, torch.arange(played.shape[1], device=played.device), 0).amax(-1)
    ends = torch.where(final.unsqueeze(-1), turns["next", *keys.PROMPT_LENGTH].squeeze(-1), start + size)
    return row, turns, _Turns(played, start, size, last, final, ends.gather(1, last.unsqueeze(1)).squeeze(1))


def _final_context(turns: TensorDictBase, places: _Turns) -> Tensor:
    """All that was said in a segment ``[S, L]``, 0 in the padding: the last observation, or the last context and response."""
    row = torch.arange(len(places.last), device=places.last.device)
    tokens = turns["next", *keys.PROMPT][row, places.last]
    if not bool(places.final.all()):
        said = places.played & (torch.arange(places.played.shape[1], device=row.device) == places.last.unsqueeze(-1))
        responses = _scatter(turns[keys.RESPONSE], turns, places._replace(played=said), tokens.shape, fill=0)
        before = turns[keys.PROMPT][row, places.last]
        before = before.masked_fill(_columns(before) >= places.start.gather(1, places.last.unsqueeze(1)), 0)
        tokens = torch.where(places.final.unsqueeze(-1), tokens, before + responses)
    return tokens.masked_fill(_columns(tokens) >= places.length.unsqueeze(-1), 0)


def _per_token(turns: TensorDictBase, places: _Turns, tokens: Tensor) -> dict[keys.NestedKey, Tensor]:
    """Put everything at its place in segments ``tokens`` ``[S, L]``."""
    turn = torch.arange(places.played.shape[1], device=tokens.device).view(1, -1, 1).expand_as(turns[keys.RESPONSE])
    log_probs = _wide(turns[keys.RESPONSE_LOG_PROBS])
    return {
        keys.TOKENS: tokens,
        keys.ATTENTION_MASK: _columns(tokens) < places.length.unsqueeze(-1),
        keys.TURN_IDS: _scatter(turn, turns, places, tokens.shape, fill=-1),
        keys.POLICY_VERSION: _scatter(turns[keys.POLICY_VERSION], turns, places, tokens.shape, fill=-1),
        keys.SAMPLE_LOG_PROB: _scatter(log_probs, turns, places, tokens.shape, fill=0),
    }


def _per_turn(turns: TensorDictBase, played: Tensor, num_turns: int) -> dict[keys.NestedKey, Tensor]:
    result: dict[keys.NestedKey, Tensor] = {keys.TURN_MASK: _fit(played, num_turns)}
    for key, source in _TURN_KEYS.items():
        value = turns["next", source].squeeze(-1)
        value = _wide(value) if value.is_floating_point() else value
        result[key] = _fit(value.masked_fill(~played, 0), num_turns)
    return result


def _scatter(values: Tensor, turns: TensorDictBase, places: _Turns, shape: torch.Size, *, fill: int) -> Tensor:
    """Lay the responses' ``values`` ``[S, T, A]`` out in segments of ``shape`` ``[S, L]``; ``fill`` elsewhere."""
    mask = turns[keys.RESPONSE_MASK] & places.played.unsqueeze(-1)
    index = places.start.unsqueeze(-1) + torch.arange(values.shape[-1], device=values.device)
    index = index.masked_fill(~mask, shape[1])  # one column more, cut off below, takes what is no action
    rows = values.new_full((shape[0], shape[1] + 1), fill)
    return rows.scatter(1, index.flatten(1), values.flatten(1))[:, :-1].contiguous()


def _check_keys(turns: TensorDictBase) -> None:
    needed: list[keys.NestedKey] = [keys.PROMPT, keys.PROMPT_LENGTH, keys.RESPONSE, keys.RESPONSE_MASK]
    needed += [keys.RESPONSE_LOG_PROBS, keys.POLICY_VERSION, keys.TURN, *_ID_KEYS]
    needed += [("next", *keys.PROMPT), ("next", *keys.PROMPT_LENGTH)]
    needed += [("next", source) for source in _TURN_KEYS.values()]
    present = turns.keys(include_nested=True)
    missing = [key for key in needed if key not in present]
    if missing or turns.ndim != 2:
        raise TurnViewError(
            f"Expected turns of batch size [B, T] with the keys of the turn view; given batch size "
            f"{list(turns.batch_size)}, missing {missing}. A collector must not drop the next observation "
            "(compact_obs=False), and a policy must be a TurnPolicy or write the same keys."
        )


def _check_ids(rows: TensorDictBase) -> None:
    fault = F.episode_fault(rows[keys.EPISODE_ID])
    fault = fault or F.group_fault(*(rows[key] for key in (keys.GROUP_ID, keys.ENV_ID, keys.TOKENS, keys.TURN_IDS)))
    if fault is not None:
        raise TurnViewError(fault)


def _check_episodes(turns: TensorDictBase, played: Tensor) -> None:
    """One whole episode a row, its turns first and in order, its responses contiguous."""
    turn, episode = turns[keys.TURN].squeeze(-1), turns[keys.EPISODE_ID].squeeze(-1)
    count = torch.arange(played.shape[1], device=played.device)
    ends = (turns["next", keys.TERMINATED] | turns["next", keys.TRUNCATED]).squeeze(-1)
    mask = turns[keys.RESPONSE_MASK]
    size, last = mask.sum(-1, keepdim=True), played.sum(-1, keepdim=True) - 1
    segment = turns.get(keys.SEGMENT, torch.zeros_like(turns[keys.TURN])).squeeze(-1)
    made_anew = segment - torch.nn.functional.pad(segment[:, :-1], (1, 0))
    faults = {
        "holds turns of several episodes": played & (episode != episode[:, :1]),
        "has a gap between its turns, or does not begin with turn 0": played & (turn != count),
        "has turns that follow an idle step": played & (count > last),
        "ends before its episode does (neither terminated nor truncated)": (count == last) & ~ends,
        "goes on after its episode has ended": played & (count < last) & ends,
        "has a response_mask with a gap": played & (mask != (_columns(mask) < size)).any(-1),
        "skips a segment, or goes back to one": played & ((made_anew < 0) | (made_anew > (count > 0).long())),
    }
    found = torch.stack([fault.any() for fault in faults.values()]).tolist()
    for (message, fault), is_fault in zip(faults.items(), found, strict=True):
        if is_fault:
            row, step = fault.nonzero()[0].tolist()
            raise TurnViewError(
                f"Row {row} (episode {int(episode[row, 0])}) {message}, at step {step}. Expected one whole episode a "
                "row, as TurnCollector delivers it, or a collector whose finished slots idle until the batch is complete."
            )


def _check_history(turns: TensorDictBase, places: _Turns, tokens: Tensor) -> None:
    """Every context and every response must stand, token for token, at its place in the final context of its segment.

    Since contexts grow, this is the same as ``context_{t+1} = context_t + response_t + feedback_t`` for every t.
    """
    contexts, responses = turns[keys.PROMPT], turns[keys.RESPONSE]
    end = places.start + places.size
    following = torch.cat([places.start[:, 1:], end[:, -1:]], 1)
    is_last = torch.arange(end.shape[1], device=end.device) == places.last.unsqueeze(-1)
    room = torch.where(is_last, places.length.unsqueeze(-1), following)
    inside = _columns(contexts) < places.start.unsqueeze(-1)
    wrong = ((_fit(tokens, contexts.shape[-1]).unsqueeze(1) != contexts) & inside).any(-1)
    index = places.start.unsqueeze(-1) + torch.arange(responses.shape[-1], device=tokens.device)
    sampled = tokens.gather(1, index.clamp(max=tokens.shape[1] - 1).flatten(1)).view_as(responses)
    wrong |= ((sampled != responses) & turns[keys.RESPONSE_MASK]).any(-1) | (end > room)
    wrong &= places.played
    if bool(wrong.any()):
        row, turn = wrong.nonzero()[0].tolist()
        raise HistoryRewrittenError(
            f"Episode {int(turns[keys.EPISODE_ID][row, 0, 0])}, turn {turn}: the context and response of this turn are not a "
            "prefix of the final context, so an environment or its formatter rewrote history (a template that drops "
            "earlier reasoning, a sliding window, ids made anew from text). Contexts must only grow: context_{t+1} = "
            f"context_t + response_t + feedback_t, unless {keys.SEGMENT!r} says that they were made anew."
        )


def _columns(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], device=x.device)


def _fit(x: Tensor, width: int, *, fill: int = 0) -> Tensor:
    """Cut or pad the last dimension to ``width``."""
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]), value=fill).contiguous()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
