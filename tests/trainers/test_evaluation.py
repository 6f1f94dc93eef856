"""Evaluation and checkpoints."""

import time
from functools import partial

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from torchrl_llm import keys
from torchrl_llm.envs import EnvironmentFault, GEMEnv
from torchrl_llm.modules import use_adapter
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import tiny_model_path
from torchrl_llm.trainers import RunConfig, build_run, evaluate
from torchrl_llm.trainers.build import _make_env


@pytest.fixture
def run(tmp_path):
    config = RunConfig(
        algo="LLMPPO",
        model_path="tiny",
        device="cpu",
        lora_r=4,
        max_model_len=256,
        max_output_tokens=16,
        num_envs=8,
        batch_size=8,
        kl_coeff=0.0,
        evaluation_interval=0,
        final_episodes=24,
        max_iterations=2,
        lr_actor=1e-2,
        output_dir=tmp_path,
        progress=False,
    )
    return build_run(config)


class TestEvaluate:
    def test_is_paired_and_apart_from_training(self, run):
        first, second = run.final_evaluation(), run.final_evaluation()
        assert torch.equal(first.rows[keys.TOKENS], second.rows[keys.TOKENS])
        assert first.episodes == 24 == len(first.rows[keys.EPISODE_ID].unique())
        wins = first.rows[keys.TURN_SUCCESS].any(-1).sum().item()
        assert first.success == wins / 24
        assert first.success_ci95[0] < first.success < first.success_ci95[1]
        seeds = [run.make_env(stream=s).tickets[i].seed for s in ("train", "eval", "test") for i in range(200)]
        assert len(set(seeds)) == 600

    def test_does_not_depend_on_the_number_of_slots(self, run):
        results = []
        for num_envs in (3, 24):
            run.config.num_envs = num_envs
            results.append(run.final_evaluation().rows)
        width = min(rows[keys.TOKENS].shape[1] for rows in results)
        assert torch.equal(*(rows[keys.TOKENS][:, :width] for rows in results))

    def test_greedy_takes_the_likeliest_token(self, run):
        env = run.make_env(stream="test")
        rows = evaluate(env, run.policy, 8, greedy=True).rows
        assert likeliest(run, rows).all()
        assert not likeliest(run, evaluate(env, run.policy, 8).rows).all()


class Fragile(StopOrGo):
    """Breaks in the turn in which it hears "crash", or at the reset for the task seeds ``bad``."""

    def __init__(self, bad=()):
        self.bad = bad

    def reset(self, seed=None):
        if seed in self.bad:
            raise RuntimeError("no board")
        return super().reset(seed)

    def step(self, action):
        if "crash" in action:
            raise RuntimeError("overturned")
        return super().step(action)


@pytest.fixture
def make(tokenizer):
    def make(env=Fragile, **kwargs):
        options = {"num_envs": 4, "max_model_len": 256, "max_output_tokens": 32, "stream": "eval", **kwargs}
        return GEMEnv(env, tokenizer=tokenizer, **options)

    return make


@pytest.fixture
def says(tokenizer):
    return lambda script: ScriptedPolicy(script, tokenizer=tokenizer)


def crash_every_fourth(episode, turn, context):
    return "stop" if episode % 4 else ("go on", "crash")[turn]


class TestFaults:
    """An episode whose environment failed is none that was not played."""

    def test_they_count_as_not_won(self, make, says):
        result = evaluate(make(), says(crash_every_fourth), 16)
        assert (result.success, result.faults, result.episodes) == (0.75, 4, 16)
        assert result.reward == 0.75
        assert result.turns == 1.25
        first = make().tickets.base
        assert result.rows[keys.EPISODE_ID].tolist() == list(range(first, first + 16))
        assert result.metrics("evaluation")["evaluation/faults"] == 4.0

    def test_those_at_a_reset_too(self, make, says):
        tickets = make().tickets
        bad = {tickets[i].seed for i in (0, 5, 16)}  # the last is none of the first 16
        result = evaluate(make(partial(Fragile, bad)), says(lambda *_: "stop"), 16)
        assert (result.success, result.faults, result.reward) == (14 / 16, 2, 14 / 16)
        assert (result.rows[keys.EPISODE_ID] - tickets.base).tolist() == [i for i in range(16) if i not in (0, 5)]

    def test_of_one_environment_of_a_mixture(self, make, says):
        tickets = make([Fragile, StopOrGo]).tickets
        bad = {tickets[i].seed for i in range(0, 8, 2)}
        env = make([partial(Fragile, bad), StopOrGo])
        env.names = ("fragile", "sound")
        result = evaluate(env, says(lambda *_: "stop"), 8)
        assert result.environments["success/fragile"] == 0.0
        assert result.environments["success/sound"] == 1.0

    def test_no_more_than_max_faults(self, make, says):
        with pytest.raises(EnvironmentFault, match="overturned"):
            evaluate(make(max_faults=3), says(crash_every_fourth), 16)
        assert evaluate(make(max_faults=4), says(crash_every_fourth), 16).faults == 4


class TestLimits:
    """What training allows of an environment, evaluation does too."""

    @pytest.fixture
    def options(self, tokenizer):
        def options(**given):
            config, make = RunConfig(model_path="tiny", num_envs=2, **given), partial(GEMEnv, StopOrGo)
            return {stream: _make_env(config, tokenizer, make, stream=stream) for stream in ("train", "eval", "test")}

        return options

    @pytest.mark.parametrize(
        ("given", "timeout"),
        [
            ({"collector": "turn"}, None),
            ({"collector": "async"}, 60.0),
            ({"collector": "ray"}, 60.0),
            ({"collector": "async", "env_threads": 0}, None),
            ({"collector": "turn", "step_timeout": 7.0}, 7.0),
            ({"collector": "ray", "step_timeout": 7.0}, 7.0),
        ],
    )
    def test_step_timeout(self, options, given, timeout):
        assert {env.step_timeout for env in options(**given).values()} == {timeout}

    @pytest.mark.parametrize("collector", ["turn", "async", "ray"])
    def test_max_faults(self, options, collector):
        assert {env.max_faults for env in options(collector=collector, max_faults=3).values()} == {3}
        assert {env.max_faults for env in options(collector=collector).values()} == {16}

    def test_an_environment_that_hangs_is_left(self, make, says):
        class Hangs(StopOrGo):
            thread_safe = True

            def step(self, action):
                time.sleep(5.0 * ("wait" in action))
                return super().step(action)

        start = time.monotonic()
        result = evaluate(make(Hangs, step_timeout=0.2), says(lambda e, *_: "stop" if e % 4 else "wait"), 4)
        assert time.monotonic() - start < 4.0
        assert (result.success, result.faults) == (0.75, 1)


def likeliest(run, rows):
    """Which action tokens have the highest logit of all tokens at their position."""
    with torch.no_grad(), use_adapter(run.models.model, "actor"):
        logits = run.models.model(rows[keys.TOKENS]).logits[:, :-1]
    return (logits.argmax(-1) == rows[keys.TOKENS][:, 1:])[rows[keys.TURN_IDS][:, 1:] >= 0]


class TestCheckpoints:
    def test_trained_adapter_loads_with_peft_alone(self, run):
        run.trainer.train()
        folder = run.config.output_dir / "checkpoints" / "last"
        assert {"actor", "critic", "tokenizer"} <= {p.name for p in folder.iterdir()}
        assert not list(folder.rglob("*.bin")) + list(folder.rglob("*.pt"))
        model = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
        loaded = PeftModel.from_pretrained(model, folder / "actor").eval()
        tokens = torch.arange(20).unsqueeze(0) + 5
        with torch.no_grad():
            plain = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)(tokens).logits
            run.models.model.set_adapter("actor")
            ours = run.models.model(tokens).logits
            assert torch.allclose(loaded(tokens).logits, ours, atol=1e-6)
            assert not torch.allclose(plain, ours, atol=1e-3)
        head = load_file(folder / "critic" / "value_head.safetensors")
        assert all(torch.equal(head[k], v) for k, v in run.models.critic.value_head.state_dict().items())
