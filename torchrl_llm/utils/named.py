"""Parts of one's own that settings name as ``"package.module:Name"``."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from torchrl_llm.utils.options import ConfigError


def find_named(setting: str, name: str, expected: str) -> Any:
    """What ``name`` names, imported.

    Args:
        setting: its name, for messages.
        name: ``"package.module:Name"``.
        expected: what it is to be, in words.

    Raises:
        ConfigError: it cannot be imported.

    Examples:
        >>> find_named("callbacks", "collections:Counter", "a Callback")
        <class 'collections.Counter'>
        >>> find_named("callbacks", "collections:Contour", "a Callback")
        Traceback (most recent call last):
        torchrl_llm.utils.options.ConfigError: callbacks names 'collections:Contour', which cannot be imported (module 'collections' has no attribute 'Contour'); expected "package.module:Name" of a Callback.
    """
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f'{setting} names {name!r}, which cannot be imported ({error}); expected "package.module:Name" of {expected}.'
        ) from error


def find_class(setting: str, name: str, base: type, other: str = "") -> Any:
    """The subclass of ``base`` that ``name`` names; errors as of :func:`find_named`, and a
    ``ConfigError`` if it is none. ``other`` is what else is expected, for messages."""
    found = find_named(setting, name, f"a subclass of {base.__name__}{other}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{setting} names {name!r}, which is {found!r}; expected a subclass of {base.__name__}.")
    return found


def call_named(setting: str, name: str, found: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """What ``found`` returns for these arguments.

    Args:
        setting, name: what named it, for messages.

    Raises:
        ConfigError: it does not take them (a ``TypeError``).
    """
    try:
        return found(*args, **options)
    except TypeError as error:
        raise ConfigError(f"{setting} names {name!r}, which cannot be made: {error}") from error


def make_named(setting: str, name: str, found: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """As :func:`call_named`; a ``ValueError``, such as of a file that is not there, is a
    ``ConfigError`` too."""
    try:
        return call_named(setting, name, found, *args, **options)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{setting} names {name!r}, which says: {error}") from error
