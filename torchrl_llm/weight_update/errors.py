"""What a weight sync fails with: :class:`WeightSyncError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class WeightSyncError(RuntimeError):
    """The trained weights did not get into the engine, or not all of them; the message names the part that failed.

    What the engine holds is unknown then: a mixture of old and new weights, or values computed with the old ones. Nothing
    may be sampled until a sync succeeds.
    """


@contextmanager
def part(name: str) -> Iterator[None]:
    """Make every error of a part of the sync a :class:`WeightSyncError` that names it.

    Examples:
        >>> with part("merging 'q_proj'"):
        ...     1 / 0
        Traceback (most recent call last):
            ...
        torchrl_llm.weight_update.errors.WeightSyncError: The weight sync failed in merging 'q_proj': ZeroDivisionError...
    """
    try:
        yield
    except WeightSyncError:
        raise
    except Exception as error:
        raise WeightSyncError(f"The weight sync failed in {name}: {type(error).__name__}: {error}") from error
