"""examples/reasoning.py: it runs with each algorithm, keeps test answers out of training, and
learns."""

import importlib.util
import json
from pathlib import Path

import pytest
from arithmetic import arithmetic_splits, make_student
from instances import usual

from torchrl_llm.runs import ConfigError, build_run, parse_settings

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "configs" / "tiny_reasoning.yaml"
QUICK = ["--max-iterations=2", "--batch-size=16", "--num-envs=16", "--minibatch-size=16"]
QUICK += ["--final-episodes=16", "--evaluation-episodes=16", "--evaluation-interval=1", "--progress=false"]


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("reasoning", ROOT / "examples" / "reasoning.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def quick(script, monkeypatch):
    monkeypatch.setattr(script, "make_student", lambda rows, seed: make_student(rows, steps=5, seed=seed))
    return script


def settings(out, *arguments):
    return parse_settings([f"--config={CONFIG}", f"--output-dir={out}", *arguments])


class TestReasoning:
    @pytest.mark.parametrize("algo", usual(["LLMPPO", "LLMREINFORCE", "GRPO"]))
    def test_writes_the_report(self, quick, tmp_path, algo):
        out = tmp_path / "run"
        result = quick.main(settings(out, f"--algo={algo}", *QUICK))
        assert json.loads((out / "result.json").read_text()) == json.loads(json.dumps(result))
        assert (result["algo"], result["episodes"], result["iterations"]) == (algo, 32, 2)
        assert "<|im_start|>assistant" in (out / "episodes.md").read_text().split("# Episodes after training")[1]

    @pytest.mark.extra
    def test_a_resumed_run_goes_on_with_its_own_model_and_first_evaluation(self, quick, tmp_path):
        first = quick.main(settings(tmp_path / "run", *QUICK))
        longer = [argument for argument in QUICK if "max-iterations" not in argument]
        changes = ["--max-iterations=3", "--resume", '--accept-changes=["max_iterations"]']
        second = quick.main(settings(tmp_path / "run", *longer, *changes))
        assert second["iterations"] == 3
        assert second["success_before"] == first["success_before"]

    @pytest.mark.extra
    def test_training_is_never_rewarded_with_a_test_answer(self, quick, tmp_path, monkeypatch):
        rows = {
            question: name for name, part in arithmetic_splits().items() for question in [r["question"] for r in part]
        }
        heard = []

        def reward_fn(completion, answer, question):
            heard.append(rows[question])
            return 0.0

        monkeypatch.setattr(quick, "reward_fn", reward_fn)
        quick.main(settings(tmp_path / "run", "--evaluation-interval=0", *[q for q in QUICK if "interval" not in q]))
        assert heard == ["test"] * 16 + ["train"] * 32 + ["test"] * 16

    def test_env_and_make_env_exclude_each_other(self, tmp_path):
        with pytest.raises(ConfigError, match="leave env out"):
            build_run(settings(tmp_path / "run"), env=object, make_env=dict)

    @pytest.mark.slow
    @pytest.mark.extra
    def test_learns(self, script, tmp_path):
        arguments = [
            "--algo=GRPO",
            "--max-steps=5120",
            "--evaluation-interval=0",
            "--save-checkpoints=false",
            "--progress=false",
        ]
        result = script.main(settings(tmp_path / "run", *arguments))
        assert result["success_before"] < 0.6
        assert result["success_after"] > result["success_before"] + 0.12
