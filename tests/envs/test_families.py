"""Environment families registered from outside the package."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
from waiting import LIMIT

from torchrl_llm import keys
from torchrl_llm.envs import (
    EnvironmentUnavailableError,
    EnvSpec,
    GEMEnv,
    UnknownEnvironmentError,
    register_env_family,
    registry,
    resolve_env,
)
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.utils.optional import MissingExtraError

ROOT = Path(__file__).resolve().parents[2]


class Countdown:
    """Shows a number and counts down; each turn pays a share, so that the return of a whole episode
    is 1."""

    def __init__(self, start):
        self.start = start

    def reset(self, seed=None):
        self.left = self.start
        return f"{self.left} to go.", {}

    def step(self, action):
        self.left -= 1
        return f"{self.left} to go.", 1 / self.start, self.left == 0, False, {}


def resolve(env_id):
    start = env_id.partition(":")[2]
    if not start.isdigit():
        raise UnknownEnvironmentError(f"There is no countdown from {start!r}; expected a number.")
    return EnvSpec(env_id, partial(Countdown, int(start)), success_by="return")


def settings(path):
    return RunSettings.from_values(
        model_path="tiny",
        algo="LLMREINFORCE",
        env_name="countdown:2",
        num_envs=2,
        batch_size=4,
        max_model_len=256,
        max_output_tokens=4,
        lora_r=0,
        output_dir=path,
        progress=False,
    )


@pytest.fixture
def family(monkeypatch):
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    register_env_family("countdown", resolve)


class TestFamily:
    def test_an_id_is_made_as_its_resolver_says(self, family, tokenizer):
        env = GEMEnv(["countdown:3", "countdown:1"], tokenizer=tokenizer, num_envs=2)
        rollout = env.rollout(9, ScriptedPolicy(lambda *_: "go", tokenizer=tokenizer), break_when_any_done=False)
        done = rollout["next", keys.DONE]
        assert env.names == ("countdown:3", "countdown:1")
        played = zip(rollout[keys.ENV_ID][done].tolist(), rollout[keys.TURN][done].tolist(), strict=True)
        assert set(played) == {(0, 2), (1, 0)}
        assert rollout["next", keys.SUCCESS][done].all(), "success_by of the spec counts"

    def test_a_run_names_it_in_its_settings(self, family, tmp_path):
        run = build_run(settings(tmp_path))
        try:
            assert run.evaluation_env.names == ("countdown:2",)
            batch = run.trainer.collector.rollout()
            assert batch[keys.TURN_MASK].sum(1).tolist() == [2] * 4
        finally:
            run.close()

    @pytest.mark.extra
    def test_the_environments_of_a_run_are_made_where_the_family_is_not_registered(self, family, tmp_path):
        """As on a worker of Ray, which gets the maker pickled."""
        run = build_run(settings(tmp_path))
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        try:
            (tmp_path / "make_env").write_bytes(cloudpickle.dumps(run.make_env))
        finally:
            cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
            run.close()
        code = "import cloudpickle, sys; print(cloudpickle.load(open(sys.argv[1], 'rb'))(stream='train').names)"
        result = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "make_env"], capture_output=True, text=True, cwd=ROOT, timeout=LIMIT
        )
        assert result.stdout.strip() == "('countdown:2',)", result.stderr[-2000:]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that is installed, in a folder of its own, and offers the families "yard" and
    "broken"."""
    (tmp_path / "yards.py").write_text(
        "from torchrl_llm.envs import EnvSpec\nfrom torchrl_llm.testing.worlds import Coins\n\n\n"
        "def resolve(env_id):\n    return EnvSpec(env_id, Coins)\n"
    )
    info = tmp_path / "yards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: yards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[torchrl_llm.env_families]\nyard = yards:resolve\nbroken = no_yards:resolve\n"
    )
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    monkeypatch.syspath_prepend(tmp_path)
    registry.installed_families.cache_clear()
    yield tmp_path
    registry.installed_families.cache_clear()
    sys.modules.pop("yards", None)


class TestInstalledFamily:
    def test_its_ids_are_known_and_its_module_is_imported_for_them(self, package):
        assert resolve_env("game:Sudoku-v0-easy").name == "game:Sudoku-v0-easy"
        assert "yards" not in sys.modules
        assert resolve_env("yard:small").name == "yard:small"
        assert "yards" in sys.modules

    def test_one_that_is_registered_comes_first(self, package):
        register_env_family("yard", lambda env_id: EnvSpec("registered", Countdown))
        assert resolve_env("yard:small").name == "registered"

    def test_a_module_that_is_missing_is_named(self, package):
        with pytest.raises(EnvironmentUnavailableError, match=r"'broken:x' cannot be made.*'no_yards:resolve'"):
            resolve_env("broken:x")

    def test_a_command_knows_it(self, package):
        command = [sys.executable, "-m", "torchrl_llm", "eval", "tiny", "--env", "yard:small", "--episodes", "2"]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            cwd=package,
            env=os.environ | {"PYTHONPATH": str(package)},
        )
        assert result.returncode == 0, result.stderr[-2000:]
        assert "yard:small" in result.stdout

    def test_worlds_of_this_package(self):
        assert resolve_env("world:coins").name == "world:coins"


class TestErrors:
    def test_the_resolver_refuses_an_id(self, family, tokenizer):
        with pytest.raises(UnknownEnvironmentError, match="no countdown from 'x'"):
            GEMEnv("countdown:x", tokenizer=tokenizer)

    def test_an_id_of_no_family_is_gems(self, family):
        named, plain = resolve_env("gem:game:Sudoku-v0-easy"), resolve_env("game:Sudoku-v0-easy")
        assert (named.name, named.success_by) == (plain.name, plain.success_by) == ("game:Sudoku-v0-easy", "return")
        with pytest.raises(UnknownEnvironmentError, match=r"of the family 'contdown', which .* register_env_family"):
            resolve_env("contdown:3")

    def test_what_success_is(self):
        with pytest.raises(ValueError, match="mine: success_by is 'last_reward'"):
            EnvSpec("mine", Countdown, success_by="last_reward")

    @pytest.mark.parametrize("name", ["", "a:b"])
    def test_names_that_no_id_can_begin_with(self, name):
        with pytest.raises(ValueError, match="without a colon"):
            register_env_family(name, resolve)

    def test_a_resolver_returns_a_spec(self, family):
        register_env_family("bare", lambda env_id: Countdown)
        with pytest.raises(TypeError, match=r"'bare' resolved 'bare:3' to .* expected an EnvSpec"):
            resolve_env("bare:3")

    def test_replacing_a_family_is_told(self, family, caplog):
        register_env_family("countdown", resolve)
        assert not caplog.records
        with caplog.at_level(logging.WARNING):
            register_env_family("countdown", lambda env_id: EnvSpec("other", Countdown))
        assert "'countdown' is registered again" in caplog.text
        assert resolve_env("countdown:3").name == "other"


class TestFamiliesOfThisPackage:
    """Without the packages that they need; with them: tests/worlds."""

    @pytest.mark.parametrize(
        ("env_id", "package"),
        [
            ("textworld:coin_collector", "textworld"),
            ("openenv:http://localhost:1", "openenv"),
            ("openenv:a.b:C", "openenv"),
            ("textarena:TicTacToe-v0", "textarena"),
        ],
    )
    def test_a_missing_package_is_a_sentence(self, monkeypatch, env_id, package):
        for name in (package, f"{package}.challenges", f"{package}.core"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingExtraError, match=rf"pip install 'torchrl-llm\[{package}\]'"):
            resolve_env(env_id)

    def test_an_unknown_game_is_a_sentence(self):
        with pytest.raises(UnknownEnvironmentError, match="no game 'textworld:chess'; expected one of"):
            resolve_env("textworld:chess")

    @pytest.mark.parametrize("image", ["echo-env:latest", "ghcr.io/meta-pytorch/echo-env", "docker://echo"])
    def test_an_image_of_a_container_is_a_sentence(self, image):
        with pytest.raises(
            UnknownEnvironmentError, match=r"expected openenv:package\.module:Class.*docker run -p 8000:8000"
        ):
            resolve_env(f"openenv:{image}")
