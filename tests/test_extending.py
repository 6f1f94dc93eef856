"""What is added from outside the package, without an edit of it: the table of docs/design.md.

An environment family is in envs/test_families.py, an inference engine in
weight_update/test_third_engine.py.
"""

import json
import re
import zlib
from base64 import b64decode
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torchrl.checkpoint import CheckpointError
from torchrl.envs import RewardScaling, TransformedEnv

from torchrl_llm import keys
from torchrl_llm.envs import GEMEnv, UnknownEnvironmentError
from torchrl_llm.objectives import LLMReinforceLoss, TurnEstimator
from torchrl_llm.report.run_report import run_and_report
from torchrl_llm.runs import ConfigError, RunSettings, build_run
from torchrl_llm.runs.effective_settings import changed_settings, effective_settings
from torchrl_llm.runs.recording import read_recording
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


class Hurried:
    """One turn, with a column of its own: the length of the response."""

    extras: ClassVar = {"spoken": float}

    def reset(self, seed=None):
        return "Speak.", {}

    def step(self, action):
        return "", 1.0, True, False, {"spoken": len(action)}


class Spoken(Callback):
    """A metric made of that column."""

    def on_batch(self, trainer, rows, metrics):
        metrics["spoken/mean"] = rows[keys.turn_extra("spoken")][rows[keys.TURN_MASK]].mean().item()


def test_a_column_of_ones_own_reaches_rows_metrics_recordings_and_the_report(tmp_path):
    config = RunSettings.from_values(output_dir=tmp_path, **SMALL | {"kl_coeff": 0.0, "max_iterations": 1})
    run_and_report(config, partial(build_run, config, env=Hurried, callbacks=[Spoken()]))
    spoken = read_recording(tmp_path / "rollouts" / "iteration-000000000001.safetensors").extras["spoken"]
    assert spoken.shape == (4, 1)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    logged = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    assert float(logged["spoken/mean"]) == pytest.approx(spoken.mean(), rel=1e-4)
    page = (tmp_path / "report.html").read_text()
    block = re.search(r'<script type="text/plain" id="index">(.*?)</script>', page)[1]
    episodes = [each for group in json.loads(zlib.decompress(b64decode(block)))["groups"] for each in group["episodes"]]
    assert {value for each in episodes for value in each["extras"]["spoken"]} >= {*spoken[:, 0].tolist()}


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


class Watch(Callback):
    """Keeps what it was made with, and how many iterations it has seen."""

    def __init__(self, *, every: int, seen: int = 0):
        self.every, self.seen = every, seen

    def on_iteration(self, trainer, metrics):
        self.seen += 1

    def state_dict(self):
        return {"seen": torch.tensor(self.seen)}

    def load_state_dict(self, state_dict):
        self.seen = int(state_dict["seen"])


class Other:
    class Watch(Watch):
        pass


class NoRate(LLMReinforceLoss):
    """Its default is no value of the setting."""

    def __init__(self, actor, *, kl_coeff: float | None = None, **options):
        super().__init__(actor, kl_coeff=kl_coeff or 0.0, **options)


class Picky(CenteredReturn):
    """Has to be given a width."""

    def __init__(self, *, width: float, **options):
        super().__init__(**options)


class ScaledReturn(CenteredReturn):
    """Has an option that is no setting, and another default of one that is."""

    def __init__(self, *, width: float = 1.0, gamma: float = 0.5, **options):
        super().__init__(gamma=gamma, **options)
        self.width = width

    def estimate(self, tensordict):
        return {name: self.width * value for name, value in super().estimate(tensordict).items()}


def length_of(completion, answer, question):
    return float(len(completion) % 3)


class Echo:
    """One turn, paid by the length of the answer."""

    def __init__(self, pay=1.0):
        self.pay = pay

    def reset(self, seed=None):
        return "Say something.", {}

    def step(self, action):
        return "", self.pay * (len(action) % 3), True, False, {}


HERE = "tests.test_extending"
"""The package of this module, from the root of the repository."""


class WithBaseline(LLMReinforceLoss):
    """A baseline for each turn, which is learned with the policy: its own parameter."""

    def __init__(self, actor, *, turns: int = 8, **options):
        super().__init__(actor, **options)
        self.baseline = torch.nn.Parameter(torch.zeros(turns))

    def terms(self, rows, scored):
        turn_ids, advantage = rows["turn_ids"], rows["advantage"]
        baseline = self.baseline[turn_ids.clamp(0, len(self.baseline) - 1)]
        less = rows.copy().set("advantage", torch.where(turn_ids >= 0, advantage - baseline.detach(), 0.0))
        error = (rows["loss_weight"] * (advantage - baseline) ** 2).sum()
        return super().terms(less, scored) | {"loss_baseline": error}


@pytest.fixture
def from_root(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])


@pytest.mark.usefixtures("from_root")
class TestNamedInAFile:
    """Parts of one's own, which a settings file names as "package.module:Name" with arguments."""

    def settings(self, tmp_path, text, **more):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return RunSettings.from_yaml(path).replace(output_dir=tmp_path / "run", **SMALL | more)

    def test_loss_and_estimator(self, tmp_path):
        config = self.settings(
            tmp_path,
            f"""\
            algo: LLMREINFORCE
            loss:
              loss_class: {HERE}:TemperedLoss
              loss_options: {{strength: 0.25}}
              estimator: {HERE}:ScaledReturn
              estimator_options: {{width: 2.0}}
              kl_coeff: 0.0
            """,
        )
        assert config.loss.gamma == 0.5  # the estimator's default
        loss = build_run(config).trainer.loss
        assert (type(loss).__name__, loss.strength, loss.kl_coeff) == ("TemperedLoss", 0.25, 0.0)
        estimator = loss.value_estimator
        assert (type(estimator).__name__, estimator.width, float(estimator.gamma)) == ("ScaledReturn", 2.0, 0.5)
        assert RunSettings.from_values(**config.as_json()) == config
        effective = effective_settings(config)
        assert (effective["loss_class"], effective["strength"], effective["width"]) == (
            f"{HERE}:TemperedLoss",
            0.25,
            2.0,
        )
        assert effective != effective_settings(config.replace(loss_options={"strength": 0.5}))
        assert not {"loss_options", "estimator_options"} & effective.keys()

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"loss_class": f"{HERE}:Watch"}, r"loss_class names '.*:Watch'.*expected a subclass of LLMReinforceLoss"),
            ({"loss_class": f"{HERE}:NoLoss"}, r"loss_class names .*cannot be imported"),
            ({"algo": "SFT", "demonstrations": "guess_by_hints", "loss_class": f"{HERE}:TemperedLoss"}, "expected a subclass of LLMSFTLoss"),
            ({"loss_options": {"strength": 0.5}}, r"loss_options=.* does nothing with loss_class=None"),
            ({"loss_class": f"{HERE}:TemperedLoss", "loss_options": {"strenght": 0.5}}, r"loss_options has strenght, which TemperedLoss does not take\. Did you mean 'strength'\?"),
            ({"loss_class": f"{HERE}:TemperedLoss", "loss_options": {"kl_coeff": 0.5}}, "loss_options has kl_coeff, which is a setting of its own"),
            ({"loss_class": f"{HERE}:TemperedLoss", "loss_options": {"strength": 2.0}}, r"strength is 2\.0; expected a number, between 0 and 1"),
            ({"estimator_options": {"width": 1.0}}, r"estimator_options=.* does nothing with estimator=None"),
            ({"loss_class": f"{HERE}:NoRate"}, r"NoRate, which the settings name, has no default of kl_coeff that the setting takes; expected a number"),
            ({"estimator": f"{HERE}:Picky"}, r"estimator names '.*:Picky', which cannot be made: .*width"),
            ({"algo": "LLMPPO", "loss_class": "torchrl_llm.objectives:LLMPPOLoss", "loss_options": {"critic": 1.0}}, "loss_options has critic, which a run makes itself"),
            ({"loss_class": f"{HERE}:TemperedLoss", "loss_options": {"strength": (1, 2)}}, "loss_options is .*; expected text keys, and values that JSON has"),
            ({"callbacks": {f"{HERE}:Watch": {"every": Path("x")}}}, "callbacks is .*; expected text keys, and values that JSON has"),
            ({"callbacks": {1: {}}}, "callbacks is .*; expected text keys"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_with_a_loss_is_said_before_models_are_loaded(self, settings, said):
        with pytest.raises(ConfigError, match=said):
            RunSettings.from_values(**{"algo": "LLMREINFORCE"} | settings)

    def test_callbacks_and_an_environment_continue_with_their_run(self, tmp_path):
        text = f"""\
            env:
              env_name: {HERE}:Echo
              env_options: {{pay: 0.5}}
            output:
              callbacks:
                {HERE}:Watch: {{every: 5}}
            """
        saved = {"save_checkpoints": True, "checkpoint_interval": 1}
        run = build_run(self.settings(tmp_path, text, **saved))
        assert 0 <= run.trainer.train()[-1]["rollout/reward"] <= 1
        assert (run.trainer.callbacks[-1].every, run.trainer.callbacks[-1].seen) == (5, 2)
        more = saved | {"resume": True, "max_iterations": 3, "accept_changes": ["max_iterations"]}
        run = build_run(self.settings(tmp_path, text, **more))
        run.trainer.train()
        assert run.trainer.callbacks[-1].seen == 3

    @pytest.mark.extra
    def test_callbacks_of_one_name_keep_apart_and_one_may_be_added(self, tmp_path, caplog):
        saved = SMALL | {"save_checkpoints": True, "checkpoint_interval": 1, "output_dir": tmp_path}
        first, second = f"{HERE}:Watch", f"{HERE}:Other.Watch"
        build_run(RunSettings.from_values(**saved, callbacks={first: {"every": 1}})).trainer.train()
        resumed = {"resume": True, "accept_changes": ["max_iterations", "callbacks"], "max_iterations": 3}
        both = {second: {"every": 2, "seen": 10}, first: {"every": 1}}
        run = build_run(RunSettings.from_values(**saved | resumed, callbacks=both))
        assert "has no state of tests.test_extending.Other.Watch: it begins as new" in caplog.text
        run.trainer.train()
        run = build_run(RunSettings.from_values(**saved | resumed, callbacks=both))
        assert [each.seen for each in run.trainer.callbacks[-2:]] == [11, 3]

    def test_a_dataset_and_its_reward(self, tmp_path):
        rows = [{"question": f"{i}?", "answer": str(i)} for i in range(8)]
        for split, part in (("train", rows[:6]), ("test", rows[6:])):
            (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)))
        config = self.settings(
            tmp_path,
            f"""\
            env:
              env_name: torchrl_llm.envs:PromptDatasetEnv
              env_options:
                dataset: {{train: {tmp_path}/train.jsonl, test: {tmp_path}/test.jsonl}}
                reward_fn: {HERE}:length_of
            """,
        )
        run = build_run(config)
        assert type(run.trainer.collector.env).__name__ == "PromptDatasetEnv"
        assert 0 <= run.trainer.train()[-1]["rollout/reward"] <= 2
        assert run.final_evaluation().episodes > 0
        own = config.env.env_options
        for changes, said in (
            ({"env_weights": [1.0]}, "env_name names PromptDatasetEnv, which makes its environments itself: name it alone"),
            ({"env_name": [config.env.env_name] * 2}, "makes its environments itself: name it alone"),
            ({"env_options": own | {"max_model_len": 64, "seed": 1}}, "env_options has max_model_len, seed, which other settings"),
            ({"env_options": own | {"quesion": "q"}}, "env_name names .*cannot be made: .*quesion"),
            ({"env_options": {"dataset": "nowhere.jsonl", "reward_fn": f"{HERE}:length_of"}}, "env_name names .*which says: .*nowhere"),
            ({"env_options": own | {"reward_fn": f"{HERE}:HERE"}}, "env_name names .*cannot be made"),
            ({"collector": "self_play", "batch_size": 4}, "env_name names PromptDatasetEnv, which is no SelfPlayEnv"),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=said):
                build_run(config.replace(**changes))

    def test_parameters_of_a_loss_are_trained_and_continue(self, tmp_path):
        text = f"""\
            algo: LLMREINFORCE
            loss:
              loss_class: {HERE}:WithBaseline
              loss_options: {{turns: 4}}
              kl_coeff: 0.0
              normalize_over: none
            optim:
              lr_loss: 0.05
            """
        saved = {"save_checkpoints": True, "checkpoint_interval": 1}
        run = build_run(self.settings(tmp_path, text, **saved, max_iterations=3))
        history = run.trainer.train()
        learned = run.trainer.loss.baseline.detach().clone()
        assert learned.shape == (4,)
        assert learned[0] > 0.05  # the returns are positive
        assert all(metrics["optim/grad_norm_loss"] > 0 for metrics in history)
        assert 0 < history[0]["optim/lr_loss"] <= 0.05
        more = saved | {"resume": True, "max_iterations": 4, "accept_changes": ["max_iterations"]}
        run = build_run(self.settings(tmp_path, text, **more))
        assert run.trainer.loss.baseline.detach().equal(learned)
        assert "exp_avg" in run.trainer.optimizer.state[run.trainer.loss.baseline]
        run.trainer.train()
        assert not run.trainer.loss.baseline.detach().equal(learned)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            (
                {"loss_options": {"turns": 3}},
                r"the state of a parameter of shape \[8\], which has the shape \[3\] here",
            ),
            (
                {"loss_class": None},
                r"parameter groups of \[.*, 1\] tensors; expected \[.*\].*of actor, critic and the loss",
            ),
        ],
    )
    @pytest.mark.extra
    def test_another_loss_of_other_parameters_is_refused_in_a_resume(self, tmp_path, changes, said):
        given = {"loss_class": f"{HERE}:WithBaseline", "save_checkpoints": True, "checkpoint_interval": 1}
        small_run(tmp_path, settings=given).trainer.train()
        more = {"resume": True, "accept_changes": ["loss_class", "loss_options"]}
        with pytest.raises(CheckpointError, match=said):
            small_run(
                tmp_path,
                settings={name: value for name, value in (given | more | changes).items() if value is not None},
            )

    def test_a_rate_of_parameters_that_there_are_not(self, tmp_path):
        with pytest.raises(ConfigError, match=r"lr_loss=0\.1 does nothing: the loss has no parameters of its own"):
            small_run(tmp_path, settings={"lr_loss": 0.1})

    @pytest.mark.parametrize(
        ("callbacks", "said"),
        [
            ({f"{HERE}:Echo": {}}, "callbacks names .*:Echo.*expected a subclass of Callback"),
            ({f"{HERE}:Watch": 3}, "callbacks has .*:Watch: 3; expected a mapping"),
            (
                {f"{HERE}:Watch": {"evry": 5}},
                "callbacks names .*:Watch.*cannot be made: .*unexpected keyword.*evry",
            ),
        ],
    )
    def test_what_is_wrong_with_a_callback(self, tmp_path, callbacks, said):
        with pytest.raises(ConfigError, match=said):
            small_run(tmp_path, settings={"callbacks": callbacks})

    def test_callbacks_are_settings_with_an_effect(self):
        one, other = (RunSettings.from_values(callbacks={f"{HERE}:Watch": {"every": n}}) for n in (1, 2))
        assert effective_settings(one)["callbacks"] != effective_settings(other)["callbacks"]
        assert (
            "callbacks" not in effective_settings(RunSettings()) or effective_settings(RunSettings())["callbacks"] == {}
        )
        assert "callbacks" in changed_settings(one)

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("NoSuch", "no id of a family, and cannot be imported"),
            ("HERE", "is 'tests.test_extending'; expected a class with reset and step"),
            ("", "is <module .*; expected a class with reset and step"),
            ("CenteredReturn", "expected a class with reset and step"),
        ],
    )
    def test_what_is_no_environment(self, tmp_path, name, said):
        with pytest.raises(UnknownEnvironmentError, match=said):
            small_run(tmp_path, settings={"env_name": f"{HERE}:{name}"})

    def test_an_environment_that_does_not_take_its_options(self, tmp_path):
        said = r"env_name is .*:Echo', which does not take env_options=\{'pays': 1\}: .*pays"
        with pytest.raises(ConfigError, match=said):
            small_run(tmp_path, settings={"env_name": f"{HERE}:Echo", "env_options": {"pays": 1}})


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

    @pytest.mark.extra
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

    @pytest.mark.extra
    def test_a_checkpoint_without_it_says_so(self, tmp_path):
        small_run(tmp_path, settings=self.SAVED).trainer.train()
        with pytest.raises(CheckpointError, match="curriculum"):
            small_run(tmp_path, settings=self.SAVED | {"resume": True}, components={"curriculum": Curriculum()})

    def test_a_name_of_the_runs_own_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="A component is called 'optimizer'; every run has one of that name"):
            small_run(tmp_path, components={"optimizer": Curriculum()})
