"""Settings of the trainer have their effect, and limits end a run where they say."""

import math

import pytest
import torch
from small_runs import ModelStub, TwoTurns, one_batch, small_config, weights

from torchrl_llm import keys
from torchrl_llm.collectors.stock import StockCollector
from torchrl_llm.data import nonzero_variance, overlong, penalize_overlong
from torchrl_llm.objectives import GroupRelative, TurnVTrace
from torchrl_llm.runs import ConfigError, LossSettings, RunSettings, build_run, make_objective
from torchrl_llm.testing.environments import Echo
from torchrl_llm.trainers import Callback, LLMTrainer
from torchrl_llm.utils.options import options_of
from torchrl_llm.utils.sections import sections_of


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
        assert make_objective(small_config(tmp_path, "LLMPPO", clip_value=None), ModelStub).clip_value is None

    def test_every_field_of_the_algorithm_is_handed_on(self):
        """All options of a loss and its estimator are settings, but those that a run decides."""
        decided = {"actor", "critic", "joint", "estimator", "value_network", "single_turn", "partial", "process_group"}
        decided |= {"group_size", "value_chunk_size", "ddof", "eps"}
        for kind in sections_of(RunSettings)["loss"]:
            parts = options_of(kind.stock).keys() | options_of(kind.stock.default_value_estimator).keys()
            inherited = {"kl_coeff", "discounted_objective", "clip_advantage"} if kind.__name__ == "SFT" else set()
            assert parts - decided - inherited == options_of(kind).keys() - options_of(LossSettings).keys()

    @pytest.mark.parametrize(("choice", "top_p", "scored"), [("sampler", 0.8, False), ("scorer", 1.0, True)])
    def test_old_log_probs(self, tmp_path, choice, top_p, scored):
        run = build_run(small_config(tmp_path, old_log_probs=choice, top_p=top_p, max_iterations=1))
        rows = one_batch(run)
        run.trainer.scorer.score(rows)
        assert (keys.OLD_LOG_PROB in rows) == scored
        (metrics,) = run.trainer.train()
        assert (metrics["policy/log_prob_gap"] > 1e-3) == (top_p < 1)
        assert (metrics["policy/log_ratio"] > 1e-3) == (choice == "sampler")

    def test_a_correction_needs_a_gap(self, tmp_path):
        """Said before models are loaded."""
        with pytest.raises(ConfigError, match="no gap"):
            small_config(tmp_path, old_log_probs="sampler", sampler_correction="truncate", sampler_bounds=2.0)
        with pytest.raises(ConfigError, match="no gap"):
            small_config(tmp_path, "LLMPPO", old_log_probs="sampler", estimator="TurnVTrace", clipping="none")

    def test_a_share_of_the_entropy_target_needs_one(self, tmp_path):
        with pytest.raises(ConfigError, match=r"min_entropy_fraction=0\.5 does nothing with entropy_target=None"):
            small_config(tmp_path, min_entropy_fraction=0.5)

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

    @pytest.mark.parametrize(
        ("algo", "number", "expected"),
        [
            ("LLMPPO", 3, "has 3 groups of parameters; expected one for the actor and one for the critic:"),
            ("LLMREINFORCE", 2, "has 2 groups of parameters; expected one for the actor:"),
        ],
    )
    def test_each_network_has_one_group_of_parameters(self, tmp_path, algo, number, expected):
        """A further group would be stepped without clipping, and out of target_kl's sight."""
        run = build_run(small_config(tmp_path, algo))
        parts = {
            name: getattr(run.trainer, name) for name in ("collector", "replay_buffer", "policy", "loss", "config")
        }
        parameters = [*run.models.actor_parameters(), *run.models.critic_parameters()]
        cut = torch.optim.AdamW([{"params": parameters[start::number]} for start in range(number)])
        with pytest.raises(ConfigError, match=expected):
            LLMTrainer(**parts, optimizer=cut)
        run.close()

    SWAPPED = ((1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0))
    EQUAL = ((1.0, 0.0),) * 4

    @pytest.mark.parametrize(
        ("algo", "settings", "rewards", "kept"),
        [
            ("GRPO", {}, SWAPPED, []),
            ("GRPO", {"credit": "turn"}, SWAPPED, [0]),
            ("GRPO", {"gamma": 0.9}, SWAPPED, [0]),
            ("GRPO", {"credit": "turn", "gamma": 0.9, "scale": "none", "baseline": "leave_one_out"}, SWAPPED, [0]),
            ("GRPO", {"overlong_penalty": 0.5, "overlong_buffer": 1}, EQUAL, []),
            ("GRPO", {"overlong_penalty": 0.5, "overlong_buffer": 1}, ((1.0, 0.0), (0.0, 0.0), *EQUAL[2:]), [0]),
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
                last = run.models.actor_parameters()[-1]
                last.add_(0.1 * torch.arange(64, device=last.device) / 64)
        rows[keys.TURN_REWARD] = torch.tensor(rewards)
        for number, count in enumerate((3, 3, 3, 16)):  # one response alone is overlong
            rows[keys.TURN_IDS][number] = -1
            rows[keys.TURN_IDS][number, 1 : 1 + count] = 0
            rows[keys.TURN_IDS][number, 20:22] = 1
        trainer.dynamic_sampling.score(rows)
        before = rows.clone()
        chosen = trainer.dynamic_sampling.choose(rows, len(rows))
        assert chosen[keys.GROUP_ID].unique().tolist() == kept
        assert set(rows.keys(True, True)) == set(before.keys(True, True))
        assert (rows == before).all(), "what was judged is still to be learned from"
        if kept:
            trainer.scorer.score(chosen)
            assert (trainer.scorer.credit(chosen)[keys.ADVANTAGE] != 0).any()
        run.close()

    def test_a_kl_of_rounding_does_not_teach(self, tmp_path):
        settings = {"kl_in": "reward", "kl_coeff": 0.5, "group_size": 2, "dynamic_sampling": 1}
        run = build_run(small_config(tmp_path, "GRPO", **settings), env=TwoTurns)
        rows = one_batch(run)
        run.trainer.dynamic_sampling.score(rows)
        assert len(run.trainer.dynamic_sampling.choose(rows, len(rows))) == 0
        run.close()

    def test_dynamic_sampling(self, tmp_path):
        settings = {"group_size": 2, "max_iterations": 1, "dynamic_sampling": 4}
        run = build_run(small_config(tmp_path, "GRPO", **settings))
        learned = []
        learn = run.trainer.learn
        run.trainer.learn = lambda batch, **options: (learned.append(batch.clone()), learn(batch, **options))[1]
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

    @pytest.mark.parametrize(
        ("algo", "settings", "env", "rounds"),
        [("LLMPPO", {}, None, 1), ("GRPO", {"kl_in": "reward", "kl_coeff": 0.5}, TwoTurns, 3)],
    )
    def test_dynamic_sampling_scores_an_episode_once(self, tmp_path, algo, settings, env, rounds):
        shared = {"group_size": 2, "max_iterations": 1, "dynamic_sampling": 3}
        run = build_run(small_config(tmp_path, algo, **shared | settings), env=env)
        scorer, scored = run.trainer.scorer, []
        score = scorer.score
        scorer.score = lambda rows: (scored.extend(rows[keys.EPISODE_ID].tolist()), score(rows))[1]
        (metrics,) = run.trainer.train()
        assert metrics["rollout/episodes"] == 8 * rounds
        assert sorted(scored) == sorted({*scored})
        assert len(scored) == 8 * rounds

    def test_dynamic_sampling_learns_from_what_it_would_have_scored_again(self, tmp_path):
        """The scores that episodes were chosen by are used in the update."""
        updated = []
        for again in (False, True):
            settings = {"group_size": 2, "max_iterations": 1, "dynamic_sampling": 2, "dtype": "float64"}
            run = build_run(small_config(tmp_path / str(again), "LLMPPO", **settings))
            learn = run.trainer.learn
            run.trainer.learn = lambda rows, scored, again=again, learn=learn: learn(rows, scored=scored and not again)
            run.trainer.train()
            updated.append(weights(run))
        torch.testing.assert_close(*updated, rtol=0, atol=1e-12)

    def test_dynamic_sampling_fills_one_batch_of_a_stock_collector(self, tmp_path):
        run = build_run(small_config(tmp_path, "LLMREINFORCE", max_iterations=1, dynamic_sampling=2, group_size=2))
        trainer, learned = run.trainer, []
        trainer.rollouts = StockCollector()
        found, learn = trainer.dynamic_sampling.found, trainer.learn
        # Two batches in which every group gets credit, of which the first is not enough.
        trainer.dynamic_sampling.found = lambda rows: min(found(rows), 7)
        trainer.learn = lambda rows, **options: (learned.append(len(rows)), learn(rows, **options))[1]
        (metrics,) = trainer.train()
        assert (metrics["rollout/episodes"], learned) == (16, [8])

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

    def test_an_overlong_penalty_is_refused_by_a_loss_that_takes_no_negative_rewards(self, tmp_path):
        """Also where the loss is made in Python, and the estimator chosen after it."""
        run = build_run(small_config(tmp_path, "GRPO", overlong_penalty=0.5, group_size=4))
        run.trainer.loss.make_value_estimator(GroupRelative, scale="mean")
        with pytest.raises(ConfigError, match='which scale="mean" does not take'):
            run.trainer.train()

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

    def test_a_callback_that_came_during_the_run_sees_its_end(self, tmp_path):
        ended = []

        class Late(Callback):
            def on_end(self, trainer):
                ended.append("late")

        class Adds(Callback):
            def on_iteration(self, trainer, metrics):
                trainer.callbacks = (*trainer.callbacks, Late())

            def on_end(self, trainer):
                ended.append("first")

        trainer = build_run(small_config(tmp_path, max_iterations=1), callbacks=[Adds()]).trainer
        trainer.train()
        assert ended == ["late", "first"]
