"""What is installed: the versions that this package requires, and its extras."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

_DISTRIBUTION = "torchrl-llm"
_OF_DEVELOPMENT = ("test", "docs")


class Finding(NamedTuple):
    """A result of a check.

    Attributes:
        name: what was checked.
        state: ``"ok"``, ``"note"`` for what somebody should know, ``"fails"`` for what stops a run.
        text: the result in words.
    """

    name: str
    state: Literal["ok", "note", "fails"]
    text: str


def installation() -> Iterator[Finding]:
    """Each package that is required, and each extra."""
    try:
        declared = requires(_DISTRIBUTION) or []
    except PackageNotFoundError:
        yield Finding(_DISTRIBUTION, "note", "not installed, so what it requires is not known: pip install -e .")
        return
    yield from check_requirements(declared)


def check_requirements(declared: Iterable[str]) -> Iterator[Finding]:
    """Compare requirements, as the metadata of a distribution has them, with what is installed.

    Examples:
        >>> [*check_requirements(["packaging>=1", "no-such-package>2; extra == 'vllm'"])][1]
        Finding(name='extra vllm', state='note', text="not installed (no-such-package): pip install 'torchrl-llm[vllm]'")
    """
    extras: dict[str, list[str]] = {}
    for requirement in map(Requirement, declared):
        name = _extra(requirement)
        if name is None:
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield _required(requirement)
        # an extra of other extras has no packages
        elif name not in _OF_DEVELOPMENT and requirement.name != _DISTRIBUTION:
            extras.setdefault(name, []).extend(_lacking(requirement))
    for name, missing in extras.items():
        how = f"not installed ({', '.join(missing)}): pip install '{_DISTRIBUTION}[{name}]'"
        yield Finding(f"extra {name}", "note" if missing else "ok", how if missing else "installed")


def _required(requirement: Requirement) -> Finding:
    wanted, found = str(requirement.specifier) or "any version", _version(requirement.name)
    if found is None:
        return Finding(requirement.name, "fails", f"not installed; required: {wanted}")
    fits = requirement.specifier.contains(found, prereleases=True)
    return Finding(requirement.name, "ok" if fits else "fails", f"{found}; required: {wanted}")


def _lacking(requirement: Requirement) -> list[str]:
    """What an extra lacks: the package, with the version that is there if it does not fit."""
    if _required(requirement).state == "ok":
        return []
    found = _version(requirement.name)
    return [f"{requirement.name}{requirement.specifier}, found {found}" if found else requirement.name]


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _extra(requirement: Requirement) -> str | None:
    """The extra that a requirement belongs to."""
    marker = str(requirement.marker) if requirement.marker else ""
    return marker.partition('extra == "')[2].partition('"')[0] or None


def check_extra(name: str, package: str, *, needed: bool = True) -> Finding:
    """Whether a package of an extra is installed that settings need, or would use."""
    if found := _version(package):
        return Finding(package, "ok", found)
    why = "the settings need it" if needed else "a run does without it"
    how = f"not installed; {why}: pip install '{_DISTRIBUTION}[{name}]'"
    return Finding(package, "fails" if needed else "note", how)
