"""Without GEM, which a Python later than 3.12.0 does not bring: everything imports, plays and
trains."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needs(python: str, *extras: str) -> list[Requirement]:
    """What an installation with these extras under this version of Python asks for, without the
    markers."""
    environment = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    optional = PROJECT["optional-dependencies"]
    wanted = map(Requirement, PROJECT["dependencies"] + [line for extra in extras for line in optional[extra]])
    chosen = [need for need in wanted if need.marker is None or need.marker.evaluate(environment)]
    for need in chosen:
        need.marker = None
    return chosen


def installed(python: str) -> set[str]:
    """The names of those distributions."""
    return {need.name for need in needs(python)}


def imported(*folders: str) -> set[str]:
    """The first part of each name that the modules in these folders import."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.partition(".")[0] for name in names}
    return found - {""}


class TestVersions:
    @pytest.mark.parametrize("python", ["3.11.0", "3.11.14", "3.12.0", "3.12.1", "3.12.12", "3.13.0", "3.13.9"])
    def test_gem_comes_where_it_declares_to_run(self, python):
        assert python in SpecifierSet(PROJECT["requires-python"])
        assert ("gem-llm" in installed(python)) == (python in SpecifierSet(">=3.10,<=3.12"))
        assert {"torch", "tensordict", "torchrl", "transformers"} <= installed(python)

    @pytest.mark.skipif("RESOLVE" not in os.environ, reason="downloads for a minute: make check-python")
    @pytest.mark.parametrize("python", ["3.12.12", "3.13.9"])
    def test_pip_finds_wheels_for_everything(self, python, tmp_path):
        # pip evaluates markers for the Python that runs it, whatever --python-version says.
        wanted = [str(need) for need in needs(python, "examples", "ray", "tensorboard", "wandb")]
        how = f"install --dry-run --quiet --only-binary=:all: --python-version={python} --target={tmp_path}".split()
        subprocess.run(
            [sys.executable, "-m", "pip", *how, "--report=-", *wanted], check=True, stdout=subprocess.DEVNULL
        )

    def test_nothing_imported_is_gone_in_3_13(self):
        gone = "aifc asynchat asyncore audioop cgi cgitb chunk crypt distutils imghdr imp mailcap msilib nis nntplib "
        gone += "ossaudiodev pipes smtpd sndhdr spwd sunau telnetlib uu xdrlib"
        found = imported("torchrl_llm", "examples", "benchmarks")
        assert "torch" in found
        assert not found & set(gone.split())

    def test_everything_imported_is_declared(self):
        """Not brought by another package: it may leave it out one day, or bring a version that
        lacks what is used."""
        extras = {each for lines in PROJECT["optional-dependencies"].values() for each in lines}
        declared = {canonicalize_name(Requirement(line).name) for line in {*PROJECT["dependencies"], *extras}}
        # The error of reading a parquet file without it names datasets, which brings it.
        known = {*sys.stdlib_module_names, "torchrl_llm", "pyarrow"}
        distributions = {"gem": "gem-llm", "yaml": "pyyaml"}
        wanted = {canonicalize_name(distributions.get(name, name)) for name in imported("torchrl_llm") - known}
        assert "torch" in wanted
        assert not wanted - declared


WITHOUT_GEM = """
    import importlib
    import pkgutil
    import sys
    from importlib.machinery import PathFinder


    class WithoutGEM(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            absent = name.partition(".")[0] in {"gem", "nltk", "reasoning_gym", "math_verify", "msgspec"}
            return None if absent else super().find_spec(name, path, target)


    sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutGEM
    import torchrl_llm

    for module in pkgutil.walk_packages(torchrl_llm.__path__, "torchrl_llm."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

    from functools import partial
    from pathlib import Path

    from torchrl_llm.envs import MissingGEMError, PromptDatasetEnv
    from torchrl_llm.testing.environments import StopOrGo
    from torchrl_llm.runs import RunSettings, build_run

    SETTINGS = dict(
        model_path="tiny", lora_r=0, kl_coeff=0.0, num_envs=4, batch_size=4, max_model_len=128, max_output_tokens=8,
        schedule="constant", lr_actor=1e-3, max_iterations=1, evaluation_interval=0, final_episodes=4,
        save_checkpoints=False, progress=False,
    )


    def trained(name, **env):
        run = build_run(RunSettings.from_values(algo="LLMREINFORCE", output_dir=Path(sys.argv[1]) / name, **SETTINGS), **env)
        before = [weight.detach().clone() for weight in run.models.actor_parameters()]
        (metrics,) = run.trainer.train()
        assert any((old != new).any() for old, new in zip(before, run.models.actor_parameters(), strict=True))
        run.close()
        return metrics["rollout/episodes"]


    class AnyReward(StopOrGo):
        def step(self, action):
            text, _, terminated, truncated, info = super().step(action)
            return text, sum(map(ord, action)) % 7, terminated, truncated, info


    ROWS = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(8)]
    SPLITS = {"train": ROWS[:4], "test": ROWS[4:]}


    def any_reward(completion, answer, question):
        return sum(map(ord, completion + question)) % 7


    dataset = partial(PromptDatasetEnv, SPLITS, any_reward)
    print("played", trained("own", env=AnyReward), trained("rows", make_env=dataset))
    try:
        build_run(RunSettings.from_values(algo="LLMREINFORCE", output_dir=Path(sys.argv[1]) / "gem", **SETTINGS))
    except MissingGEMError as error:
        print("refused", error)
    assert "gem" not in sys.modules
"""


@pytest.mark.extra
def test_everything_but_gem_works_without_it(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(WITHOUT_GEM), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^played 4", done.stdout, re.MULTILINE)
    (refused,) = re.findall(r"^refused (.*)", done.stdout, re.MULTILINE)
    assert "'game:GuessTheNumber-v0-easy' is an environment of GEM" in refused
    assert "pip install --ignore-requires-python gem-llm==0.1.0" in refused
