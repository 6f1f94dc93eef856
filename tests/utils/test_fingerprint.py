"""Fingerprints of objects given in Python: what counts, and that another process finds the same."""

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest

from torchrl_llm.testing.worlds import Coins
from torchrl_llm.utils.fingerprint import fingerprint

SCRIPT = """
from functools import partial
from torchrl_llm.utils.fingerprint import fingerprint
class Base:
    def won(self): return {step!r}
class Env(Base):
    def step(self, words={words}): return self.won()
print(fingerprint([partial(Env, {{"b": 1, "a": {{"x", "y", "z"}}}}), lambda: Env]))
"""


MODULE = """
import torch
import helpers
STEP, WORDS, calls = {step!r}, {words}, 0
def won(length): return length >= STEP and deeper(length)
def deeper(length): return length and won(length - 1) and WORDS
class Env:
    pays = {pays!r}
    spent = 0
    def step(self, action):
        global calls
        calls += 1
        Env.spent += 1
        return [torch.tensor(each) for each in action if won(len(each))] and helpers.paid(self.pays)
def make(): return Env()
"""
HELPERS = """
FACTOR = {factor!r}
def paid(amount): return amount * FACTOR
"""


def module(**changed):
    """A script's module, whose code finds values and functions by their names."""
    given = {"step": 3, "words": (), "pays": 1.0, "factor": 2} | changed
    helpers, script = ModuleType("helpers"), ModuleType("script")
    exec(HELPERS.format(**given), vars(helpers))
    sys.modules["helpers"] = helpers
    exec(MODULE.format(**given), vars(script))
    return script


def printed(seed=0, comment="", step="3", words="()"):
    source = comment + SCRIPT.format(step=step, words=words)
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=True)
    return done.stdout


def counter(start):
    calls = []

    def make():
        calls.append(start)
        return Coins()

    return make


@dataclass
class Factory:
    cells: int

    def __call__(self):
        return Coins(cells=self.cells)


class TestFingerprint:
    def test_other_processes_find_the_same(self):
        found = printed()
        assert printed(seed=1, comment="# a comment\n\n") == found
        assert len({found, printed(step="4"), printed(words="(1,)")}) == 3

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (Coins, dict),
            (partial(Coins, cells=3), partial(Coins, cells=4)),
            (partial(partial(Coins, cells=3), moves=1), partial(partial(Coins, cells=3), moves=2)),
            (partial(Path, "a"), partial(Path, b="a")),
            (lambda: Coins(cells=3), lambda: Coins(cells=4)),
            (counter(3), counter(4)),
            (Factory(3), Factory(4)),
            (Factory(3).__call__, Factory(4).__call__),
            (cache(lambda: Coins(cells=3)), cache(lambda: Coins(cells=4))),
            ([1], [True]),
            ({"a": 1}, {"a": 2}),
        ],
    )
    def test_others_differ(self, one, other):
        assert fingerprint(one) == fingerprint(one) != fingerprint(other)

    def test_use_changes_nothing(self):
        make = counter(3)
        before = fingerprint(make)
        make()
        assert fingerprint(make) == before == fingerprint(counter(3))

    @pytest.mark.parametrize("name", ["make", "Env"])
    @pytest.mark.parametrize("changed", [{"step": 4}, {"words": (1,)}, {"pays": 0.5}, {"factor": 3}])
    def test_what_code_finds_by_a_name_counts(self, name, changed, monkeypatch):
        monkeypatch.setitem(sys.modules, "helpers", None)
        one, again, other = (getattr(module(**each), name) for each in ({}, {}, changed))
        assert fingerprint(one) == fingerprint(again) != fingerprint(other)

    def test_what_code_assigns_is_its_memory(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "helpers", None)
        script = module()
        before = fingerprint(script.make)
        script.make().step(["long enough"])
        assert (script.calls, script.Env.spent) == (1, 1)
        assert fingerprint(script.make) == before

    def test_functions_that_call_each_other_are_read_once_each(self):
        names = [f"f{i}" for i in range(24)]  # along all paths it would take for ever
        called = ", ".join(names)
        source = "".join(f"@around\ndef {name}(): return [{called}]\n" for name in names)
        script = ModuleType("script")
        exec("def around(f):\n    return lambda: f()\n" + source, vars(script))
        assert fingerprint(script.f0) == fingerprint(script.f0) != fingerprint(script.f1)

    def test_a_function_that_holds_itself(self):
        def again(times):
            return again(times - 1) if times else 0

        assert fingerprint(again) == fingerprint(again)

    def test_an_object_that_has_every_attribute(self):
        class Proxy:
            def __getattr__(self, name):
                return lambda *args: object()

        assert fingerprint(Proxy()) == fingerprint(Proxy())

    def test_an_object_may_speak_for_itself(self):
        class Mine:
            def __init__(self, name):
                self.name = name

            def fingerprint(self):
                return self.name

        assert fingerprint([Mine("a")]) == fingerprint([Mine("a")]) != fingerprint([Mine("b")])
