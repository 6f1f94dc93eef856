"""The paired comparison of two evaluations of the same games: :func:`paired_comparison`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torchrl_llm.metrics.evaluated import Evaluation

OTHER_GAMES = "The evaluations before and after are of different games, for settings or code were changed in between: their difference is not what was learned."
"""What reports say where the two evaluations of a run are not comparable."""

_FAILED = "-" * 8
"""In :attr:`Evaluation.beginnings`, an episode whose reset failed."""


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """What changed, episode by episode, from one evaluation to another of the same games; printed
    as one line.

    Attributes:
        episodes: number of pairs, including those in which nothing changed.
        gained: episodes that were not won before and are won after.
        lost: episodes that were won before and are not won after.
        p_value: :func:`mcnemar_p_value` of ``gained`` and ``lost``.
        left_out: episodes that began otherwise in the two evaluations, and are not pairs.

    Examples:
        >>> print(PairedComparison(episodes=256, gained=98, lost=12, p_value=mcnemar_p_value(98, 12)))
        of 256 episodes 98 gained, 12 lost (McNemar p = 6e-18)
    """

    episodes: int
    gained: int
    lost: int
    p_value: float
    left_out: int = 0

    @property
    def p(self) -> str:
        """The p-value for a sentence: ``"p = 0.07"``."""
        # a float has no smaller ones
        return f"p = {self.p_value:.1g}" if self.p_value else "p < 1e-300"

    def __str__(self) -> str:
        left_out = f"; {self.left_out} more began otherwise" if self.left_out else ""
        return f"of {self.episodes} episodes {self.gained} gained, {self.lost} lost (McNemar {self.p}){left_out}"


def paired_comparison(before: Evaluation, after: Evaluation) -> PairedComparison | None:
    """Compare two evaluations of the same games, episode by episode.

    Pairs are episodes of the same rules and task (:attr:`Evaluation.task_digest`) that began alike
    (:attr:`Evaluation.beginnings`). How the policy samples may differ: that is what is compared. An
    episode that is missing because its reset failed counts as not won.

    The p-value takes episodes as independent. Where they share few different tasks
    (:attr:`Evaluation.tasks`, such as the 10 targets of ``game:GuessTheNumber-v0-easy``), it is
    about these tasks alone: for tasks in general, an interval of the difference that is clustered
    by task is usually wider than this p-value suggests.

    Args:
        before: an evaluation, also one that was read from a file.
        after: one of other weights.

    Returns:
        The comparison; ``None``: one of them is of a version that did not keep
        :attr:`Evaluation.beginnings`.

    Raises:
        ValueError: they are of other games or tasks, or no episode began alike.

    Examples:
        >>> shared = dict(
        ...     episodes=4, success=0.5, success_ci95=(0.15, 0.85), reward=0.5, turns=2.0, response_length=8.0,
        ...     task_digest="1f", beginnings="00000000" * 4,
        ... )
        >>> before, after = (Evaluation(outcomes=outcomes, **shared) for outcomes in ("0011", "1010"))
        >>> print(paired_comparison(before, after))
        of 4 episodes 1 gained, 1 lost (McNemar p = 1)
    """
    return paired_statistics(before.statistics(), after.statistics())


def paired_statistics(before: Mapping[str, Any], after: Mapping[str, Any]) -> PairedComparison | None:
    """:func:`paired_comparison` of two :meth:`Evaluation.statistics`, also of a file of a later
    version."""
    if not all(each.get(name) for each in (before, after) for name in ("outcomes", "beginnings")):
        return None
    if before.get("task_digest") != after.get("task_digest"):
        raise ValueError(
            f"The evaluations of {before.get('episodes')} and {after.get('episodes')} episodes are not of the same games; a paired "
            "comparison needs the same environments and their options, limits, prompts and opponent, and the same seed, stream and "
            "number of episodes."
        )
    began = zip(*(_pieces(each["beginnings"]) for each in (before, after)), strict=True)
    alike = [first == second or _FAILED in (first, second) for first, second in began]
    results = zip(alike, before["outcomes"], after["outcomes"], strict=True)
    pairs = [(first, second) for same, first, second in results if same]
    if not pairs:
        raise ValueError(
            f"None of {len(alike)} episodes began alike in the two evaluations, though their seeds are the same: the environment gives other "
            "tasks than before, or does not follow its seed."
        )
    gained, lost = pairs.count(("0", "1")), pairs.count(("1", "0"))
    p, left_out = mcnemar_p_value(gained, lost), len(alike) - len(pairs)
    return PairedComparison(episodes=len(pairs), gained=gained, lost=lost, p_value=p, left_out=left_out)


def _pieces(beginnings: str) -> list[str]:
    return [beginnings[i : i + len(_FAILED)] for i in range(0, len(beginnings), len(_FAILED))]


def mcnemar_p_value(gained: int, lost: int) -> float:
    """The exact two-sided test of McNemar (1947): is a change as likely in one direction as in the
    other?

    Twice the smaller tail of the binomial distribution of ``gained`` among ``gained + lost`` with
    1/2, at most 1.

    Args:
        gained: pairs that changed in one direction, >= 0.
        lost: pairs that changed in the other, >= 0.

    Returns:
        The p-value; 1.0 where nothing changed.

    Raises:
        ValueError: a count is negative.

    Examples:
        >>> mcnemar_p_value(9, 2)
        0.0654296875
    """
    if min(gained, lost) < 0:
        raise ValueError(f"{gained} gained and {lost} lost; expected counts >= 0.")
    changed = gained + lost
    # Each binomial coefficient from the one before: math.comb for each takes seconds from some
    # thousands on.
    tail = sum(accumulate(range(min(gained, lost)), lambda term, i: term * (changed - i) // (i + 1), initial=1))
    return min(1.0, 2 * tail / 2**changed)
