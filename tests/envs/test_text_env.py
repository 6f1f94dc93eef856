"""What environments return, and whether they take a seed: what is accepted, and what is refused
with which sentence."""

import asyncio

import numpy as np
import pytest
import torch

from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import GEMEnv, TextStep
from torchrl_llm.envs.env_reset import reset_env, takes_seed
from torchrl_llm.envs.text_env import read_reset
from torchrl_llm.testing.environments import Dice, StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy


def step(text="Done.", reward=1.0, terminated=True, truncated=False, info=None):
    return TextStep.read((text, reward, terminated, truncated, info))


class TestSteps:
    @pytest.mark.parametrize(
        "one", [np.float32(1), np.array(1.0), np.array([1.0]), torch.tensor(1.0), torch.ones(1, 1), True]
    )
    def test_a_number_is_one_in_an_array_too(self, one):
        assert step(reward=one).reward == 1.0

    @pytest.mark.parametrize("yes", [True, 1, np.bool_(True), np.array([True]), torch.tensor([True])])
    def test_so_is_a_boolean(self, yes):
        read = step(terminated=yes, info={"success": yes, "use_tool": yes})
        assert (read.terminated, read.success, read.role) == (True, True, "tool")

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"reward": np.array([1.0, 2.0])}, r"the reward array\(\[1\., 2\.\]\); expected a number"),
            ({"reward": {"total": 1.0}}, "the reward {'total': 1.0}; expected a number"),
            ({"terminated": np.array([True, True])}, "expected booleans"),
            ({"truncated": "True"}, "truncated='True'; expected booleans"),
            ({"info": ["x"]}, r"step\(\) returned the info \['x'\]; expected a dictionary, such as {}"),
            ({"info": "won"}, "returned the info 'won'; expected a dictionary"),
            ({"info": {"prefix": 3}}, r"the info\['prefix'\] 3; expected text"),
            ({"info": {"suffix": ["a"]}}, r"the info\['suffix'\] \['a'\]; expected text"),
            ({"info": {"use_tool": "false"}}, r"the info\['use_tool'\] 'false'; expected a boolean, or none"),
            ({"info": {"use_tool": 2}}, r"the info\['use_tool'\] 2; expected a boolean, or none"),
            ({"info": {"success": np.array([True, False])}}, r"the info\['success'\] .*; expected a boolean, or none"),
        ],
    )
    def test_anything_else_is_told(self, wrong, said):
        with pytest.raises(TypeError, match=said):
            step(**wrong)

    @pytest.mark.parametrize("nothing", [None, {}, [], (), ""], ids=repr)
    def test_no_info(self, nothing):
        assert step(info=nothing) == step(info={})
        assert read_reset(("Go.", nothing)) == ("Go.", "Go.")

    def test_a_coroutine_is_told_and_closed(self, recwarn):
        async def answer():
            await asyncio.sleep(0)

        for read in (TextStep.read, read_reset):
            with pytest.raises(TypeError, match="it has to be an ordinary method"):
                read(answer())
        assert not [each for each in recwarn if "never awaited" in str(each.message)]

    def test_the_info_of_a_reset(self):
        with pytest.raises(TypeError, match=r"reset\(\) returned the info \['x'\]; expected a dictionary"):
            read_reset(("Go.", ["x"]))


class Drawn:
    """As ``gymnasium.Env``: a generator of its own, made of the seed, or of the system's entropy
    where there is none."""

    thread_safe = True

    def reset(self, *, seed=None, options=None):
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.number = int(self.rng.integers(10**6))
        return f"Say {self.number}.", {}

    def step(self, action):
        return "", float(action == str(self.number)), True, False, {}


class Wrapper:
    """As wrappers are written everywhere."""

    inside = Drawn

    def __init__(self):
        self.env = self.inside()

    def reset(self, **kwargs):
        return self.env.reset(**kwargs)

    def step(self, action):
        return self.env.step(action)


class Twice(Wrapper):
    inside = Wrapper

    def reset(self, *args, **kwargs):
        return self.env.reset(*args, **kwargs)


class AroundDice(Wrapper):
    inside = Dice


class Hidden(Dice):
    """A wrapper whose environment cannot be seen, and takes no seed."""

    def reset(self, **kwargs):
        return self._roll(**kwargs)

    def _roll(self):
        return super().reset()


class Alone:
    def reset(self, **kwargs):
        self.number = kwargs["seed"]
        return f"Say {self.number}.", {}

    step = Drawn.step


class Strict(StopOrGo):
    """It takes options, and a seed is none of them."""

    def reset(self, **options):
        if options:
            raise ValueError(f"unknown options {sorted(options)}")
        return super().reset(seed=0)


class Picky(StopOrGo):
    """Task 3 is broken."""

    def __init__(self):
        self.calls = []

    def reset(self, **kwargs):
        self.calls.append(kwargs["seed"])
        if kwargs["seed"] == 3:
            raise ValueError("no task 3")
        return super().reset(**kwargs)


class TestSeeds:
    """The seed of a task reaches an environment through ``**kwargs``; without it each run of one
    seed has tasks of its own."""

    @pytest.mark.parametrize("make", [Drawn, Wrapper, Twice, AroundDice, Alone])
    def test_the_same_seed_is_the_same_tasks(self, tokenizer, make):
        def contexts(group_size):
            env = GEMEnv(make, tokenizer=tokenizer, num_envs=4, group_size=group_size, max_model_len=256, seed=1)
            policy = ScriptedPolicy(lambda *_: "x", tokenizer=tokenizer, max_output_tokens=8)
            return TurnCollector(env, policy, batch_size=4).rollout()["task_id"].tolist()

        assert contexts(1) == contexts(1)
        assert len(set(contexts(1))) == 4
        assert len(set(contexts(4))) == 1

    def test_what_takes_none_behind_kwargs_gets_none(self):
        assert takes_seed(Hidden())
        assert reset_env(Hidden(), 3)[1] is False
        assert reset_env(Drawn(), 3)[1] is True
        with pytest.raises(KeyError):
            reset_env(Alone(), None)

    def test_one_that_refuses_it_in_its_own_words_gets_none_and_it_is_told(self, tokenizer, caplog):
        env = GEMEnv(Strict, tokenizer=tokenizer, num_envs=4, max_model_len=256, seed=1)
        policy = ScriptedPolicy(lambda *_: "x", tokenizer=tokenizer, max_output_tokens=8)
        rows = TurnCollector(env, policy, batch_size=8).rollout()
        assert len(rows) == 8
        told = [each.getMessage() for each in caplog.records]
        assert (
            len([each for each in told if "Strict takes no seed (ValueError: unknown options ['seed'])" in each]) == 1
        )
        assert not [each for each in told if "failed" in each]

    def test_a_task_that_fails_is_no_seed_that_is_refused(self):
        env = Picky()
        with pytest.raises(ValueError, match="no task 3"):
            reset_env(env, 3)
        assert reset_env(env, 4)[1] is True
        # after a reset with a seed it is not asked again
        with pytest.raises(ValueError, match="no task 3"):
            reset_env(env, 3, first=False)
        assert env.calls == [3, 2, 4, 3]

    @pytest.mark.parametrize(
        ("env", "takes"),
        [
            (Drawn, True),
            (Wrapper, True),
            (Twice, True),
            (Alone, True),
            (StopOrGo, True),
            (AroundDice, False),
            (Dice, False),
        ],
    )
    def test_who_takes_one(self, env, takes):
        assert takes_seed(env()) is takes
