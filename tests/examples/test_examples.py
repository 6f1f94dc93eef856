"""The scripts run as their pages say, and learn where that is quick to see."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict.nn import TensorDictModule

from torchrl_llm.data import nonzero_variance
from torchrl_llm.envs import GEMEnv
from torchrl_llm.report.run_report import RunReport
from torchrl_llm.runs import build_run, parse_settings
from torchrl_llm.runs.table import read_metrics
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.tiny import load_tiny_model
from torchrl_llm.trainers import update

ROOT = Path(__file__).parents[2]
EXAMPLES, CONFIGS = ROOT / "examples", ROOT / "examples" / "configs"
QUICK = ["--max-iterations=2", "--batch-size=16", "--num-envs=16", "--final-episodes=16", "--evaluation-episodes=16"]


def load(path: Path):
    """Import a script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keep_models(script, monkeypatch) -> list:
    """Every model that the script's policies play with."""
    kept = []

    class Kept(script.HFPolicy):
        def __init__(self, model, *given, **more):
            kept.append(model)
            super().__init__(model, *given, **more)

    monkeypatch.setattr(script, "HFPolicy", Kept)
    return kept


def break_first_gradient(monkeypatch) -> None:
    """The first loss of an update has a gradient of NaN: the derivative of the root at 0 is
    infinite, times 0."""
    calls, total = [], update.total

    def broken(losses):
        calls.append(losses)
        loss = total(losses)
        return loss + 0.0 * (loss * 0.0).sqrt() if len(calls) == 1 else loss

    monkeypatch.setattr(update, "total", broken)


def finite(model) -> bool:
    """Whether all weights are numbers."""
    return all(parameter.isfinite().all() for parameter in model.parameters())


def trained(model) -> bool:
    """Whether each tensor of the shipped model's copy has changed."""
    pairs = zip(load_tiny_model().parameters(), model.parameters(), strict=True)
    return all((untrained != now).any() for untrained, now in pairs)


class TestMultiturn:
    @pytest.mark.parametrize("name", ["tiny_ppo_llm", "tiny_reinforce_llm", "tiny_grpo_multiturn"])
    def test_writes_the_report(self, tmp_path, name, capsys):
        out = tmp_path / "run"
        config = parse_settings(
            [f"--config={CONFIGS / name}.yaml", f"--output-dir={out}", *QUICK, "--tensorboard", "--export-merged"]
        )
        result = load(EXAMPLES / "multiturn.py").main(config)
        table = capsys.readouterr().out
        assert "95 % interval" in table
        assert "before" in table
        names = re.search(rf"^report: {out}/ \((.*)\)$", table, re.MULTILINE).group(1).split(", ")
        assert set(names) == {"report.html", "result.json", "episodes.md"}
        assert all((out / name).exists() for name in names)
        assert json.loads((out / "result.json").read_text()) == json.loads(json.dumps(result))
        wanted = {"algo", "seed", "success_before", "success_after", "success_ci95", "episodes", "iterations", "wall_s"}
        assert wanted | {"cpu_s"} <= set(result)
        assert (result["algo"], result["episodes"], result["iterations"]) == (config.algo, 32, 2)
        assert "# Episodes before training" in (out / "episodes.md").read_text()
        assert (out / "checkpoints" / "last" / "actor" / "model.safetensors").exists()
        assert (out / "merged" / "model.safetensors").exists()
        assert len(read_metrics(out / "metrics.csv")) == 2
        assert list((out / "tensorboard").rglob("events.*"))
        assert parse_settings([f"--config={out / 'config.yaml'}"]).as_json() == config.as_json() | {
            "max_tokens": 16_384
        }

    def test_names_no_file_that_is_not_there(self, tmp_path, capsys):
        """Interrupted in the evaluation before training."""
        out = tmp_path / "run"
        run = build_run(parse_settings([f"--config={CONFIGS / 'tiny_ppo_llm.yaml'}", f"--output-dir={out}", *QUICK]))
        run.begin()
        RunReport(print).write(run, "interrupted")
        run.close()
        assert f"report: {out}/ (report.html, result.json)\n" in capsys.readouterr().out

    @pytest.mark.extra
    def test_weights_and_biases_offline(self, tmp_path, monkeypatch):
        for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        arguments = [f"--config={CONFIGS / 'tiny_reinforce_llm.yaml'}", f"--output-dir={tmp_path / 'run'}", "--wandb"]
        load(EXAMPLES / "multiturn.py").main(parse_settings([*arguments, *QUICK]))
        assert list(tmp_path.rglob("offline-run-*/*.wandb"))


# they train on the CPU, which accelerate refuses in a process that has used a GPU
@pytest.mark.host
class TestCustomLoop:
    def test_is_one_short_file_without_our_trainer(self):
        source = (EXAMPLES / "custom_loop.py").read_text()
        assert len(source.splitlines()) <= 200
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        modules = {node.module for node in imports}
        assert {"torchrl.collectors", "torchrl.data"} <= modules
        assert "LLMTrainer" not in {alias.name for node in imports for alias in node.names}

    def test_runs(self, monkeypatch):
        script = load(EXAMPLES / "custom_loop.py")
        monkeypatch.setattr(script, "NUM_ENVS", 16)
        models = keep_models(script, monkeypatch)
        assert len(script.main(iterations=2)) == 2
        assert trained(models[0])

    def test_ends_an_update_at_its_target(self, monkeypatch):
        script, steps, step = load(EXAMPLES / "custom_loop.py"), [], update.Update.step
        monkeypatch.setattr(script, "NUM_ENVS", 16)
        monkeypatch.setattr(update.Update, "step", lambda *given: (steps.append(given), step(*given))[1])
        for target in (1e-9, 1e9):
            monkeypatch.setattr(script, "TARGET_KL", target)
            script.main(iterations=2)
        assert len(steps) == 2 + 2 * script.EPOCHS

    @pytest.mark.extra
    def test_learns(self):
        win_rates = load(EXAMPLES / "custom_loop.py").main(iterations=30)
        assert sum(win_rates[-5:]) / 5 > sum(win_rates[:5]) / 5 + 0.1


class TestCustomLoss:
    ARGUMENTS = (f"--config={CONFIGS / 'tiny_grpo_multiturn.yaml'}", *QUICK)

    def test_trains_with_its_objective(self, tmp_path, monkeypatch):
        script, calls = load(EXAMPLES / "custom_loss.py"), []
        objective = script.SmoothClipLoss.objective
        monkeypatch.setattr(
            script.SmoothClipLoss, "objective", lambda self, *args: (calls.append(self), objective(self, *args))[1]
        )
        config = parse_settings([*self.ARGUMENTS, f"--output-dir={tmp_path}"])
        history = script.main(config)
        assert len(history) == 2
        assert len(calls) >= 2 * config.trainer.epochs
        assert len(set(map(id, calls))) == 1

    def test_keeps_a_gradient_beyond_the_clip(self):
        script = load(EXAMPLES / "custom_loss.py")
        actor = TensorDictModule(lambda x: x, in_keys=["tokens"], out_keys=["log_prob"])
        log_ratio = torch.tensor([[0.0, 1.0]], requires_grad=True)
        for loss, expected in ((script.SmoothClipLoss(actor), True), (script.LLMGRPOLoss(actor), False)):
            (gradient,) = torch.autograd.grad(loss.objective(log_ratio, torch.ones(1, 2)).sum(), log_ratio)
            assert gradient[0, 0] == pytest.approx(1.0)
            assert bool(gradient[0, 1] > 0) == expected

    def test_takes_every_setting_of_its_loss(self):
        """What the config sets away from its default is found in the loss or its estimator."""
        given = {
            "gamma": 0.7, "credit": "turn", "discounted_objective": True, "clip_advantage": 2.5, "kl_coeff": 0.03, "kl_in": "loss",
            "kl_kind": "k2", "clipping": "cispo", "ratio_level": "turn", "ratio_reduction": "sum", "unit_weight": "by_tokens",
            "weighting": "constant", "weight_constant": 9.0, "entropy_coeff": 0.2, "sampler_correction": "truncate",
            "sampler_bounds": 3.0, "sampler_level": "turn", "sampler_reduction": "mean", "scale": "none",
            "baseline": "leave_one_out", "clip_epsilon": (0.1, 0.4),
        }  # fmt: skip
        config = parse_settings(list(self.ARGUMENTS)).replace(**given)
        actor = TensorDictModule(lambda x: (x, x), in_keys=["tokens"], out_keys=["log_prob", "entropy"])
        loss = load(EXAMPLES / "custom_loss.py").make_loss(config, SimpleNamespace(actor=actor))
        estimator = loss.value_estimator
        found = vars(estimator) | vars(loss) | estimator.options | {"clip_epsilon": (loss.clip_low, loss.clip_high)}
        assert {name: found[name] for name in given} == given
        assert estimator.options["group_size"] == config.rollouts.group_size

    def test_the_new_objective_is_twenty_lines(self):
        tree = ast.parse((EXAMPLES / "custom_loss.py").read_text())
        (new,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        assert new.end_lineno - new.lineno < 20


# they train on the CPU, which accelerate refuses in a process that has used a GPU
@pytest.mark.host
@pytest.mark.parametrize(("name", "size"), [("custom_loop.py", "NUM_ENVS"), ("torchrl_trainer.py", "CONVERSATIONS")])
def test_a_gradient_that_is_not_finite_takes_no_step(name, size, monkeypatch, caplog):
    script = load(EXAMPLES / name)
    monkeypatch.setattr(script, size, 16)
    models = keep_models(script, monkeypatch)
    break_first_gradient(monkeypatch)
    script.main(iterations=1)
    assert finite(models[0])
    assert trained(models[0])
    assert caplog.text.count("an optimizer step is skipped") == 1


# they train on the CPU, which accelerate refuses in a process that has used a GPU
@pytest.mark.host
class TestTorchRLTrainer:
    def test_learns_within_the_target_from_groups_that_differ(self, monkeypatch):
        script, learned, call = load(EXAMPLES / "torchrl_trainer.py"), [], update.Update.__call__

        def recorded(self, rows):
            metrics = call(self, rows)
            learned.append((nonzero_variance(rows), metrics))
            return metrics

        monkeypatch.setattr(update.Update, "__call__", recorded)
        monkeypatch.setattr(script, "CONVERSATIONS", 16)
        models = keep_models(script, monkeypatch)
        assert len(script.main(iterations=2, lr=0.03)) == len(learned) == 2
        assert trained(models[0])
        assert all(chosen.all() for chosen, _ in learned)
        assert max(metrics["policy/kl_update"] for _, metrics in learned) <= 0.05
        assert min(metrics["optim/step_share"] for _, metrics in learned) < 1

    def test_batches_in_which_no_group_has_an_advantage_are_skipped(self, monkeypatch):
        """They count, so that the run ends."""
        script = load(EXAMPLES / "torchrl_trainer.py")
        monkeypatch.setattr(script, "CONVERSATIONS", 16)
        monkeypatch.setattr(script, "GEMEnv", lambda _, **options: GEMEnv(StopOrGo, **options))
        monkeypatch.setattr(StopOrGo, "step", lambda self, action: ("Over.", 0.0, True, False, {}))
        models = keep_models(script, monkeypatch)
        assert script.main(iterations=2) == [0.0, 0.0]
        assert all(map(torch.equal, load_tiny_model().parameters(), models[0].parameters()))
