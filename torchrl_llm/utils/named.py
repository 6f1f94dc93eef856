"""Parts of one's own that settings name as ``"package.module:Name"``: :func:`find_named`."""

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
        expected: in words, for messages.

    Raises:
        ConfigError: it cannot be imported.

    Examples:
        >>> find_named("callbacks", "collections:Counter", "a Callback")
        <class 'collections.Counter'>
        >>> find_named("callbacks", "collections:Contour", "a Callback")
        Traceback (most recent call last):
        torchrl_llm.utils.options.ConfigError: callbacks names 'collections:Contour', which cannot be imported (module 'collections' has no attribute 'Contour'); expected a Callback.
    """
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{setting} names {name!r}, which cannot be imported ({error}); expected {expected}."
        ) from error


def find_class(setting: str, name: str, base: type, expected: str = '"package.module:Name"') -> Any:
    """The subclass of ``base`` that ``name`` names; arguments and errors as of
    :func:`find_named`, and a ``ConfigError`` if it is none."""
    found = find_named(setting, name, expected)
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
        raise ConfigError(f"{setting} names {name!r}, which does not take its arguments: {error}") from error


def make_named(setting: str, name: str, found: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """As :func:`call_named`; a ``ValueError``, such as of a file that is not there, is a
    ``ConfigError`` too."""
    try:
        return call_named(setting, name, found, *args, **options)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{setting} names {name!r}, which says: {error}") from error
