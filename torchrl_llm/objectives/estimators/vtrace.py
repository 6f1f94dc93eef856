"""V-trace over turns: :class:`TurnVTrace`."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm.objectives import functional as F
from torchrl_llm.objectives.estimators.base import CriticEstimator
from torchrl_llm.options import NonNegative, Share


@dataclass(kw_only=True, eq=False, repr=False)
class TurnVTrace(CriticEstimator):
    """V-trace over turns, for episodes that an older policy played (Espeholt et al., 2018, arXiv:1802.01561).

    The ratio of a turn is that of its probabilities under the model at the start of the update (``"old_log_prob"``, which
    must have been scored) and under the policy that sampled (``"sample_log_prob"``). The advantage holds it already, so
    the losses take this estimator with ``clipping="none"`` and without a sampler correction only.

    Reads and writes what :class:`~torchrl_llm.objectives.TurnGAE` does at turn granularity, and reads those two.

    Args:
        value_network: as in :class:`~torchrl_llm.objectives.TurnGAE`.

    Keyword Args:
        gamma: discount per turn. Default: 0.99.
        rho_clip: cap of the ratio in the advantage and in the target's temporal differences. Default: 1.0.
        c_clip: cap of the ratio on the way back. Default: 1.0.
        value_chunk_size: run the critic on this many rows at a time. Default: all.
        kl_coeff, discounted_objective, clip_advantage, process_group: see :class:`~torchrl_llm.objectives.TurnEstimator`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> yes, no = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)
        >>> turn = dict(reward=torch.tensor([[1.0]]), mask=yes, terminated=yes, truncated=no)
        >>> ids, zeros = torch.tensor([[-1, 0]]), torch.zeros(1, 2)
        >>> old = torch.tensor([[0.0, 0.5]]).log()
        >>> rows = dict(turn=turn, turn_ids=ids, state_value=zeros, sample_log_prob=zeros, old_log_prob=old)
        >>> TurnVTrace()(TensorDict(rows, [1]))["advantage"]
        tensor([[0.0000, 0.5000]])
    """

    corrects_sampler = True

    _reads = (*CriticEstimator._reads, "old_log_prob", "sample_log_prob")

    gamma: Share = 0.99
    rho_clip: NonNegative = 1.0
    c_clip: NonNegative = 1.0

    def estimate(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        reward, mask, turn_ids, acted = self._turns(tensordict)
        values = self._values(tensordict)
        value = F.turn_first(values["value"], turn_ids, mask.shape[1])
        old = self._get(tensordict, "old_log_prob", "Score the model at the start of the update.")
        log_rho = F.turn_sum(old - self._get(tensordict, "sample_log_prob"), turn_ids, mask.shape[1])
        bootstrap, clips = self._bootstrap(tensordict, values), {"rho_clip": self.rho_clip, "c_clip": self.c_clip}
        advantage, target = F.turn_vtrace(reward, value, log_rho, mask, self.gamma, bootstrap, acted=acted, **clips)
        return {**values, "turn_value": value, "turn_advantage": advantage, "turn_value_target": target}
