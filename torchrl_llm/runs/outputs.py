"""What a run says of itself: tables, sample episodes as text, ``result.json``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import keys
from torchrl_llm.modules.segments import Segments
from torchrl_llm.rendering import ChatTemplateError, Message, Renderer
from torchrl_llm.utils.files import write_text
from torchrl_llm.utils.terminal import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchrl_llm.metrics.evaluated import Evaluation

NEXT_SEGMENT = "\n\n[... parts of earlier turns leave the context; the model sees from here on:]\n\n"
"""Stands between the contexts of an episode whose oldest turns were dropped."""


def comparison_table(evaluations: Mapping[str, Evaluation]) -> str:
    """A plain-text table, one evaluation a line: win rate with its 95 % interval, turns, return,
    penalized turns, episodes.

    "penalized" is the share of the turns whose reward is negative. The last columns are the
    different tasks among the episodes, the share of episodes whose task was trained on, and the
    episodes whose environment failed; "-" where it is unknown.

    Args:
        evaluations: label -> :class:`~torchrl_llm.metrics.Evaluation`.
    """
    width = max(len("weights"), *(len(label) for label in evaluations))
    lines = [
        f"{'weights':<{width}}  win rate  95 % interval    turns  return  penalized  episodes  tasks  trained on  faults"
    ]
    for label, result in evaluations.items():
        low, high = result.success_ci95
        lines.append(
            f"{label:<{width}}  {result.success:8.3f}  [{low:.3f}, {high:.3f}]  {result.turns:6.2f}  "
            f"{result.reward:6.3f}  {_known(result.penalized, 9, '.1%')}  {result.episodes:8d}  {_known(result.tasks, 5, 'd')}  "
            f"{_known(result.task_overlap, 10, '.0%')}  {result.faults:6d}"
        )
    return "\n".join(lines)


def percent(share: float | None) -> str:
    """A share in percent; a dash if it is unknown.

    Examples:
        >>> percent(0.071), percent(None)
        ('7%', '-')
    """
    return _known(share, 0, ".0%")


def _known(value: float | None, width: int, kind: str) -> str:
    """The number, or a dash if it is unknown."""
    known = value is not None and not math.isnan(value)
    return f"{value:{width}{kind}}" if known else f"{'-':>{width}}"


def episodes_text(
    rows: TensorDictBase,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int = 4,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The first ``count`` episodes of ``rows`` as text, special tokens included, with their
    outcome.

    They are numbered from 1, and so are their tasks, in order of appearance. The turn that the
    template opens after the environment's last message is left out: the policy was not asked for
    it.

    Args:
        rows: ``[B]`` episodes.
        tokenizer: of the model.
        count: how many at most; default 4.
        chat_template_kwargs: the arguments that its template was given; default none.
    """
    opening = _opening(tokenizer, chat_template_kwargs or {})
    tasks: dict[int, int] = {}
    parts = []
    for number, row in enumerate(rows[:count], start=1):
        turns = int(row[keys.TURN_MASK].sum())
        stop = keys.StopReason(int(row[keys.TURN_STOP_REASON][turns - 1]))
        ended = outcome(stop, row[keys.TURN_REWARD][:turns].tolist())
        task = tasks.setdefault(int(row.get(keys.TASK_ID, row[keys.GROUP_ID])), len(tasks) + 1)
        contexts = map(tokenizer.decode, _contexts(row[keys.TOKENS], row[keys.ATTENTION_MASK]))
        text = NEXT_SEGMENT.join(contexts).removesuffix(opening)
        parts.append(f"### episode {number}, task {task}: {ended}\n\n{fenced(text)}\n")
    return "\n".join(parts)


def outcome(stop: keys.StopReason, rewards: Sequence[float]) -> str:
    """How an episode ended, with the reward of each turn.

    Examples:
        >>> outcome(keys.StopReason.WON, [0.0, 1.0])
        'won after 2 turns, rewards 0, 1'
    """
    turns = len(rewards)
    reason, paid = stop.name.lower().replace("_", " "), ", ".join(f"{reward:.4g}" for reward in rewards)
    return f"{reason} after {turns} turn{'s' * (turns != 1)}, rewards {paid}"


def _opening(tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]) -> str:
    """The text with which the chat template opens the assistant's turn; none without a template
    that can be used."""
    try:
        render = Renderer(tokenizer, chat_template_kwargs=chat_template_kwargs)
        closed, opened = (render([Message("user", "?")], prompt=prompt) for prompt in (False, True))
    except ChatTemplateError:  # of a run without one
        return ""
    return opened.removeprefix(closed) if opened.startswith(closed) else ""


def fenced(text: str) -> str:
    """``text`` as a block of Markdown that shows it unchanged: the fence is longer than any in the
    text.

    Examples:
        >>> print(fenced("```\\n<b>"))
        ````text
        ```
        <b>
        ````
    """
    longest = max(map(len, re.findall("`+", text)), default=0)
    # A text that closed its own block would act as Markdown and HTML where the report is shown.
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def code(text: str) -> str:
    """``text`` as inline code of Markdown that shows it unchanged, on one line: the fence is longer
    than any in the text.

    Examples:
        >>> print(code("a"), code("a`b"), code("`a\\n`"))
        `a` ``a`b`` `` `a\\n` ``
    """
    text = one_line(text)
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    room = " " if text.startswith(("`", " ")) or text.endswith(("`", " ")) else ""
    return f"{fence}{room}{text}{room}{fence}"


def _contexts(tokens: Tensor, attention_mask: Tensor) -> list[Tensor]:
    segments = Segments.find(attention_mask.unsqueeze(0))
    if segments is None:
        return [tokens[attention_mask.bool()]]
    rows = segments.split(tokens.unsqueeze(0))
    return [row[:length] for row, length in zip(rows, segments.lengths.tolist(), strict=True)]


def with_final(history: Sequence[Mapping[str, float]], after: Mapping[str, float]) -> list[Mapping[str, float]]:
    """``history``, whose last iteration has the evaluation at the run's end if it has none of its
    own.

    Args:
        history: the metrics of each iteration.
        after: metrics of the evaluation, ``Evaluation.metrics("evaluation")``; empty without one.

    Examples:
        >>> with_final([{"rollout/steps": 9.0}], {"evaluation/success": 0.5})
        [{'evaluation/success': 0.5, 'rollout/steps': 9.0}]
    """
    if not history or "evaluation/success" in history[-1]:
        return [*history]
    return [*history[:-1], {**after, **history[-1]}]


def write_json(result: Mapping[str, Any], path: Path) -> None:
    """Write ``result`` as strict JSON, whole or not at all: nan and infinities become null."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [clean(entry) for entry in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    # allow_nan=False: by default json writes NaN, which is not JSON and which other readers refuse.
    write_text(path, json.dumps(clean(result), indent=2, allow_nan=False, default=str) + "\n")
