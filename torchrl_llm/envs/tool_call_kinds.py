"""The kinds of form in which calls of tools are written: readers for
:class:`~torchrl_llm.envs.tool_calls.CallForm`.

A kind finds its own part of a call in what a template wrote for a made-up one (``span``), makes a
reader of what stands around it (``of``), and reads calls (:class:`Reader`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

MASKS = "\U000f0000-\U0010ffff"
"""The characters that stand for control tokens, as a range of a pattern: of a private plane, which
no text has."""
MASK = re.compile(f"[{MASKS}]")
MARK = re.compile(rf"[{MASKS}]|</?[^\s<>\"'=]+>?|\[[A-Z_]+\]")
"""What may open a call: a token, or text in its form."""

NAME, ARGUMENTS = "toolone", {"key_a": "val_a", "key_b": 1234}
"""The call that was made up."""
ID = "call0000"
"""How the ids of calls begin; Mistral's templates take nine letters and digits."""

_NAME = r"(?P<name>[\w.\-]+)(?![\w.\-])"
_KEY = "\ue000"  # stands for the name of an argument
_DEEPEST = 64  # brackets within each other; parsers of JSON end at some hundreds
_PYTHON = {"True": True, "False": False, "None": None}  # some templates write values as Python does
Types = Mapping[tuple[str, str], frozenset[str]]
"""The declared types of a tool's parameter."""


class MalformedError(ValueError):
    """What the policy is told of a call that it wrote wrongly."""


class Around(NamedTuple):
    """What stands around a call.

    Attributes:
        before, after: up to the part that differs from call to call, and behind it.
        end: behind all calls.
        several: whether several can be written.
    """

    before: str
    after: str
    end: str
    several: bool


class Reader(Protocol):
    """Reads calls of one kind.

    Attributes:
        several: whether the template writes more than one.
    """

    several: bool

    def read(self, text: str, at: int, types: Types) -> tuple[list[tuple[str, Any]], int]:
        """The calls that begin at a place, as names and arguments, and where they end.

        Raises:
            MalformedError: there is none.
        """

    def begins(self, text: str) -> bool:
        """Whether a text begins as a call; asked where a call has no mark."""


def common_prefix(one: str, two: str) -> str:
    """What both texts begin with."""
    return one[: next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))]


def common_suffix(one: str, two: str) -> str:
    """What both texts end with."""
    return common_prefix(one[::-1], two[::-1])[::-1]


def _pattern(text: str) -> str:
    """Text as a pattern: white space is free, and so are numbers and ids."""
    pieces = re.split(rf"(\s+|{ID}\d|\d+)", text.strip())
    free = {True: r"\s*", False: r"\d+"}
    return "".join(
        re.escape(piece) if i % 2 == 0 else r"[\w.:\-]*" if piece.startswith(ID) else free[piece.isspace()]
        for i, piece in enumerate(pieces)
    )


def _closed(close: re.Pattern[str], text: str, at: int) -> int:
    found = close.match(text, at)
    if found is None:
        raise MalformedError("The call is not closed as calls are.")
    return found.end()


# ---------------------------------------- JSON


def _read_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place, and where it ends."""
    try:
        value, end = json.JSONDecoder(strict=False, parse_constant=_refuse_constant).raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"This is not JSON ({error}).") from None
    if _is_deeper(value, _DEEPEST):
        raise MalformedError(f"There are more than {_DEEPEST} brackets within each other.")
    return value, end


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it has no {name}")


def _is_deeper(value: Any, depth: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_is_deeper(each, depth - 1) for each in parts)


def _path(value: Any, wanted: Any) -> tuple[Any, ...] | None:
    """The keys that lead to a value within JSON objects; ``None``: it is not there."""
    for key, each in value.items() if isinstance(value, dict) else ():
        inner = () if each in wanted else _path(each, wanted)
        if inner is not None:
            return (key, *inner)
    return None


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


class _JsonCalls:
    """JSON objects with the name and the arguments, or lists of them."""

    def __init__(self, around: Around, name: tuple[str, ...] | None, arguments: tuple[str, ...] | None) -> None:
        self.several, self._name, self._arguments = around.several, name, arguments
        self._open, self._close = (re.compile(rf"\s*{_pattern(part)}\s*") for part in (around.before, around.after))

    @staticmethod
    def span(text: str, name: str) -> tuple[int, int] | None:
        for found in re.finditer(r"[\[{]", text):
            try:
                value, end = _read_json(text, found.start())
            except MalformedError:
                continue
            if f'"{name}"' in text[found.start() : end] and value:
                return found.start(), end
        return None

    @classmethod
    def of(cls, one: str, around: Around) -> _JsonCalls | None:
        value, _ = _read_json(one, cls.span(one, NAME)[0])  # type: ignore[index]  # it is there
        call = value[0] if isinstance(value, list) else value
        name = _path(call, [NAME])
        arguments = _path(call, [ARGUMENTS, json.dumps(ARGUMENTS)])
        if arguments is None or (name is None and arguments != (NAME,)):
            return None
        return cls(around, name, None if name is None else arguments)

    def begins(self, text: str) -> bool:
        opened = self._open.match(text)
        first = "" if self._name is None else self._name[0]
        return opened is not None and re.match(rf'\[?\s*\{{\s*"{re.escape(first)}', text[opened.end() :]) is not None

    def read(self, text: str, at: int, types: Types) -> tuple[list[tuple[str, Any]], int]:
        opened = self._open.match(text, at)
        if opened is None:
            raise MalformedError("The call does not begin as calls do.")
        value, end = _read_json(text, opened.end())
        values = [value]
        while (following := re.compile(r"[\s,]*(?=[\[{])").match(text, end)) and not self._close.match(text, end):
            value, end = _read_json(text, following.end())
            values.append(value)
        calls = [call for each in values for call in (each if isinstance(each, list) else [each])]
        if not calls:
            raise MalformedError("There is no call in the list.")
        return [self._call(call) for call in calls], _closed(self._close, text, end)

    def _call(self, call: Any) -> tuple[str, Any]:
        if self._name is None and isinstance(call, dict) and len(call) == 1:
            return _checked(*next(iter(call.items())))
        path = self._arguments or ("arguments",)
        arguments, around = _at(call, path), _at(call, path[:-1])
        if (
            arguments is None
            and isinstance(around, dict)
            and {*around} - {*(self._name or ("name",)), path[-1], "id", "type"}
        ):
            raise MalformedError(f"The call has no {path[-1]!r}.")
        return _checked(_at(call, self._name or ("name",)), {} if arguments is None else arguments)


def _checked(name: Any, arguments: Any) -> tuple[str, Any]:
    if not (isinstance(name, str) and name):
        raise MalformedError("The call does not name its tool.")
    if isinstance(arguments, str):
        arguments, _ = _read_json(arguments, 0)
    if not isinstance(arguments, dict):
        raise MalformedError(f"The arguments of {name} are {json.dumps(arguments):.80}; expected an object, {{...}}.")
    try:
        # Not what Python reads besides JSON: infinity, halves of characters.
        json.dumps([name, arguments], allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        raise MalformedError("The call has a number or a character that JSON does not have.") from None
    return name, arguments


class _NamedJson:
    """A name, and the arguments as JSON behind it."""

    def __init__(self, around: Around, between: str) -> None:
        self.several = around.several
        # The header of a message, in any order, up to the token behind it.
        tokens = MASK.findall(between)
        header = rf"[^{tokens[-1]}]*" if tokens and not MARK.search(around.before) else ""
        rest = header + tokens[-1] if header else _pattern(between)
        opening = rf"\s*{header and header + '?'}{_pattern(around.before)}\s*{_NAME}\s*{rest}\s*"
        self._begins, self._open = re.compile(opening), re.compile(opening + r"(?=\{)")
        self._close = re.compile(rf"\s*{_pattern(around.after)}")

    @staticmethod
    def span(text: str, name: str) -> tuple[int, int] | None:
        start = text.rfind(name)
        at = text.find("{", start)
        try:
            value, end = _read_json(text, at) if start >= 0 <= at else (None, 0)
        except MalformedError:
            return None
        return (start, end) if value == ARGUMENTS else None

    @classmethod
    def of(cls, one: str, around: Around) -> _NamedJson:
        return cls(around, one.rpartition(NAME)[2].partition("{")[0])

    def begins(self, text: str) -> bool:
        return self._begins.match(text) is not None

    def read(self, text: str, at: int, types: Types) -> tuple[list[tuple[str, Any]], int]:
        opened = self._open.match(text, at)
        if opened is None:
            raise MalformedError("The call does not begin as calls do, with a name and JSON.")
        arguments, end = _read_json(text, opened.end())
        return [_checked(opened["name"], arguments)], _closed(self._close, text, end)


# ---------------------------------------- tags


class _Tags:
    """A name, and each argument's name and value between tags."""

    def __init__(self, around: Around, name_end: str, key_open: str, opens: tuple[str, str], close: tuple[str, str]):
        self.several = around.several
        end = rf"\s*{_pattern(close[1])}"
        self._open = re.compile(
            rf"\s*{_pattern(around.before)}\s*{_NAME}\s*{_pattern(name_end)}(?=\s*{_pattern(key_open)}|{end})"
        )
        value_close = _spaces(close[0][: len(close[0]) - len(close[0].lstrip())]) + _pattern(close[0])
        self._argument = re.compile(
            rf"\s*{_pattern(key_open)}\s*(?P<key>[^\n]+?)\s*{_value_open(*opens)}(?P<value>.*?)"
            + value_close.replace(_KEY, "(?P=key)"),
            re.DOTALL,
        )
        self._typed, self._close = opens[0] != opens[1], re.compile(end)

    @staticmethod
    def _places(text: str, name: str) -> list[tuple[int, int]]:
        places, at = [], text.rfind(name)
        for part in (name, "key_a", "val_a", "key_b", "1234"):
            if at < 0 or (at := text.find(part, at)) < 0:
                return []
            places.append((at, at := at + len(part)))
        return places

    @classmethod
    def span(cls, text: str, name: str) -> tuple[int, int] | None:
        places = cls._places(text, name)
        return (places[0][0], places[-1][1]) if places else None

    @classmethod
    def of(cls, one: str, around: Around) -> _Tags | None:
        places = cls._places(one, NAME)
        between = [one[before[1] : behind[0]] for before, behind in pairwise(places)]
        after_name, text_open, after_value, other_open = between
        last = (around.after or around.end).replace("key_b", _KEY)
        after_value = after_value.replace("key_a", _KEY)
        key_open = common_suffix(after_name, after_value)
        value_close = after_value.removesuffix(key_open)
        if not (key_open.strip() and value_close.strip() and last.startswith(value_close)):
            return None
        close = value_close, last.removeprefix(value_close)
        return cls(around, after_name.removesuffix(key_open), key_open, (text_open, other_open), close)

    def begins(self, text: str) -> bool:
        return self._open.match(text) is not None

    def read(self, text: str, at: int, types: Types) -> tuple[list[tuple[str, Any]], int]:
        opened = self._open.match(text, at)
        if opened is None:
            raise MalformedError("The call does not begin as calls do, with a name.")
        name, end, arguments = opened["name"], opened.end(), {}
        while found := self._argument.match(text, end):
            kinds = types.get((name, found["key"]), frozenset())
            is_text = found["text"] is not None if self._typed else "string" in kinds and kinds <= {"string", "null"}
            is_text = is_text and not ("null" in kinds and found["value"].strip() in ("null", "None"))
            arguments[found["key"]] = found["value"] if is_text else _value(found["value"])
            end = found.end()
        return [_checked(name, arguments)], _closed(self._close, text, end)


def _value_open(text: str, other: str) -> str:
    """The pattern of what stands between a key and its value: before a text, and before others."""
    space = _spaces(text[len(text.rstrip()) :])
    if text == other:
        return _pattern(text) + space
    before = common_prefix(text, other)
    behind = common_suffix(text.removeprefix(before), other.removeprefix(before))
    before, behind = re.sub(r"\w+$", "", before), re.sub(r"^\w+", "", behind)
    return rf"(?:(?P<text>{_pattern(text)})|{_pattern(before)}\w*{_pattern(behind)}){space}"


def _spaces(text: str) -> str:
    return "".join(f"(?:{re.escape(space)})?" for space in text)


def _value(text: str) -> Any:
    """A value that stands between tags: JSON, else text."""
    if text.strip() in _PYTHON:
        return _PYTHON[text.strip()]
    for read in (json.loads, ast.literal_eval) if text.lstrip()[:1] in "[{" else (json.loads,):
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return text if _is_deeper(value, _DEEPEST) else value
    return text


# ---------------------------------------- Python


class _PythonCalls:
    """A list of Python's call expressions."""

    def __init__(self, around: Around) -> None:
        self.several = around.several
        self._open, self._end = re.compile(rf"\s*{_pattern(around.before)}\s*"), re.compile(_pattern(around.after))

    @staticmethod
    def span(text: str, name: str) -> tuple[int, int] | None:
        at = text.find(f"{name}(")
        start, end = text.rfind("[", 0, at), text.find("]", at) + 1
        return (start, end) if at > start >= 0 < end else None

    @classmethod
    def of(cls, one: str, around: Around) -> _PythonCalls | None:
        return cls(around) if around.after.strip() else None

    def begins(self, text: str) -> bool:
        return self._open.match(text) is not None

    def read(self, text: str, at: int, types: Types) -> tuple[list[tuple[str, Any]], int]:
        opened = self._open.match(text, at)
        closed = self._end.search(text, opened.end()) if opened else None
        if opened is None or closed is None:
            raise MalformedError("The call is not closed as calls are.")
        try:
            tree = _parsed(text[opened.end() : closed.start()].strip())
            return [_of_expression(call) for call in getattr(tree, "elts", [tree])], closed.end()
        except SyntaxError as error:
            reason = error.msg
        except (ValueError, RecursionError, MemoryError, TypeError):
            # Python's own words name places in memory, which are others in a replay.
            reason = "values are strings, numbers, True, False, None, lists and dictionaries, by name"
        raise MalformedError(f"This is not a list of calls, [name(key=value), ...]: {reason}.")


def _parsed(written: str) -> ast.expr:
    try:
        return ast.parse(written, mode="eval").body
    except SyntaxError:  # templates write line breaks in strings as they are
        return ast.parse(written.replace("\n", "\\n"), mode="eval").body


def _of_expression(call: ast.expr) -> tuple[str, Any]:
    if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
        raise ValueError("expected calls with named arguments")
    arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    return _checked(ast.unparse(call.func), json.loads(json.dumps(arguments, allow_nan=False)))


KINDS = (_JsonCalls, _NamedJson, _Tags, _PythonCalls)
"""In the order in which they are tried."""
