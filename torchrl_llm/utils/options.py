"""Options that check themselves: types and ranges from annotations, and rules about options without
effect.

An option is declared once, by the annotation of the parameter or field that takes it: ``Literal``
names the choices, and the aliases below add a range to a number. :class:`Checked` reads the
annotations when an object is made, so that settings, losses and estimators refuse the same values
in the same words. The command line reads the same annotations.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeGuard, TypeVar, Union, cast

from torchrl_llm.utils.hints import nearest

_F = TypeVar("_F", bound=Callable[..., Any])

__all__ = [
    "Bound",
    "Checked",
    "Count",
    "Idle",
    "IdleError",
    "MinP",
    "Natural",
    "NonNegative",
    "Option",
    "Positive",
    "PositiveShare",
    "Range",
    "Ratio",
    "Share",
    "Temperature",
    "brief",
    "brief_repr",
    "check_idle",
    "check_options",
    "check_value",
    "describe",
    "fits",
    "is_section",
    "meanings",
    "options_of",
]  # ConfigError is documented with the settings


class ConfigError(ValueError):
    """An option that is of another type or out of range, does nothing, or contradicts another."""


class IdleError(ConfigError):
    """Options that do nothing under other options.

    Attributes:
        names: the options without effect.
        under: the options that leave them without effect.
    """

    def __init__(self, message: str, names: tuple[str, ...] = (), under: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names, self.under = names, under


@dataclass(frozen=True)
class Range:
    """An interval that a number is in.

    Args:
        interval: in the notation of mathematics, such as ``"[0, 1)"``.
        hint: what to do about a number outside; default nothing.

    Examples:
        >>> 1.0 in Range("[0, 1)"), float("nan") in Range("[0, inf)")
        (False, False)
        >>> [str(Range(interval)) for interval in ("[1, inf)", "(0, inf)", "[0, 1]", "[0, 1)")]
        ['at least 1', 'greater than 0', 'between 0 and 1', 'in [0, 1)']
    """

    interval: str
    hint: str = ""

    def __contains__(self, value: float) -> bool:
        low, high = map(float, self.interval[1:-1].split(", "))
        above = value >= low if self.interval[0] == "[" else value > low
        return above and (value <= high if self.interval[-1] == "]" else value < high)

    def __str__(self) -> str:
        low, high = self.interval[1:-1].split(", ")
        if low == "-inf":
            return "finite"
        if high == "inf":
            return f"at least {low}" if self.interval[0] == "[" else f"greater than {low}"
        closed = self.interval[0] + self.interval[-1] == "[]"
        return f"between {low} and {high}" if closed else f"in {self.interval}"


Count = Annotated[int, Range("[1, inf)")]
"""A number of things, at least one."""
Natural = Annotated[int, Range("[0, inf)")]
"""A number of things; 0 is none."""
Positive = Annotated[float, Range("(0, inf)")]
"""A finite number greater than 0."""
Finite = Annotated[float, Range("(-inf, inf)")]
"""A finite number."""
NonNegative = Annotated[float, Range("[0, inf)")]
"""A finite number, at least 0."""
Share = Annotated[float, Range("[0, 1]")]
"""A number between 0 and 1."""
PositiveShare = Annotated[float, Range("(0, 1]")]
"""A share that is not 0."""
Bound = Annotated[float, Range("[0, inf]")]
"""A bound of ratios; infinity bounds nothing."""
Ratio = Annotated[float, Range("(1, inf)")]
"""A ratio beyond 1."""

Temperature = Annotated[float, Range("(0, inf)", "greedy decoding is ExplorationType.DETERMINISTIC")]
"""The divisor of logits."""
MinP = Annotated[float, Range("[0, 1)")]
"""A share below 1."""

_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path", type(None): "None"}


def fits(value: object, hint: Any) -> bool:
    """Whether ``value`` fits an annotation. Annotations of kinds that options do not have (modules)
    fit anything.

    Examples:
        >>> fits(3, float), fits(3.0, int), fits(True, int), fits("1e-3", float)
        (True, False, False, False)
        >>> fits([0.2, 0.3], float | tuple[float, float]), fits(None, Literal["a"] | None), fits(0, Count)
        (True, True, False)
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return fits(value, arguments[0]) and all(value in limit for limit in arguments[1:])
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is Literal:
        # The type too, because True == 1 and 1.0 == 1.
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is list or arguments[1:] == (...,):
        return isinstance(value, list | tuple) and all(fits(each, arguments[0]) for each in value)
    if origin is tuple:  # YAML and JSON have lists only
        same = isinstance(value, list | tuple) and len(value) == len(arguments)
        return same and all(map(fits, value, arguments))  # type: ignore[call-overload]
    # The abstract classes accept NumPy's numbers too; bool is a subclass of int.
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if hint is Path:
        return isinstance(value, str | PathLike)
    kind = origin or hint
    return isinstance(value, kind) if kind in (bool, str, dict, type(None)) or is_section(kind) else True


def is_section(hint: Any) -> TypeGuard[type[Checked]]:
    """Whether an annotation is a section of settings (:mod:`torchrl_llm.utils.sections`): a
    :class:`Checked` dataclass."""
    return isinstance(hint, type) and is_dataclass(hint) and issubclass(hint, Checked)


def describe(hint: Any) -> str:
    """An annotation in words.

    Examples:
        >>> describe(Count | None)
        'an integer, at least 1, or None'
        >>> describe(Literal["k2", "k3"])
        "one of 'k2', 'k3'"
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits = [f"{limit}{'; ' + limit.hint if limit.hint else ''}" for limit in arguments[1:]]
        return ", ".join([describe(arguments[0]), *limits])
    if origin in (Union, types.UnionType):
        parts = [describe(each) for each in arguments]
        return (", or " if any("," in part for part in parts) else " or ").join(parts)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}" if len(arguments) > 1 else repr(arguments[0])
    if origin is list or arguments[1:] == (...,):
        return f"a list in brackets, each {describe(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {describe(arguments[0])}"
    if origin is dict or hint is dict:
        return "a mapping"
    return _NOUNS.get(hint, getattr(hint, "__name__", str(hint)))


def brief(value: object) -> str:
    """``repr(value)`` for messages; of a long one the beginning and the end, about 200 characters.

    Examples:
        >>> brief("auto"), len(brief([*range(100_000)]))
        ("'auto'", 205)
    """
    text = repr(value)
    return text if len(text) <= 205 else f"{text[:150]} ... {text[-50:]}"


def brief_repr(options: Any) -> str:
    """The ``__repr__`` of a dataclass whose values may be long: each is cut as by :func:`brief`,
    those of dataclasses in it too.

    Args:
        options: an instance of a dataclass.
    """
    values = {each.name: getattr(options, each.name) for each in fields(options) if each.repr}
    shown = {name: brief_repr(value) if is_dataclass(value) else brief(value) for name, value in values.items()}
    return f"{type(options).__name__}({', '.join(f'{name}={text}' for name, text in shown.items())})"


def check_value(name: str, value: object, hint: Any) -> None:
    """Raise :class:`ConfigError` unless ``value`` fits the annotation.

    Examples:
        >>> check_value("gamma", 99, Share)
        Traceback (most recent call last):
        torchrl_llm.utils.options.ConfigError: gamma is 99; expected a number, between 0 and 1.
    """
    if not fits(value, hint):
        raise ConfigError(f"{name} is {brief(value)}; expected {describe(hint)}.")


class Idle(NamedTuple):
    """A rule: these options have no effect under some values of other options, so that giving them
    is an error.

    Attributes:
        names: the options without effect.
        under: values of other options, by name, that leave them without effect; all of them
            together.
        instead: what to do so that they count.
        harmless: values, by name, that ask for what happens anyway, such as
            ``{"max_staleness": 0}`` for a collector that is never stale. They are not an error, and
            neither is an option's default.

    Examples:
        >>> rule = Idle(("clip_epsilon",), {"clipping": ("none",)}, 'set clipping to "ppo" or "cispo"')
        >>> rule.check({"clipping": "none", "clip_epsilon": 0.3}, {"clip_epsilon": 0.2})
        Traceback (most recent call last):
        torchrl_llm.utils.options.IdleError: clip_epsilon=0.3 does nothing with clipping='none': leave it out, or set clipping to "ppo" or "cispo".
    """

    names: tuple[str, ...]
    under: Mapping[str, tuple[Any, ...]]
    instead: str
    harmless: Mapping[str, Any] = types.MappingProxyType({})

    def check(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Raise :class:`IdleError` for options that are given, are not their default, and do
        nothing."""
        present = {**defaults, **given}
        if not all(name in present and present[name] in values for name, values in self.under.items()):
            return
        allowed = {name: [each[name] for each in (defaults, self.harmless) if name in each] for name in self.names}
        idle = [name for name in self.names if name in given and given[name] not in allowed[name]]
        if idle:
            where = " and ".join(f"{name}={present[name]!r}" for name in self.under)
            do, them = ("does", "it") if len(idle) == 1 else ("do", "them")
            raise IdleError(
                f"{', '.join(f'{name}={brief(given[name])}' for name in idle)} {do} nothing with {where}: leave {them} out, or "
                f"{self.instead}.",
                tuple(idle),
                tuple(self.under),
            )


class Option(NamedTuple):
    """An option of a class: its annotation, and its default (``inspect.Parameter.empty``: none)."""

    hint: Any
    default: Any


def remembered(function: _F) -> _F:
    """Cache the results of ``function``: reading annotations and sources takes milliseconds, for
    every object with options."""
    # Measured: the settings parse in 0.1 s with the cache, and in 3 s without. The cast, because
    # mypy holds that classes have no hash.
    return cast(_F, cache(function))


@remembered
def options_of(cls: type) -> Mapping[str, Option]:
    """The keyword arguments that ``cls`` takes, those it passes on to its bases by ``**options``
    included.

    Args:
        cls: any class.

    Examples:
        >>> class Base:
        ...     def __init__(self, *, gamma: Share = 0.9): ...
        >>> class Derived(Base):
        ...     def __init__(self, *, width: int = 1, **options): ...
        >>> {name: option.default for name, option in options_of(Derived).items()}
        {'width': 1, 'gamma': 0.9}
    """
    found: dict[str, Option] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        hints, own = _hints(base), fields(base) if is_dataclass(base) else ()
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        named = [each for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
        # The signature of a dataclass shows a placeholder for a default that a factory makes.
        made = {each.name: each.default_factory() for each in own if each.default_factory is not MISSING}
        for each in named:
            # A class precedes its bases in the MRO, so its own annotation and default win.
            found.setdefault(each.name, Option(hints.get(each.name, Any), made.get(each.name, each.default)))
        # Without **options it passes nothing on to the constructors after it.
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            break
    found.pop("self", None)
    # Read-only, because all callers share the cached mapping.
    return types.MappingProxyType(found)


@remembered
def meanings(cls: type) -> Mapping[str, str]:
    """What the docstrings below the fields of a dataclass and of its bases begin with: the first
    paragraph of each, on one line.

    Args:
        cls: a dataclass whose source can be read.
    """
    found: dict[str, str] = {}
    # Python throws these strings away (PEP 258 was never built in), so they are read from the
    # source, as Sphinx does.
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for declared, said in pairwise(definition.body):  # type: ignore[attr-defined]
            match declared, said:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.partition("\n\n")[0].split())
    return types.MappingProxyType(found)


def _hints(cls: type) -> dict[str, Any]:
    """The annotations of a constructor; none for a class of others whose names are imported for a
    type checker only.

    Raises:
        TypeError: such a name in a :class:`Checked` class, whose options would not be checked.
    """
    try:
        # A dataclass inherits fields whose annotations are to be read in the module of its base. A
        # class below a dataclass may have a constructor of its own, whose annotations count then.
        declared = "__dataclass_fields__" in vars(cls)
        return typing.get_type_hints(cls if declared else vars(cls)["__init__"], include_extras=True)
    except NameError as error:
        if issubclass(cls, Checked):
            raise TypeError(
                f"An annotation of {cls.__module__}.{cls.__qualname__} cannot be read ({error}), and options are checked by their "
                "annotations: import the name in its module at run time, outside of functions and of `if TYPE_CHECKING`."
            ) from error
        return {}


def check_options(cls: type[Checked], given: Mapping[str, Any]) -> None:
    """Check the keyword arguments of a class: names, types and ranges, and that each has an effect.

    Args:
        cls: the class.
        given: its keyword arguments.

    Raises:
        TypeError: the class has no such option; the nearest one is named.
        ConfigError: a value does not fit its annotation, or (:class:`IdleError`) does nothing
            (:attr:`Checked.idle`).
    """
    known = options_of(cls)
    for name in given:
        if name not in known:
            raise TypeError(f"{cls.__name__} has no option {name!r}.{nearest(name, [*known])}")
    for name, value in given.items():
        check_value(f"{cls.__name__}.{name}", value, known[name].hint)
    check_idle(cls, given, known)


def check_idle(cls: type[Checked], given: Mapping[str, Any], known: Mapping[str, Option]) -> None:
    """Raise :class:`IdleError` for options that are given and do nothing.

    Args:
        cls: has the rules (:attr:`Checked.idle`).
        given: the options.
        known: all that there are, with their defaults.
    """
    defaults = {name: option.default for name, option in known.items() if option.default is not inspect.Parameter.empty}
    for rule in cls.idle:
        rule.check(given, defaults)


class Checked:
    """Base class of objects whose keyword arguments are checked before they are made, see
    :func:`check_options`.

    A subclass annotates its own options, and passes the others on as ``**options``.

    Examples:
        >>> class Model(Checked):
        ...     def __init__(self, *, width: Count = 1): ...
        >>> Model(widht=2)
        Traceback (most recent call last):
        TypeError: Model has no option 'widht'. Did you mean 'width'?
    """

    idle: ClassVar[tuple[Idle, ...]] = ()
    """The rules about options without effect."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        # Not in __post_init__, which cannot tell a value that was given from a default: the rules
        # about options without effect need to.
        check_options(cls, options)
        return super().__new__(cls)
