"""From ids to environments.

An id such as ``"world:coins"`` names one, if its family is registered
(:func:`register_env_family`) or an installed package has it (:data:`FAMILY_GROUP`). GEM is such a
family (:mod:`~torchrl_llm.envs.gem_catalog`); this module does not know it. An id that has a dot
before its colon, ``"package.module:Name"``, names a class or function of one's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any

from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.faults import EnvironmentUnavailableError, UnknownEnvironmentError
from torchrl_llm.envs.text_env import TextEnv

logger = logging.getLogger(__name__)

EnvSource = str | EnvSpec | Callable[..., TextEnv]
"""What names a text environment: an id, a factory, or an :class:`EnvSpec`."""

FAMILY_GROUP = "torchrl_llm.env_families"
"""The group of entry points by which installed packages, this one too, offer families: each is a
family's name and resolver.

A family's module is imported when the first of its ids is resolved."""

_families: dict[str, Callable[[str], EnvSpec]] = {}


@cache
def installed_families() -> dict[str, EntryPoint]:
    """The families that installed packages offer, by name; read once in a process."""
    return {each.name: each for each in entry_points(group=FAMILY_GROUP)}


def register_env_family(name: str, resolve: Callable[[str], EnvSpec]) -> None:
    """Let ids that begin with ``name:`` be environments, wherever an id is taken (``GEMEnv``,
    settings, command line).

    Ids of no family are GEM's, so a family that is named as a part of GEM's ids (``"game"``) hides
    them. A package need not call this: its entry points of the group ``torchrl_llm.env_families``
    are found.

    Args:
        name: of the family, without a colon. A family of that name is replaced, with a warning.
        resolve: called with the whole id; returns an :class:`EnvSpec`, or raises
            :class:`UnknownEnvironmentError`. Its ``make`` is sent to workers on Ray, so it must be
            picklable there.

    Raises:
        ValueError: ``name`` is empty or holds a colon.

    Examples:
        >>> from torchrl_llm.testing.environments import Echo
        >>> register_env_family("echo", lambda env_id: EnvSpec(env_id, lambda: Echo(turns=int(env_id[5:]))))
        >>> resolve_env("echo:3").make().turns
        3
    """
    if not name or ":" in name:
        raise ValueError(f"The name of an environment family is {name!r}; expected text without a colon.")
    if _families.get(name, resolve) is not resolve:
        logger.warning("The environment family %r is registered again; its new resolver replaces the first.", name)
    _families[name] = resolve


def named_env(env: EnvSource | Sequence[str]) -> Any:
    """The environment of one's own that an id names as ``"package.module:Name"``; ``None``: it is
    an id of a family, which has no dot.

    Raises:
        UnknownEnvironmentError: it cannot be imported, or has no ``reset`` and ``step``.
    """
    if not isinstance(env, str):
        return None
    family, colon, _ = env.partition(":")
    if not colon or "." not in family or family in _families:
        return None
    try:
        found = resolve_name(env)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise UnknownEnvironmentError(
            f"The environment {env!r} is no id of a family, and cannot be imported ({error}); expected "
            '"package.module:Name" of a text environment.'
        ) from error
    plays = not isinstance(found, type) or (hasattr(found, "reset") and hasattr(found, "step"))
    if not ((callable(found) and plays) or isinstance(found, EnvSpec)):
        raise UnknownEnvironmentError(
            f"The environment {env!r} is {found!r:.200}; expected a class with reset and step, a function that makes an "
            "environment, or an EnvSpec."
        )
    return found


def resolve_env(env: EnvSource) -> EnvSpec:
    """The environment that an id or a factory names.

    Raises:
        MissingGEMError: it is an id of no family, and GEM cannot be imported.
        EnvironmentUnavailableError: an installed package offers its family, and that cannot be
            imported.
        UnknownEnvironmentError: no environment has this id; close matches are named.
        TypeError: the family's resolver returned something else than an :class:`EnvSpec`.
    """
    if isinstance(env, EnvSpec):
        return env
    if not isinstance(env, str):
        return EnvSpec.of(env)
    if (named := named_env(env)) is not None:
        return replace(resolve_env(named), name=env)
    family = env.partition(":")[0]
    if family not in _families and (offered := installed_families().get(family)):
        try:
            _families[family] = offered.load()
        except (ImportError, AttributeError) as error:
            needs = f"Its family is {offered.value!r}, and is not there."
            raise EnvironmentUnavailableError(env, needs, error) from error
    spec = _families.get(family, _families["gem"])(env)
    if not isinstance(spec, EnvSpec):
        raise TypeError(f"The environment family {family!r} resolved {env!r} to {spec!r:.80}; expected an EnvSpec.")
    return spec
