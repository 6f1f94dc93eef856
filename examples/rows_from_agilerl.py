"""Conversion of data in AgileRL's layout to rows: :func:`rows_from_agilerl`.

For recorded rollouts of AgileRL 2.x, or an environment that yields them. Copy this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchrl_llm import keys


def rows_from_agilerl(
    completion_ids: Tensor | Sequence[Tensor],
    action_masks: Tensor | Sequence[Tensor],
    rewards: Tensor | Sequence[Tensor],
    turn_ids: Tensor | Sequence[Tensor] | None = None,
    *,
    sampling_logps: Sequence[Tensor] | None = None,
    group_size: int = 1,
) -> TensorDict:
    """The arguments of AgileRL's ``learn((completion_ids, action_masks, rewards), turn_ids,
    sampling_logps)`` as rows.

    AgileRL (2.9.1) aligns ``action_masks`` and ``turn_ids`` with *predicted* tokens: entry j
    describes token j + 1, so they are one shorter than the ids. Ours are aligned with the tokens
    themselves. Its layout does not say whether an episode was truncated: rows are marked as
    terminated, without bootstrap. Success and stop reason are not known and are left out.

    Args:
        completion_ids: whole episodes: a list of ``[1, L_i]`` (or ``[n_i, L_i]``), or ``[B, L]``
            right-padded.
        action_masks: bool, one column less than the ids, each.
        rewards: per turn, ``[B, T]`` or a list with ``[T_i]`` for each row; single-turn data also
            ``[B]``.
        turn_ids: int64, shaped as ``action_masks``, -1 off-action; ``None``: every action is of
            turn 0.
        sampling_logps: log-probs of the generated tokens, one flat tensor a row; ``None`` leaves
            ``"sample_log_prob"`` out, and ``"old_log_prob"`` has to be scored.
        group_size: consecutive rows that share a task.

    Returns:
        Rows ``[B]`` with ids, masks, ``turn_ids``, ``policy_version`` 0, the per-turn keys and the
        episode's ids. Ids behind the last action token are kept where the length of a row is known
        (a list), and dropped from a padded tensor, which does not tell padding from feedback.

    Raises:
        ValueError: shapes that do not fit together, or a reward for a turn without a response.

    Examples:
        >>> rows = rows_from_agilerl(
        ...     [torch.tensor([[7, 8, 9, 5]]), torch.tensor([[7, 6]])],
        ...     [torch.tensor([[False, True, True]]), torch.tensor([[True]])],
        ...     torch.tensor([1.0, 0.5]))
        >>> rows["turn_ids"].tolist(), rows["turn", "reward"].tolist()
        ([[-1, -1, 0, 0], [-1, 0, -1, -1]], [[1.0], [0.5]])
    """
    ids, lengths = _stack(completion_ids, 0)
    actions, _ = _stack(action_masks, False)
    turns = torch.where(actions.bool(), 0, -1) if turn_ids is None else _stack(turn_ids, -1)[0].long()
    reward = _stack(rewards, 0)[0]
    reward = reward.to(torch.promote_types(reward.dtype, torch.float32))
    if not (ids.shape[1] == actions.shape[1] + 1 == turns.shape[1] + 1) or not len(ids) == len(actions) == len(reward):
        raise ValueError(
            f"completion_ids {tuple(ids.shape)}, action_masks {tuple(actions.shape)}, turn_ids {tuple(turns.shape)} and "
            f"rewards {tuple(reward.shape)} do not fit together; expected [B, L], [B, L-1], [B, L-1] and [B, T]."
        )
    # An action mask may exclude tokens that turn_ids still count.
    turns = F.pad(turns.masked_fill(~actions.bool(), -1), (1, 0), value=-1)
    places = torch.arange(ids.shape[1])
    if isinstance(completion_ids, Tensor):
        lengths = torch.where(turns >= 0, places + 1, 0).amax(-1)
    mask = places < lengths.unsqueeze(-1)
    row: dict[keys.NestedKey, Tensor] = {
        keys.TOKENS: ids.masked_fill(~mask, 0),
        keys.ATTENTION_MASK: mask,
        keys.TURN_IDS: turns,
        keys.POLICY_VERSION: torch.where(turns >= 0, 0, -1),
        keys.EPISODE_ID: torch.arange(len(ids)),
        keys.GROUP_ID: torch.arange(len(ids)) // group_size,
        keys.ENV_ID: torch.zeros(len(ids), dtype=torch.int64),
    }
    if sampling_logps is not None:
        row[keys.SAMPLE_LOG_PROB] = _flat_to_rows(sampling_logps, turns)
    return TensorDict(row | _turn_keys(reward, turns), batch_size=[len(ids)])


def _stack(parts: Tensor | Sequence[Tensor], value: int | bool) -> tuple[Tensor, Tensor]:
    """One right-padded ``[B, L]`` tensor on the CPU, and the width of each row before padding,
    ``[B]``."""
    rows = [row for part in parts for row in torch.atleast_2d(part.detach().cpu())]
    return pad_sequence(rows, batch_first=True, padding_value=value), torch.tensor([len(row) for row in rows])


def _turn_keys(reward: Tensor, turns: Tensor) -> dict[keys.NestedKey, Tensor]:
    """The per-turn keys ``[B, T]``: the mask holds the turns up to the last one with an action
    token."""
    last = turns.amax(-1, keepdim=True)
    count = torch.arange(max(reward.shape[1], int(last.max()) + 1))
    reward = F.pad(reward, (0, len(count) - reward.shape[1]))
    played = count <= last
    if bool((reward.masked_fill(played, 0) != 0).any()):
        row, turn = reward.masked_fill(played, 0).nonzero()[0].tolist()
        raise ValueError(
            f"Row {row} has the reward {float(reward[row, turn])} in turn {turn}, but its last action token is of turn "
            f"{int(last[row])}. Pass turn_ids that name every turn (single-turn rewards are one number a row)."
        )
    return {
        keys.TURN_REWARD: reward,
        keys.TURN_MASK: played,
        keys.TURN_TERMINATED: count == last,
        keys.TURN_TRUNCATED: torch.zeros_like(played),
    }


def _flat_to_rows(log_probs: Sequence[Tensor], turns: Tensor) -> Tensor:
    flat = torch.cat([part.detach().cpu().flatten().float() for part in log_probs])
    actions = turns >= 0
    counts, given = actions.sum(-1).tolist(), [part.numel() for part in log_probs]
    if counts != given:
        raise ValueError(f"sampling_logps holds {given} numbers a row; expected one for each action token: {counts}.")
    return torch.zeros(turns.shape).masked_scatter(actions, flat)
