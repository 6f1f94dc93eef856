"""How many episodes failed, and how many may: :class:`FaultCounter`."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from torchrl_llm.envs.text_env import EnvironmentFault

logger = logging.getLogger(__name__)


@dataclass
class FaultCounter:
    """Counts failed episodes, and raises the first of them if there are too many.

    Attributes:
        max_faults: failed episodes tolerated since ``recent`` was cleared.
        scope: which these are, for the message.
        counts: all failed episodes, by :attr:`EnvironmentFault.reason`.
        recent: the faults since the last batch, or the last episode that ended well.
        alike: all faults that :meth:`warn` was told of, by :attr:`EnvironmentFault.kind`.
    """

    max_faults: int
    scope: str
    counts: Counter[str] = field(default_factory=Counter)
    recent: list[EnvironmentFault] = field(default_factory=list)
    alike: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def record(self, fault: EnvironmentFault) -> None:
        """Count a failed episode.

        Raises:
            EnvironmentFault: the first of ``recent``, if there are more than ``max_faults``.
        """
        self.counts[fault.reason] += 1
        self.recent.append(fault)
        if (count := len(self.recent)) > self.max_faults:
            first, self.recent = self.recent[0], []
            first.add_note(f"It was the first of {count} failed episodes {self.scope}; max_faults={self.max_faults}.")
            raise first

    def warn(self, fault: EnvironmentFault, outcome: str) -> None:
        """Log a fault: of those that are alike the first, the tenth, the hundredth and so on,
        because a bug fails every episode.

        Args:
            fault: what failed. Its traceback is left out: where it ends the run, it is shown then.
            outcome: a sentence on what becomes of the episode.
        """
        self.alike[fault.kind] += 1
        count = self.alike[fault.kind]
        if count == 1:
            logger.warning("%s %s Of faults like it, only the 10th, the 100th and so on are shown.", fault, outcome)
        elif count == 10 ** (len(str(count)) - 1):
            logger.warning("%s %s It is the %dth fault like it.", fault, outcome, count)
