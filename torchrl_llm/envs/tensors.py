"""The tensors of :class:`~torchrl_llm.envs.GEMEnv`: its specs, and the observation made of its
slots."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_llm import keys
from torchrl_llm.envs.slots import TERMINATED, SlotMachine
from torchrl_llm.keys import StopReason


def set_specs(env: EnvBase, vocab_size: int) -> None:
    """Set the specs of a :class:`~torchrl_llm.envs.GEMEnv`: observation, action, reward and done.

    Args:
        env: changed in place.
        vocab_size: ids that a response may hold.
    """
    n = env.batch_size[0]
    size: dict[str, Any] = {"shape": (n, 1), "dtype": torch.int64}
    observation: dict[Any, Any] = {
        "tokens": Composite(
            prompt=Unbounded(shape=(n, env.max_model_len), dtype=torch.int64),
            prompt_length=Bounded(low=0, high=env.max_model_len, **size),
            shape=(n,),
        ),
        keys.ENV_ID: Bounded(low=0, high=len(env.names), **size),
        keys.SUCCESS: Binary(1, shape=(n, 1), dtype=torch.bool),
        keys.STOP_REASON: Bounded(low=0, high=max(StopReason), **size),
    }
    unbounded = [keys.TURN, keys.EPISODE_ID, keys.GROUP_ID, keys.TASK_ID]
    unbounded += [keys.SEGMENT] if env.slots.window.rebuilds else []
    observation |= {key: Unbounded(**size) for key in unbounded}
    spec = Composite(observation, shape=(n,))
    for column in env.slots.columns:
        spec[column.name] = Unbounded(shape=(n, 1), dtype=column.dtype)
    env.observation_spec = spec.to(env.device)
    response = Composite(
        response=Categorical(vocab_size, shape=(n, env.max_output_tokens), dtype=torch.int64),
        response_mask=Binary(env.max_output_tokens, shape=(n, env.max_output_tokens), dtype=torch.bool),
        shape=(n,),
    )
    env.action_spec = Composite(tokens=response, shape=(n,), device=env.device)
    env.reward_spec = Unbounded(shape=(n, 1), dtype=torch.float32, device=env.device)
    flag = {name: Binary(1, shape=(n, 1), dtype=torch.bool) for name in (keys.DONE, keys.TERMINATED, keys.TRUNCATED)}
    env.full_done_spec = Composite(flag, shape=(n,), device=env.device)


def observation_of(machine: SlotMachine) -> dict[Any, Tensor]:
    """The observation of all slots, under the keys of the turn view."""
    slots = [*machine]
    values: dict[Any, list[int]] = {
        keys.PROMPT_LENGTH: [slot.length for slot in slots],
        keys.TURN: [slot.turn for slot in slots],
        keys.EPISODE_ID: [slot.task_spec.episode_id for slot in slots],
        keys.GROUP_ID: [slot.task_spec.group_id for slot in slots],
        keys.ENV_ID: [slot.task_spec.env_id for slot in slots],
        keys.TASK_ID: [slot.task_id for slot in slots],
        keys.STOP_REASON: [slot.stop_reason for slot in slots],
    }
    if machine.window.rebuilds:
        values[keys.SEGMENT] = [slot.segment for slot in slots]
    # One array of all: a tensor of a list takes longer than the rest, and by itself each of them
    # would be one.
    table = torch.from_numpy(np.array([*values.values()], np.int64)).unsqueeze(-1)
    columns: dict[Any, Tensor] = dict(zip(values, table.unbind(), strict=True))
    columns[keys.SUCCESS] = columns[keys.STOP_REASON] == StopReason.WON
    turns = [machine.values(slot) for slot in range(len(slots))] if machine.columns else []
    for column in machine.columns:
        columns[column.name] = torch.tensor([turn[column.name] for turn in turns], dtype=column.dtype).unsqueeze(-1)
    # slots write on in it, and a collector keeps what it was given
    context = machine.prompt.clone()
    if idle := [i for i, slot in enumerate(slots) if slot.length == 0]:
        context[idle] = 0
    return columns | {keys.PROMPT: context}


def done_of(slots: SlotMachine) -> dict[Any, Tensor]:
    """Whether the episodes of ``slots`` are over, and how: ``[N, 1]`` each."""
    flags = np.array([(slot.finished, slot.stop_reason in TERMINATED) for slot in slots])
    done, terminated = torch.from_numpy(flags.T.copy()).unsqueeze(-1).unbind()
    return {keys.DONE: done, keys.TERMINATED: terminated, keys.TRUNCATED: done & ~terminated}


def responses_of(tensordict: TensorDictBase) -> list[list[int]]:
    """The ids of each slot's response."""
    mask = tensordict[keys.RESPONSE_MASK].bool()
    # One transfer for all slots.
    ids = iter(tensordict[keys.RESPONSE][mask].tolist())
    return [list(islice(ids, length)) for length in mask.sum(-1).tolist()]


def chosen_slots(tensordict: TensorDictBase | None, mask_key: str, count: int) -> list[int]:
    """The slots that a mask of ``tensordict`` marks (``"_reset"``, ``"_step"``); all ``count``
    without one."""
    mask = None if tensordict is None else tensordict.get(mask_key, None)
    return list(range(count)) if mask is None else mask.flatten().nonzero().flatten().tolist()
