"""What an editor and a type checker know of the settings, before anything runs."""

import re
import subprocess
import sys
from pathlib import Path

import jedi
import pytest

from torchrl_llm import runs
from torchrl_llm.utils.options import options_of
from torchrl_llm.utils.sections import sections_of

ROOT = Path(__file__).parents[2]
SECTIONS = [kind for kinds in sections_of(runs.RunSettings).values() for kind in kinds]
PARTS = {"RunSettings": runs.RunSettings, **{kind.__name__: kind for kind in SECTIONS}}


def completed(code: str) -> set[str]:
    return {each.name for each in jedi.Script(f"from torchrl_llm import runs\n{code}").complete()}


@pytest.mark.parametrize("name", [*PARTS])
def test_an_editor_completes_every_field(name):
    fields = options_of(PARTS[name]).keys()
    assert fields == {each.removesuffix("=") for each in completed(f"runs.{name}(") if each.endswith("=")}
    assert completed(f"runs.{name}().") >= fields


def test_an_editor_completes_the_sections_of_a_run_and_what_is_in_them():
    code = "run = runs.build_run(runs.RunSettings(loss=runs.GRPO()))\nrun.config."
    assert completed(code) >= sections_of(runs.RunSettings).keys()
    assert completed(f"{code}rollouts.") >= {"batch_size", "group_size"}
    assert completed(f"{code}loss.") >= {"kl_coeff", "gamma", "estimator"}


MISTAKES = """\
from torchrl_llm import runs

runs.RunSettings(batch_size=8)
runs.RunSettings(loss="GRPO")
runs.RunSettings(rollouts=runs.TurnRollouts(batch_sise=8))
runs.RunSettings(rollouts=runs.TurnRollouts(batch_size="8"))
runs.RunSettings(rollouts=runs.EnvSettings())
runs.RunSettings(model={"model_path": "tiny"})
runs.RunSettings(sampling=runs.SamplingConfig(temperature="hot"))
config = runs.RunSettings(trainer=runs.TrainerConfig(schedule="linear"))
config.max_steps
config.optim.lr_actor.bit_length()
runs.build_run(config).config.env.num_envs.real
runs.RunSettings(loss=runs.GRPO(critic_coeff=0.5))
runs.SFT(imitate="some")
right = runs.RunSettings(loss=runs.GRPO(scale="none"), rollouts=runs.TurnRollouts(batch_size=8, group_size=4))
steps: int = right.trainer.max_steps
"""


@pytest.mark.extra
def test_a_type_checker_finds_every_mistake_and_one_that_may_be_none(tmp_path):
    (tmp_path / "mine.py").write_text(MISTAKES)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            f"--config-file={ROOT / 'pyproject.toml'}",
            str(tmp_path / "mine.py"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    wrong = {int(line) for line in re.findall(r"mine\.py:(\d+): error", done.stdout)}
    assert wrong == {*range(3, 16)}, done.stdout + done.stderr
