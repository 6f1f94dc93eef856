"""What the tests of GEMEnv share: its settings here, policies that speak by a script, and what
episodes showed."""

from __future__ import annotations

from torchrl_llm import keys
from torchrl_llm.envs import GEMEnv
from torchrl_llm.testing.policies import ScriptedPolicy

EASY = "game:GuessTheNumber-v0-easy"


def make_env(env=EASY, **kwargs):
    return GEMEnv(env, **{"max_model_len": 2048, "max_output_tokens": 32, **kwargs})


def make_policy(script, **kwargs):
    """A policy that says the same in every turn, or what a function of episode, turn and context
    returns."""
    return ScriptedPolicy(script if callable(script) else lambda episode, turn, context: script, **kwargs)


def play(env, policy, steps):
    return env.rollout(steps, policy, break_when_any_done=False)


def contexts(env, rollout):
    """What each episode showed, by episode and turn."""
    shown = {}
    for part in (rollout, rollout["next"]):
        for td in part.flatten().unbind(0):
            length = int(td[keys.PROMPT_LENGTH])
            shown[int(td["episode_id"]), int(td["turn"])] = env.formatter.tokenizer.decode(td[keys.PROMPT][:length])
    return shown
