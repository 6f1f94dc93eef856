"""What the tests of the report share: recorded rows that are made up, and the folder of a run that
holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.data import turns_to_rows
from torchrl_llm.envs import CHATML, GEMEnv, with_tools
from torchrl_llm.runs.recording import FOLDER, trimmed, write_recording
from torchrl_llm.runs.table import FILE, table_text
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tokenizers import byte_tokenizer

PAYLOADS = (
    "</script><script>document.title='run'</script>",
    "<img src=x onerror=\"document.title='run'\">",
    "\u202egnp.exe\u2066",
    "\x1b[2J\x00",
    "'\"{{ 7 * 7 }}{% raw %}&lt;",
    "x" * 5000,
)
"""Texts that act where they are not escaped."""


def made_rows(
    episodes: int = 4,
    turns: int = 2,
    length: int = 12,
    *,
    first: int = 0,
    groups: int = 1,
    seed: int = 0,
    vocabulary: int = 50,
) -> TensorDict:
    """Scored and credited rows: half of each turn's tokens are the model's, and every odd episode
    is won.

    Args:
        length: tokens of a row.
        first: the first episode's number.
        groups: tasks that the episodes are divided among, one after the other.
        vocabulary: token ids are below it.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.arange(episodes)
    turn_of = torch.arange(length) * turns // length
    said = torch.arange(length) * turns * 2 // length % 2 == 1
    turn_ids = torch.where(said, turn_of, -1).expand(episodes, length).contiguous()
    last = torch.zeros(episodes, turns, dtype=torch.bool)
    last[:, -1] = True
    won = last & (ids % 2 == 1).unsqueeze(-1)
    action = turn_ids >= 0
    sampled = torch.where(action, -noise(episodes, length).abs(), 0.0)
    advantage = noise(episodes, turns)
    stops = torch.where(won, int(keys.StopReason.WON), int(keys.StopReason.LOST)) * last
    return TensorDict(
        {
            keys.TOKENS: torch.randint(vocabulary, (episodes, length), generator=generator),
            keys.ATTENTION_MASK: torch.ones(episodes, length, dtype=torch.bool),
            keys.TURN_IDS: turn_ids,
            keys.POLICY_VERSION: torch.where(action, 0, -1),
            keys.SAMPLE_LOG_PROB: sampled,
            keys.REF_LOG_PROB: sampled + 0.01 * noise(episodes, length),
            keys.LOG_PROB: sampled + 0.1 * noise(episodes, length),
            keys.ENTROPY: noise(episodes, length).abs(),
            keys.ADVANTAGE: torch.where(action, advantage.gather(1, turn_ids.clamp_min(0)), 0.0),
            keys.LOSS_WEIGHT: torch.where(action, 1.0 / action.sum(), 0.0),
            keys.TURN_REWARD: won.float(),
            keys.TURN_MASK: torch.ones(episodes, turns, dtype=torch.bool),
            keys.TURN_TERMINATED: last,
            keys.TURN_TRUNCATED: torch.zeros_like(last),
            keys.TURN_SUCCESS: won,
            keys.TURN_STOP_REASON: stops,
            keys.TURN_VALUE: noise(episodes, turns),
            keys.TURN_ADVANTAGE: advantage,
            keys.BOOTSTRAP_VALUE: noise(episodes),
            keys.EPISODE_ID: ids + first,
            keys.GROUP_ID: (ids + first) * groups // episodes,
            keys.ENV_ID: torch.zeros_like(ids),
            keys.TASK_ID: ids * groups // episodes,
        },
        [episodes],
    )


class Counts:
    """Three turns, whose messages are numbered."""

    def reset(self, seed: int | None = None) -> tuple[str, dict]:
        self.turn = 0
        return "Speak.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.turn += 1
        return f"Message {self.turn}.", 0.0, self.turn == 3, False, {}


def thinking_rows() -> tuple[TensorDict, dict[int, str]]:
    """Two episodes of three turns that think, whose template drops the thinking of earlier turns;
    and the text of each token."""
    drops = CHATML.replace("message['content']", "message['content'].split('</think>')[-1].lstrip('\n')")
    tokenizer = byte_tokenizer(chat_template=drops)
    policy = ScriptedPolicy(
        lambda episode, turn, context: f"<think>\nturn {turn}\n</think>\n\n{turn}",
        tokenizer=tokenizer,
        max_output_tokens=40,
    )
    env = GEMEnv(Counts, tokenizer=tokenizer, num_envs=2, max_output_tokens=40, on_done="idle")
    rows = turns_to_rows(env.rollout(3, policy, break_when_any_done=False))
    return rows, {token: tokenizer.decode([token]) for token in rows[keys.TOKENS].unique().tolist()}


def tool_rows() -> tuple[TensorDict, dict[int, str], dict[int, str]]:
    """An episode of two calls in a turn, of a call that is none, and of three answers; the text of
    each token, and of each text among the extras."""

    def look(place: str, markup: str = "<b>") -> str:
        """Look.

        Args:
            place: where.
            markup: any text.
        """
        return f"{place}: nothing"

    calls = "{% for call in message.tool_calls %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    content = "{{ message['content'] }}"
    tokenizer = byte_tokenizer(chat_template=CHATML.replace(content, content + calls))
    called = '<call>{"name": "look", "arguments": {"place": "here", "markup": "<i>"}}</call>'
    answers = [called + called.replace("here", "there"), called[:-15], "3", "4", "5"]
    policy = ScriptedPolicy(lambda episode, turn, context: answers[turn], tokenizer=tokenizer, max_output_tokens=200)
    env = GEMEnv(with_tools(Counts, [look]), tokenizer=tokenizer, max_model_len=2000, max_output_tokens=200)
    collector = TurnCollector(env, policy, batch_size=1, total_batches=1)
    (rows,) = collector
    return rows, {token: tokenizer.decode([token]) for token in rows[keys.TOKENS].unique().tolist()}, collector.texts


def about(kind: str = "training", iteration: int = 1, **changes: Any) -> dict[str, Any]:
    """The attributes of a recording."""
    pieces = {token: f" word{token}" for token in range(2000)}
    base = {"kind": kind, "iteration": iteration, "steps": 10 * iteration, "gamma": 0.9, "env_names": ["game:Guess"]}
    return base | {"pieces": pieces, "missing": {}, "interval": 1} | changes


def write_rows(run: Path, rows: TensorDict, name: str = "iteration-000000000001", **changes: Any) -> Path:
    """Record rows in the folder of a run, with ``"clipped"`` where a token's log-prob is large."""
    arrays = trimmed(rows)
    if keys.LOSS_WEIGHT in rows:
        arrays["clipped"] = (arrays["sample_log_prob"] < -1.5) & (arrays["turn_ids"] >= 0)
    path = run / FOLDER / f"{name}.safetensors"
    write_recording(path, arrays, **about(**changes))
    return path


def write_metrics(run: Path, iterations: int = 4, **metrics: float) -> None:
    """The table of a run with these metrics in each iteration."""
    steps = np.arange(1, iterations + 1) * 10
    values = {
        "rollout/steps": steps,
        "rollout/success": np.linspace(0.2, 0.8, iterations),
        "time/rollout_s": steps / 10,
    }
    values |= {name: np.full(iterations, value) for name, value in metrics.items()}
    run.mkdir(parents=True, exist_ok=True)
    history = [{name: float(column[i]) for name, column in values.items()} for i in range(iterations)]
    (run / FILE).write_text(table_text(history))


def write_result(run: Path, **changes: Any) -> None:
    """``result.json`` of a run that ended."""
    result = {"algo": "GRPO", "env_name": "game:Guess", "seed": 0, "success_before": 0.2, "success_after": 0.8}
    run.mkdir(parents=True, exist_ok=True)
    (run / "result.json").write_text(json.dumps(result | {"stop_reason": "max_steps=40 turns played"} | changes))
