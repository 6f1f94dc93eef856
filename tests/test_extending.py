"""What is added from outside the package, without an edit of it: the table of docs/design.md.

An environment family is in envs/test_families.py, an inference engine in
weight_update/test_third_engine.py.
"""

from dataclasses import dataclass

import pytest
import torch
from torchrl.checkpoint import CheckpointError
from torchrl.envs import RewardScaling, TransformedEnv

from torchrl_llm import keys
from torchrl_llm.envs import GEMEnv
from torchrl_llm.objectives import LLMReinforceLoss, TurnEstimator
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.trainers import Callback
from torchrl_llm.utils.options import Share

SMALL = {
    "model_path": "tiny",
    "algo": "LLMREINFORCE",
    "batch_size": 4,
    "num_envs": 4,
    "max_model_len": 128,
    "max_output_tokens": 8,
    "max_iterations": 2,
    "evaluation_interval": 0,
    "save_checkpoints": False,
    "progress": False,
}


def small_run(tmp_path, *, settings=None, **parts):
    return build_run(RunSettings.from_values(output_dir=tmp_path, **SMALL | (settings or {})), **parts)


class CenteredReturn(TurnEstimator):
    """The return of an episode less the mean of the batch."""

    def estimate(self, tensordict):
        mask = tensordict[keys.TURN_MASK]
        score = (tensordict[keys.TURN_REWARD] * mask).sum(-1, keepdim=True)
        centered = torch.where(mask, score - score.mean(), 0.0)
        return {"turn_advantage": centered, "turn_value_target": centered}


def test_an_estimator_is_named_in_the_settings(tmp_path):
    settings = {"estimator": f"{__name__}:CenteredReturn", "kl_coeff": 0.0}
    run = small_run(tmp_path, settings=settings)
    assert type(run.trainer.loss.value_estimator) is CenteredReturn
    assert len(run.trainer.train()) == 2


@dataclass(kw_only=True, eq=False, repr=False)
class TemperedLoss(LLMReinforceLoss):
    """Multiplies the advantage by a setting of its own."""

    strength: Share = 1.0

    def objective(self, log_ratio, advantage):
        return super().objective(log_ratio, self.strength * advantage)


def test_a_setting_of_a_loss_is_one_field(tmp_path):
    def make_loss(config, models):
        return TemperedLoss(models.actor, strength=0.25, **config.loss_options(TemperedLoss))

    run = small_run(tmp_path, make_loss=make_loss)
    with pytest.raises(ValueError, match=r"strength is 2\.0; expected a number, between 0 and 1"):
        TemperedLoss(run.models.actor, strength=2.0)
    assert (run.trainer.loss.strength, LLMReinforceLoss in type(run.trainer.loss).__mro__) == (0.25, True)
    assert len(run.trainer.train()) == 2


def test_a_metric_is_what_an_evaluator_returns(tmp_path):
    class Longest(Callback):
        def on_start(self, trainer):
            trainer.evaluator = lambda: {"mine/longest": 7.0}

    history = small_run(tmp_path, settings={"evaluation_interval": 1}, callbacks=[Longest()]).trainer.train()
    assert [metrics["mine/longest"] for metrics in history] == [7.0, 7.0]


class TestTransformedEnvironment:
    SAVED = {"save_checkpoints": True, "max_iterations": 1}  # noqa: RUF012

    @staticmethod
    def make_env(**options):
        return TransformedEnv(GEMEnv(RunSettings().env.env_name, **options), RewardScaling(loc=0.0, scale=10.0))

    def test_a_run_learns_from_what_the_transform_makes_of_rewards(self, tmp_path):
        ((plain,), (scaled,)) = (
            small_run(tmp_path / name, settings={"max_iterations": 1}, **parts).trainer.train()
            for name, parts in (("plain", {}), ("scaled", {"make_env": self.make_env}))
        )
        assert scaled["rollout/reward"] == pytest.approx(10 * plain["rollout/reward"])
        assert scaled["rollout/success"] == plain["rollout/success"]

    def test_a_seed_that_is_meant_to_differ_reaches_the_environment(self, tmp_path):
        small_run(tmp_path, settings=self.SAVED, make_env=self.make_env).trainer.train()
        changed = {"resume": True, "seed": 5, "accept_changes": ["seed"]}
        run = small_run(tmp_path, settings=self.SAVED | changed, make_env=self.make_env)
        assert run.trainer.collector.env.base_env.task_sampler.seed == 5


class Curriculum(Callback):
    """A part of a run with a state of its own."""

    def __init__(self):
        self.level = torch.zeros(2)

    def on_iteration(self, trainer, metrics):
        self.level += torch.tensor([1.0, 0.5])

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state_dict):
        self.level = state_dict["level"].clone()


class TestCheckpointComponent:
    SAVED = {"save_checkpoints": True, "checkpoint_interval": 1}  # noqa: RUF012

    def test_it_continues_with_the_run(self, tmp_path):
        first, second = Curriculum(), Curriculum()
        run = small_run(tmp_path, settings=self.SAVED, callbacks=[first], components={"curriculum": first})
        run.trainer.train()
        more = self.SAVED | {"resume": True, "max_iterations": 3, "accept_changes": ["max_iterations"]}
        resumed = small_run(tmp_path, settings=more, callbacks=[second], components={"curriculum": second})
        assert second.level.tolist() == first.level.tolist() == [2.0, 1.0]
        resumed.trainer.train()
        assert second.level.tolist() == [3.0, 1.5]

    def test_a_checkpoint_without_it_says_so(self, tmp_path):
        small_run(tmp_path, settings=self.SAVED).trainer.train()
        with pytest.raises(CheckpointError, match="curriculum"):
            small_run(tmp_path, settings=self.SAVED | {"resume": True}, components={"curriculum": Curriculum()})

    def test_a_name_of_the_runs_own_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="A component is called 'optimizer'; every run has one of that name"):
            small_run(tmp_path, components={"optimizer": Curriculum()})
