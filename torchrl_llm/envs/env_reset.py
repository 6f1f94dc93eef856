"""How an environment is reset: with the task's seed, where its ``reset`` takes one
(:func:`reset_env`)."""

from __future__ import annotations

import inspect
import logging
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)


def takes_seed(env: Any) -> bool:
    """Whether ``reset`` takes a seed. The ``**kwargs`` of a wrapper take what ``reset`` of the
    environment in it takes.

    Examples:
        >>> class Wrapper:
        ...     def __init__(self, env):
        ...         self.env = env
        ...     def reset(self, **kwargs):
        ...         return self.env.reset(**kwargs)
        >>> from torchrl_llm.testing.environments import Dice, StopOrGo
        >>> takes_seed(Wrapper(StopOrGo())), takes_seed(Wrapper(Dice()))
        (True, False)
    """
    parameters = inspect.signature(env.reset).parameters
    if "seed" in parameters:
        return True
    inside = getattr(env, "env", None)
    passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return passes_on and (not hasattr(inside, "reset") or takes_seed(inside))


def reset_env(env: Any, seed: int | None, *, first: bool = True) -> tuple[Any, bool]:
    """What ``reset`` returns, with ``seed`` if it takes one, and whether it does.

    What ``reset(**kwargs)`` does with its arguments cannot always be seen by :func:`takes_seed`: it
    may refuse a seed.

    Args:
        env: the environment.
        seed: of the task; ``None``: it takes none.
        first: no reset has taken a seed before. Default: True.
    """
    if seed is None:
        return env.reset(), False
    try:
        return env.reset(seed=seed), True
    except Exception as error:
        named = "seed" in inspect.signature(env.reset).parameters
        unexpected = isinstance(error, TypeError) and "unexpected keyword argument 'seed'" in str(error)
        # Where another seed will do, it is this task that fails.
        if named or not (unexpected or (first and _fails(env, seed ^ 1))):
            raise
        try:
            found = env.reset()
        except Exception:  # noqa: BLE001  with or without a seed: the first error is the one to tell
            raise error from None
        if not unexpected:
            _warn_of_no_seed(type(env).__name__, f"{type(error).__name__}: {error}"[:200])
        return found, False


def _fails(env: Any, seed: int) -> bool:
    try:
        env.reset(seed=seed)
    except Exception:  # noqa: BLE001  an environment raises what it likes
        return True
    return False


@cache
def _warn_of_no_seed(name: str, error: str) -> None:
    logger.warning(
        "reset(**kwargs) of %s takes no seed (%s), and is called without: its tasks do not follow from the run's seed, unless it draws "
        "them from the generators of Python or numpy.",
        name,
        error,
    )
