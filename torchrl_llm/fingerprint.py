"""What tells an object that was given in Python from another: :func:`fingerprint`.

Environments, losses and players are given as objects. Two runs are of one setting, and two evaluations of one game, only if
these objects do the same. That cannot be decided, so names, arguments and code are compared.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FunctionType, MethodType, NoneType
from typing import Any

_PLAIN = (str, bytes, bool, int, float, NoneType)


def fingerprint(part: Any) -> str:
    """A hash that is the same, in every process, for objects that do the same as far as their parts tell.

    It is a hash and no text, because arguments may be secrets, such as the key of a server.

    Functions and classes have their names; partials, dataclasses, lists and mappings what they hold. Code that is not installed,
    such as that of a script, counts too, for it may change under the same name: its instructions, those of base classes, and
    the plain values that a function has as defaults or from the function around it. Comments do not count, another version
    of Python does. Of other objects the class counts alone, for their state may change while they are used. An object with a
    method ``fingerprint() -> str`` speaks for itself.

    Args:
        part: any object.

    Returns:
        16 hexadecimal digits.

    Examples:
        >>> fingerprint(partial(Path, "a")) == fingerprint(partial(Path, "a")) != fingerprint(partial(Path, "b"))
        True
        >>> fingerprint(lambda: 3) == fingerprint(lambda: 3) != fingerprint(lambda: 4)
        True
        >>> fingerprint({"moves": 3, "cells": 2}) == fingerprint({"cells": 2, "moves": 3})
        True
    """
    return _hash(_text(part, ()))


def _text(part: Any, outer: tuple[int, ...]) -> str:
    """What :func:`fingerprint` hashes; ``outer`` are the ids of the objects that hold this one."""
    if isinstance(part, _PLAIN):
        return repr(part)
    if id(part) in outer:  # a function that calls itself by its own name
        return "..."
    outer = (*outer, id(part))
    if isinstance(part, Path):
        return repr(str(part))
    if isinstance(part, partial):
        given = [_text(value, outer) for value in part.args]
        given += [f"{name}={_text(value, outer)}" for name, value in sorted(part.keywords.items())]
        return f"{_text(part.func, outer)}({', '.join(given)})"
    if isinstance(part, MethodType):
        return f"{_text(part.__self__, outer)}.{part.__name__}"
    if isinstance(part, type | FunctionType):
        return _name(part) + _own_code(part, outer)
    if isinstance(part, Mapping):
        return f"{{{', '.join(sorted(f'{_text(key, outer)}: {_text(value, outer)}' for key, value in part.items()))}}}"
    if isinstance(part, list | tuple | set | frozenset):
        texts = [_text(each, outer) for each in part]
        return f"[{', '.join(texts if isinstance(part, list | tuple) else sorted(texts))}]"
    return _object(part, outer)


def _object(part: Any, outer: tuple[int, ...]) -> str:
    # Of the class: proxies of other processes, and mocks, have an attribute of any name.
    if callable(getattr(type(part), "fingerprint", None)):
        return str(part.fingerprint())
    if isinstance(part, Enum):
        return f"{_name(type(part))}.{part.name}"
    if isinstance(wrapped := getattr(part, "__dict__", {}).get("__wrapped__"), FunctionType):
        return f"{_name(type(part))}({_text(wrapped, outer)})"  # such as a function with a cache
    if isinstance(getattr(part, "__qualname__", None), str):  # such as a function of a module in C
        return _name(part)
    kind = _text(type(part), outer)
    if not is_dataclass(part):
        return kind
    values = {each.name: getattr(part, each.name) for each in fields(part) if each.init}
    return f"{kind}({', '.join(f'{name}={_text(value, outer)}' for name, value in values.items())})"


def _name(part: Any) -> str:
    return f"{part.__module__}:{part.__qualname__}"


def _own_code(part: type | FunctionType, outer: tuple[int, ...]) -> str:
    """The code of a function, or of all methods of a class, as far as it is not installed."""
    holders: list[Any] = [part] if isinstance(part, FunctionType) else [*part.__mro__]
    parts = [_function(each, outer) for holder in holders if not _is_installed(holder) for each in _functions(holder)]
    return "".join(f" {each}" for each in parts)


def _functions(holder: Any) -> list[FunctionType]:
    if isinstance(holder, FunctionType):
        return [holder]
    members = [
        getattr(member, "__func__", getattr(member, "fget", member)) for _, member in sorted(vars(holder).items())
    ]
    return [member for member in members if isinstance(member, FunctionType)]


def _function(function: FunctionType, outer: tuple[int, ...]) -> str:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    # Not lists and other objects: they may be a function's memory, and change with each call.
    kept = [each for each in cells if isinstance(each, (*_PLAIN, tuple, type, FunctionType, partial))]
    given = [*(function.__defaults__ or ()), *kept, function.__kwdefaults__ or {}]
    return f"{function.__qualname__} {_code(function.__code__)} {_text(given, outer)}"


def _is_filled(cell: Any) -> bool:
    try:
        return bool(cell.cell_contents is not None)
    except ValueError:  # of a variable that has no value yet
        return False


def _code(code: CodeType) -> str:
    """What a code object does, without the lines and the file that it stands in."""
    constants = [_code(each) if isinstance(each, CodeType) else _text(each, ()) for each in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, constants))


def _is_installed(part: Any) -> bool:
    """Whether a class or function has a name of its own in Python, in an installed package or in this one."""
    name = part.__module__ or ""
    if "<" in part.__qualname__:  # a lambda, or local to a function: others have the same name
        return False
    if name.partition(".")[0] in (*sys.stdlib_module_names, "torchrl_llm") and name != "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    places = {sysconfig.get_path(each) for each in ("purelib", "platlib")}
    return file is not None and any(Path(file).is_relative_to(place) for place in places)


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
