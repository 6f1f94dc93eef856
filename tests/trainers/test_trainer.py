"""The training loop: it learns, it stops where it is told to, its settings have effect, its gradient is the batch's."""

import ast
import inspect
import math
import re
import threading
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tensordict.nn import TensorDictModule
from torchrl.record.loggers import CSVLogger
from transformers import AutoModelForCausalLM

from torchrl_llm import keys
from torchrl_llm.data import nonzero_variance, overlong, penalize_overlong
from torchrl_llm.envs import TaskSampler
from torchrl_llm.modules import use_adapter
from torchrl_llm.objectives import LLMReinforceLoss, TurnEstimator, TurnVTrace
from torchrl_llm.record import METRICS, wilson_interval
from torchrl_llm.testing.environments import Echo
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer
from torchrl_llm.trainers import Callback, ConfigError, LLMTrainer, RunConfig, build_run, make_objective, verify
from torchrl_llm.trainers.build import _worker_policy, make_optimizer
from torchrl_llm.trainers.checkpoint import NOT_EVALUATED
from torchrl_llm.trainers.config import LOSSES, loss_settings
from torchrl_llm.trainers.schedule import lr_factor

SMALL = {
    "model_path": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 256,
    "max_output_tokens": 16,
    "num_envs": 8,
    "batch_size": 8,
    "lora_r": 0,
    "kl_coeff": 0.0,
    "evaluation_interval": 0,
    "evaluation_episodes": 8,
    "final_episodes": 8,
    "save_checkpoints": False,
    "progress": False,
}
ALGORITHMS = {"LLMPPO": {}, "LLMREINFORCE": {}, "GRPO": {"group_size": 4}}


class ModelStub:
    """Keys only: what a loss needs of its networks to be made."""

    actor = TensorDictModule(lambda x: (x, x), in_keys=["tokens"], out_keys=["log_prob", "entropy"])
    critic = TensorDictModule(lambda x: (x, x), in_keys=["tokens"], out_keys=["state_value", "bootstrap_value"])


def small_config(tmp_path, algo="LLMREINFORCE", **settings) -> RunConfig:
    return RunConfig(**SMALL | {"algo": algo, "output_dir": tmp_path / "run"} | ALGORITHMS[algo] | settings)


def one_batch(run):
    """The rows of one batch."""
    next(iter(run.trainer.collector))
    rows = run.trainer.replay_buffer[:].contiguous()
    run.trainer.replay_buffer.empty(empty_write_count=False)
    return rows


def weights(run) -> torch.Tensor:
    parameters = run.models.actor_parameters() + run.models.critic_parameters()
    return torch.cat([p.detach().flatten() for p in parameters])


class TestAsync:
    """Runs with an AsyncTurnCollector; what it delivers is tested with the collectors."""

    def test_on_policy_plays_the_games_of_a_run_with_a_barrier(self, tmp_path):
        runs = [small_config(tmp_path, max_iterations=1, collector=kind) for kind in ("turn", "async")]
        first, second = (build_run(config).trainer.train()[0] for config in runs)
        for name in ("rollout/reward", "rollout/turns", "rollout/response_length", "data/tokens"):
            assert first[name] == second[name]
        assert first["data/staleness"] == second["data/staleness"] == 0

    def test_older_weights_are_scored_anew_and_corrected_for(self, tmp_path):
        run = build_run(small_config(tmp_path, max_iterations=4, batch_size=16, collector="async", max_staleness=1))
        assert run.trainer.scorer.scores_old
        assert (run.trainer.loss.sampler_correction, run.trainer.loss.sampler_bounds) == ("truncate", 2.0)
        history = run.trainer.train()
        assert history[0]["data/staleness"] == 0
        assert 0 < max(row["data/staleness"] for row in history) <= 1
        assert history[-1]["policy/log_prob_gap"] > history[0]["policy/log_prob_gap"]

    def test_a_correction_that_is_asked_for_is_kept(self, tmp_path):
        settings = {"sampler_correction": "mask", "sampler_bounds": (0.5, 2.0)}
        config = small_config(tmp_path, collector="async", max_staleness=1, **settings)
        assert make_objective(config, ModelStub()).sampler_correction == "mask"


class Won:
    """Over after a turn, and won by whoever speaks."""

    won = 1.0

    def reset(self, seed=None):
        self.seed = seed
        return "Speak.", {}

    def step(self, action):
        return "Over.", self.won, True, False, {}


class Lost(Won):
    won = 0.0


class Coin(Won):
    """Won in one task of two."""

    @property
    def won(self):
        return float(self.seed // 4 % 2)


class TwoTurns(Won):
    """Over after two turns, which pay nothing."""

    won = 0.0

    def reset(self, seed=None):
        self.turn = 0
        return super().reset(seed)

    def step(self, action):
        self.turn += 1
        return "Go on.", 0.0, self.turn == 2, False, {}


class TestAdaptiveTasks:
    def test_what_can_be_learnt_is_dealt_most(self, tmp_path):
        config = small_config(
            tmp_path, "GRPO", adaptive_mixture=True, max_iterations=12, batch_size=64, group_size=2, lr_actor=0.0
        )
        run = build_run(config, env=[Won, Coin, Lost])
        played = []
        iterate = run.trainer.iterate
        run.trainer.iterate = lambda batch: (played.append(batch[keys.ENV_ID].clone()), iterate(batch))[1]
        history = run.trainer.train()
        first, last = played[0].bincount(minlength=3), torch.cat(played[-4:]).bincount(minlength=3)
        assert first.max() - first.min() <= 2
        # Once all rates are known the shares are 1/8, 6/8, 1/8.
        assert last[1] > 0.6 * last.sum()
        assert (last[[0, 2]] > 0).all()
        assert (history[-1]["rollout/success/Won"], history[-1]["rollout/success/Lost"]) == (1, 0)

    def test_evaluation_keeps_its_tasks(self, tmp_path):
        config = small_config(
            tmp_path, adaptive_mixture=True, max_iterations=3, evaluation_interval=1, evaluation_episodes=9
        )
        run = build_run(config, env=[Won, Coin, Lost])
        before = run.final_evaluation()
        history = run.trainer.train()
        assert run.trainer.collector.env.task_sampler.success is not None
        rates = [[row[f"evaluation/success/{name}"] for name in ("Won", "Coin", "Lost")] for row in history]
        assert (rates[0][0], rates[0][2]) == (1, 0)
        assert rates[0] == rates[1] == rates[2], "who wins does not depend on the policy, so the tasks were the same"
        assert sum(rates[0]) / 3 == pytest.approx(history[0]["evaluation/success"])
        after = run.final_evaluation()
        assert torch.equal(before.rows[keys.ENV_ID], after.rows[keys.ENV_ID])

    def test_one_environment_is_an_error(self, tmp_path):
        with pytest.raises(ConfigError, match="the only one"):
            build_run(small_config(tmp_path, adaptive_mixture=True))


class TestStepTimeout:
    """An environment that hangs costs its episode, in training and in evaluation, whatever the collector."""

    @pytest.mark.parametrize("collector", ["turn", "async"])
    def test_the_run_goes_on(self, tmp_path, collector):
        release = threading.Event()

        class Hangs(Won):
            thread_safe = True

            def step(self, action):
                if self.seed in bad:
                    release.wait(30.0)
                return super().step(action)

        bad = {TaskSampler(seed=3, stream=stream)[2].seed for stream in ("train", "eval")}
        config = small_config(
            tmp_path, collector=collector, step_timeout=0.3, seed=3, max_iterations=2, evaluation_interval=1
        )
        run = build_run(config, env=Hangs)
        history = run.trainer.train()
        assert [row["data/faults"] for row in history] == [1, 1]
        assert [row["rollout/episodes"] for row in history] == [8, 16]
        assert run.evaluation_env.faults == {"timeout": 2}
        assert run.evaluation_env.num_threads == 8
        run.close()
        assert run.evaluation_env.is_closed
        release.set()

    def test_threads_without_a_limit(self, tmp_path):
        run = build_run(small_config(tmp_path, env_threads=2))
        assert (run.trainer.collector.env.num_threads, run.evaluation_env.num_threads) == (2, 2)
        run.close()


class TestLearning:
    @pytest.mark.slow
    @pytest.mark.timeout(280)
    def test_ppo_raises_the_win_rate_beyond_its_interval(self, tmp_path):
        """The short version of benchmarks/learning.py."""
        from torchrl_llm.trainers import parse_run_config

        config = parse_run_config(
            [
                "--config=examples/configs/tiny_ppo_llm.yaml",
                f"--output-dir={tmp_path}",
                "--max-iterations=30",
                "--schedule=constant",
                "--evaluation-interval=0",
                "--save-checkpoints=false",
                "--progress=false",
            ]
        )
        run = build_run(config)
        before = run.final_evaluation()
        run.trainer.train()
        after = run.final_evaluation()
        assert before.success < 0.75
        assert after.success >= before.success + 0.10
        # Both play the same tasks, so how much the ten tasks differ does not count here: an interval of plain episodes.
        (_, high), (low, _) = (wilson_interval(each.success * each.episodes, each.episodes) for each in (before, after))
        assert low > high


class TestIteration:
    @pytest.mark.parametrize("algo", ALGORITHMS)
    @pytest.mark.parametrize("lora_r", [0, 4])
    def test_every_metric_is_named_and_finite(self, tmp_path, algo, lora_r):
        config = small_config(
            tmp_path, algo, lora_r=lora_r, kl_coeff=0.01, epochs=2, minibatch_size=4, max_iterations=2, max_tokens=300,
            evaluation_interval=1, evaluation_greedy=True,
        )  # fmt: skip
        run = build_run(config)
        history = run.trainer.train()
        assert len(history) == 2
        assert run.trainer.stop_reason == "max_iterations=2"
        assert set(history[0]) <= set(METRICS)
        wanted = {"rollout/reward", "policy/kl_reference", "policy/entropy", "policy/ESS", "policy/log_prob_gap"}
        wanted |= {"optim/grad_norm_actor", "evaluation/success", "evaluation_greedy/success", "data/padding_share"}
        wanted |= {"time/rollout_tokens_per_s", "time/update_tokens_per_s"}
        if algo == "LLMPPO":
            wanted |= {"critic/explained_variance", "critic/value_return_correlation", "optim/grad_norm_critic"}
        assert wanted <= set(history[0])
        assert all(math.isfinite(history[0][name]) for name in wanted - {"critic/value_return_correlation"})
        assert history[0]["policy/log_prob_gap"] < 1e-5
        assert history[1]["rollout/episodes"] == 16
        assert run.policy.policy_version == 2

    def test_the_next_batch_is_played_by_the_new_weights(self, tmp_path):
        run = build_run(small_config(tmp_path, max_iterations=3))
        versions = []

        class Watch(Callback):
            def on_iteration(self, trainer, metrics):
                versions.append(metrics["policy/version"])

        run.trainer.callbacks = (Watch(),)
        run.trainer.train()
        assert versions == [1, 2, 3]

    def test_an_evaluator_has_metrics_of_its_own(self, tmp_path):
        settings = {"max_iterations": 1, "evaluation_interval": 1, "save_checkpoints": True}
        run = build_run(small_config(tmp_path, **settings))
        run.trainer.evaluator = lambda: {"evaluation/elo": torch.tensor(1200), "score": True}
        (metrics,) = run.trainer.train()
        assert (metrics["evaluation/elo"], metrics["score"]) == (1200.0, 1.0)
        assert (tmp_path / "run" / "csv" / "scalars" / "evaluation" / "elo.csv").read_text().strip().endswith("1200.0")
        assert verify(run.checkpoints.latest())["metadata"]["evaluation_success"] == NOT_EVALUATED


class TestWhatOthersBring:
    """An evaluator, a logger or a callback that fails ends the run with its error, and costs no iteration."""

    @pytest.mark.parametrize(
        ("returned", "error", "match"),
        [
            ({"evaluation/success": "high"}, TypeError, "'evaluation/success' is 'high'; expected a number"),
            ({"rollout/reward": 1.0}, ValueError, r"\['rollout/reward'\], which are metrics of training"),
            (
                {"my/score": 1.0},
                ConfigError,
                r"needs \"evaluation/success\", and the evaluator returned \['my/score'\]",
            ),
            (ArithmeticError("mine"), ArithmeticError, "mine"),
        ],
    )
    def test_an_evaluator(self, tmp_path, returned, error, match):
        def evaluator():
            if isinstance(returned, Exception):
                raise returned
            return returned

        run = build_run(small_config(tmp_path, **self.SETTINGS, evaluation_interval=2, stop_at_success=1.0))
        run.trainer.evaluator = evaluator
        self.check(run, error, match, last=2)

    def test_a_callback(self, tmp_path):
        class Fails(Callback):
            def on_iteration(self, trainer, metrics):
                if trainer.iteration == 2:
                    raise ArithmeticError("mine")

        run = build_run(small_config(tmp_path, **self.SETTINGS), callbacks=[Fails()])
        self.check(run, ArithmeticError, "mine", last=2)
        assert len(run.trainer.history) == 2
        resumed = build_run(small_config(tmp_path, **self.SETTINGS, resume=True))
        assert len(resumed.trainer.train()) == 3

    def test_a_logger(self, tmp_path):
        class Offline(CSVLogger):
            def log_metrics(self, *args, **kwargs):
                raise ConnectionError("mine")

        run = build_run(small_config(tmp_path, **self.SETTINGS))
        run.trainer.loggers = (Offline("offline", str(tmp_path)),)
        self.check(run, ConnectionError, "mine", last=1)

    def test_the_end_of_a_callback(self, tmp_path):
        class Fails(Callback):
            def on_end(self, trainer):
                raise ArithmeticError("mine")

        run = build_run(small_config(tmp_path, **self.SETTINGS), callbacks=[Fails()])
        self.check(run, ArithmeticError, "mine", last=3)

    SETTINGS: ClassVar = {"max_iterations": 3, "checkpoint_interval": 0, "save_checkpoints": True}

    def check(self, run, error, match, last):
        with pytest.raises(error, match=match):
            run.trainer.train()
        assert verify(run.checkpoints.latest())["metadata"]["iteration"] == last
        assert run.trainer.collector.closed


class CountedLoss(LLMReinforceLoss):
    """The stock objective, counted."""

    calls = 0

    def objective(self, log_ratio, advantage):
        self.calls += 1
        return super().objective(log_ratio, advantage)


def counted_loss(config, models):
    return CountedLoss(models.actor, **config.loss_options(CountedLoss))


class TestOffload:
    """Weights that nothing here computes with are elsewhere while an engine samples."""

    @staticmethod
    def events(tmp_path, *, owns_weights, **settings):
        events = []

        @contextmanager
        def offload():
            events.append("offloaded")
            yield
            events.append("back")

        run = build_run(small_config(tmp_path, max_iterations=1, evaluation_interval=1, **settings))
        trainer, policy = run.trainer, run.policy
        trainer.offload, policy.owns_weights = offload, owns_weights
        for name, part in (("score", trainer.scorer), ("step", trainer.updater)):
            method = getattr(part, name)
            setattr(part, name, lambda *rest, name=name, method=method: (events.append(name), method(*rest))[1])
        policy.weights_changed = lambda: (events.append("sync"), type(policy).weights_changed(policy))[1]
        trainer.train()
        return events

    def test_they_are_back_before_rows_are_scored_weights_stepped_and_sent(self, tmp_path):
        events = self.events(tmp_path, owns_weights=True, old_log_probs="scorer")
        rollout, update, evaluation = events[:2], events[2:-2], events[-2:]
        assert rollout == evaluation == ["offloaded", "back"]
        assert update == ["score", "step", "sync"]

    def test_a_policy_that_samples_from_them_keeps_them(self, tmp_path):
        assert "offloaded" not in self.events(tmp_path, owns_weights=False)


class TestParts:
    """A trainer trains with the parts that it was made with, and with no others."""

    def test_a_loss_of_ones_own_is_what_is_trained(self, tmp_path):
        settings = {"kl_coeff": 0.1, "gamma": 0.5, "clip_epsilon": (0.1, 0.3), "max_iterations": 2}
        run = build_run(small_config(tmp_path, **settings), make_loss=counted_loss)
        stock = build_run(small_config(tmp_path, **settings))
        for trainer in (run.trainer, stock.trainer):
            trainer.train()
        assert run.trainer.loss.calls == 2
        assert (run.trainer.loss.kl_coeff, run.trainer.loss.clip_high) == (0.1, 0.3)
        assert torch.equal(weights(run), weights(stock)), "the stock path is the custom path"

    def test_an_objective_that_raises_is_not_passed_over(self, tmp_path):
        class Broken(CountedLoss):
            def objective(self, log_ratio, advantage):
                raise ArithmeticError("mine")

        run = build_run(
            small_config(tmp_path, max_iterations=1), make_loss=lambda _, models: Broken(models.actor, kl_coeff=0.0)
        )
        with pytest.raises(ArithmeticError, match="mine"):
            run.trainer.train()

    def test_another_one_put_there_later_is_an_error(self, tmp_path):
        trainer = build_run(small_config(tmp_path)).trainer
        for name in ("accelerator", "collector", "config", "loss", "module", "optimizer", "policy", "distributed", "reference",
                     "replay_buffer", "weight_sync"):  # fmt: skip
            with pytest.raises(AttributeError, match=f"{name} is read-only.*Make the trainer with yours: .*LLMTrainer"):
                setattr(trainer, name, getattr(trainer, name))
        with pytest.raises(AttributeError, match=re.escape("build_run(config, make_loss=...)")):
            trainer.loss = trainer.loss
        trainer.close()

    def test_a_loss_of_another_model_is_an_error(self, tmp_path):
        other = build_run(small_config(tmp_path, lora_r=4))
        with pytest.raises(ConfigError, match=r"none of LLMReinforceLoss's trainable ones.*lora_A.*models.actor"):
            build_run(
                small_config(tmp_path, lora_r=4),
                make_loss=lambda config, _: make_objective(config, other.models),
            )

    def test_a_function_that_makes_no_loss_is_an_error(self, tmp_path):
        with pytest.raises(
            ConfigError, match=r"make_loss\(config, models\) returned a NoneType; expected a TurnPolicyLoss"
        ):
            build_run(small_config(tmp_path), make_loss=lambda config, models: None)

    def test_a_parameter_that_nothing_steps_is_an_error(self, tmp_path):
        class Learned(CountedLoss):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                self.temperature = torch.nn.Parameter(torch.ones(()))

        with pytest.raises(ConfigError, match=r"leaves out 1 that are \(temperature\)"):
            build_run(small_config(tmp_path), make_loss=lambda _, models: Learned(models.actor, kl_coeff=0.0))

    def test_accelerate_must_not_divide_the_gradient(self, tmp_path, monkeypatch):
        monkeypatch.setattr(GradientState, "_shared_state", {})
        run = build_run(small_config(tmp_path))
        parts = {
            name: getattr(run.trainer, name) for name in ("collector", "replay_buffer", "policy", "loss", "config")
        }
        optimizer, rows = torch.optim.AdamW(run.models.actor_parameters()), prepared(run.trainer)
        given = Accelerator(cpu=True, gradient_accumulation_steps=2)
        with pytest.raises(ConfigError, match="gradient_accumulation_steps=2"):
            LLMTrainer(**parts, optimizer=optimizer, accelerator=given)
        # accelerate keeps one number for a process: any later Accelerator changes it.
        with pytest.raises(ConfigError, match="gradient_accumulation_steps=2"):
            run.trainer.update(rows)
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
        for make in (lambda: LLMTrainer(**parts, optimizer=optimizer), lambda: build_run(small_config(tmp_path))):
            with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=4.*by 4\. Leave it at 1"):
                make()
        run.close()

    def test_settings_are_those_of_one_algorithm(self, tmp_path):
        with pytest.raises(
            ConfigError, match=r"algo='GRPO' are those of LLMGRPOLoss, which CountedLoss is no subclass"
        ):
            small_config(tmp_path, "GRPO").loss_options(CountedLoss)

    def test_an_estimator_that_does_not_go_with_the_settings_is_an_error_later_too(self, tmp_path):
        run = build_run(small_config(tmp_path, "LLMPPO", clipping="none", old_log_probs="sampler"))
        run.trainer.loss.make_value_estimator(TurnVTrace)
        with pytest.raises(ConfigError, match="leaves no gap"):
            run.trainer.train()
        run.close()

    def test_the_estimator_may_be_chosen_later(self, tmp_path):
        run = build_run(small_config(tmp_path, max_iterations=1))
        run.trainer.loss.make_value_estimator(Zero)
        before = weights(run)
        run.trainer.train()
        assert torch.equal(weights(run), before)


class Zero(TurnEstimator):
    """No credit for anybody."""

    def estimate(self, tensordict):
        nothing = torch.zeros_like(tensordict[keys.TURN_REWARD])
        return {"turn_advantage": nothing, "turn_value_target": nothing}


class TestUpdate:
    @pytest.mark.parametrize("algo", ALGORITHMS)
    def test_micro_batches_do_not_change_the_weights(self, tmp_path, exact_norms, algo):
        """Float64, two epochs of two optimizer steps: the same weights for one pass of all rows and for one row a pass."""
        results = []
        for max_tokens in (10**6, 1):
            config = small_config(tmp_path, algo, epochs=2, minibatch_size=4, max_tokens=max_tokens, kl_coeff=0.01)
            run = build_run(config)
            rows = one_batch(run)
            for module in (run.models.actor, run.models.reference, run.models.critic):
                if module is not None:
                    module.double()
            run.trainer.learn(rows)
            results.append(weights(run))
        moved = (results[0] - weights(build_run(config)).double()).norm()
        assert moved > 1e-4
        assert (results[0] - results[1]).norm() / moved < 1e-9

    @pytest.mark.parametrize(
        ("before", "after", "factor"),
        [
            (0, 50, 0.5),
            (50, 100, 1.0),
            (90, 140, 1.0),
            (100, 150, 1.0),
            (550, 600, 0.55),
            (999, 1049, 0.1000),
            (1000, 1050, 0.1),
        ],
    )
    def test_learning_rates_follow_the_schedule(self, tmp_path, before, after, factor):
        config = small_config(tmp_path, max_steps=1000, warmup_fraction=0.1, min_lr_fraction=0.1)
        assert lr_factor(config, before, after) == pytest.approx(factor, abs=1e-5)

    @pytest.mark.parametrize(
        "settings", [{}, {"warmup_fraction": 0.5}, {"warmup_fraction": 1.0}, {"schedule": "constant"}]
    )
    @pytest.mark.parametrize("max_steps", [1, 60])
    def test_no_update_has_a_learning_rate_of_0(self, tmp_path, settings, max_steps):
        config = small_config(tmp_path, "LLMPPO", lr_actor=1e-3, lr_critic=4e-3, max_steps=max_steps, **settings)
        run = build_run(config)
        seen, before = [], weights(run)

        class Watch(Callback):
            def on_iteration(self, trainer, metrics):
                seen.append(weights(run))

        run.trainer.callbacks = (Watch(),)
        history = run.trainer.train()
        assert (len(history) == 1) == (max_steps == 1)
        assert all(metrics["optim/lr_actor"] > 1e-5 for metrics in history)
        assert all(metrics["optim/lr_critic"] == 4 * metrics["optim/lr_actor"] for metrics in history)
        for old, new in zip([before, *seen], seen, strict=False):
            assert (old - new).abs().max() > 1e-6

    @pytest.mark.parametrize("limit", [1e-3, 1e3])
    def test_gradient_is_clipped_at_max_grad_norm(self, tmp_path, limit):
        trainer = build_run(small_config(tmp_path, max_grad_norm=limit)).trainer
        norms = []
        step = trainer.optimizer.step
        group = trainer.optimizer.param_groups[0]["params"]

        def spy(*args, **kwargs):
            norms.append(torch.stack([p.grad.norm() for p in group if p.grad is not None]).norm().item())
            return step(*args, **kwargs)

        trainer.optimizer.step = spy
        figures = trainer.update(prepared(trainer))
        raw = figures["optim/grad_norm_actor"]
        assert 1e-3 < raw < 1e3
        assert norms[0] == pytest.approx(min(limit, raw), rel=1e-4)

    @pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
    def test_the_entropy_target_falls_in_a_straight_line(self, tmp_path, monkeypatch, fraction):
        """Also if the trainer gets a new optimizer in the middle, and in a second run with the same loss."""
        settings = {"entropy_coeff": 0.1, "entropy_target": 0.4, "min_entropy_fraction": fraction, "max_steps": 80}
        run, used = build_run(small_config(tmp_path, **settings)), []
        trainer, update = run.trainer, run.trainer.update

        def recorded(batch):
            used.append(trainer.loss.entropy_bound)
            if len(used) == 2:
                trainer.replace_optimizer(make_optimizer(run.config, run.models))
            return update(batch)

        monkeypatch.setattr(trainer, "update", recorded)
        trainer.train()
        done = torch.tensor([0.0] + [metrics["rollout/steps"] / 80 for metrics in trainer.history[:-1]])
        expected = 0.4 * torch.lerp(torch.ones_like(done), torch.full_like(done, fraction), done)
        assert len(used) > 3
        assert used == pytest.approx(expected.tolist())
        assert used == [metrics["optim/entropy_target"] for metrics in trainer.history]
        assert trainer.loss.entropy_target == 0.4

    @pytest.mark.parametrize("kl_in", ["loss", "reward"])
    @pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
    def test_the_weight_of_the_kl_falls_in_a_straight_line(self, tmp_path, monkeypatch, fraction, kl_in):
        """In the loss and in the reward, also where the loss gets a new estimator in the middle."""
        settings = {"kl_coeff": 0.2, "kl_in": kl_in, "kl_decay_fraction": fraction, "max_steps": 80}
        run, used = build_run(small_config(tmp_path, **settings)), []
        trainer, update = run.trainer, run.trainer.update

        def recorded(batch):
            used.append((trainer.loss.kl_weight, trainer.loss.value_estimator.kl_fraction * 0.2))
            if len(used) == 2:
                trainer.loss.make_value_estimator()
            return update(batch)

        monkeypatch.setattr(trainer, "update", recorded)
        trainer.train()
        done = torch.tensor([0.0] + [metrics["rollout/steps"] / 80 for metrics in trainer.history[:-1]])
        expected = 0.2 * (1 - done / fraction).clamp_min(0) if fraction else torch.full_like(done, 0.2)
        assert len(used) > 3
        for weights in zip(*used, strict=True):
            assert weights == pytest.approx(expected.tolist())
        if fraction:
            assert [metrics["optim/kl_coeff"] for metrics in trainer.history] == [weight for weight, _ in used]
        assert trainer.loss.kl_coeff == 0.2

    def test_truncating_sampler_is_scored_anew(self, tmp_path):
        run = build_run(small_config(tmp_path, top_p=0.8))
        rows = one_batch(run)
        run.trainer.score(rows)
        gap = (rows[keys.OLD_LOG_PROB] - rows[keys.SAMPLE_LOG_PROB])[rows[keys.TURN_IDS] >= 0]
        assert gap.max() <= 1e-5
        assert gap.min() < -0.01

    def test_lora_reference_is_the_base(self, tmp_path):
        run = build_run(small_config(tmp_path, lora_r=4, kl_coeff=0.1))
        before = {name: p.clone() for name, p in run.models.model.named_parameters() if not p.requires_grad}
        rows = one_batch(run)
        for _ in range(3):
            run.trainer.learn(rows.clone())
        with torch.no_grad(), use_adapter(run.models.model, None):
            run.trainer.score(rows)
        first = run.models.reference(rows.clone())[keys.LOG_PROB]
        assert torch.equal(first, rows[keys.REF_LOG_PROB])
        assert all(torch.equal(p, before[name]) for name, p in run.models.model.named_parameters() if name in before)


class TestOptions:
    """What each setting of the algorithm and of the data does: without it, a test here fails."""

    def test_options_of_two_parts(self, tmp_path):
        loss = make_objective(
            small_config(tmp_path, "GRPO", baseline="leave_one_out", scale="none", clip_epsilon=[1.0, 0.3],
                         weighting="constant", weight_constant=64.0, sampler_correction="mask",
                         sampler_bounds=[0.5, 5.0], sampler_level="turn", sampler_reduction="mean"),
            ModelStub,
        )  # fmt: skip
        assert loss.value_estimator.options["baseline"] == "leave_one_out"
        assert (loss.clip_low, loss.clip_high, loss.weighting, loss.weight_constant) == (1.0, 0.3, "constant", 64.0)
        assert (loss.sampler_correction, loss.sampler_bounds) == ("mask", (0.5, 5.0))
        assert (loss.sampler_level, loss.sampler_reduction) == ("turn", "mean")
        assert make_objective(small_config(tmp_path, "LLMPPO", clip_value=0.0), ModelStub).clip_value is None

    def test_every_field_of_the_algorithm_is_handed_on(self):
        """Every option of every loss is a setting that ``make_objective`` hands on."""
        names = {name for algo in LOSSES for name in loss_settings(algo)}
        assert names <= {field.name for field in fields(RunConfig)}
        assert {"gamma", "clip_epsilon", "lmbda", "normalize_over", "credit"} <= names

    @pytest.mark.parametrize(("choice", "top_p", "scored"), [("sampler", 0.8, False), ("scorer", 1.0, True)])
    def test_old_log_probs(self, tmp_path, choice, top_p, scored):
        run = build_run(small_config(tmp_path, old_log_probs=choice, top_p=top_p, max_iterations=1))
        rows = one_batch(run)
        run.trainer.score(rows)
        assert (keys.OLD_LOG_PROB in rows) == scored
        (metrics,) = run.trainer.train()
        assert (metrics["policy/log_prob_gap"] > 1e-3) == (top_p < 1)
        assert (metrics["policy/log_ratio"] > 1e-3) == (choice == "sampler")

    def test_a_correction_needs_a_gap(self, tmp_path):
        config = small_config(tmp_path, old_log_probs="sampler", sampler_correction="truncate", sampler_bounds=2.0)
        with pytest.raises(ConfigError, match="no gap"):
            build_run(config)

    def test_v_trace_has_the_old_log_probs_scored(self, tmp_path):
        run = build_run(small_config(tmp_path, "LLMPPO", clipping="none", max_iterations=1))
        run.trainer.loss.make_value_estimator(TurnVTrace)
        assert run.trainer.logprobs_match_trainer
        (metrics,) = run.trainer.train()
        assert math.isfinite(metrics["loss/critic"])
        assert run.trainer.scorer.scores_old

    @pytest.mark.parametrize("trunk", ["separate", "shared"])
    @pytest.mark.parametrize("lora_r", [0, 4])
    def test_critic_warmup_moves_the_critic_and_nothing_else(self, tmp_path, trunk, lora_r):
        settings = {"critic_trunk": trunk, "lora_r": lora_r, "weight_decay": 0.1, "lr_actor": 1e-3, "epochs": 2}
        run = build_run(small_config(tmp_path, "LLMPPO", critic_warmup=2, max_iterations=3, **settings))
        rows, seen = one_batch(run), []

        def present():
            with torch.no_grad():
                log_prob = run.models.actor(rows.clone())[keys.LOG_PROB]
            return [log_prob, *(torch.cat([p.detach().flatten() for p in part]) for part in parts)]

        parts = (run.models.actor_parameters(), run.models.critic_parameters())

        class Watch(Callback):
            def on_iteration(self, trainer, metrics):
                seen.append(present())
                stepped = [bool(trainer.optimizer.state.get(p)) for p in parts[0]]
                assert any(stepped) == (trainer.iteration > 2)

        before = present()
        run.trainer.callbacks = (Watch(),)
        run.trainer.train()
        for log_prob, actor, _ in seen[:2]:
            assert torch.equal(log_prob, before[0])
            assert torch.equal(actor, before[1])
        assert not torch.equal(seen[0][2], before[2])
        assert not torch.equal(seen[1][2], seen[0][2])
        assert not torch.equal(seen[2][1], before[1])
        assert not torch.equal(seen[2][0], before[0])

    def test_critic_warmup_needs_a_group_of_the_critics_own(self, tmp_path):
        run = build_run(small_config(tmp_path, "LLMPPO", critic_warmup=1))
        parts = {
            name: getattr(run.trainer, name) for name in ("collector", "replay_buffer", "policy", "loss", "config")
        }
        together = torch.optim.AdamW([*run.models.actor_parameters(), *run.models.critic_parameters()])
        with pytest.raises(ConfigError, match="a group of their own"):
            LLMTrainer(**parts, optimizer=together)

    SWAPPED = ((1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0))
    EQUAL = ((1.0, 0.0),) * 4

    @pytest.mark.parametrize(
        ("algo", "settings", "rewards", "kept"),
        [
            ("GRPO", {}, SWAPPED, []),
            ("GRPO", {"credit": "turn"}, SWAPPED, [0]),
            ("GRPO", {"gamma": 0.9}, SWAPPED, [0]),
            ("GRPO", {"credit": "turn", "gamma": 0.9, "scale": "none", "baseline": "leave_one_out"}, SWAPPED, [0]),
            ("GRPO", {"overlong_penalty": 0.5, "overlong_buffer": 1}, EQUAL, [1]),
            ("GRPO", {"kl_in": "reward", "kl_coeff": 0.5}, EQUAL, [0, 1]),
            ("LLMREINFORCE", {}, SWAPPED, [0, 1]),
            ("LLMREINFORCE", {"normalize_over": "none"}, ((0.0, 0.0), (0.0, 0.0), (1.0, 0.0), (1.0, 0.0)), [1]),
            ("LLMREINFORCE", {}, ((0.0, 0.0),) * 4, []),
            ("LLMPPO", {}, EQUAL, [0, 1]),
            ("LLMPPO", {"gamma": 1.0, "lmbda": 1.0}, ((0.0, 0.0),) * 4, []),
        ],
    )
    def test_the_estimator_says_which_groups_teach(self, tmp_path, algo, settings, rewards, kept):
        shared = {"group_size": 2, "num_envs": 4, "batch_size": 4, "dynamic_sampling": 2}
        run = build_run(small_config(tmp_path, algo, **shared | settings), env=TwoTurns)
        trainer, rows = run.trainer, one_batch(run)
        if trainer.reference is not None:
            with torch.no_grad():
                run.models.actor_parameters()[-1].add_(0.1 * torch.arange(64) / 64)
        rows[keys.TURN_REWARD] = torch.tensor(rewards)
        for number, count in enumerate((3, 3, 3, 16)):  # one response alone is overlong
            rows[keys.TURN_IDS][number] = -1
            rows[keys.TURN_IDS][number, 1 : 1 + count] = 0
            rows[keys.TURN_IDS][number, 20:22] = 1
        before = rows.clone()
        chosen = trainer.choose(rows)
        assert chosen[keys.GROUP_ID].unique().tolist() == kept
        assert set(rows.keys(True, True)) == set(before.keys(True, True))
        assert (rows == before).all(), "what was judged is still to be learned from"
        if kept:
            trainer.score(chosen)
            assert (trainer.credit(chosen)[keys.ADVANTAGE] != 0).any()
        run.close()

    def test_a_kl_of_rounding_does_not_teach(self, tmp_path):
        settings = {"kl_in": "reward", "kl_coeff": 0.5, "group_size": 2, "dynamic_sampling": 1}
        run = build_run(small_config(tmp_path, "GRPO", **settings), env=TwoTurns)
        rows = one_batch(run)
        assert len(run.trainer.choose(rows)) == 0
        run.close()

    def test_dynamic_sampling(self, tmp_path):
        settings = {"group_size": 2, "max_iterations": 1, "dynamic_sampling": 4}
        run = build_run(small_config(tmp_path, "GRPO", **settings))
        learned = []
        learn = run.trainer.learn
        run.trainer.learn = lambda batch: (learned.append(batch.clone()), learn(batch))[1]
        (metrics,) = run.trainer.train()
        (batch,) = learned
        assert batch.shape[0] == 8
        assert bool(nonzero_variance(run.trainer.scorer.estimator(batch)).all())
        assert (batch[keys.GROUP_ID].unique(return_counts=True)[1] == 2).all()
        played = metrics["rollout/episodes"]
        assert played in (16, 24, 32)
        assert run.trainer.episodes == played
        assert metrics["data/frac_nonzero_variance"] == 8 / played
        once = build_run(small_config(tmp_path, "GRPO", **settings | {"dynamic_sampling": 1}))
        (metrics,) = once.trainer.train()
        assert metrics["rollout/episodes"] == 8
        assert metrics["data/frac_nonzero_variance"] < 1

    def test_nothing_is_learned_where_nothing_differs(self, tmp_path):
        config = small_config(tmp_path, "GRPO", dynamic_sampling=2, max_iterations=2, weight_decay=0.1)
        run = build_run(config, env=Echo)
        before = weights(run)
        history = run.trainer.train()
        assert [metrics["rollout/episodes"] for metrics in history] == [16, 32]
        assert [metrics["data/frac_nonzero_variance"] for metrics in history] == [0, 0]
        assert torch.equal(weights(run), before)
        assert run.policy.policy_version == 0

    def test_overlong_conversations_are_left_out_of_the_update(self, tmp_path):
        run = build_run(small_config(tmp_path, overlong_filter=True, batch_size=32, max_output_tokens=5))
        rows = one_batch(run)
        kept = ~overlong(rows, 5)
        assert 0 < kept.sum() < 32
        updated = []
        update = run.trainer.update
        run.trainer.update = lambda batch: (updated.append(batch.clone()), update(batch))[1]
        run.trainer.learn(rows.clone())
        assert torch.equal(updated[0][keys.EPISODE_ID], rows[keys.EPISODE_ID][kept])
        # Credit was given before: the statistics cover them all.
        credited = run.trainer.loss.value_estimator(rows.clone())
        assert torch.equal(updated[0][keys.ADVANTAGE], credited[keys.ADVANTAGE][kept])
        version = run.policy.policy_version
        run.trainer.learn(rows[~kept].clone())
        assert (len(updated), run.policy.policy_version) == (1, version)

    def test_overlong_penalty(self, tmp_path):
        plain, paid = (
            build_run(small_config(tmp_path, overlong_penalty=coeff, overlong_buffer=4 if coeff else None))
            for coeff in (0.0, 0.5)
        )
        rows = one_batch(plain)
        expected = penalize_overlong(rows.clone(), 0.5, max_response_length=16, buffer=4)
        (reward, shaped) = (x[keys.TURN_REWARD].clone() for x in (rows, expected))
        paid.trainer.learn(rows)
        assert torch.equal(rows[keys.TURN_REWARD], shaped)
        rows[keys.TURN_IDS] = torch.where(rows[keys.TURN_IDS] >= 0, 0, -1)
        assert (penalize_overlong(rows, 0.5, max_response_length=16, buffer=4)[keys.TURN_REWARD] < reward).any()


def prepared(trainer):
    """A scored and credited batch."""
    next(iter(trainer.collector))
    rows = trainer.replay_buffer[:].contiguous()
    trainer.score(rows)
    trainer.loss.value_estimator(rows)
    return rows


def test_the_loop_reads_as_one_process_with_parts_of_one_kind():
    """What several processes, Ray or other collectors need is behind :class:`Distributed` and :class:`StockCollector`."""
    source = Path(inspect.getfile(LLMTrainer)).read_text()
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"isinstance", "getattr", "hasattr"}
    assert not re.search(r"\b(ray|ranks?|world_size)\b", source, re.IGNORECASE)
    assert len(source.splitlines()) <= 350


class TestLimits:
    def test_max_steps(self, tmp_path):
        trainer = build_run(small_config(tmp_path, max_steps=20)).trainer
        trainer.train()
        assert trainer.steps >= 20
        assert trainer.history[-1]["rollout/steps"] == trainer.steps
        assert all(metrics["rollout/steps"] < 20 for metrics in trainer.history[:-1])
        assert "max_steps=20" in trainer.stop_reason

    def test_the_collectors_own_limit(self, tmp_path):
        trainer = build_run(small_config(tmp_path)).trainer
        trainer.collector.total_batches = 2
        assert len(trainer.train()) == 2
        assert "its own limit" in trainer.stop_reason

    def test_max_seconds(self, tmp_path):
        trainer = build_run(small_config(tmp_path, max_seconds=1e-3)).trainer
        trainer.train()
        assert trainer.iteration == 1
        assert "max_seconds" in trainer.stop_reason

    def test_stop_at_success(self, tmp_path):
        config = small_config(tmp_path, stop_at_success=0.01, evaluation_interval=2, evaluation_episodes=32)
        trainer = build_run(config).trainer
        trainer.train()
        assert trainer.iteration == 2
        assert "stop_at_success=0.01" in trainer.stop_reason

    def test_a_callback_may_stop_the_run_and_always_sees_its_end(self, tmp_path):
        seen = []

        class Stop(Callback):
            def on_start(self, trainer):
                seen.append("start")

            def on_iteration(self, trainer, metrics):
                trainer.stop_reason = "enough"

            def on_end(self, trainer):
                seen.append("end")

        trainer = build_run(small_config(tmp_path), callbacks=[Stop()]).trainer
        trainer.train()
        assert (trainer.iteration, seen) == (1, ["start", "end"])

        class Fail(Stop):
            def on_iteration(self, trainer, metrics):
                raise RuntimeError("boom")

        trainer = build_run(small_config(tmp_path), callbacks=[Fail()]).trainer
        with pytest.raises(RuntimeError, match="boom"):
            trainer.train()
        assert seen[-1] == "end"
        assert trainer.collector.closed


class TestReproducibility:
    def test_the_seed_fixes_the_run(self, tmp_path):
        def play(seed, disturb):
            run = build_run(small_config(tmp_path, "GRPO", seed=seed, max_iterations=2))
            if disturb:
                torch.manual_seed(99)
            run.trainer.train()
            return weights(run), [m["rollout/reward"] for m in run.trainer.history]

        first, rewards = play(3, False)
        second, same = play(3, True)
        other, _ = play(4, False)
        assert torch.equal(first, second)
        assert rewards == same
        assert not torch.equal(first, other)

    def test_no_global_generator_is_touched(self, tmp_path):
        import random

        import numpy as np

        state = (torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
        build_run(small_config(tmp_path, max_iterations=1, lora_r=4)).trainer.train()
        assert torch.equal(state[0], torch.random.get_rng_state())
        assert state[1] == random.getstate()
        assert (state[2] == np.random.get_state()[1]).all()


class TestMemoryAndPrecision:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate would choose the GPU that is asked for")
    def test_a_device_that_is_not_there_is_an_error(self, tmp_path):
        with pytest.raises(ConfigError, match="accelerate chose 'cpu'"):
            build_run(small_config(tmp_path, device="cuda"))

    def test_gradient_checkpointing_changes_no_weight(self, tmp_path):
        results = []
        for gradient_checkpointing in (False, True):
            config = small_config(tmp_path, "LLMPPO", lora_r=4, gradient_checkpointing=gradient_checkpointing)
            run = build_run(config)
            run.trainer.learn(one_batch(run))
            results.append(weights(run))
        assert torch.allclose(*results, atol=1e-7)

    def test_bfloat16_autocast(self, tmp_path, monkeypatch):
        # accelerate keeps one precision for a process; the test borrows a state of its own.
        monkeypatch.setattr(AcceleratorState, "_shared_state", {})
        run = build_run(small_config(tmp_path, mixed_precision="bf16", max_iterations=1))
        (metrics,) = run.trainer.train()
        # Sampled in float32, scored in bfloat16: a gap, but no ratio before the first step. Weights stay float32.
        assert 1e-5 < metrics["policy/log_prob_gap"] < 0.1
        assert metrics["policy/log_ratio"] < 1e-6
        assert {p.dtype for p in run.models.actor_parameters()} == {torch.float32}

    def test_bfloat16_base_with_float32_adapters(self, tmp_path):
        run = build_run(small_config(tmp_path, "LLMPPO", dtype="bfloat16", lora_r=4, max_iterations=2))
        history = run.trainer.train()
        trained = run.models.actor_parameters() + run.models.critic_parameters()
        assert {p.dtype for p in trained} == {torch.float32}
        assert {p.dtype for p in run.models.model.parameters() if not p.requires_grad} == {torch.bfloat16}
        assert math.isfinite(history[-1]["loss/objective"])


@pytest.fixture
def half_model(tmp_path, monkeypatch):
    """A folder with the tiny model in bfloat16, as most checkpoints are."""
    # accelerate keeps one precision for a process; the test borrows a state of its own.
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    load_tiny_model().bfloat16().save_pretrained(tmp_path / "half")
    load_tiny_tokenizer().save_pretrained(tmp_path / "half")
    return str(tmp_path / "half")


class TestMasterWeights:
    """AdamW's steps are below what bfloat16 can hold: where all weights train, they are kept in float32."""

    @pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
    def test_every_weight_moves_at_the_default_rate(self, half_model, tmp_path, dtype, caplog):
        # In the first of two epochs the critic's head is zero, and its trunk has no gradient.
        config = small_config(
            tmp_path, "LLMPPO", model_path=half_model, dtype=dtype, max_iterations=1, epochs=2, kl_coeff=0.1
        )
        assert config.lr_actor == 5e-6
        run = build_run(config)
        # The critic's embedding has a gradient for tokens that occur.
        trained = [*run.models.actor_parameters(), *run.models.critic_parameters()[1:]]
        before = torch.cat([p.detach().flatten() for p in trained])
        (metrics,) = run.trainer.train()
        assert (torch.cat([p.flatten() for p in trained]) != before).float().mean() > 0.99
        assert math.isfinite(metrics["loss/objective"])
        # They still compute in the checkpoint's precision, and are scored before the update.
        assert run.trainer.accelerator.mixed_precision == "bf16"
        assert "kept in float32 and not in bfloat16" in caplog.text
        assert {p.dtype for p in run.models.reference.model.parameters()} == {torch.float32}

    def test_the_gain_is_that_of_a_float32_checkpoint(self, half_model, tmp_path):
        """The same update on the same rows from the same values: what is rounded away would be missing."""
        gains, rows = [], None
        for dtype in ("bfloat16", "float32"):
            run = build_run(small_config(tmp_path, model_path=half_model, dtype=dtype, mixed_precision="no"))
            rows = one_batch(run) if rows is None else rows
            before = run.models.actor(rows.clone())[keys.LOG_PROB].sum().item()
            rows[keys.TURN_REWARD] = torch.arange(8.0).view(-1, 1).expand_as(rows[keys.TURN_REWARD]).contiguous()
            run.trainer.learn(rows.clone())
            gains.append(run.models.actor(rows.clone())[keys.LOG_PROB].sum().item() - before)
        assert gains[0] == pytest.approx(gains[1], rel=1e-4) != 0.0

    def test_checkpoint_and_export_are_float32_and_load(self, half_model, tmp_path):
        run = build_run(small_config(tmp_path, "LLMPPO", model_path=half_model, max_iterations=1))
        run.trainer.train()
        run.models.export_merged(tmp_path / "merged", run.tokenizer)
        saved = run.save_checkpoint(tmp_path / "saved")
        own = run.models.model.state_dict()
        for folder in (tmp_path / "merged", saved / "actor"):
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            assert loaded.dtype == torch.float32
            assert all(own[name].equal(value) for name, value in loaded.state_dict().items())
        again = build_run(small_config(tmp_path / "again", "LLMPPO", model_path=half_model))
        again.load_checkpoint(saved)
        assert weights(again).equal(weights(run))

    def test_adapters_leave_the_base_as_it_is(self, half_model, tmp_path):
        run = build_run(small_config(tmp_path, model_path=half_model, dtype="auto", lora_r=2))
        assert {p.dtype for p in run.models.base_parameters()} == {torch.bfloat16}
        assert run.trainer.accelerator.mixed_precision == "no"

    def test_what_only_plays_stays_as_it_is(self, half_model, tmp_path):
        """Such as a worker on Ray: the dtype of an engine is that of the checkpoint or the settings."""
        config = small_config(tmp_path, model_path=half_model, dtype="auto")
        assert _worker_policy(config, load_tiny_tokenizer(), config.sampling(), None).dtype == torch.bfloat16

    def test_a_loop_of_ones_own_is_told(self, half_model, tmp_path, caplog):
        run = build_run(small_config(tmp_path, model_path=half_model))
        parts = {name: getattr(run.trainer, name) for name in ("collector", "replay_buffer", "policy", "loss")}
        run.models.model.bfloat16()
        optimizer = torch.optim.AdamW(run.models.actor_parameters())
        LLMTrainer(**parts, optimizer=optimizer, config=run.config, accelerator=run.trainer.accelerator)
        assert "AdamW steps torch.bfloat16 weights without a float32 copy" in caplog.text
