"""What tells an object that was given in Python from another: :func:`fingerprint`.

Environments, losses and players are given as objects. Two runs are of one setting, and two
evaluations of one game, only if these objects do the same. That cannot be decided, so names,
arguments and code are compared.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

_PLAIN = (str, bytes, bool, int, float, NoneType)
_KEPT = (*_PLAIN, tuple, type, FunctionType, partial)
"""What counts of the values that code finds by a name. Lists and other objects may be its memory,
and change with each call."""
_LISTED = -1
"""Among the ids of outer objects: code that is not installed is listed elsewhere, and named
here."""


def fingerprint(part: Any) -> str:
    """A hash that is the same, in every process, for objects that do the same as far as their parts
    tell.

    It is a hash and no text, because arguments may be secrets, such as the key of a server.

    Functions and classes have their names; partials, dataclasses, lists and mappings what they
    hold. Code that is not installed, such as the code of a script, counts too, for it may change
    under the same name: its instructions, the instructions of base classes and of what it finds by
    a name, and the plain values that it finds as defaults, in the function around it, in its class
    or in its module, but for those that code there assigns. Comments do not count, another version
    of Python does. Of other objects the class counts alone, for their state may change while they
    are used. An object with a method ``fingerprint() -> str`` speaks for itself.

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
    return blake2b(_text(part, ()).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


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
        return _name(part) + ("" if _LISTED in outer else _own_code(part, outer))
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
    """The code of a function, or of all methods of a class, as far as it is not installed, and that
    which it reaches."""
    return "".join(f" {_members(each, (*outer, _LISTED))}" for each in _reached(part))


def _reached(part: Any) -> list[Any]:
    """The classes and functions that are not installed, from this one on by what their code finds;
    each once."""
    found: list[Any] = []
    waiting = [part]
    while waiting:
        first = waiting.pop(0)
        for each in first.__mro__ if isinstance(first, type) else (first,):
            if not _is_installed(each) and all(each is not other for other in found):
                found.append(each)
                values = [*_found(each).values(), *(value for f in _functions(each) for value in _given(f))]
                waiting += [own for value in values for own in _held(value)]
    return found


def _held(value: Any) -> Iterator[Any]:
    """The classes and functions in a value."""
    if isinstance(value, partial):
        value = (value.func, *value.args, *value.keywords.values())
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for each in value:
            yield from _held(each)
    elif not isinstance(value, _PLAIN):
        value = getattr(value, "__dict__", {}).get("__wrapped__", value) if not isinstance(value, type) else value
        yield value if isinstance(value, type | FunctionType) else type(value)


def _found(part: Any) -> dict[str, Any]:
    """Names and values that the code of a function, or of the methods of a class, finds in its
    module, and in other modules there."""
    found: dict[str, Any] = {}
    for function in _functions(part):
        around = function.__globals__
        values = {name: around[name] for name in _names(function.__code__, "LOAD_GLOBAL") if name in around}
        modules = [each for each in values.values() if isinstance(each, ModuleType)]
        for own in [vars(each) for each in modules if not _is_installed_module(each.__name__)]:
            inside = _names(function.__code__, "LOAD_ATTR", "LOAD_METHOD") & own.keys() - _assigned(own)
            values |= {f"{own['__name__']}.{name}": own[name] for name in inside}
        assigned = _assigned(around) if values else frozenset()
        found |= {name: value for name, value in values.items() if name not in assigned and not name.startswith("__")}
    return {name: found[name] for name in sorted(found) if isinstance(found[name], _KEPT)}


def _members(part: Any, outer: tuple[int, ...]) -> str:
    """What a function, or a class, does by itself: its code, and the values that it finds."""
    functions = _functions(part)
    found = _found(part)
    if isinstance(part, type):
        assigned = {name for each in functions for name in _names(each.__code__, "STORE_ATTR")}
        own = {name: value for name, value in vars(part).items() if not name.startswith("__") and name not in assigned}
        found |= {f"self.{name}": own[name] for name in sorted(own) if isinstance(own[name], _PLAIN)}
    values = [f"{name}={_text(value, outer)}" for name, value in found.items()]
    code = [f"{each.__qualname__} {_code(each.__code__)} {_text(_given(each), outer)}" for each in functions]
    return " ".join([*code, *values])


def _functions(holder: Any) -> list[FunctionType]:
    if isinstance(holder, FunctionType):
        return [holder]
    members = [
        getattr(member, "__func__", getattr(member, "fget", member)) for _, member in sorted(vars(holder).items())
    ]
    return [member for member in members if isinstance(member, FunctionType)]


def _given(function: FunctionType) -> list[Any]:
    """What a function has as defaults, and from the function around it."""
    # An empty cell is of a variable that has no value yet.
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    kept = [each for each in cells if each is not None and isinstance(each, _KEPT)]
    return [*(function.__defaults__ or ()), *kept, function.__kwdefaults__ or {}]


def _assigned(around: Mapping[str, Any]) -> frozenset[str]:
    """The names of a module that a function of it assigns: its memory, such as a count of calls."""
    own = [each for each in [*around.values()] if isinstance(each, type | FunctionType)]
    functions = [each for part in own if part.__module__ == around.get("__name__") for each in _functions(part)]
    return frozenset().union(*(_names(each.__code__, "STORE_GLOBAL", "DELETE_GLOBAL") for each in functions))


@cache
def _names(code: CodeType, *instructions: str) -> frozenset[str]:
    """The names that a code object, and those in it, read or assign by these instructions."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname in instructions}
    inner = (_names(each, *instructions) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(own).union(*inner)


def _code(code: CodeType) -> str:
    """What a code object does, without the lines and the file that it stands in."""
    constants = [_code(each) if isinstance(each, CodeType) else _text(each, ()) for each in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, constants))


def _is_installed(part: Any) -> bool:
    """Whether a class or function has a name of its own in Python, in an installed package or in
    this one."""
    if "<" in part.__qualname__:  # a lambda, or local to a function: others have the same name
        return False
    return _is_installed_module(part.__module__ or "")


def _is_installed_module(name: str) -> bool:
    if name.partition(".")[0] in (*sys.stdlib_module_names, "torchrl_llm") and name != "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    places = {sysconfig.get_path(each) for each in ("purelib", "platlib")}
    return file is not None and any(Path(file).is_relative_to(place) for place in places)
