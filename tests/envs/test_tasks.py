"""Which task an episode plays, and which rows a stream has."""

from __future__ import annotations

import gem
import numpy as np
import pytest
import torch
from datasets import Dataset
from gem.envs.registration import ENV_REGISTRY

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.envs import (
    GEM_CLASSES,
    EnvironmentUnavailableError,
    GEMEnv,
    IsolatedEnv,
    PromptDatasetEnv,
    SeenTasks,
    TaskSampler,
    resolve_env,
)
from torchrl_llm.envs.tasks import rows_of
from torchrl_llm.testing.environments import EarlyDecision, StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy

EASY = "game:GuessTheNumber-v0-easy"
STREAMS = ("train", "eval", "test")


def tasks_of(factory, seeds):
    game = IsolatedEnv(factory)
    return [(game.reset(int(seed)), game.task)[1].task_id for seed in seeds]


def seeds(stream, count):
    task_sampler = TaskSampler(stream=stream)
    return [task_sampler[i].seed for i in range(count)]


class TestTasks:
    def test_the_secret_tells_two_of_one_prompt_apart(self):
        factory = resolve_env(EASY).make
        game, known = IsolatedEnv(factory), {}
        for seed in range(100):
            game.reset(seed)
            assert game.task.known
            known.setdefault(game.env.game_number, set()).add(game.task.task_id)
        assert len(known) == 10 == len(set.union(*known.values()))

    @pytest.mark.parametrize(
        ("env_id", "least", "most"),
        [(EASY, 1.0, 1.0), ("game:Mastermind-v0-easy", 0.9, 1.0), ("game:Minesweeper-v0-easy", 0.0, 0.0)],
    )
    def test_overlap_of_streams_that_share_no_seed(self, env_id, least, most):
        factory = resolve_env(env_id).make
        train, test = seeds("train", 256), seeds("test", 128)
        assert not set(train) & set(test)
        seen = SeenTasks()
        seen.add(tasks_of(factory, train))
        assert least <= seen.overlap(tasks_of(factory, test)) <= most

    def test_without_a_hidden_state_the_first_observation_decides(self):
        game = IsolatedEnv(EarlyDecision)
        shown = {(game.reset(seed), game.task)[1] for seed in range(50)}
        assert len(shown) == 4
        assert not any(task.known for task in shown)

    def test_an_environment_says_what_it_hides(self):
        class Hides(StopOrGo):
            def reset(self, seed=None):
                self.secret = seed % 3
                return super().reset(seed)

            def hidden_state(self):
                return self.secret

        assert len(set(tasks_of(Hides, range(30)))) == 3

    def test_every_game_of_gem_is_in_the_catalog(self):
        played = {
            str(spec.entry_point).rpartition(":")[2]
            for env_id, spec in ENV_REGISTRY.items()
            if env_id.startswith(("game:", "math:", "code:", "qa:", "logic:", "rg:"))
        }
        assert played - {name for name, known in GEM_CLASSES.items() if known.hidden} <= {
            "MathVisualEnv"
        }  # its questions are images

    @pytest.mark.parametrize("name", sorted({"Sudoku", "FifteenPuzzle", "TowerofHanoi", "Game2048", "Sokoban"}))
    def test_attributes_of_the_catalog_exist(self, name):
        env_id = next(each for each in ENV_REGISTRY if each.startswith(f"game:{name}-v0-easy"))
        assert len(set(tasks_of(resolve_env(env_id).make, [1, 1]))) == 1

    def test_both_collectors_deliver_them(self, tokenizer):
        batches = []
        for kind, options in ((TurnCollector, {}), (AsyncTurnCollector, {"num_threads": 0})):
            env = GEMEnv(EASY, tokenizer=tokenizer, num_envs=2, group_size=2, max_model_len=1024, max_output_tokens=32)
            policy = ScriptedPolicy(lambda *_: r"\boxed{3}", tokenizer=tokenizer)
            collector = kind(env, policy, batch_size=8, **options)
            batches.append(collector.rollout())
            collector.shutdown()
        assert torch.equal(batches[0][keys.TASK_ID], batches[1][keys.TASK_ID])
        task, group = batches[0][keys.TASK_ID], batches[0][keys.GROUP_ID]
        assert len({*zip(group.tolist(), task.tolist(), strict=True)}) == 4


class TestSeenTasks:
    def test_memory_is_bounded_and_the_overlap_unbiased(self):
        rng = np.random.default_rng(0)
        played, others = rng.integers(-(2**63), 2**63 - 1, (2, 20_000))
        seen = SeenTasks(limit=4_000)
        for part in np.split(played, 40):
            seen.add(part)
        assert len(seen) == 4_000
        assert seen.overlap(played) == 1.0
        assert seen.overlap(others) == 0.0
        assert abs(seen.overlap(np.concatenate([played[:5_000], others[:5_000]])) - 0.5) < 0.05

    def test_nothing_to_judge_is_nan(self):
        seen = SeenTasks(limit=1)
        seen.add([0, 5])
        assert np.isnan(seen.overlap([7]))
        assert SeenTasks().overlap([7]) == 0.0


def sums(count):
    return Dataset.from_list([{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(count)])


class TestRows:
    @staticmethod
    def questions(tokenizer, env, stream, **kwargs):
        """The tasks of the first 150 tasks."""
        env = GEMEnv(env, tokenizer=tokenizer, num_envs=1, max_model_len=2048, stream=stream, **kwargs)
        return {env.slots.open(0, i).task.task_id for i in range(150)}

    @pytest.mark.parametrize("kind", ["math:GSM8K", "qa:HotpotQA", "code:Taco8k"])
    def test_streams_of_a_data_set_share_no_row(self, tokenizer, kind):
        rows = sums(60)
        if kind.startswith("code"):
            rows = rows.rename_column("answer", "tests").map(lambda row: {"tests": '{"inputs": [], "outputs": []}'})
        given = {"use_mp": False} if kind.startswith("math") else {}

        def factory():
            return gem.make(kind, dataset=rows, **given)

        shown = [self.questions(tokenizer, factory, stream, divide=True) for stream in STREAMS]
        assert sum(map(len, shown)) == len(set.union(*shown))
        assert [len(each) for each in shown[1:]] == [6, 6]
        assert len(shown[0]) > 40
        everything = [self.questions(tokenizer, factory, stream) for stream in STREAMS]
        # a factory's data is its own business, unless it is to be divided
        assert everything[0] & everything[2]

    def test_those_of_an_id_are_divided_unless_it_is_for_evaluation(self, tokenizer):
        shown = [self.questions(tokenizer, "rg:base_conversion", stream) for stream in STREAMS]
        assert sum(map(len, shown)) == len(set.union(*shown))
        again = [self.questions(tokenizer, "rg:base_conversion", stream, divide=False) for stream in STREAMS]
        assert again[0] & again[2]
        env = GEMEnv(["eval:AMC", "math:GSM8K", StopOrGo], tokenizer=tokenizer, stream="test")
        assert [spec.divide for spec in env.mixture] == [False, True, False]

    def test_rows_are_the_streams_whichever_sampler_it_is(self, tokenizer):
        """A greedy evaluation samples from a choice of tasks, which is not ``TaskSampler``."""
        envs = [GEMEnv("rg:base_conversion", tokenizer=tokenizer, max_model_len=2048, stream="test") for _ in range(2)]
        envs[1].task_sampler = [envs[0].task_sampler[i] for i in range(3)]
        assert [envs[1].slots.open(0, i).spans for i in range(3)] == [envs[0].slots.open(0, i).spans for i in range(3)]

    def test_equal_questions_are_one(self):
        questions = [str(i % 20) for i in range(200)]
        parts = [{questions[i] for i in rows_of(questions, stream)} for stream in STREAMS]
        assert [len(part) for part in parts] == [16, 2, 2]
        assert len(set.union(*parts)) == 20
        assert sum(len(rows_of(questions, stream)) for stream in STREAMS) == 200

    def test_too_few_to_divide_are_refused(self, tokenizer):
        env = GEMEnv(
            lambda: gem.make("math:GSM8K", dataset=sums(9), use_mp=False), tokenizer=tokenizer, num_envs=1, divide=True
        )
        with pytest.raises(EnvironmentUnavailableError, match=r"9 different questions.*divide=False"):
            env.reset()

    def test_rows_of_a_prompt_dataset_are_tasks(self, tokenizer):
        rows = [{"question": f"{i}?", "answer": str(i)} for i in range(3)]
        env = PromptDatasetEnv(rows, lambda *_: 1.0, tokenizer=tokenizer, num_envs=6)
        assert len(env.reset()[keys.TASK_ID].unique()) == 3
        assert len(env.lockstep.first_of_each_task(6)) == 3

    def test_the_first_of_each_task_are_looked_for_once(self, tokenizer):
        resets = []

        class Two(StopOrGo):
            def hidden_state(self):
                return self.task

            def reset(self, seed=None):
                resets.append(seed)
                self.task = seed % 8 // 4
                return super().reset(seed)

        env = GEMEnv(Two, tokenizer=tokenizer, num_envs=3, stream="eval")
        first = env.lockstep.first_of_each_task(10)
        assert (len(first), len(resets)) == (2, 10)
        first.clear()
        assert len(env.lockstep.first_of_each_task(10)) == 2
        assert len(resets) == 10
        env.lockstep.first_of_each_task(9)  # of others
        env.set_seed(env.task_sampler.seed + 1)
        env.lockstep.first_of_each_task(9)
        assert len(resets) == 10 + 9 + 9
