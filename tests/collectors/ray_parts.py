"""What workers of the tests are made of. They import this module, so it is light and knows nothing
of pytest."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import ray
import scripted_episodes
from peft import LoraConfig

from torchrl_llm.collectors._cluster import RayCluster, RolloutActor
from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import HFPolicy, SamplingConfig, load_actor_critic
from torchrl_llm.testing.environments import Echo, Faulty, StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy, SleepingPolicy
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer, tiny_model_path
from torchrl_llm.testing.tokenizers import byte_tokenizer
from torchrl_llm.weight_update import RayWeightSync

EASY = "game:GuessTheNumber-v0-easy"
SAMPLING = SamplingConfig(max_output_tokens=16)


class ReusingCluster(RayCluster):
    """Workers get processes that are up already, where there are some: starting one takes many
    seconds.

    A process that still answers when it is ended stays here; one that is lost does not.
    """

    spare: list = []  # noqa: RUF012

    def __init__(self, options):
        super().__init__(options)
        self.opening = {}

    @classmethod
    def warm_up(cls, count):
        actor_class = ray.remote(RolloutActor).options(num_cpus=0)
        cls.spare = [actor_class.remote() for _ in range(count)]

    @classmethod
    @contextmanager
    def none_spare(cls):
        kept, cls.spare = cls.spare, []
        try:
            yield
        finally:
            cls.spare += kept

    def make_process(self):
        return self.spare.pop(0) if self.spare else super().make_process()

    def call(self, process, method, *args, **kwargs):
        call = super().call(process, method, *args, **kwargs)
        if method == "open":
            self.opening[process] = call
        return call

    def end(self, process):
        if not ray.is_initialized():
            return
        starting = not ray.wait([self.opening.pop(process)], timeout=0)[0]
        if answers(process, 0.0 if starting else 2.0) is None:
            super().end(process)
        else:
            self.spare.append(process)


class SpendingCluster(ReusingCluster):
    """Takes processes that are up already, and ends them as they are ended outside of tests."""

    end = RayCluster.end


def answers(actor, patience):
    """Whether it does; ``None``: it is dead or does not come back. Who is still starting counts as
    one that does."""
    ready = actor.__ray_ready__.remote()
    try:
        ray.get(ready, timeout=patience)
    except ray.exceptions.GetTimeoutError:
        return None if patience else True
    except ray.exceptions.RayError:
        return None
    return True


class Stamp(RayWeightSync):
    """Sends versions without weights, to policies without a model."""

    def __init__(self, policy):
        super().__init__(None, policy=policy)

    def publish(self, version):
        self.current = version, ray.put(version)

    @staticmethod
    def install(policy, version):
        policy.policy_version = version
        return math.nan


# ---------------------------------------- games and players without a model


def make_env(env=StopOrGo, **kwargs):
    return scripted_episodes.make_env(env, **{"tokenizer": byte_tokenizer(), "num_envs": 4, **kwargs})


def make_script(kind=ScriptedPolicy, max_output_tokens=16, **kwargs):
    return kind(scripted_episodes.script, tokenizer=byte_tokenizer(), max_output_tokens=max_output_tokens, **kwargs)


def make_constant():
    """Answers the same number, whatever the prompt."""
    return ScriptedPolicy(lambda *_: "\\boxed{5}", tokenizer=byte_tokenizer(), max_output_tokens=16)


make_sleeper = partial(make_script, SleepingPolicy)


class Doomed(SleepingPolicy):
    """Does something bad when it answers an episode.

    Args:
        deed: what.
        episode: when.
        once: a file that says that it was done; ``None``: again and again.
    """

    def __init__(self, *args, deed, episode=0, once=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.deed, self.episode, self.once = deed, episode, once

    def submit(self, request):
        if request.episode_id == self.episode and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            self.deed()
        super().submit(request)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(1000)


class OutOfLuckError(ValueError):
    """Knows more than its text."""

    def __init__(self, text, luck):
        super().__init__(text)
        self.luck = luck

    def __reduce__(self):
        return type(self), (self.args[0], self.luck)


class LockedError(RuntimeError):
    """Cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


def fail(error, *args):
    raise error(*args)


def fail_elsewhere(here, make, error):
    """Make something in the process ``here``, and fail in every other one."""
    return make() if os.getpid() == here else fail(error, "no paper")


def differently(here, make, **kwargs):
    """Make something in the process ``here``, and with ``kwargs`` in every other one."""
    return make() if os.getpid() == here else make(**kwargs)


class Sometimes(Faulty):
    """Fails for some seeds of tasks: ``deed`` instead of a step, else it stops at "stop"."""

    thread_safe = True

    def __init__(self, seeds, deed):
        super().__init__("raise")
        self.seeds, self.deed = seeds, deed

    def reset(self, seed=None):
        self.bad = seed in self.seeds
        return super().reset(seed)

    def step(self, action):
        if self.bad:
            return self.deed()
        stop = "stop" in action
        return "On.", float(stop), stop, False, {}


# ---------------------------------------- games and players with a model


LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])


def make_guess(env=EASY, **kwargs):
    defaults = {"num_envs": 4, "max_model_len": 256, "max_output_tokens": 16}
    return GEMEnv(env, tokenizer=load_tiny_tokenizer(), **defaults | kwargs)


def make_sliding(**kwargs):
    return make_env(partial(Echo, 6), max_model_len=150, overflow="slide", **kwargs)


def make_hf(model=None, adapter=None):
    return HFPolicy(
        load_tiny_model() if model is None else model, load_tiny_tokenizer(), SAMPLING, adapter=adapter, seed=3
    )


def make_lora_models(**kwargs):
    return load_actor_critic(tiny_model_path(), dtype="float32", sampling=SAMPLING, **kwargs)


def make_lora_policy(spoil=0.0):
    models = make_lora_models(lora=LORA)
    if spoil:
        models.model.get_base_model().lm_head.weight.data.mul_(spoil)
    return make_hf(models.model, models.adapter)
