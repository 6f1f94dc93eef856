"""Selection of episodes to learn from, and penalties on length: functions of rows ``[B]``
(:mod:`torchrl_llm.keys`).

Select rows before loss weights are computed, so that the weights count the rows that are left.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm import keys


def nonzero_variance(rows: TensorDictBase) -> Tensor:
    """Whether any episode of a row's group has an advantage; without one the group gives no
    gradient.

    The filter of dynamic sampling (DAPO, Yu et al., 2025, arXiv:2503.14476, sec. 3.2), for every
    estimator: it looks at the advantages of the update (with its discount, comparing turns or
    episodes, with a KL in the reward), not at the plain returns. An advantage of at most 1e-6
    counts as none.

    Args:
        rows: ``[B]`` with ``"advantage"`` and ``"group_id"``; groups are whole.

    Returns:
        ``[B]`` bool, the same for all members of a group.

    Raises:
        KeyError: the rows have no advantage yet.

    Examples:
        >>> from tensordict import TensorDict
        >>> advantage, group_id = torch.tensor([[0.0], [0.5], [0.0], [0.0]]), torch.tensor([0, 0, 1, 1])
        >>> nonzero_variance(TensorDict(advantage=advantage, group_id=group_id, batch_size=[4])).tolist()
        [True, True, False, False]
    """
    advantage = rows.get(keys.ADVANTAGE, None)
    if advantage is None:
        raise KeyError(
            f"nonzero_variance needs {keys.ADVANTAGE!r}, which is not in the rows. Run the value estimator first."
        )
    credited = (advantage.abs() > F.SPREAD_TOLERANCE).any(1)
    labels, group = rows[keys.GROUP_ID].unique(return_inverse=True)
    return torch.zeros_like(labels).index_add_(0, group, credited.long())[group] > 0


def unsampled(turn_ids: Tensor, log_prob: Tensor) -> Tensor:
    """Whether nobody sampled a row: it has NaN as the log-prob of each of its action tokens.

    Args:
        turn_ids: ``[B, L]`` int64, -1 off actions.
        log_prob: ``[B, L]``, of the sampler.

    Returns:
        ``[B]`` bool; False without an action token.
    """
    actions = turn_ids >= 0
    return actions.any(-1) & (log_prob.isnan() | ~actions).all(-1)


def overlong(rows: TensorDictBase, max_response_length: int) -> Tensor:
    """Whether a length limit cut an episode: it was truncated, or one of its responses was.

    A response of ``max_response_length`` tokens counts as cut. DAPO's overlong filtering
    (arXiv:2503.14476, sec. 3.4) leaves such episodes out of the loss.

    Args:
        rows: ``[B]`` with ``"turn_ids"`` and ``("turn", mask / terminated / truncated)``.
        max_response_length: where responses are cut, in tokens.

    Returns:
        ``[B]`` bool.

    Examples:
        >>> from tensordict import TensorDict
        >>> flag = torch.tensor([[True]])
        >>> turn = dict(mask=flag, terminated=flag, truncated=~flag)
        >>> overlong(TensorDict(turn=turn, turn_ids=torch.tensor([[-1, 0, 0]]), batch_size=[1]), 2).tolist()
        [True]
    """
    mask = rows[keys.TURN_MASK]
    # GEM sets both flags at its own turn limit, which is a part of the task and cuts nothing.
    cut = (mask & rows[keys.TURN_TRUNCATED] & ~rows[keys.TURN_TERMINATED]).any(1)
    return cut | (F.turn_lengths(rows[keys.TURN_IDS], mask.shape[1]) >= max_response_length).any(1)


def penalize_overlong(rows: TensorDictBase, coeff: float, *, max_response_length: int, buffer: int) -> TensorDictBase:
    """Subtract ``coeff`` times the soft overlong penalty of each response from the reward of its
    turn.

    See :func:`~torchrl_llm.functional.overlong_penalty`. Call it before the advantage estimator.

    Args:
        rows: ``[B]`` with ``"turn_ids"`` and ``("turn", reward / mask)``; the reward is replaced.
        coeff: the penalty of a response that reaches the limit, in units of reward.
        max_response_length: where responses are cut, in tokens.
        buffer: over how many tokens before the limit the penalty grows.

    Returns:
        ``rows``.

    Examples:
        >>> from tensordict import TensorDict
        >>> turn = dict(reward=torch.tensor([[1.0]]), mask=torch.tensor([[True]]))
        >>> rows = TensorDict(turn=turn, turn_ids=torch.tensor([[-1, 0, 0, 0]]), batch_size=[1])
        >>> penalize_overlong(rows, 0.5, max_response_length=4, buffer=2)["turn", "reward"].tolist()
        [[0.75]]
    """
    length = F.turn_lengths(rows[keys.TURN_IDS], rows[keys.TURN_MASK].shape[1])
    penalty = coeff * F.overlong_penalty(length, max_response_length, buffer)
    reward = rows[keys.TURN_REWARD]
    return rows.set(keys.TURN_REWARD, reward + torch.where(rows[keys.TURN_MASK], penalty, 0.0).to(reward.dtype))
