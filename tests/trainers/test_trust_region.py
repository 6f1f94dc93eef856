"""``target_kl``: a step that moves the policy further is shortened, and is the update's last."""

import pytest
import torch
from small_runs import one_batch, small_config, weights

from torchrl_llm import keys
from torchrl_llm.functional import kl_estimate
from torchrl_llm.objectives import LLMReinforceLoss
from torchrl_llm.runs import ConfigError, build_run
from torchrl_llm.trainers import Callback
from torchrl_llm.trainers.trust_region import ATTEMPTS

FAR = {"lr_actor": 0.03, "epochs": 3}
"""Settings whose first step moves the policy by much more than 0.01 nats a token."""


def prepared(trainer, rows):
    trainer.scorer.score(rows)
    return trainer.scorer.credit(rows)


def updated(tmp_path, algo="LLMREINFORCE", **settings):
    """A run after one update, its weights before and after, the rows, the update's metrics."""
    share = {"target_kl_share": 1.0} if "target_kl" in settings else {}
    run = build_run(small_config(tmp_path, algo, **share | settings))
    before, rows = weights(run), prepared(run.trainer, one_batch(run))
    metrics = run.trainer.update(rows)
    return run, before, weights(run), rows, metrics


def kl(run, rows):
    """KL from the policy that sampled ``rows`` to the present one, on all of them."""
    with torch.no_grad():
        new = run.models.actor(rows.clone())[keys.LOG_PROB]
    actions = rows[keys.TURN_IDS] >= 0
    return kl_estimate(rows[keys.SAMPLE_LOG_PROB], new, "k3")[actions].mean().item()


@pytest.mark.parametrize("target", [0.01, 0.0005])
def test_a_long_step_is_shortened_to_the_target(tmp_path, target):
    free, before, far, rows, metrics = updated(tmp_path, **FAR | {"epochs": 1})
    assert kl(free, rows) > 0.05
    assert "policy/kl_update" not in metrics
    run, _, near, rows, metrics = updated(tmp_path, target_kl=target, **FAR)
    share = metrics["optim/step_share"]
    assert 0 < share < 1
    # One step of the three, in its own direction.
    torch.testing.assert_close(near - before, share * (far - before), rtol=1e-3, atol=1e-6)
    assert target / 10 < kl(run, rows) <= target * (1 + 1e-6)
    assert metrics["policy/kl_update"] == pytest.approx(kl(run, rows), rel=1e-4)


def test_short_steps_are_all_taken_whole(tmp_path):
    settings = {"lr_actor": 1e-4, "epochs": 3, "minibatch_size": 4}
    *_, free, _, _ = updated(tmp_path, **settings)
    run, _, after, rows, metrics = updated(tmp_path, target_kl=0.01, **settings)
    assert torch.equal(free, after)
    assert metrics["optim/step_share"] == 1
    assert metrics["policy/kl_update"] == pytest.approx(kl(run, rows), rel=1e-4)


def test_the_bound_is_on_the_whole_update(tmp_path):
    """Each step alone stays within the target; together they would not."""
    settings = {"lr_actor": 5e-4, "epochs": 10}
    one, *_, rows, _ = updated(tmp_path, **settings | {"epochs": 1})
    all_, *_ = updated(tmp_path, **settings)
    target = (kl(one, rows) * kl(all_, rows)) ** 0.5
    assert kl(one, rows) < target / 2 < target * 2 < kl(all_, rows)
    run, _, _, rows, metrics = updated(tmp_path, target_kl=target, **settings)
    assert kl(run, rows) <= target * (1 + 1e-6)
    assert 0.5 < metrics["optim/step_share"] < 1


@pytest.mark.parametrize("settings", [{"target_kl": 1e-30}, {"target_kl": 0.01, "lr_actor": 1e30}])
def test_a_step_that_no_length_makes_right_is_taken_back(tmp_path, settings):
    """The critic's own step is kept."""
    run, before, after, _, metrics = updated(tmp_path, "LLMPPO", **FAR | settings)
    actor = sum(parameter.numel() for parameter in run.models.actor_parameters())
    assert torch.equal(before[:actor], after[:actor])
    assert not torch.equal(before[actor:], after[actor:])
    assert metrics["optim/step_share"] == 0
    assert metrics["policy/kl_update"] == pytest.approx(0, abs=1e-9)


def test_the_kl_may_be_measured_on_a_part_of_the_batch(tmp_path):
    run, _, _, rows, metrics = updated(tmp_path, target_kl=0.01, target_kl_share=0.4, **FAR)
    assert metrics["policy/kl_update"] == pytest.approx(kl(run, rows[::2]), rel=1e-4)
    assert metrics["policy/kl_update"] != pytest.approx(kl(run, rows), rel=1e-2)


def test_what_the_sampler_computes_otherwise_is_no_step(tmp_path):
    """Truncated sampling, whose log-probs are others: the KL is to the trained policy before the
    update."""
    settings = {"top_p": 0.8, "old_log_probs": "sampler", "lr_actor": 1e-6}
    run, _, _, rows, metrics = updated(tmp_path, target_kl=0.001, **settings)
    assert kl(run, rows) > 0.002
    assert metrics["policy/kl_update"] < 1e-6
    assert metrics["optim/step_share"] == 1


@pytest.mark.parametrize("guard", [{"target_kl": 0.01}, {"entropy_coeff": 0.1, "entropy_target": 0.2}])
def test_a_batch_in_which_nothing_was_sampled_moves_nothing(tmp_path, guard):
    run = build_run(small_config(tmp_path, weight_decay=0.0, **guard))
    rows, before = one_batch(run), weights(run)
    rows[keys.TURN_IDS] = torch.full_like(rows[keys.TURN_IDS], -1)
    run.trainer.learn(rows)
    assert torch.equal(weights(run), before)


def test_nothing_is_measured_while_the_actor_keeps_still(tmp_path):
    *_, metrics = updated(tmp_path, "LLMPPO", target_kl=0.01, critic_warmup=1)
    assert "policy/kl_update" not in metrics


FOUR = {"epochs": 2, "minibatch_size": 4, "lr_actor": 1e-4}
"""An update of four short steps."""


class Heard(Callback):
    """How many optimizer steps there were."""

    steps = 0

    def on_minibatch(self, trainer, rows, metrics):
        self.steps += 1


def counted_update(tmp_path, make_loss=None, **settings):
    """The metrics of an update, how often the actor scored rows without a gradient meanwhile, how
    many steps were heard of."""
    heard, scored = Heard(), []
    config = small_config(tmp_path, **{"target_kl_share": 1.0} | settings)
    run = build_run(config, make_loss=make_loss, callbacks=[heard])
    rows = prepared(run.trainer, one_batch(run))
    run.models.actor.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else scored.append(1))
    metrics = run.trainer.update(rows)
    passes, decide = len(scored), rows[:: int(1 / config.trainer.target_kl_share)]
    assert metrics["policy/kl_update"] == pytest.approx(kl(run, decide), rel=1e-4)
    assert metrics["policy/kl_update"] <= config.trainer.target_kl
    assert all(parameter.grad is None for parameter in run.trainer.loss.parameters())
    return metrics, passes, heard.steps


class TestNextForward:
    """The log-probs of the next optimizer step's forward tell how far the step before has led."""

    def test_within_the_target_only_the_last_step_is_scored(self, tmp_path):
        _, scored, steps = counted_update(tmp_path, target_kl=0.01, **FOUR)
        assert (scored, steps) == (1, 4)

    @pytest.mark.parametrize("loss", [{"weighting": "sequence"}, {"weighting": "constant", "weight_constant": 10**6}])
    def test_a_loss_whose_kl_is_no_mean_over_tokens_is_not_asked(self, tmp_path, loss):
        _, scored, steps = counted_update(tmp_path, target_kl=0.01, **FOUR, **loss)
        assert (scored, steps) == (4, 4)

    def test_where_it_finds_the_step_too_long_the_rows_decide(self, tmp_path):
        """A minibatch, here of all rows, is beyond the target, and every fourth row is not: the
        step is kept, and the next taken."""
        settings = {"epochs": 2, "lr_actor": 1e-4, "seed": 0}
        free, *_, rows, _ = updated(tmp_path, **settings | {"epochs": 1})
        found, decides = kl(free, rows), kl(free, rows[::4])
        assert decides < 0.9 * found
        target = (found * decides) ** 0.5
        metrics, scored, steps = counted_update(tmp_path, target_kl=target, target_kl_share=0.25, **settings)
        assert scored > steps == 2
        assert 0.5 < metrics["optim/step_share"] < 1

    def test_a_minibatch_that_finds_the_step_too_long_is_left_out(self, tmp_path):
        """Of means, callbacks and weights: the update is the first step alone."""
        settings = {"target_kl": 0.01, "minibatch_size": 4, "lr_actor": 0.03}
        metrics, scored, steps = counted_update(tmp_path, **settings)
        assert metrics["optim/step_share"] < 1 == steps
        assert 1 < scored <= 1 + ATTEMPTS  # the whole step, and those that were tried
        assert metrics["policy/kl_old"] == pytest.approx(0, abs=1e-6)

    def test_a_step_before_one_that_is_skipped_is_bounded(self, tmp_path):
        class BrokenInTheEnd(LLMReinforceLoss):
            calls = 0

            def objective(self, log_ratio, advantage):
                self.calls += 1
                objective = super().objective(log_ratio, advantage)
                return objective * float("nan") if self.calls == 2 else objective

        def make_loss(config, models):
            return BrokenInTheEnd(models.actor, **config.loss_options(BrokenInTheEnd))

        metrics, *_ = counted_update(tmp_path, make_loss, target_kl=0.01, minibatch_size=4, lr_actor=1e-3)
        assert metrics["optim/skipped_steps"] == 1
        assert 0 < metrics["policy/kl_update"] <= 0.01


def test_a_share_without_a_target_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="target_kl"):
        small_config(tmp_path, target_kl_share=0.5)


GUARDS = {
    "none": {},
    "clipped ratios, half as far": {"clip_epsilon": 0.1},
    "clipped advantages": {"clip_advantage": 1.0},
    "clipped gradients": {"max_grad_norm": 0.01},
    "short memory of second moments": {"adam_beta2": 0.9},
    "minibatches": {"minibatch_size": 16},
    "one epoch": {"epochs": 1},
}


@pytest.mark.parametrize("guard", GUARDS)
def test_one_update_undoes_what_was_learned_whatever_bounds_the_gradient(tmp_path, guard):
    """The fall in miniature: what bounds gradients does not bound Adam's step, whose length is the
    learning rate's."""
    assert success_after_one_update(tmp_path, **GUARDS[guard]) < 0.1


def test_one_update_within_the_trust_region_does_not(tmp_path):
    assert success_after_one_update(tmp_path, target_kl=0.01) > 0.4


def success_after_one_update(tmp_path, **guard):
    """The win rate, 0.56 before, after one update with seven times the usual learning rate."""
    settings = {"num_envs": 64, "batch_size": 64, "lr_actor": 0.01, "epochs": 2, "max_steps": 10**6}
    run = build_run(small_config(tmp_path, **settings | guard))
    rows = one_batch(run)
    assert success(rows) > 0.5
    run.trainer.learn(rows)
    return success(one_batch(run))


def success(rows):
    return rows[keys.TURN_SUCCESS].any(-1).float().mean().item()
