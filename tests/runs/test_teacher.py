"""On-policy distillation: the KL of a run is to a teacher."""

from __future__ import annotations

import pytest
import torch
from small_runs import one_batch, small_config, weights

from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer
from torchrl_llm.runs import RunSettings, build, build_run
from torchrl_llm.testing.tiny import load_tiny_tokenizer, random_model
from torchrl_llm.testing.tokenizers import byte_tokenizer
from torchrl_llm.utils.options import ConfigError, IdleError

DISTILL = {"estimator": "NoCredit", "kl_coeff": 1.0, "kl_kind": "k2", "kl_in": "loss"}


@pytest.fixture
def teacher(tmp_path):
    """A model of the student's tokenizer that says other things."""
    tokenizer, path = load_tiny_tokenizer(), tmp_path / "teacher"
    random_model(tokenizer, seed=3).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_the_reference_log_probs_are_the_teachers(tmp_path, teacher):
    run = build_run(small_config(tmp_path, teacher=str(teacher), **DISTILL, temperature=0.7, batch_size=4, num_envs=4))
    rows = one_batch(run)
    run.trainer.scorer.score(rows)
    scorer = TokenScorer(random_model(load_tiny_tokenizer(), seed=3), run.policy.sampling)
    action = rows[keys.TURN_IDS] >= 0
    own = scorer(rows.copy())[keys.LOG_PROB]
    torch.testing.assert_close(rows[keys.REF_LOG_PROB][action], own[action], atol=1e-5, rtol=0)
    assert (rows[keys.REF_LOG_PROB] - rows[keys.SAMPLE_LOG_PROB])[action].abs().mean() > 0.1
    run.close()


@pytest.mark.extra
def test_a_run_with_adapters_teaches_its_own_start(tmp_path):
    """The checkpoint of a run is a teacher, and a student that follows it comes nearer to it than
    it was."""
    first = build_run(
        small_config(tmp_path / "first", lora_r=4, lr_actor=2e-2, max_iterations=4, save_checkpoints=True)
    )
    first.trainer.train()
    first.close()
    student = small_config(
        tmp_path / "student",
        teacher=str(tmp_path / "first" / "run"),
        lora_r=4,
        lr_actor=1e-2,
        batch_size=32,
        minibatch_size=8,
        max_iterations=8,
        **DISTILL,
    )
    run = build_run(student)
    history = run.trainer.train()
    run.close()
    gaps = [metrics["policy/kl_reference"] for metrics in history]
    assert gaps[0] > 0.02
    assert sum(gaps[-2:]) < sum(gaps[:2]) / 2, gaps
    assert all(metrics["credit/largest"] == 0 for metrics in history)  # the rewards taught nothing


@pytest.mark.parametrize("algo", ["LLMREINFORCE", "GRPO"])
def test_a_kl_in_the_reward_teaches_too(tmp_path, teacher, algo):
    """The default of LLMREINFORCE: its advantages come from the KL."""
    settings = DISTILL | {"kl_in": "reward", "kl_kind": "k3"}
    run = build_run(small_config(tmp_path, algo, teacher=str(teacher), **settings, lr_actor=1e-3, max_iterations=1))
    before = weights(run)
    (metrics,) = run.trainer.train()
    run.close()
    assert metrics["credit/largest"] > 0
    assert metrics["optim/grad_norm_actor"] > 0
    assert (weights(run) - before).abs().max() > 1e-5


def test_nothing_to_learn_from_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"NoCredit gives no credit for rewards.*nothing would be learned"):
        build_run(small_config(tmp_path, estimator="NoCredit", kl_coeff=0.0))


def test_a_teacher_of_other_tokens_is_refused(tmp_path, monkeypatch):
    tokenizer, path = byte_tokenizer(), tmp_path / "teacher"
    random_model(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    monkeypatch.setattr(build, "load_models", None)  # before a model is loaded
    with pytest.raises(
        ConfigError, match=r"has another tokenizer: \d+ tokens, and the student's has \d+, of which \d+"
    ):
        build_run(small_config(tmp_path, teacher=str(path), **DISTILL))


def test_a_teacher_of_shorter_contexts_is_refused(tmp_path, teacher):
    with pytest.raises(ConfigError, match=r"^teacher='.*': max_model_len is 257, and the model .* has 256 positions"):
        build_run(small_config(tmp_path, teacher=str(teacher), **DISTILL, max_model_len=257))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kl_coeff": 0.0}, "does nothing with kl_coeff=0.0"),
        ({"algo": "SFT"}, "does nothing with algo='SFT'"),
        ({"kl_coeff": 0.1, "refresh_reference": 2}, "refresh_reference is about the reference of the KL, and teacher='tiny' is that"),
    ],
)  # fmt: skip
def test_settings_that_leave_it_without_effect(settings, said):
    with pytest.raises((ConfigError, IdleError), match=said):
        RunSettings.from_values(teacher="tiny", **settings)


def test_one_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"^teacher='.*nobody': .*there is no such folder"):
        build_run(small_config(tmp_path, teacher=str(tmp_path / "nobody"), **DISTILL))
