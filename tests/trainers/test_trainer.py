"""The training loop: it learns, collectors and environments fit, its parts can be used one by
one."""

import ast
import inspect
import math
import re
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from small_runs import ALGORITHMS, ModelStub, Won, prepared, small_config, weights
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.objectives.value import GAE
from torchrl.record.loggers import CSVLogger

from torchrl_llm import keys
from torchrl_llm.collectors.stock import StockCollector
from torchrl_llm.envs import TaskSampler
from torchrl_llm.metrics import METRICS, wilson_interval
from torchrl_llm.objectives import LLMPPOLoss, LLMReinforceLoss, TurnEstimator, TurnVTrace
from torchrl_llm.runs import ConfigError, build_run, make_objective, verify
from torchrl_llm.runs.checkpoint import NOT_EVALUATED
from torchrl_llm.runs.table import read_metrics
from torchrl_llm.trainers import Callback, LLMTrainer


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

    def test_a_correction_that_leaves_out_every_token_is_told(self, tmp_path, caplog):
        """Under top-p the ratio of a token is the share of the probability that is kept; of a turn
        it is their product."""
        settings = {"top_p": 0.5, "sampler_correction": "mask", "sampler_bounds": (0.8, 1.25)}
        config = small_config(tmp_path, **settings, sampler_level="turn", max_iterations=1)
        (metrics,) = build_run(config).trainer.train()
        assert metrics["policy/sampler_rejected"] > 0.9
        assert metrics["policy/sampler_weight"] < 0.1
        assert f"sampler_correction leaves out {metrics['policy/sampler_rejected']:.0%} of the tokens" in caplog.text

    def test_a_correction_that_is_asked_for_is_kept(self, tmp_path):
        settings = {"sampler_correction": "mask", "sampler_bounds": (0.5, 2.0)}
        config = small_config(tmp_path, collector="async", max_staleness=1, **settings)
        assert make_objective(config, ModelStub()).sampler_correction == "mask"


class Lost(Won):
    won = 0.0


class Coin(Won):
    """Won in one task of two."""

    @property
    def won(self):
        return float(self.seed // 4 % 2)


class TestAdaptiveTasks:
    def test_what_can_be_learned_is_dealt_most(self, tmp_path):
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
    """An environment that hangs costs its episode, in training and in evaluation, whatever the
    collector."""

    @pytest.mark.parametrize("collector", ["turn", "async"])
    def test_the_run_goes_on(self, tmp_path, collector, hang):
        class Hangs(Won):
            thread_safe = True

            def step(self, action):
                if self.seed in bad:
                    hang()
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

    def test_threads_without_a_limit(self, tmp_path):
        run = build_run(small_config(tmp_path, env_threads=2))
        assert (run.trainer.collector.env.num_threads, run.evaluation_env.num_threads) == (2, 2)
        run.close()


class TestLearning:
    @pytest.mark.slow
    def test_ppo_raises_the_win_rate_beyond_its_interval(self, tmp_path):
        """The short version of benchmarks/learning.py."""
        from torchrl_llm.runs import parse_settings

        config = parse_settings(
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
        # Both play the same tasks, so how much the ten tasks differ does not count here: an
        # interval of plain episodes.
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
        (row,) = read_metrics(tmp_path / "run" / "metrics.csv")
        assert row["evaluation/elo"] == 1200.0
        assert verify(run.checkpoints.latest())["metadata"]["evaluation_success"] == NOT_EVALUATED


class TestWhatOthersBring:
    """An evaluator, a logger or a callback that fails ends the run with its error, and costs no
    iteration."""

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
        with pytest.raises(ConfigError, match=r"make_loss\(config, models\) returned a NoneType; expected a TurnLoss"):
            build_run(small_config(tmp_path), make_loss=lambda config, models: None)

    def test_a_parameter_that_nothing_steps_is_an_error(self, tmp_path):
        class Learned(CountedLoss):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                self.temperature = torch.nn.Parameter(torch.ones(()))

        run = build_run(small_config(tmp_path), make_loss=lambda _, models: Learned(models.actor, kl_coeff=0.0))
        names = ("collector", "replay_buffer", "policy", "loss", "config")
        parts = {name: getattr(run.trainer, name) for name in names}
        optimizer = torch.optim.AdamW(run.models.actor_parameters())
        with pytest.raises(ConfigError, match=r"leaves out 1 that are \(temperature\)"):
            LLMTrainer(**parts, optimizer=optimizer)

    @pytest.mark.host  # where accelerate is told to compute
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
            ConfigError, match=r"algo='GRPO' are those of LLMGRPOLoss, which CountedLoss is not a subclass"
        ):
            small_config(tmp_path, "GRPO").loss_options(CountedLoss)

    def test_an_estimator_that_does_not_go_with_the_settings_is_an_error_later_too(self, tmp_path):
        run = build_run(small_config(tmp_path, "LLMPPO", clipping="none", old_log_probs="sampler"))
        run.trainer.loss.make_value_estimator(TurnVTrace)
        with pytest.raises(ConfigError, match="leaves no gap"):
            run.trainer.train()
        run.close()

    def test_the_kl_that_decays_is_one_that_the_loss_sets(self, tmp_path):
        """``kl_fraction`` reaches no estimator of another package, whatever its attributes are
        called."""

        class Foreign(GAE):
            kl_coeff = 1.0

        def make_loss(config, models):
            loss = LLMPPOLoss(models.actor, models.critic, kl_coeff=0.0)
            return loss.make_value_estimator(Foreign(gamma=1.0, lmbda=1.0, value_network=None))

        config = small_config(tmp_path, "LLMPPO", kl_coeff=0.1, kl_decay_fraction=0.5)
        with pytest.raises(ConfigError, match="lowers the loss's kl_coeff, which is 0"):
            build_run(config, make_loss=make_loss)

    def test_a_stock_collector_shows_the_environments_of_a_mixture(self, tmp_path):
        names = [f"game:GuessTheNumber-v0-{level}" for level in ("easy", "hard")]
        run = build_run(small_config(tmp_path, env_name=names))
        env = TransformedEnv(run.trainer.collector.env)
        collector = Collector(env, run.policy, frames_per_batch=8, trust_policy=True)
        assert list(StockCollector.of(collector).env_names) == list(run.trainer.env_names) == names
        collector.shutdown()
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


def test_the_loop_reads_as_one_process_with_parts_of_one_kind():
    """What several processes, Ray or other collectors need is behind :class:`Distributed` and
    :class:`StockCollector`."""
    source = Path(inspect.getfile(LLMTrainer)).read_text()
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"isinstance", "getattr", "hasattr"}
    assert not re.search(r"\b(ray|ranks?|world_size)\b", source, re.IGNORECASE)
