"""What a wrong name was meant to be: a name near it, or the name that another system has for the
same setting."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from functools import cache

from torchrl_llm.utils.other_systems import MARKS, SYSTEMS

__all__ = ["nearest", "system_of"]

_PERIODS = "every|freq|frequency|interval|iters|steps"
"""Ends of names for how often something is done: the systems differ, and none has all."""


def nearest(name: str, names: Collection[str], *, system: str | None = None) -> str:
    """``" Did you mean 'gamma'?"``: what another system calls so, else the nearest name; nothing if
    no name is near.

    Args:
        name: a wrong name; of a flag with its dashes.
        names: the right ones.
        system: the one whose words are read first, of ``torchrl_llm.utils.other_systems.SYSTEMS``;
            nothing is guessed then.

    Examples:
        >>> nearest("gama", ["gamma", "lmbda"]), nearest("x", ["gamma"])
        (" Did you mean 'gamma'?", '')
        >>> nearest("--num_generations", ["--max_iterations", "--group_size"])
        " Did you mean '--group_size'?"
        >>> nearest("--save-every", ["--checkpoint_interval", "--sampler_level"])
        " Did you mean '--checkpoint_interval'? It counts iterations; the best checkpoint is kept too."
        >>> nearest("LR", ["lr_actor"]), nearest("clip_coef", ["kl_coeff"])
        (" Did you mean 'lr_actor'?", '')
    """
    dashes = "--" if name.startswith("--") else ""
    plain = name.removeprefix(dashes).lstrip("+").lower().replace("-", "_")
    known = {each.removeprefix(dashes) for each in names}
    if plain in known:
        return f" Did you mean {dashes + plain!r}?"
    if plain not in _meanings() and (period := re.fullmatch(rf"(\w+)_({_PERIODS})", plain)):
        plain = next((each for each in _meanings() if re.fullmatch(rf"{period[1]}_({_PERIODS})", each)), plain)
    meant = [_said(text, known, dashes) for text in _meanings().get(plain, {}).values()]
    if system is not None:
        meant.insert(0, _said(_meanings().get(plain, {}).get(system, ""), known, dashes))
    if found := next(filter(None, meant), ""):
        return found
    # No guess at a name that is another system's: it would mean something else.
    near = [] if system is not None or plain in _meanings() else difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def system_of(names: Iterable[str]) -> str | None:
    """The system that a file with these wrong names is written for; ``None``: no other that is
    known.

    Examples:
        >>> system_of(["INIT_HP"]), system_of(["num_generations", "learning_rate", "beta"]), system_of(["lr_actr"])
        ('AgileRL', 'TRL', None)
    """
    names = list(names)
    marked = {system: 2 * len(MARKS.get(system, frozenset()) & {*names}) for system in SYSTEMS}
    scores = {system: sum(n.lower() in _parts(system) for n in names) + score for system, score in marked.items()}
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] >= 2 else None


@cache
def _parts(system: str) -> frozenset[str]:
    """The names of a system, and of its sections."""
    return frozenset(part for name in SYSTEMS[system] for part in (name, name.partition(".")[0]))


@cache
def _meanings() -> dict[str, dict[str, str]]:
    """Name -> system -> what it is here; the last part of a name with dots is a name too, if it has
    several words."""
    found: dict[str, dict[str, str]] = {}
    for system, table in SYSTEMS.items():
        for name, text in table.items():
            last = name.rpartition(".")[2]
            for each in {name, last if "_" in last else name}:
                found.setdefault(each, {}).setdefault(system, text)
    return found


def _said(text: str, known: set[str], dashes: str) -> str:
    """What a text of ``torchrl_llm.utils.other_systems.SYSTEMS`` says where these settings are;
    nothing where they are not."""
    if not {*re.findall(r"`(\w+)`", text)} & known:
        return ""
    begins = re.match(r"`(\w+)`(: |$)", text)
    if begins is None:
        return f" {text.replace('`', '')}"
    rest = text[begins.end() :].replace("`", "")
    return f" Did you mean {dashes + begins[1]!r}?{rest and f' {rest}'}" if begins[1] in known else ""
