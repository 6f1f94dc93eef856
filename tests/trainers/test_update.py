"""The update: its gradient is the whole batch's, in every precision, and the same when it is
repeated."""

import math

import pytest
import torch
from accelerate.state import AcceleratorState
from small_runs import ALGORITHMS, one_batch, prepared, small_config, weights
from transformers import AutoModelForCausalLM

from torchrl_llm import keys
from torchrl_llm.modules import use_adapter
from torchrl_llm.objectives import GroupRelative
from torchrl_llm.runs import ConfigError, build_run
from torchrl_llm.runs.build import _worker_policy, make_optimizer
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer
from torchrl_llm.trainers import Callback, LLMTrainer
from torchrl_llm.trainers.schedule import lr_factor


class TestUpdate:
    @pytest.mark.parametrize("algo", ALGORITHMS)
    def test_micro_batches_do_not_change_the_weights(self, tmp_path, exact_norms, algo):
        """Float64, two epochs of two optimizer steps: the same weights for one pass of all rows and
        for one row a pass."""
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
        assert lr_factor(config.trainer, before, after) == pytest.approx(factor, abs=1e-5)

    @pytest.mark.parametrize(
        ("before", "share", "factor"),
        [
            (50, 0.3, 1.0),
            (300, 0.3, 1.0),
            (700, 0.3, 1.0),
            (850, 0.3, 0.55),
            (1000, 0.3, 0.1),
            (550, 0.95, 0.55),  # the warm-up ends later
        ],
    )
    def test_the_cosine_falls_at_the_end_of_a_run(self, tmp_path, before, share, factor):
        config = small_config(
            tmp_path, max_steps=1000, warmup_fraction=0.1, min_lr_fraction=0.1, lr_decay_fraction=share
        )
        assert lr_factor(config.trainer, before, before + 50) == pytest.approx(factor, abs=1e-5)

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
        """Also if the trainer gets a new optimizer in the middle, and in a second run with the same
        loss."""
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
    @pytest.mark.parametrize("fraction", [None, 0.5, 1.0])
    def test_the_weight_of_the_kl_falls_in_a_straight_line(self, tmp_path, monkeypatch, fraction, kl_in):
        """In the loss and in its estimator, also if it gets a new estimator in the middle."""
        settings = {"kl_coeff": 0.2, "kl_in": kl_in, "kl_decay_fraction": fraction, "max_steps": 80}
        run, used = build_run(small_config(tmp_path, **settings)), []
        trainer, update = run.trainer, run.trainer.update

        def recorded(batch):
            if len(used) == 2:
                trainer.loss.make_value_estimator()
            used.append((trainer.loss.kl_fraction, trainer.loss.value_estimator.kl_fraction))
            return update(batch)

        monkeypatch.setattr(trainer, "update", recorded)
        trainer.train()
        done = torch.tensor([0.0] + [metrics["rollout/steps"] / 80 for metrics in trainer.history[:-1]])
        expected = (1 - done / fraction).clamp_min(0) if fraction else torch.ones_like(done)
        assert len(used) > 3
        for column in zip(*used, strict=True):
            assert column == pytest.approx(expected.tolist())
        if fraction:
            assert [metrics["optim/kl_fraction"] for metrics in trainer.history] == [share for share, _ in used]
        assert trainer.loss.kl_coeff == 0.2

    @pytest.mark.parametrize("kl_in", ["loss", "reward"])
    def test_the_reference_is_scored_while_its_kl_has_a_weight(self, tmp_path, kl_in):
        settings = {"kl_coeff": 0.2, "kl_in": kl_in, "kl_decay_fraction": 0.5, "max_steps": 80}
        trainer, scored = build_run(small_config(tmp_path, **settings)).trainer, []
        trainer.reference.register_forward_hook(lambda *_: scored.append(trainer.iteration))
        history = trainer.train()
        counts = [i for i, metrics in enumerate(history) if metrics["optim/kl_fraction"] > 0]
        assert 0 < len(counts) < len(history)
        assert sorted({*scored}) == counts
        assert [i for i, metrics in enumerate(history) if "policy/kl_reference" in metrics] == counts

    def test_the_reference_is_scored_for_an_estimator_that_reads_it(self, tmp_path):
        class Reads(GroupRelative):
            """Reads the reference whatever the weight of the KL."""

            @property
            def in_keys(self):
                return list({*super().in_keys, keys.REF_LOG_PROB})

            def estimate(self, tensordict):
                assert keys.REF_LOG_PROB in tensordict
                return super().estimate(tensordict)

        settings = {"kl_coeff": 0.2, "kl_decay_fraction": 0.5, "max_steps": 80}
        trainer = build_run(small_config(tmp_path, "GRPO", **settings)).trainer
        trainer.loss.make_value_estimator(Reads)
        assert trainer.train()[-1]["optim/kl_fraction"] == 0

    def test_dynamic_sampling_scores_while_the_kl_in_the_reward_has_a_weight(self, tmp_path, monkeypatch):
        settings = {"kl_coeff": 0.2, "kl_in": "reward", "kl_decay_fraction": 0.5, "dynamic_sampling": 2}
        settings |= {"old_log_probs": "scorer"}
        trainer, scored = build_run(small_config(tmp_path, "GRPO", max_steps=200, **settings)).trainer, []
        score = trainer.dynamic_sampling.score

        def recorded(rows):
            score(rows)
            scored.append((trainer.loss.kl_fraction > 0, keys.OLD_LOG_PROB in rows))

        monkeypatch.setattr(trainer.dynamic_sampling, "score", recorded)
        trainer.train()
        assert set(scored) == {(True, True), (False, False)}

    @pytest.mark.parametrize("fraction", [0.5, None])
    def test_dynamic_sampling_counts_with_the_weight_of_the_update(self, tmp_path, monkeypatch, fraction):
        """And not with the one before: a resumed run has none before."""
        settings = {"kl_coeff": 0.2, "kl_in": "reward", "kl_decay_fraction": fraction, "dynamic_sampling": 2}
        run, found = build_run(small_config(tmp_path, "GRPO", max_steps=200, **settings)), []
        trainer = run.trainer
        count = trainer.dynamic_sampling.found

        def recorded(rows):
            found.append((trainer.steps, trainer.loss.value_estimator.kl_fraction))
            return count(rows)

        monkeypatch.setattr(trainer.dynamic_sampling, "found", recorded)
        trainer.loss.kl_fraction = 0.0  # what another run with this loss left
        trainer.train()
        assert len(found) > 3
        for steps, share in found:
            assert share == pytest.approx(max(0.0, 1 - steps / 100) if fraction else 1.0)

    def test_truncating_sampler_is_scored_anew(self, tmp_path):
        run = build_run(small_config(tmp_path, top_p=0.8))
        rows = one_batch(run)
        run.trainer.scorer.score(rows)
        gap = (rows[keys.OLD_LOG_PROB] - rows[keys.SAMPLE_LOG_PROB])[rows[keys.TURN_IDS] >= 0]
        assert gap.max() <= 1e-5
        assert gap.min() < -0.01

    @pytest.mark.parametrize("settings", [{}, {"kl_coeff": 0.1}, {"kl_coeff": 0.1, "kl_in": "loss", "target_kl": 0.01}])
    def test_old_log_probs_are_scored_where_rows_have_none_of_the_sampler(self, tmp_path, settings):
        """As they are where the rows have scores of the same weights."""
        results = []
        # the last as in rows of conversations that nobody sampled
        for given in ("known", "missing", "nan"):
            run = build_run(small_config(tmp_path, lr_actor=1e-3, record_interval=1, **settings))
            rows = one_batch(run)
            if given == "nan":
                rows[keys.SAMPLE_LOG_PROB][0] = torch.nan
            metrics = run.trainer.learn(rows.exclude(keys.SAMPLE_LOG_PROB) if given == "missing" else rows)
            results.append((weights(run), metrics.get("policy/first_turn_entropy"), metrics))
        (known, entropy, _), *others = results
        for scored, none, metrics in others:
            assert (known - scored).abs().max() < 1e-5
            assert none is None
            assert metrics["optim/skipped_steps"] == 0
            assert "policy/log_prob_gap" not in metrics
        assert entropy > 0

    def test_supervised_learning_needs_none(self, tmp_path):
        run = build_run(small_config(tmp_path, "SFT", record_interval=1))
        before = weights(run)
        run.trainer.learn(one_batch(run).exclude(keys.SAMPLE_LOG_PROB))
        assert not weights(run).equal(before)

    @pytest.mark.parametrize(
        ("algo", "settings", "message"),
        [
            ("GRPO", {"old_log_probs": "sampler"}, 'set "auto", which scores the old ones'),
            ("GRPO", {"sampler_correction": "truncate", "sampler_bounds": 2.0}, "corrects for them: leave it out"),
            ("LLMPPO", {"estimator": "TurnVTrace", "clipping": "none"}, "choose another estimator"),
        ],
    )
    def test_what_compares_with_the_sampler_says_that_it_needs_them(self, tmp_path, algo, settings, message):
        run = build_run(small_config(tmp_path, algo, **settings))
        with pytest.raises(KeyError, match=message):
            run.trainer.learn(one_batch(run).exclude(keys.SAMPLE_LOG_PROB))

    def test_lora_reference_is_the_base(self, tmp_path):
        run = build_run(small_config(tmp_path, lora_r=4, kl_coeff=0.1))
        before = {name: p.clone() for name, p in run.models.model.named_parameters() if not p.requires_grad}
        rows = one_batch(run)
        for _ in range(3):
            run.trainer.learn(rows.clone())
        with torch.no_grad(), use_adapter(run.models.model, None):
            run.trainer.scorer.score(rows)
        first = run.models.reference(rows.clone())[keys.LOG_PROB]
        assert torch.equal(first, rows[keys.REF_LOG_PROB])
        assert all(torch.equal(p, before[name]) for name, p in run.models.model.named_parameters() if name in before)


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
        with pytest.raises(ConfigError, match="finds no GPU"):
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
        # Sampled in float32, scored in bfloat16: a gap, but no ratio before the first step. Weights
        # stay float32.
        assert 1e-5 < metrics["policy/log_prob_gap"] < 0.1
        assert metrics["policy/log_ratio"] < 1e-6
        assert {p.dtype for p in run.models.actor_parameters()} == {torch.float32}

    @pytest.mark.host  # which has no float16
    @pytest.mark.parametrize("given", [{"mixed_precision": "fp16"}, {"dtype": "float16"}])
    def test_float16_on_a_cpu_is_refused(self, tmp_path, monkeypatch, given):
        """accelerate would compute in float32."""
        monkeypatch.setattr(AcceleratorState, "_shared_state", {})
        (name, value), *_ = given.items()
        with pytest.raises(
            ConfigError, match=f"{name}='{value}' asks for .* does not have on a CPU: set mixed_precision"
        ):
            build_run(small_config(tmp_path, **given))
        build_run(small_config(tmp_path, dtype="float16", mixed_precision="no"))

    def test_another_precision_than_that_of_an_earlier_run_is_refused(self, tmp_path):
        build_run(small_config(tmp_path))
        said = "mixed_precision='bf16' .* earlier run of this process with 'no', .*: start this run in another process"
        with pytest.raises(ConfigError, match=said):
            build_run(small_config(tmp_path / "other", mixed_precision="bf16"))

    def test_bfloat16_base_with_float32_adapters(self, tmp_path, monkeypatch):
        monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # a GPU computes it in bfloat16
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
    """AdamW's steps are below what bfloat16 can hold: where all weights train, they are kept in
    float32."""

    @pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
    def test_every_weight_moves_at_the_default_rate(self, half_model, tmp_path, dtype, caplog):
        # In the first of two epochs the critic's head is zero, and its trunk has no gradient.
        config = small_config(
            tmp_path, "LLMPPO", model_path=half_model, dtype=dtype, max_iterations=1, epochs=2, kl_coeff=0.1
        )
        assert config.optim.lr_actor == 5e-6
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
        """The same update on the same rows from the same values: what is rounded away would be
        missing."""
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
            assert all(own[name].cpu().equal(value) for name, value in loaded.state_dict().items())
        again = build_run(small_config(tmp_path / "again", "LLMPPO", model_path=half_model))
        again.load_checkpoint(saved)
        assert weights(again).equal(weights(run))

    @pytest.mark.host  # where autocast is off by default
    def test_adapters_leave_the_base_as_it_is(self, half_model, tmp_path):
        run = build_run(small_config(tmp_path, model_path=half_model, dtype="auto", lora_r=2))
        assert {p.dtype for p in run.models.base_parameters()} == {torch.bfloat16}
        assert run.trainer.accelerator.mixed_precision == "no"

    def test_what_only_plays_stays_as_it_is(self, half_model, tmp_path):
        """Such as a worker on Ray: the dtype of an engine comes from the checkpoint or the
        settings."""
        config = small_config(tmp_path, model_path=half_model, dtype="auto")
        assert _worker_policy(config, load_tiny_tokenizer(), config.sampling, None).dtype == torch.bfloat16

    def test_a_loop_of_ones_own_is_told(self, half_model, tmp_path, caplog):
        run = build_run(small_config(tmp_path, model_path=half_model))
        parts = {name: getattr(run.trainer, name) for name in ("collector", "replay_buffer", "policy", "loss")}
        run.models.model.bfloat16()
        optimizer = torch.optim.AdamW(run.models.actor_parameters())
        LLMTrainer(**parts, optimizer=optimizer, config=run.config.trainer, accelerator=run.trainer.accelerator)
        assert "AdamW steps torch.bfloat16 weights without a float32 copy" in caplog.text
