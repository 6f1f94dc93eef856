"""Statistics over seeds and worlds: interquartile means, stratified bootstrap intervals,
probabilities of improvement.

All are of Agarwal et al., 2021 (arXiv:2108.13264). ``scores`` are ``[worlds, seeds]``.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from learning import interquartile_mean

Scores = npt.NDArray[np.float64]

SAMPLES = 10_000


def overall(scores: Scores) -> float:
    """The interquartile mean of all runs of all worlds.

    >>> overall(np.array([[0.0, 1.0], [1.0, 9.0]]))
    1.0
    """
    return float(interquartile_mean(scores.reshape(*scores.shape[:-2], -1)))


def improvement(better: Scores, worse: Scores) -> npt.NDArray[np.float64]:
    """P(X > Y) + P(X = Y) / 2 over all pairs of seeds of a world, mean over worlds; leading
    dimensions are kept.

    >>> improvement(np.array([[1.0, 2.0]]), np.array([[1.0, 0.0]])).item()
    0.875
    """
    pairs = np.sign(better[..., :, None] - worse[..., None, :])
    return (pairs.mean((-1, -2)) / 2 + 0.5).mean(-1)


def resampled(scores: Scores, generator: np.random.Generator, samples: int) -> Scores:
    """``[samples, worlds, seeds]``: seeds drawn with replacement, in each world by itself
    (stratified)."""
    worlds, seeds = scores.shape
    chosen = generator.integers(seeds, size=(samples, worlds, seeds))
    return np.take_along_axis(np.broadcast_to(scores, chosen.shape), chosen, axis=-1)


def interval(
    statistic: Callable[..., npt.NDArray[np.float64]], *scores: Scores, samples: int = SAMPLES
) -> tuple[float, float]:
    """95 % percentile interval of a statistic of one or more estimators' scores."""
    generator = np.random.default_rng(0)
    values = statistic(*(resampled(each, generator, samples) for each in scores))
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def flat_iqm(scores: Scores) -> npt.NDArray[np.float64]:
    """:func:`overall` of each sample of ``[samples, worlds, seeds]``."""
    return interquartile_mean(scores.reshape(len(scores), -1))
