"""A gradient that is not finite takes no step, and weights that are not finite are not saved."""

import logging
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from small_runs import prepared, small_config, weights
from torchrl.checkpoint import CheckpointError

from torchrl_llm.modules.engine import NonFiniteLogitsError
from torchrl_llm.objectives import LLMPPOLoss, LLMReinforceLoss, steps
from torchrl_llm.runs import build_run
from torchrl_llm.runs.finite import NonFiniteWeightsError
from torchrl_llm.trainers import MAX_SKIPPED_STEPS, Callback, NonFiniteGradientError


class Broken:
    """Where a loss is to be broken: in which optimizer steps, counted from 0."""

    def __init__(self, *steps):
        self.steps, self.step = steps, 0

    @property
    def now(self):
        return self.step in self.steps


class Count(Callback):
    def __init__(self, broken):
        self.broken = broken

    def on_minibatch(self, trainer, rows, metrics):
        self.broken.step += 1


def gradient_of_nan(x):
    """0, but with a gradient of NaN: the derivative of the root at 0 is infinite, times 0."""
    return 0.0 * (x * 0.0).sqrt()


class BrokenActor(LLMReinforceLoss):
    broken = Broken()

    def objective(self, log_ratio, advantage):
        objective = super().objective(log_ratio, advantage)
        return objective + gradient_of_nan(log_ratio) if self.broken.now else objective


class BrokenCritic(LLMPPOLoss):
    broken = Broken()

    def _pool(self, value, turn_ids):
        pooled = super()._pool(value, turn_ids)
        return pooled + gradient_of_nan(value) if value.requires_grad and self.broken.now else pooled


def broken_run(tmp_path, loss_type, broken, **settings):
    algo = {BrokenActor: "LLMREINFORCE", BrokenCritic: "LLMPPO"}[loss_type]

    def make_loss(config, models):
        networks = [models.actor] if models.critic is None else [models.actor, models.critic]
        loss = loss_type(*networks, **config.loss_options(loss_type))
        loss.broken = broken
        return loss

    config = small_config(tmp_path, algo, lr_actor=1e-3, **settings)
    return build_run(config, make_loss=make_loss, callbacks=[Count(broken)])


def state(trainer):
    """Copies of weights and optimizer."""
    moments = [value.clone() for values in trainer.optimizer.state.values() for value in values.values()]
    return [parameter.detach().clone() for parameter in trainer.loss.parameters()] + moments


BOTH = pytest.mark.parametrize("loss_type", [BrokenActor, BrokenCritic])


class TestSkippedSteps:
    @BOTH
    @pytest.mark.parametrize("target", [None, 0.01])
    def test_a_gradient_that_is_not_finite_changes_nothing(self, tmp_path, caplog, loss_type, target):
        broken = Broken(2)
        run = broken_run(tmp_path, loss_type, broken, target_kl=target)
        for _ in range(2):
            run.trainer.update(prepared(run.trainer))
        rows, before = prepared(run.trainer), state(run.trainer)
        metrics = run.trainer.update(rows)
        assert all(map(torch.equal, before, state(run.trainer)))
        assert metrics["optim/skipped_steps"] == 1.0
        assert not {"optim/grad_norm_actor", "optim/step_share"} & set(metrics)
        name = "critic" if loss_type is BrokenCritic else "actor"
        (record,) = [each for each in caplog.records if each.name == steps.__name__]
        assert f"{name} nan" in record.getMessage()
        assert "iteration 1: an optimizer step is skipped" in record.getMessage()
        # What was accumulated for it is gone: the next step is as after no such gradient.
        metrics = run.trainer.update(rows)
        assert metrics["optim/skipped_steps"] == 0.0
        assert math.isfinite(metrics["optim/grad_norm_actor"])
        assert not all(map(torch.equal, before, state(run.trainer)))

    def test_the_other_steps_of_an_update_are_taken(self, tmp_path):
        runs = [broken_run(tmp_path / str(i), BrokenActor, Broken(*b), epochs=3) for i, b in enumerate([(), (1,)])]
        rows = prepared(runs[0].trainer)
        metrics = [run.trainer.update(rows.clone()) for run in runs]
        assert [each["optim/skipped_steps"] for each in metrics] == [0.0, 1.0]
        assert all(math.isfinite(value) for value in metrics[1].values())
        assert {int(values["step"]) for values in runs[1].trainer.optimizer.state.values()} == {2}

    def test_the_run_ends_after_some_in_a_row(self, tmp_path):
        """And not after as many with others in between; what is saved has the weights of the last
        step that was taken."""
        apart = Broken(*(step for step in range(3 * MAX_SKIPPED_STEPS) if step % MAX_SKIPPED_STEPS))
        run = broken_run(tmp_path / "apart", BrokenActor, apart, max_iterations=2 * MAX_SKIPPED_STEPS)
        history = run.trainer.train()
        assert sum(metrics["optim/skipped_steps"] for metrics in history) == 2 * (MAX_SKIPPED_STEPS - 1)
        settings = {"max_iterations": 20, "checkpoint_interval": 1, "save_checkpoints": True}
        run = broken_run(tmp_path / "row", BrokenActor, Broken(*range(2, 20)), **settings)
        said = (
            f"gradients of {MAX_SKIPPED_STEPS} optimizer steps in a row .*actor nan.*iteration {2 + MAX_SKIPPED_STEPS}"
        )
        with pytest.raises(NonFiniteGradientError, match=said):
            run.trainer.train()
        saved = run.checkpoints.latest()
        assert saved.name.endswith(f"{1 + MAX_SKIPPED_STEPS:012d}")
        again = build_run(small_config(tmp_path / "again"))
        again.load_checkpoint(saved, load_optimizer=False)
        assert weights(again).equal(weights(run))
        assert weights(run).isfinite().all()

    def test_a_resumed_run_counts_on(self, tmp_path):
        broken = Broken(*range(20))
        settings = {"save_checkpoints": True, "checkpoint_interval": 1, "max_iterations": MAX_SKIPPED_STEPS - 1}
        broken_run(tmp_path, BrokenActor, broken, **settings).trainer.train()
        settings |= {"max_iterations": 20, "resume": True, "accept_changes": ["max_iterations"]}
        run = broken_run(tmp_path, BrokenActor, broken, **settings)
        assert run.trainer.skipped_in_a_row == MAX_SKIPPED_STEPS - 1
        with pytest.raises(NonFiniteGradientError):
            run.trainer.train()
        assert run.trainer.iteration == MAX_SKIPPED_STEPS - 1


@pytest.fixture
def half(monkeypatch):
    """Runs scale their losses as in float16: accelerate makes a scaler on GPUs only, so it is put
    in here."""
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})

    def make_accelerator(config):
        accelerator = Accelerator(cpu=True, mixed_precision="fp16")
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=8.0)
        return accelerator

    monkeypatch.setattr("torchrl_llm.runs.assembly.make_accelerator", make_accelerator)


@pytest.mark.host  # whose accelerator scales losses on a CPU
class TestLossScale:
    """In float16 skipped steps are normal while they lower the scale."""

    def test_steps_that_lower_the_scale_do_not_count(self, tmp_path, half, caplog):
        caplog.set_level(logging.INFO, "torchrl_llm")
        run = broken_run(tmp_path, BrokenActor, Broken(1, 2), max_iterations=4)
        history = run.trainer.train()
        assert [metrics["optim/skipped_steps"] for metrics in history] == [0.0, 1.0, 1.0, 0.0]
        assert run.trainer.accelerator.scaler.get_scale() == 2.0
        assert run.trainer.skipped_in_a_row == 0
        assert [each.levelname for each in caplog.records if each.name == steps.__name__] == ["INFO", "INFO"]
        assert weights(run).isfinite().all()

    def test_gradients_that_no_scale_makes_finite_end_the_run(self, tmp_path, half):
        run = broken_run(tmp_path, BrokenActor, Broken(*range(99)), max_iterations=30)
        before = weights(run)
        with pytest.raises(NonFiniteGradientError, match="fp16"):
            run.trainer.train()
        # 8 -> 1 takes three steps.
        assert run.trainer.iteration == 3 + MAX_SKIPPED_STEPS - 1
        assert weights(run).equal(before)

    def test_merged_adapters_have_their_gradients_unscaled_once(self, tmp_path, half):
        """Though accelerate knows the optimizer of the parameters before, too."""
        saved = build_run(small_config(tmp_path / "one", lora_r=2)).save_checkpoint(tmp_path / "saved")
        norms = []
        for merge in (False, True):
            run = build_run(small_config(tmp_path / str(merge), lora_r=2))
            run.load_checkpoint(saved, load_optimizer=False, merge_lora_configs=merge)
            norms.append(run.trainer.update(prepared(run.trainer))["optim/grad_norm_actor"])
        assert norms[0] == pytest.approx(norms[1], rel=1e-4) != 0.0

    def test_a_finite_gradient_without_a_finite_norm_is_skipped_too(self, tmp_path, half):
        """Its squares overflow: clipped by such a norm it would be 0, and a step of Adam's old
        moments."""
        run = build_run(small_config(tmp_path, max_grad_norm=math.inf))
        run.trainer.update(prepared(run.trainer))
        before = state(run.trainer)
        for parameter in run.models.actor_parameters():
            parameter.grad = torch.full_like(parameter, 1e30)
        run.trainer.accelerator.scaler.scale(torch.ones(()))
        metrics = run.trainer.updater.step()
        assert metrics["optim/skipped_steps"] == 1.0
        assert all(map(torch.equal, before, state(run.trainer)))
        assert run.trainer.skipped_in_a_row == 1


class Poison(Callback):
    """Writes NaN into a weight, or into the optimizer's state, after an iteration."""

    def __init__(self, what, iteration):
        self.what, self.iteration = what, iteration

    def on_iteration(self, trainer, metrics):
        if trainer.iteration == self.iteration:
            (parameter, *_) = trainer.optimizer.param_groups[-1]["params"]
            tensor = parameter.data if self.what == "weights" else trainer.optimizer.state[parameter]["exp_avg"]
            tensor.view(-1)[-1] = float("nan")


SAVED = {"save_checkpoints": True, "checkpoint_interval": 1, "max_iterations": 2}


class TestWeights:
    @pytest.mark.parametrize("algo", ["LLMREINFORCE", "LLMPPO"])
    @pytest.mark.parametrize("what", ["weights", "optimizer"])
    def test_what_is_not_finite_is_not_saved(self, tmp_path, algo, what):
        run = build_run(small_config(tmp_path, algo, lora_r=4, **SAVED), callbacks=[Poison(what, 2)])
        with pytest.raises(NonFiniteWeightsError, match=f"After iteration 2, 1 of .* tensors of the {what} are NaN"):
            run.trainer.train()
        (saved,) = run.checkpoints.checkpoints()
        assert saved.name.endswith("1")
        with pytest.raises(NonFiniteWeightsError):
            run.save_checkpoint(tmp_path / "own")
        assert not (tmp_path / "own").exists()
        resumed = build_run(small_config(tmp_path, algo, lora_r=4, resume=True, **SAVED))
        assert len(resumed.trainer.train()) == 2

    def test_an_evaluation_that_finds_them_saves_nothing(self, tmp_path):
        class PoisonedUpdate(Callback):
            def on_minibatch(self, trainer, rows, metrics):
                for parameter in trainer.loss.parameters():
                    parameter.data.fill_(float("nan"))

        settings = SAVED | {"checkpoint_interval": 2, "evaluation_interval": 1}
        run = build_run(small_config(tmp_path, **settings), callbacks=[PoisonedUpdate()])
        with pytest.raises(NonFiniteWeightsError) as raised:
            run.trainer.train()
        assert isinstance(raised.value.__context__, NonFiniteLogitsError)
        assert run.checkpoints.checkpoints() == []

    def test_a_checkpoint_that_an_earlier_version_saved_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr("torchrl_llm.runs.checkpoint.check_finite", lambda trainer: None)
        build_run(small_config(tmp_path, **SAVED), callbacks=[Poison("optimizer", 2)]).trainer.train()
        said = "000000000002 holds 1 of .* tensors of the optimizer .*000000000001 is whole: resume from it"
        with pytest.raises(CheckpointError, match=said):
            build_run(small_config(tmp_path, resume=True, **SAVED))
