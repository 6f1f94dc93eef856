"""What the tests of PromptDatasetEnv share: rows, an environment over them, and what is played of
it."""

from __future__ import annotations

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.envs import PromptDatasetEnv
from torchrl_llm.testing.policies import ScriptedPolicy

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(5)]
SPLITS = {"train": ROWS, "test": [{"question": f"Held out {i}?", "answer": f"secret {i}"} for i in range(3)]}


def exact_match(completion, answer, question):
    return completion == answer


def make_env(dataset=ROWS, reward_fn=exact_match, **kwargs):
    return PromptDatasetEnv(
        dataset, reward_fn, **{"max_model_len": 128, "max_output_tokens": 16, "max_faults": 0, **kwargs}
    )


def make_policy(answer="4", **kwargs):
    """A policy that answers every question alike."""
    return ScriptedPolicy(lambda episode, turn, context: answer, max_output_tokens=16, **kwargs)


def collect_rows(env, episodes, answer="4"):
    """The rows, rewards and groups of the next episodes."""
    tokenizer = env.formatter.tokenizer
    batch = TurnCollector(env, make_policy(answer, tokenizer=tokenizer), batch_size=episodes).rollout()
    lengths = (batch[keys.TURN_IDS] >= 0).long().argmax(-1)  # of the prompts
    texts = [tokenizer.decode(ids[:length]) for ids, length in zip(batch[keys.TOKENS], lengths, strict=True)]
    rows = [next(i for i, row in enumerate(env.rows) if row.question in text) for text in texts]
    return rows, batch[keys.TURN_REWARD][:, 0].tolist(), batch["group_id"].tolist()
