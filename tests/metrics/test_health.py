"""The warnings that a run goes wrong: each comes when it should, once, and says what to do; healthy
runs have none."""

import logging
from types import SimpleNamespace

import pytest

from torchrl_llm.metrics.health import FAR, HealthRules
from torchrl_llm.trainers import TrainerConfig
from torchrl_llm.trainers.callbacks import HealthWatch


def warnings_of(history, caplog, *, resumed_after=0, config=None):
    caplog.clear()
    watch, config = HealthWatch(), config or TrainerConfig()
    with caplog.at_level(logging.WARNING):
        watch.on_start(SimpleNamespace(history=history[:resumed_after]))
        for iteration, metrics in enumerate(history[resumed_after:], start=resumed_after + 1):
            trainer = SimpleNamespace(
                iteration=iteration, config=config, steps=100 * iteration, seconds=1.0 * iteration
            )
            watch.on_iteration(trainer, metrics)
    return [record.getMessage() for record in caplog.records]


def runs(*wins, **others):
    healthy = {"policy/kl_old": 0.002, "policy/first_turn_entropy": 0.5}
    return [{"rollout/success": win, **healthy, **others} for win in wins]


def test_a_healthy_run_has_none(caplog):
    wins = [0.5 + 0.02 * i + 0.05 * (-1) ** i for i in range(20)]
    assert warnings_of(runs(*wins), caplog) == []


def test_a_reference_that_is_far_from_the_start(caplog):
    """As after a warm start without init_reference; later the policy may move away, and from a
    teacher it begins there."""
    (message,) = warnings_of(runs(0.5, 0.5, **{"policy/kl_reference_start": 0.5}), caplog)
    assert "0.5 nats a token away from the reference" in message
    assert "init_reference" in message
    assert warnings_of([*runs(0.5), *runs(0.5, **{"policy/kl_reference_start": 0.5})], caplog) == []
    assert HealthRules(teacher=True).problems(runs(0.5, **{"policy/kl_reference_start": 0.5})[0]) == []


def test_tools_that_are_never_called(caplog):
    (message,) = warnings_of(runs(*[0.5] * 12, **{"data/tool_calls": 0.0}), caplog)
    assert "has tools, and no response of" in message
    called = runs(0.5, **{"data/tool_calls": 1.0})
    assert warnings_of(called + runs(*[0.5] * 12, **{"data/tool_calls": 0.0}), caplog) == []


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"max_steps": 10**9, "max_iterations": 10}, True),
        ({"max_steps": 10**9, "max_iterations": 4}, False),  # a look
        # a first iteration may be slower than all others
        ({"max_steps": 2000, "max_seconds": 1.5}, False),
        ({"max_steps": 10**9}, False),  # long, but it will come to its end
        ({"max_steps": 5000, "max_iterations": 10}, False),
        ({"max_steps": 5000, "max_iterations": 6}, False),  # more than half of its rates
    ],
)
def test_a_run_that_ends_in_its_warm_up(caplog, settings, warned):
    """100 turns an iteration; the warm-up takes 0.2 of max_steps."""
    messages = warnings_of(runs(0.5, 0.5, 0.5), caplog, config=TrainerConfig(warmup_fraction=0.2, **settings))
    assert len(messages) == warned
    assert all("Set max_steps to about the turns of the run" in message for message in messages)


def test_a_rise_from_nothing_is_no_fall(caplog):
    assert warnings_of(runs(0.9, 0.1, 0.1), caplog) == []


def test_a_fall_of_the_mean(caplog):
    """One bad batch is chance."""
    assert warnings_of(runs(*[0.9] * 6, 0.5, *[0.9] * 6), caplog) == []
    (message,) = warnings_of(runs(*[0.9] * 6, *[0.5] * 6), caplog)
    assert message.startswith("iteration 8: success fell from 0.90 to 0.74")
    assert "target_kl" in message


def test_a_resumed_run_falls_from_the_best_before_it(caplog):
    history = runs(*[0.9] * 6, *[0.5] * 6)
    whole = warnings_of(history, caplog)
    for resumed_after in (3, 6, 7):
        assert warnings_of(history, caplog, resumed_after=resumed_after) == whole


def test_a_resumed_run_has_been_warned(caplog):
    assert warnings_of(runs(0.5, 0.5, **{"policy/kl_old": 0.2}), caplog, resumed_after=1) == []


@pytest.mark.parametrize("name", ["policy/kl_old", "policy/kl_update"])
def test_a_long_update(caplog, name):
    (message,) = warnings_of(runs(0.5, 0.5, **{name: 0.2}), caplog)
    assert message.startswith("iteration 1: the update moved the policy by 0.2 nats")
    assert "target_kl" in message


def test_settled_on_one_response(caplog):
    (message,) = warnings_of(runs(0.6, 0.6, **{"policy/first_turn_entropy": 0.001}), caplog)
    assert "entropy_coeff" in message
    assert warnings_of(runs(0.95, 0.95, **{"policy/first_turn_entropy": 0.001}), caplog) == []


def test_rewards_that_teach_nothing(caplog):
    dead = {"credit/largest": 0.0}
    (message,) = warnings_of([*runs(0.02, 0.01), *runs(*[0.0] * 7, **dead)], caplog)
    assert message.startswith("iteration 7: no episode was won and no turn had an advantage for 5 iterations")
    assert warnings_of(runs(*[0.0] * 4, **dead), caplog) == []
    assert warnings_of(runs(*[0.3] * 9, **dead), caplog) == []  # a teacher's
    assert warnings_of(runs(*[0.0] * 9, **{"credit/largest": 0.5}), caplog) == []


def test_a_correction_that_leaves_out_nearly_all(caplog):
    rejected = {"policy/sampler_rejected": 0.97, "optim/grad_norm_actor": 0.0}
    (message,) = warnings_of(runs(*[0.5] * 9, **rejected), caplog)
    assert message.startswith("iteration 1: sampler_correction leaves out 97% of the tokens")
    assert 'sampler_level="token"' in message
    assert warnings_of(runs(0.5, 0.5, **{"policy/sampler_rejected": 0.2}), caplog) == []


def test_no_gradient(caplog):
    """Whatever the reason is; but for one that is not a fault: all is won, or the critic is warmed
    up."""
    still = {"optim/grad_norm_actor": 0.0}
    (message,) = warnings_of([*runs(0.4, 0.4), *runs(*[0.4] * 9, **still)], caplog)
    assert message.startswith("iteration 7: the gradient was 0 for 5 iterations: nothing is learned")
    assert warnings_of(runs(*[0.4] * 4, **still), caplog) == []
    assert warnings_of(runs(*[1.0] * 9, **still), caplog) == []
    assert warnings_of(runs(*[0.4] * 9, **still, **{"loss/critic": 0.1}), caplog) == []
    (message,) = warnings_of(runs(*[0.0] * 9, **still, **{"credit/largest": 0.0}), caplog)
    assert "no episode was won and no turn had an advantage" in message


def test_a_policy_that_turns_to_noise(caplog):
    rising = [{"policy/entropy": 0.4 * 1.3**i} for i in range(12)]
    (message,) = warnings_of([run | each for run, each in zip(runs(*[0.1] * 12), rising, strict=True)], caplog)
    assert message.startswith("iteration 6: the entropy of a token rose from 0.40 to 1.49 nats")
    assert "entropy_target" in message
    learning = runs(*[0.1 + 0.05 * i for i in range(12)])
    assert warnings_of([run | each for run, each in zip(learning, rising, strict=True)], caplog) == []


def test_every_run_is_watched(tmp_path):
    from small_runs import small_config

    from torchrl_llm.runs import build_run

    run = build_run(small_config(tmp_path))
    assert any(isinstance(callback, HealthWatch) for callback in run.trainer.callbacks)


def test_a_run_that_begins_on_its_reference_is_not_far_from_it(tmp_path, caplog):
    """However far its first update goes: the mean over the steps was taken for the start, "0.12
    nats a token away"."""
    from small_runs import small_config

    from torchrl_llm.runs import build_run

    steps = {"epochs": 8, "lr_actor": 0.1, "lora_r": 4, "max_grad_norm": 10.0, "record_interval": 0}
    run = build_run(small_config(tmp_path, "GRPO", kl_coeff=0.01, max_iterations=1, **steps))
    with caplog.at_level(logging.WARNING):
        (metrics,) = run.trainer.train()
    run.close()
    assert metrics["policy/kl_reference"] > FAR
    assert metrics["policy/kl_reference_start"] == pytest.approx(0.0, abs=1e-6)
    assert "from the reference of the KL" not in caplog.text
