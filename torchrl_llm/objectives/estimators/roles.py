"""Credit in self-play: :class:`RoleRelative`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.objectives.estimators.returns import ReturnEstimator
from torchrl_llm.objectives.estimators.rows import extra_of


@dataclass(kw_only=True, eq=False, repr=False)
class RoleRelative(ReturnEstimator):
    """Role-conditioned advantages: returns less the mean of the same role's in the other games of
    the batch.

    Where one policy plays all seats of a game, a seat may have an advantage by the rules, such as
    the first move. A baseline for each game and role takes it out, so that a return is compared
    with what that role earns (SPIRAL, Liu et al., 2025, arXiv:2506.24119, sec. 3.3). There the
    baseline is an exponential moving average; here it is the mean over the batch without the
    episode itself, which keeps no state and biases nothing: the baseline does not depend on the
    episode that it is for. A role that no other episode of the batch has keeps its return.

    Reads ``("turn", reward / mask / terminated / truncated)`` ``[B, T]``, ``"turn_ids"``
    ``[B, L]``, ``"env_id"`` ``[B]`` if there is one, and the extra ``role``
    (``("turn", "extra", role)`` ``[B, T]`` int64, taken from a row's first turn), which the seats
    of a :class:`~torchrl_llm.envs.SelfPlayEnv` have. Writes ``"advantage"``, ``"value_target"``
    ``[B, L]`` and ``("turn", advantage / value_target)`` ``[B, T]``; the target is the return that
    was compared.

    Keyword Args:
        **options: those of :class:`~torchrl_llm.objectives.TurnEstimator`, and the following;
            ``discounted_objective`` is for ``credit="turn"``.

    Examples:
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(3, 1, dtype=torch.bool), torch.zeros(3, 1, dtype=torch.bool)
        >>> turn = dict(reward=torch.tensor([[1.0], [-1.0], [0.0]]), mask=yes, terminated=yes, truncated=no)
        >>> turn["extra"] = dict(role=torch.tensor([[5], [6], [5]]))
        >>> rows = TensorDict({"turn": turn, "turn_ids": torch.zeros(3, 1, dtype=torch.int64)}, [3])
        >>> RoleRelative()(rows)["advantage"].flatten().tolist()
        [1.0, -1.0, -1.0]
    """

    credit: Literal["episode", "turn"] = "episode"
    """Compare the returns of whole episodes, or, turn by turn, those from there on.

    With ``"episode"`` every turn of a row gets the same advantage; with ``"turn"`` an episode that
    has ended counts with 0.
    """
    role: str = "role"
    """Name of the extra that tells the role."""

    def __post_init__(self, value_network: TensorDictModuleBase | None) -> None:
        super().__post_init__(value_network)
        if self.discounted_objective and self.credit == "episode":
            raise ValueError(
                'credit="episode" is discounted from the first turn on; discounted_objective is for credit="turn".'
            )

    def score(self, reward: Tensor, mask: Tensor, acted: Tensor) -> Tensor:
        if self.credit == "episode":
            return F.episode_return(reward, mask, self.gamma)
        return F.turn_returns(reward, mask, self.gamma)

    def compare(self, tensordict: TensorDictBase, score: Tensor, penalty: Tensor, acted: Tensor) -> Tensor:
        total, counted = score + penalty, self._get(tensordict, "mask").any(1)
        relative, others = F.leave_one_out(total, self.labels(tensordict), counted, self.process_group)
        return torch.where((others == 0).view(-1, *[1] * (score.ndim - 1)), total, relative)

    def labels(self, tensordict: TensorDictBase) -> Tensor:
        """The environment and the role of each row, ``[B, 2]`` int64.

        Raises:
            KeyError: the rows have no such extra.
            TypeError: the extra is a number.
        """
        instead = "collect games with a SelfPlayCollector, or name an extra that the environment declares as text"
        role = extra_of(tensordict, self.role, str, option="role", instead=instead)
        env_id = tensordict.get(keys.ENV_ID, torch.zeros_like(role[:, 0]))
        return torch.stack([env_id, role[:, 0]], 1)
