"""Evaluation and checkpoints."""

from functools import partial

import gem
import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file
from torchrl.envs import StepCounter, TransformedEnv
from transformers import AutoModelForCausalLM

from torchrl_llm import keys
from torchrl_llm.envs import EnvironmentFault, GEMEnv, PromptDatasetEnv, SeenTasks
from torchrl_llm.metrics import success_interval, wilson_interval
from torchrl_llm.modules import use_adapter
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.runs.environments import make_environment
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import tiny_model_path
from torchrl_llm.trainers import evaluate


@pytest.fixture
def run(tmp_path):
    config = RunSettings.from_values(
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
    @pytest.mark.extra
    def test_is_paired_and_apart_from_training(self, run):
        first, second = run.final_evaluation(), run.final_evaluation()
        assert torch.equal(first.rows[keys.TOKENS], second.rows[keys.TOKENS])
        assert first.episodes == 24 == len(first.rows[keys.EPISODE_ID].unique())
        wins = first.rows[keys.TURN_SUCCESS].any(-1).sum().item()
        assert first.success == wins / 24
        assert first.success_ci95[0] < first.success < first.success_ci95[1]
        seeds = [run.make_env(stream=s).task_sampler[i].seed for s in ("train", "eval", "test") for i in range(200)]
        assert len(set(seeds)) == 600

    def test_does_not_depend_on_the_number_of_slots(self, run):
        results = []
        for num_envs in (3, 24):
            run.config.env.num_envs = num_envs
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
        first = make().task_sampler.base
        assert result.rows[keys.EPISODE_ID].tolist() == list(range(first, first + 16))
        assert result.metrics("evaluation")["evaluation/faults"] == 4.0

    def test_those_at_a_reset_too(self, make, says):
        task_sampler = make().task_sampler
        bad = {task_sampler[i].seed for i in (0, 5, 16)}  # the last is none of the first 16
        result = evaluate(make(partial(Fragile, bad)), says(lambda *_: "stop"), 16)
        assert (result.success, result.faults, result.reward) == (14 / 16, 2, 14 / 16)
        assert (result.rows[keys.EPISODE_ID] - task_sampler.base).tolist() == [i for i in range(16) if i not in (0, 5)]

    def test_of_one_environment_of_a_mixture(self, make, says):
        task_sampler = make([Fragile, StopOrGo]).task_sampler
        bad = {task_sampler[i].seed for i in range(0, 8, 2)}
        env = make([partial(Fragile, bad), StopOrGo])
        env.names = ("fragile", "sound")
        result = evaluate(env, says(lambda *_: "stop"), 8)
        assert result.environments["success/fragile"] == 0.0
        assert result.environments["success/sound"] == 1.0

    def test_no_more_than_max_faults(self, make, says):
        with pytest.raises(EnvironmentFault, match="overturned"):
            evaluate(make(max_faults=3), says(crash_every_fourth), 16)
        assert evaluate(make(max_faults=4), says(crash_every_fourth), 16).faults == 4


QUESTIONS = [{"question": f"{i}?", "answer": str(i)} for i in range(20)]


@pytest.fixture
def ask(tokenizer):
    def ask(**kwargs):
        splits = {"train": QUESTIONS, "test": [{**row, "question": f"x{row['question']}"} for row in QUESTIONS]}
        options = {"num_envs": 4, "max_model_len": 256, "max_output_tokens": 32, "stream": "test", **kwargs}
        return PromptDatasetEnv(splits, lambda said, answer, _: said == answer, tokenizer=tokenizer, **options)

    return ask


def even_rows(episode, turn, context):
    row = episode % 2**40 % 20
    return str(row) if row % 2 == 0 else "?"


class TestTasks:
    """Episodes of one task are not independent samples of tasks."""

    def test_repeats_narrow_no_interval(self, ask, says):
        once, often = (evaluate(ask(), says(even_rows), n) for n in (20, 200))
        assert (once.success, often.success) == (0.5, 0.5)
        assert (once.tasks, often.tasks) == (20, 20)
        assert once.success_ci95 == pytest.approx(wilson_interval(10, 20))
        assert often.success_ci95 == pytest.approx(once.success_ci95)

    def test_greedy_plays_each_task_once(self, ask, says):
        result = evaluate(ask(), says(even_rows), 200, greedy=True)
        assert (result.episodes, result.tasks, len(result.rows)) == (20, 20, 20)
        again = evaluate(ask(), says(even_rows), 30)
        assert again.episodes == 30

    def test_greedy_in_a_world_of_few_tasks(self, make, says):
        env = make("game:GuessTheNumber-v0-easy", max_model_len=1024)
        result = evaluate(env, says(lambda *_: r"\boxed{3}"), 100, greedy=True)
        assert (result.episodes, result.tasks) == (10, 10)
        assert result.success == 0.1
        assert evaluate(env, says(lambda *_: r"\boxed{3}"), 100).episodes == 100

    def test_greedy_beneath_transforms(self, make, says):
        """The same tasks, although a TransformedEnv keeps attributes that are set on it to
        itself."""
        plain, beneath = (make("game:GuessTheNumber-v0-easy", max_model_len=1024) for _ in range(2))
        within = TransformedEnv(beneath, StepCounter())
        result, expected = (evaluate(env, says(lambda *_: r"\boxed{3}"), 100, greedy=True) for env in (within, plain))
        assert (result.episodes, result.success, result.faults) == (10, 0.1, 0)
        assert (result.rows[keys.EPISODE_ID] == expected.rows[keys.EPISODE_ID]).all()
        assert within.task_sampler is beneath.task_sampler

    def test_greedy_where_something_unknown_is_hidden(self, make, says):
        result = evaluate(make(), says(lambda *_: "stop"), 12, greedy=True)
        assert (result.episodes, result.tasks) == (12, 1)

    def test_a_failed_task_of_a_greedy_evaluation_counts(self, ask, says):
        env = ask()
        env._grader.reward_fn = lambda said, answer, _: 1 / (int(answer) - 3)
        result = evaluate(env, says(even_rows), 200, greedy=True)
        assert (result.episodes, result.faults) == (20, 1)

    def test_interval_by_hand(self):
        won, task = torch.tensor([True, True, False, False]), torch.tensor([5, 5, 9, 9])
        assert success_interval(won, task) == pytest.approx(wilson_interval(1, 2))
        assert success_interval(won, torch.arange(4)) == pytest.approx(wilson_interval(2, 4))
        assert success_interval(won, torch.zeros(4)) == pytest.approx(wilson_interval(2, 4))
        assert success_interval(torch.ones(40).bool(), torch.arange(40) % 4) == pytest.approx(wilson_interval(4, 4))

    def test_interval_covers_the_rate_over_tasks(self):
        """40 tasks, each won always or never, played ten times: the interval of 400 coins covers in
        one case of three."""
        rng, hits = np.random.default_rng(0), [0, 0]
        for _ in range(300):
            won = torch.from_numpy(rng.random(40) < 0.4).repeat(10)
            clustered = success_interval(won, torch.arange(40).repeat(10))
            for i, (low, high) in enumerate((clustered, wilson_interval(int(won.sum()), 400))):
                hits[i] += low <= 0.4 <= high
        assert hits[0] > 0.9 * 300
        assert hits[1] < 0.6 * 300


class TestOverlap:
    """Streams share no seed; whether they share tasks is measured."""

    def test_of_data_and_of_a_small_world(self, ask, make, says):
        seen = SeenTasks()
        seen.add(evaluate(ask(stream="train"), says(even_rows), 20).rows[keys.TASK_ID])
        assert evaluate(ask(), says(even_rows), 40, seen_tasks=seen).task_overlap == 0.0
        assert evaluate(ask(), says(even_rows), 40).metrics("evaluation").get("evaluation/task_overlap") is None
        env = make("game:GuessTheNumber-v0-easy", max_model_len=1024, stream="train")
        seen.add(evaluate(env, says(lambda *_: r"\boxed{3}"), 100).rows[keys.TASK_ID])
        env = make("game:GuessTheNumber-v0-easy", max_model_len=1024)
        result = evaluate(env, says(lambda *_: r"\boxed{3}"), 50, seen_tasks=seen)
        assert result.metrics("evaluation")["evaluation/task_overlap"] == 1.0

    def test_a_run_reports_it_and_a_resumed_one_too(self, tmp_path):
        config = RunSettings.from_values(
            algo="LLMREINFORCE", model_path="tiny", device="cpu", output_dir=tmp_path, num_envs=8, batch_size=8, lora_r=2,
            max_model_len=256, max_output_tokens=16, evaluation_interval=1, evaluation_episodes=8, final_episodes=8,
            max_iterations=1, progress=False,
        )  # fmt: skip
        run = build_run(config)
        assert run.final_evaluation().task_overlap == 0.0
        history = run.trainer.train()
        assert 0 < history[-1]["evaluation/task_overlap"] <= 1
        played, after = run.trainer.seen_tasks, run.final_evaluation().task_overlap
        assert 1 < len(played) <= 8
        assert after > 0
        run.close()
        resumed = build_run(config.replace(resume=True))
        assert resumed.trainer.seen_tasks.tasks.tolist() == played.tasks.tolist()
        assert resumed.final_evaluation().task_overlap == after
        resumed.close()

    def test_streams_of_a_run_divide_the_rows_of_a_data_set(self, tmp_path):
        def factory():
            rows = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(200)]
            return gem.make("math:GSM8K", dataset=Dataset.from_list(rows), use_mp=False)

        config = RunSettings.from_values(
            algo="LLMREINFORCE", model_path="tiny", device="cpu", output_dir=tmp_path, num_envs=1, batch_size=2,
            lora_r=2, max_model_len=256, progress=False, save_checkpoints=False,
        )  # fmt: skip
        run = build_run(config, env=factory)
        shown = []
        for stream in ("train", "eval", "test"):
            env = run.make_env(stream=stream)
            shown.append({env.slots.open(0, i).task.task_id for i in range(300)})
        run.close()
        assert sum(map(len, shown)) == len(set.union(*shown))
        assert [len(each) for each in shown[1:]] == [20, 20]


class TestLimits:
    """What training allows of an environment, evaluation does too."""

    @pytest.fixture
    def options(self, tokenizer):
        def options(**given):
            config, make = RunSettings.from_values(model_path="tiny", num_envs=2, **given), partial(GEMEnv, StopOrGo)
            return {
                stream: make_environment(config, tokenizer, make, stream=stream) for stream in ("train", "eval", "test")
            }

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

    def test_success_reward_is_a_setting(self, options):
        assert {env.success_reward for env in options(success_reward=0.9).values()} == {0.9}
        assert {env.success_reward for env in options().values()} == {1.0}

    def test_an_environment_that_hangs_is_left(self, make, says, hang):
        class Hangs(StopOrGo):
            thread_safe = True

            def step(self, action):
                if "wait" in action:
                    hang()
                return super().step(action)

        result = evaluate(make(Hangs, step_timeout=0.2), says(lambda e, *_: "stop" if e % 4 else "wait"), 4)
        assert (result.success, result.faults) == (0.75, 1)


def likeliest(run, rows):
    """Which action tokens have the highest logit of all tokens at their position."""
    rows = rows.to(run.trainer.accelerator.device)
    with torch.no_grad(), use_adapter(run.models.model, "actor"):
        logits = run.models.model(rows[keys.TOKENS]).logits[:, :-1]
    return (logits.argmax(-1) == rows[keys.TOKENS][:, 1:])[rows[keys.TURN_IDS][:, 1:] >= 0]


class TestCheckpoints:
    def test_trained_adapter_loads_with_peft_alone(self, run):
        run.trainer.train()
        folder = run.config.output.output_dir / "checkpoints" / "last"
        assert {"actor", "critic", "tokenizer"} <= {p.name for p in folder.iterdir()}
        assert not list(folder.rglob("*.bin")) + list(folder.rglob("*.pt"))
        model = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
        loaded = PeftModel.from_pretrained(model, folder / "actor").eval()
        tokens = torch.arange(20).unsqueeze(0) + 5
        with torch.no_grad():
            plain = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)(tokens).logits
            run.models.model.set_adapter("actor")
            ours = run.models.model(tokens.to(run.trainer.accelerator.device)).logits.cpu()
            assert torch.allclose(loaded(tokens).logits, ours, atol=1e-6)
            assert not torch.allclose(plain, ours, atol=1e-3)
        head = load_file(folder / "critic" / "value_head.safetensors")
        assert all(torch.equal(head[k], v.cpu()) for k, v in run.models.critic.value_head.state_dict().items())
