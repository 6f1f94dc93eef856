"""Records of episodes, and the batch they come to: :class:`Episode`, :func:`batch_of`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_llm import keys
from torchrl_llm.collectors._base import MASK, PADDING
from torchrl_llm.envs.slots import TERMINATED
from torchrl_llm.envs.tasks import Ticket
from torchrl_llm.keys import StopReason
from torchrl_llm.modules.policy import TurnResponse


@dataclass(eq=False)
class Episode:
    """What was played of a ticket.

    Attributes:
        index: the place of the ticket among the tickets.
        ticket: the ticket.
        task_id: of the task that it names.
        lengths: tokens of the context before each turn, and after the last one.
        segments: for each of these, how often the context was made anew before.
        responses: the policy's, one a turn.
        rewards: one a turn.
        oldest: the lowest version of the weights that sampled a token; ``None`` before the first.
        contexts: the longest context of each segment that is over, int64; all of them once finished.
        stop_reason: why it ended, or that it runs.
    """

    index: int
    ticket: Ticket
    task_id: int = -1
    lengths: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    responses: list[TurnResponse] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    oldest: int | None = None
    contexts: list[npt.NDArray[np.int64]] = field(default_factory=list)
    stop_reason: StopReason = StopReason.RUNNING

    @property
    def finished(self) -> bool:
        """Whether the last turn was played."""
        return self.stop_reason != StopReason.RUNNING

    def stale(self, oldest: int) -> bool:
        """Whether a token was sampled with weights older than the version ``oldest``."""
        return self.oldest is not None and self.oldest < oldest

    def hear(self, response: TurnResponse) -> None:
        """Record the policy's response of the next turn."""
        self.responses.append(response)
        oldest = int(response.versions.min())
        self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)


def batch_of(episodes: Sequence[Episode], *, width: int, output_width: int, slides: bool = False) -> TensorDict:
    """The turn view of finished episodes, as :class:`~torchrl_llm.collectors.TurnCollector` delivers it.

    Args:
        episodes: B finished episodes.
        width: columns of a context.
        output_width: columns of a response.
        slides: whether contexts may be made anew, and ``"segment"`` says how often they were.

    Returns:
        A TensorDict ``[B, T]``, right-padded to the longest episode.
    """
    turns = torch.tensor([len(episode.rewards) for episode in episodes])
    steps = torch.arange(int(turns.max()))
    mask = steps < turns.unsqueeze(-1)
    last = steps == turns.unsqueeze(-1) - 1
    columns: dict[Any, Tensor] = _contexts(episodes, mask, width) | _responses(episodes, mask, output_width)
    reasons = torch.tensor([episode.stop_reason for episode in episodes]).unsqueeze(-1)
    terminated = torch.tensor([episode.stop_reason in TERMINATED for episode in episodes]).unsqueeze(-1)
    ids = (
        torch.tensor([[*episode.ticket[:3], episode.task_id] for episode in episodes])
        .unsqueeze(1)
        .expand(-1, len(steps), -1)
    )
    flat: dict[Any, Tensor] = {
        keys.TURN: steps.expand_as(mask),
        ("next", keys.TURN): steps.expand_as(mask) + 1,
        ("next", keys.REWARD): _filled(mask, [reward for episode in episodes for reward in episode.rewards]),
        keys.STOP_REASON: torch.zeros_like(mask, dtype=torch.int64),
        ("next", keys.STOP_REASON): torch.where(last, reasons, 0),
        ("next", keys.SUCCESS): last & (reasons == StopReason.WON),
        ("next", keys.DONE): last,
        ("next", keys.TERMINATED): last & terminated,
        ("next", keys.TRUNCATED): last & ~terminated,
    }
    if slides:
        segment = _padded([episode.segments for episode in episodes], mask.shape[1] + 1)
        flat |= {keys.SEGMENT: segment[:, :-1], ("next", keys.SEGMENT): segment[:, 1:]}
    flat |= {key: torch.zeros_like(mask) for key in (keys.SUCCESS, keys.DONE, keys.TERMINATED, keys.TRUNCATED)}
    for i, name in enumerate((keys.EPISODE_ID, keys.GROUP_ID, keys.ENV_ID, keys.TASK_ID)):
        flat |= {name: ids[..., i], ("next", name): ids[..., i]}
    for key, value in flat.items():
        columns[key] = value.masked_fill(~mask, PADDING.get(key, 0)).unsqueeze(-1)
    batch = TensorDict({MASK: mask}, batch_size=mask.shape)
    for key, value in columns.items():
        batch.set(key, value)
    return batch


def _filled(mask: Tensor, values: Sequence[float]) -> Tensor:
    result = torch.zeros(mask.shape)
    result[mask] = torch.tensor(values, dtype=torch.float32)
    return result


def _padded(values: Sequence[Sequence[int] | npt.NDArray[np.int64]], width: int) -> Tensor:
    result = np.zeros((len(values), width), np.int64)
    for row, value in zip(result, values, strict=True):
        row[: len(value)] = value
    return torch.from_numpy(result)


def _contexts(episodes: Sequence[Episode], mask: Tensor, width: int) -> dict[Any, Tensor]:
    """The contexts before and after each turn: the longest of their segment, cut. Padded turns have length 0."""
    longest = _padded([context for episode in episodes for context in episode.contexts], width)
    first = torch.tensor([0, *(len(episode.contexts) for episode in episodes[:-1])]).cumsum(0)
    place = first.unsqueeze(-1) + _padded([episode.segments for episode in episodes], mask.shape[1] + 1)
    length = _padded([episode.lengths for episode in episodes], mask.shape[1] + 1).unsqueeze(-1)
    result: dict[Any, Tensor] = {}
    for before, turns in (((), slice(None, -1)), (("next",), slice(1, None))):
        size = length[:, turns] * mask.unsqueeze(-1)
        result[(*before, *keys.PROMPT)] = torch.where(torch.arange(width) < size, longest[place[:, turns]], 0)
        result[(*before, *keys.PROMPT_LENGTH)] = size
    return result


def _responses(episodes: Sequence[Episode], mask: Tensor, width: int) -> dict[Any, Tensor]:
    responses = [response for episode in episodes for response in episode.responses]
    sizes = torch.zeros(mask.shape, dtype=torch.int64)
    sizes[mask] = torch.tensor([len(response.tokens) for response in responses])
    valid = torch.arange(width) < sizes.unsqueeze(-1)

    def column(values: Sequence[npt.NDArray[Any]], fill: float, dtype: torch.dtype) -> Tensor:
        result = torch.full(valid.shape, fill, dtype=dtype)
        result[valid] = torch.from_numpy(np.concatenate(values)).to(dtype)
        return result

    turn = torch.arange(mask.shape[1]).view(1, -1, 1)
    return {
        keys.RESPONSE: column([response.tokens for response in responses], 0, torch.int64),
        keys.RESPONSE_MASK: valid,
        keys.RESPONSE_LOG_PROBS: column([response.log_probs for response in responses], 0.0, torch.float32),
        keys.TURN_IDS: torch.where(valid, turn, -1),
        keys.POLICY_VERSION: column([response.versions for response in responses], -1, torch.int64),
    }
