"""Which episodes are a success: :class:`SuccessRule`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.text_env import TextStep

logger = logging.getLogger(__name__)

_WARN_AFTER = 64  # episodes without a success; then a warning asks what counts as one


class SuccessRule:
    """Decides which terminated episodes are a success; warns if an environment never has one.

    Args:
        specs: the environments of the mixture; their ``success_by`` says whether the last reward or
            the return (up to 1e-6) counts.
        threshold: an episode is a success with at least this reward.
    """

    def __init__(self, specs: Sequence[EnvSpec], threshold: float) -> None:
        self.threshold, self._specs = threshold, specs
        # episodes, and the most that one earned
        self._never_won = dict.fromkeys(range(len(specs)), (0, 0.0))

    def holds(self, env_id: int, total: float, step: TextStep) -> bool:
        """Whether an episode that terminates with ``step`` is a success.

        Args:
            env_id: its environment, an index of ``specs``.
            total: the rewards before.
            step: the last.
        """
        if step.success is not None:
            return step.success
        return self._earned(env_id, total + step.reward, step.reward) >= self.threshold

    def _earned(self, env_id: int, total: float, last: float) -> float:
        # Shares of 1 need not sum to 1: ten times 0.1 is 0.9999999999999999.
        return total + 1e-6 if self._specs[env_id].success_by == "return" else last

    def watch(self, env_id: int, total: float, step: TextStep, *, won: bool) -> None:
        """Warn, once, if an environment is never won though one of its episodes earned half of what
        that takes.

        Args:
            env_id: the environment of an episode that terminated.
            total: all of its rewards.
            step: its last.
            won: whether it was a success.
        """
        if env_id not in self._never_won:
            return
        if step.success is not None or won:
            del self._never_won[env_id]
            return
        count, most = self._never_won[env_id]
        count, most = count + 1, max(most, self._earned(env_id, total, step.reward))
        self._never_won[env_id] = count, most
        if count >= _WARN_AFTER and most >= self.threshold / 2 > 0:
            del self._never_won[env_id]
            spec = self._specs[env_id]
            earned = "return" if spec.success_by == "return" else "last reward"
            logger.warning(
                "None of %d episodes of %r was a success; the highest %s was %.3g, and a success takes success_reward=%s. If "
                "less counts as won there, set success_reward, or let the environment say info['success'].",
                count, spec.name, earned, most, self.threshold,
            )  # fmt: skip
