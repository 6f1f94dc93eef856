"""Callbacks see the rows of an update and add metrics; what a loss returns of its own is logged."""

from dataclasses import dataclass

import pytest
import torch
from small_runs import small_config, weights

from torchrl_llm import keys
from torchrl_llm.objectives import GroupRelative, LLMGRPOLoss, LLMReinforceLoss, NoCredit, ReBN, TurnVine
from torchrl_llm.runs import ConfigError, RunSettings, build_run
from torchrl_llm.runs.effective_settings import python_settings
from torchrl_llm.trainers import Callback
from torchrl_llm.utils.options import Share


class Watch(Callback):
    def __init__(self):
        self.batches, self.steps, self.evaluations = [], [], []

    def on_batch(self, trainer, rows, metrics):
        self.batches.append((trainer.policy.policy_version, rows[keys.EPISODE_ID].tolist()))
        metrics["mine/credit"] = rows[keys.ADVANTAGE].abs().max()

    def on_minibatch(self, trainer, rows, metrics):
        self.steps.append((trainer.policy.policy_version, rows[keys.EPISODE_ID].tolist()))
        metrics["mine/rows"] = torch.tensor(float(len(rows)))

    def on_evaluation(self, trainer, metrics):
        self.evaluations.append(metrics["evaluation/success"])
        metrics["mine/lost"] = 1 - metrics["evaluation/success"]


def test_every_hook_sees_its_part_and_what_it_adds_is_logged(tmp_path):
    watch = Watch()
    config = small_config(tmp_path, epochs=2, minibatch_size=4, max_iterations=2, evaluation_interval=2)
    history = build_run(config, callbacks=[watch]).trainer.train()
    assert [version for version, _ in watch.batches] == [0, 1]
    for version, episodes in watch.batches:
        steps = [rows for at, rows in watch.steps if at == version]
        assert [len(rows) for rows in steps] == [4] * 4
        assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3]) == sorted(episodes)
    assert all(metrics["mine/credit"] > 0 and metrics["mine/rows"] == 4 for metrics in history)
    assert [history[1]["mine/lost"]] == [1 - success for success in watch.evaluations]
    assert "mine/lost" not in history[0]


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("policy/entropy", 1.0, ValueError, r"callbacks returned \['policy/entropy'\], which are metrics of training"),
        ("mine", "much", TypeError, "'mine' is 'much'; expected a number, for it is a metric of the callbacks"),
    ],
)
def test_what_is_no_metric_of_its_own_is_an_error(tmp_path, name, value, error, match):
    class Adds(Callback):
        def on_batch(self, trainer, rows, metrics):
            metrics[name] = value

    run = build_run(small_config(tmp_path, max_iterations=1), callbacks=[Adds()])
    before = weights(run)
    with pytest.raises(error, match=match):
        run.trainer.train()
    assert torch.equal(weights(run), before)


def test_a_metric_of_a_step_is_not_changed_unseen_and_one_of_some_steps_is_their_mean(tmp_path):
    class Adds(Callback):
        def on_minibatch(self, trainer, rows, metrics):
            if len(names) == 1:
                metrics["mine/second"] = 3.0
            names.append(set(metrics))
            if clashes:
                metrics["policy/entropy"] = metrics["policy/entropy"] * 0

    for clashes in (False, True):
        names = []
        run = build_run(small_config(tmp_path / str(clashes), max_iterations=1, minibatch_size=4), callbacks=[Adds()])
        if clashes:
            with pytest.raises(
                ValueError, match=r"callbacks returned \['policy/entropy'\], which are metrics of training"
            ):
                run.trainer.train()
        else:
            (metrics,) = run.trainer.train()
            assert metrics["mine/second"] == 3
            assert len(names) == 2
            assert "mine/second" not in names[0]


class WithTerms(LLMReinforceLoss):
    """Adds a term to minimize and a number to look at, and one under another's name where
    ``clash``."""

    clash = False

    def forward(self, tensordict):
        out = super().forward(tensordict)
        weight = tensordict[keys.LOSS_WEIGHT]
        out["loss_length"] = 0.25 * weight.sum()
        out["share"] = (weight * tensordict[keys.TURN_IDS].clamp_min(0)).sum().detach()
        if self.clash:
            out["objective"] = weight.sum()
        return out


def with_terms(config, models):
    return WithTerms(models.actor, **config.loss_options(WithTerms))


def test_what_a_loss_returns_of_its_own_is_logged_however_the_batch_is_cut(tmp_path):
    found = []
    for max_tokens in (100_000, 256):
        config = small_config(tmp_path / str(max_tokens), max_iterations=1, max_tokens=max_tokens)
        (metrics,) = build_run(config, make_loss=with_terms).trainer.train()
        found.append((metrics["loss/length"], metrics["loss/share"]))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0][0] == pytest.approx(0.25)
    assert 0 < found[0][1] < 8


def test_a_name_of_another_output_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(WithTerms, "clash", True)
    with pytest.raises(ValueError, match="'objective' would be logged as 'loss/objective', which is another"):
        build_run(small_config(tmp_path, max_iterations=1), make_loss=with_terms).trainer.train()


def test_continuations_are_sampled_with_the_discount_of_the_losss_estimator(tmp_path):
    def halved(_, models):
        return LLMReinforceLoss(models.actor, kl_coeff=0.0, estimator=TurnVine(gamma=0.5))

    run = build_run(small_config(tmp_path, estimator="TurnVine", branches=2), make_loss=halved)
    assert run.trainer.collector.branches.gamma == 0.5
    run.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda actor: LLMReinforceLoss(actor),
        lambda actor: LLMReinforceLoss(actor, kl_coeff=0.0, estimator=ReBN(kl_coeff=0.1)),
    ],
)
def test_a_kl_without_a_reference_is_refused_before_the_first_rollout(tmp_path, make):
    config = small_config(tmp_path, kl_coeff=0.0)
    with pytest.raises(
        ConfigError, match=r"has a KL to a reference .*, and the run has no reference, because its setting kl_coeff"
    ):
        build_run(config, make_loss=lambda _, models: make(models.actor))


@dataclass(kw_only=True, eq=False, repr=False)
class LeaveOneOut(GroupRelative):
    """With other defaults than its base has."""

    respects_units = True
    baseline: str = "leave_one_out"
    scale: str = "none"


def test_the_baseline_of_trees_is_the_estimators():
    trees = {"algo": "GRPO", "group_size": 4, "tree_branches": 1}
    assert RunSettings.from_values(**trees, estimator=f"{__name__}:LeaveOneOut").rollouts.tree_branches == 1
    with pytest.raises(ConfigError, match="the mean of the group as baseline is biased"):
        RunSettings.from_values(**trees)


class Grouped(LLMReinforceLoss):
    """With an estimator of its own."""

    default_value_estimator = GroupRelative


@dataclass(kw_only=True, eq=False, repr=False)
class Discounted(LLMGRPOLoss):
    """With an option that its estimator has too."""

    gamma: Share = 1.0


def test_options_reach_the_loss_and_its_own_estimator():
    config = RunSettings.from_values(algo="GRPO", group_size=4, gamma=0.9)
    options = config.loss_options(Discounted)
    assert (options["gamma"], options["estimator"].gamma) == (0.9, 0.9)
    assert isinstance(RunSettings.from_values(algo="LLMREINFORCE").loss_options(Grouped)["estimator"], GroupRelative)
    with pytest.raises(ConfigError, match='granularity="auto" is decided by the environment'):
        RunSettings.from_values(granularity="auto").loss_options()


def test_a_loss_without_the_estimator_of_the_settings_is_refused(tmp_path):
    config = small_config(tmp_path, estimator="NoCredit", entropy_coeff=0.1)
    with pytest.raises(ConfigError, match=r"estimator='NoCredit', but the loss that .* returned has a ReBN"):
        build_run(config, make_loss=lambda _, models: LLMReinforceLoss(models.actor, kl_coeff=0.0))
    run = build_run(config, make_loss=with_terms)
    assert isinstance(run.trainer.loss.value_estimator, NoCredit)
    run.close()


@dataclass
class Counts:
    """A ``make_loss`` that holds something else after it was used."""

    calls: int = 0

    def __call__(self, config, models):
        self.calls += 1
        return with_terms(config, models)


def test_what_is_given_is_told_apart_by_what_it_held_before_it_was_used(tmp_path):
    before, make_loss = python_settings(make_loss=Counts()), Counts()
    run = build_run(small_config(tmp_path), make_loss=make_loss)
    assert make_loss.calls == 1
    assert run.open_folder.info["settings"]["make_loss"] == before["make_loss"]
    run.close()
