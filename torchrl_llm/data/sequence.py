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

_MASK = ("collector", "mask")
_TURN_KEYS = {
    keys.TURN_REWARD: keys.REWARD,
    keys.TURN_TERMINATED: keys.TERMINATED,
    keys.TURN_TRUNCATED: keys.TRUNCATED,
    keys.TURN_SUCCESS: keys.SUCCESS,
    keys.TURN_STOP_REASON: keys.STOP_REASON,
}
_ID_KEYS = (keys.EPISODE_ID, keys.GROUP_ID, keys.ENV_ID)


class TurnViewError(ValueError):
    """A batch of turns that is not one whole episode a row."""


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
        if isinstance(tensordict.get(keys.TOKENS, None), Tensor):
            return tensordict
        return turns_to_rows(tensordict, max_model_len=self.max_model_len, max_turns=self.max_turns)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Samples pass as they are."""
        return tensordict


class _Turns(NamedTuple):
    """The numbers of turns ``[B, T]`` that place them in their rows ``[B, L]``."""

    played: Tensor  # [B, T] bool
    start: Tensor  # [B, T] context length = place of the response's first token
    size: Tensor  # [B, T] tokens of the response
    last: Tensor  # [B] index of the last turn
    length: Tensor  # [B] tokens of the row


def turns_to_rows(
    turns: TensorDictBase, *, max_model_len: int | None = None, max_turns: int | None = None
) -> TensorDict:
    """Collapse whole episodes of turns ``[B, T]`` into rows ``[B']``, one conversation a row.

    Turns count as played where ``("collector", "mask")`` (if present) is True and ``prompt_length > 0``; episodes
    without any are dropped, hence ``B' <= B``. A row is the last context, the last response and the feedback to it as
    far as it fits, that is ``("next", "tokens", "prompt")`` of the last turn; off-action entries of ``turn_ids`` and
    ``policy_version`` are -1, of ``sample_log_prob`` 0.

    Args:
        turns: the turn view of :mod:`torchrl_llm.keys`, one whole episode a row, its turns first.
        max_model_len: width ``L`` of the rows; ``None``: the longest row.
        max_turns: width ``T`` of the per-turn keys; ``None``: as given.

    Returns:
        The row view, all tensors on the device of ``turns``.

    Raises:
        TurnViewError: keys are missing, a row holds several episodes, part of one, or more than fits.
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
    if _MASK in turns.keys(include_nested=True):
        played = played & turns[_MASK].view(played.shape)
    kept = played.any(-1)
    if not bool(kept.all()):
        turns, played = turns[kept], played[kept]
    places = _place(turns, played)
    _check_episodes(turns, places)
    longest, most = torch.stack([places.length.max(), places.last.max() + 1]).tolist() if len(played) else (0, 0)
    width, num_turns = max_model_len or longest, max_turns or played.shape[1]
    if longest > width or most > num_turns:
        raise TurnViewError(
            f"An episode of {most} turns and one of {longest} tokens do not fit into max_turns={num_turns} and "
            f"max_model_len={width}. Give TurnsToSequence the limits of the environment."
        )
    tokens = _final_context(turns, places)
    _check_history(turns, places, tokens)
    return _rows(turns, places, _fit(tokens, width), num_turns)


def _place(turns: TensorDictBase, played: Tensor) -> _Turns:
    lengths = turns["next", *keys.PROMPT_LENGTH].squeeze(-1)
    last = (played.sum(-1) - 1).clamp(min=0)
    return _Turns(
        played=played,
        start=turns[keys.PROMPT_LENGTH].squeeze(-1),
        size=turns[keys.RESPONSE_MASK].sum(-1),
        last=last,
        length=lengths.gather(1, last.unsqueeze(1)).squeeze(1),
    )


def _final_context(turns: TensorDictBase, places: _Turns) -> Tensor:
    """The whole conversation ``[B, L]``, 0 in the padding."""
    contexts = turns["next", *keys.PROMPT]
    tokens = contexts[torch.arange(len(contexts), device=contexts.device), places.last]
    return tokens.masked_fill(_columns(tokens) >= places.length.unsqueeze(-1), 0)


def _rows(turns: TensorDictBase, places: _Turns, tokens: Tensor, num_turns: int) -> TensorDict:
    """Put everything at its place in rows ``tokens`` ``[B, L]``."""
    turn = torch.arange(places.played.shape[1], device=tokens.device).view(1, -1, 1)
    row: dict[keys.NestedKey, Tensor] = {
        keys.TOKENS: tokens,
        keys.ATTENTION_MASK: _columns(tokens) < places.length.unsqueeze(-1),
        keys.TURN_IDS: _scatter(turn.expand_as(turns[keys.RESPONSE]), turns, places, tokens.shape, fill=-1),
        keys.POLICY_VERSION: _scatter(turns[keys.POLICY_VERSION], turns, places, tokens.shape, fill=-1),
        keys.SAMPLE_LOG_PROB: _scatter(_wide(turns[keys.RESPONSE_LOG_PROBS]), turns, places, tokens.shape, fill=0),
        keys.TURN_MASK: _fit(places.played, num_turns),
    }
    for key, source in _TURN_KEYS.items():
        value = turns["next", source].squeeze(-1)
        value = _wide(value) if value.is_floating_point() else value
        row[key] = _fit(value.masked_fill(~places.played, 0), num_turns)
    row |= {name: turns[name][:, 0, 0] for name in _ID_KEYS}
    return TensorDict(row, batch_size=tokens.shape[:1], device=turns.device)


def _scatter(values: Tensor, turns: TensorDictBase, places: _Turns, shape: torch.Size, *, fill: int) -> Tensor:
    """Lay the responses' ``values`` ``[B, T, A]`` out in rows of ``shape`` ``[B, L]``; ``fill`` elsewhere."""
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


def _check_episodes(turns: TensorDictBase, places: _Turns) -> None:
    """One whole episode a row, its turns first and in order, its responses contiguous."""
    played = places.played
    turn, episode = turns[keys.TURN].squeeze(-1), turns[keys.EPISODE_ID].squeeze(-1)
    count = torch.arange(played.shape[1], device=played.device)
    ends = (turns["next", keys.TERMINATED] | turns["next", keys.TRUNCATED]).squeeze(-1)
    mask = turns[keys.RESPONSE_MASK]
    faults = {
        "holds turns of several episodes": played & (episode != episode[:, :1]),
        "has a gap between its turns, or does not begin with turn 0": played & (turn != count),
        "has turns that follow an idle step": played & (count > places.last.unsqueeze(-1)),
        "ends before its episode does (neither terminated nor truncated)": (count == places.last.unsqueeze(-1)) & ~ends,
        "goes on after its episode has ended": played & (count < places.last.unsqueeze(-1)) & ends,
        "has a response_mask with a gap": played & (mask != (_columns(mask) < places.size.unsqueeze(-1))).any(-1),
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
    """Every context and every response must stand, token for token, at its place in the final context.

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
            "earlier reasoning, a sliding window, ids made anew from text). Contexts must only grow: "
            "context_{t+1} = context_t + response_t + feedback_t."
        )


def _columns(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], device=x.device)


def _fit(x: Tensor, width: int) -> Tensor:
    """Cut or zero-pad the last dimension to ``width``."""
    return torch.nn.functional.pad(x, (0, width - x.shape[-1])).contiguous()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
