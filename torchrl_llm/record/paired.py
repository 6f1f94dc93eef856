"""The paired comparison of two evaluations of the same tasks: :func:`paired_comparison`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torchrl_llm.record.evaluation import Evaluation


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """What changed, episode by episode, from one evaluation to another of the same tasks; printed as one line.

    Attributes:
        episodes: number of pairs, including those in which nothing changed.
        gained: episodes that were not won before and are won after.
        lost: episodes that were won before and are not won after.
        p_value: :func:`mcnemar_p_value` of ``gained`` and ``lost``.

    Examples:
        >>> print(PairedComparison(episodes=256, gained=98, lost=12, p_value=mcnemar_p_value(98, 12)))
        of 256 episodes 98 gained, 12 lost (McNemar p = 6e-18)
    """

    episodes: int
    gained: int
    lost: int
    p_value: float

    def __str__(self) -> str:
        p = f"= {self.p_value:.1g}" if self.p_value else "< 1e-300"  # a float has no smaller ones
        return f"of {self.episodes} episodes {self.gained} gained, {self.lost} lost (McNemar p {p})"


def paired_comparison(before: Evaluation, after: Evaluation) -> PairedComparison | None:
    """Compare two evaluations of the same tasks, episode by episode.

    An episode that is missing because its reset failed counts as not won.

    The p-value takes episodes as independent. Where they share few different tasks (:attr:`Evaluation.tasks`, such as the 10
    targets of ``game:GuessTheNumber-v0-easy``), it is about these tasks alone: for tasks in general, an interval of the
    difference that is clustered by task is usually wider than this p-value suggests.

    Args:
        before: an evaluation, also one that was read from a file.
        after: one of other weights.

    Returns:
        The comparison; ``None``: one of them is of a version that did not keep :attr:`Evaluation.outcomes`.

    Raises:
        ValueError: they are not of the same tasks.

    Examples:
        >>> shared = dict(
        ...     episodes=4, success=0.5, success_ci95=(0.15, 0.85), reward=0.5, turns=2.0, response_length=8.0, task_digest="1f"
        ... )
        >>> before, after = (Evaluation(outcomes=outcomes, **shared) for outcomes in ("0011", "1010"))
        >>> print(paired_comparison(before, after))
        of 4 episodes 1 gained, 1 lost (McNemar p = 1)
    """
    if before.outcomes is None or after.outcomes is None:
        return None
    if before.task_digest != after.task_digest:
        raise ValueError(
            f"The evaluations of {before.episodes} and {after.episodes} episodes are not of the same tasks; a paired comparison "
            "needs the same environments, seed, stream and number of episodes."
        )
    return paired_outcomes(before.outcomes, after.outcomes)


def paired_outcomes(before: str, after: str) -> PairedComparison:
    """Compare two strings of outcomes of the same tasks, :attr:`Evaluation.outcomes`.

    Raises:
        ValueError: they are not as long.

    Examples:
        >>> print(paired_outcomes("0011", "1010"))
        of 4 episodes 1 gained, 1 lost (McNemar p = 1)
    """
    pairs = list(zip(before, after, strict=True))
    gained, lost = pairs.count(("0", "1")), pairs.count(("1", "0"))
    return PairedComparison(episodes=len(pairs), gained=gained, lost=lost, p_value=mcnemar_p_value(gained, lost))


def mcnemar_p_value(gained: int, lost: int) -> float:
    """The exact two-sided test of McNemar (1947): is a change as likely in one direction as in the other?

    Twice the smaller tail of the binomial distribution of ``gained`` among ``gained + lost`` with 1/2, at most 1.

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
    # Each binomial coefficient from the one before: math.comb for each takes seconds from some thousands on.
    tail = sum(accumulate(range(min(gained, lost)), lambda term, i: term * (changed - i) // (i + 1), initial=1))
    return min(1.0, 2 * tail / 2**changed)
