"""Whether settings would run: device, engine, model, chat template, environment and memory, by the
checks of a run itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchrl_llm.cli._installation import Finding, check_extra
from torchrl_llm.envs import AsTemplate, GEMEnv
from torchrl_llm.envs.contexts import num_tokens
from torchrl_llm.envs.games import GameSlots
from torchrl_llm.envs.slots import SlotMachine
from torchrl_llm.modules.checks import check_size
from torchrl_llm.modules.lm import embedding_of
from torchrl_llm.runs import build
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.demonstrations import check_demonstrations, check_player, find_demonstrations, read_demonstrations
from torchrl_llm.runs.device import make_accelerator, make_numerics
from torchrl_llm.runs.environments import make_environment, stock_env
from torchrl_llm.runs.memory import (
    OF_UPDATES,
    default_max_tokens,
    empty_model,
    engine_weights,
    memory_estimate,
    trainer_memory,
    what_to_lower,
)
from torchrl_llm.runs.sources import check_length, load_tokenizer
from torchrl_llm.runs.teacher import check_teacher
from torchrl_llm.utils.host import host_memory
from torchrl_llm.utils.options import brief

_T = TypeVar("_T")
_TASKS = 32
"""Tasks whose first prompts are measured."""

_FORESEEN = (ValueError, ImportError, RuntimeError, OSError)
"""What models, tokenizers and environments raise that cannot be used."""


def devices() -> Iterator[Finding]:
    """What there is to compute on."""
    has = f"{os.cpu_count()} cores, {torch.get_num_threads()} for PyTorch, {_size(host_memory())} of memory"
    yield Finding("cpu", "ok", has)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(f"cuda:{index}", "ok", f"{properties.name}, {_size(properties.total_memory)}")
    if not torch.cuda.is_available():
        yield Finding("cuda", "note", "none that PyTorch can use")


def fit(config: RunSettings) -> Iterator[Finding]:
    """The checks of the settings, in the order in which a run meets them; after one that fails,
    those that need it are left out."""
    device, finding = _tried("device", lambda: _device(config), lambda found: f"{found} is used")
    yield finding
    yield from _engine(config)
    tokenizer, finding = _tried("tokenizer", lambda: load_tokenizer(config), _vocabulary)
    yield finding
    if tokenizer is None:
        return
    model, finding = _tried("model", lambda: _checked_model(config, tokenizer), _describe)
    yield finding
    if model is not None:
        if config.model.teacher is not None:
            yield _tried("teacher", lambda: check_teacher(config, tokenizer), lambda _: "has the model's tokenizer")[1]
        yield from _environment(config, tokenizer)
        yield from _memory(config, model, device)


def _vocabulary(tokenizer: Any) -> str:
    return f"{len(tokenizer)} tokens"


def _tried(name: str, make: Callable[[], _T], describe: Callable[[_T], str]) -> tuple[_T | None, Finding]:
    try:
        made = make()
    except _FORESEEN as error:
        return None, Finding(name, "fails", " ".join(str(error).split()))
    return made, Finding(name, "ok", describe(made))


def _engine(config: RunSettings) -> Iterator[Finding]:
    yield Finding("engine", "ok", f"{config.engine.description} samples, {config.rollouts.place}")
    asked = {"ray": config.collector == "ray", "wandb": config.output.wandb, "tensorboard": config.output.tensorboard}
    for package in (*config.engine.requires, *(name for name, given in asked.items() if given)):
        yield check_extra(package, package)
    for name, check in config.engine.checks():
        yield _tried(name, check, str)[1]
    if config.output.callbacks:
        yield _tried("callbacks", lambda: build.make_callbacks(config), lambda made: ", ".join(made))[1]
    if config.model.quantization is not None:
        yield _package("bitsandbytes", f"quantization: {config.model.quantization}")
    yield check_extra("report", "matplotlib", needed=False)  # for the learning curves


def _package(name: str, setting: str) -> Finding:
    """A package of no extra."""
    if find_spec(name) is None:
        return Finding(name, "fails", f"not installed; {setting} needs it: pip install {name}")
    return Finding(name, "ok", version(name))


def _checked_model(config: RunSettings, tokenizer: Any) -> Any:
    model = empty_model(config)
    check_length(config, config.env.max_model_len)
    check_size(tokenizer, embedding_of(model).shape[0], config.model.model_path)
    return model


def _describe(model: Any) -> str:
    return f"{type(model).__name__}, {model.num_parameters() / 1e6:,.3g} million parameters, embeds every token"


def _environment(config: RunSettings, tokenizer: Any) -> Iterator[Finding]:
    make, finding = _tried("environment", lambda: stock_env(config), lambda _: str(config.env.env_name))
    yield finding
    if make is None:
        return
    env, finding = _tried(
        "template",
        partial(make_environment, config, tokenizer, make, stream="train"),
        partial(_template, config),
    )
    yield finding
    if env is None:
        return
    try:
        yield _stops(config, env)
        if (shown := env.formatter.template_date) is not None:
            yield Finding(
                "date",
                "ok",
                f"the chat template shows today's date: a run keeps that of its first day ({shown}, template_date)",
            )
        yield _tried("prompt", lambda: _longest_prompt(env), lambda length: _room(config, length))[1]
        if config.rollouts.demonstrations is not None:
            yield _tried("demonstrations", lambda: _demonstrations(config, env), str)[1]
    finally:
        env.close(raise_if_closed=False)


def _demonstrations(config: RunSettings, env: GEMEnv) -> str:
    check_demonstrations(config)
    found = find_demonstrations(str(config.rollouts.demonstrations))
    if isinstance(found, Path):
        sampling = build.make_sampling(config, env.formatter)
        episodes = read_demonstrations(found, env, max_model_len=config.env.max_model_len, sampling=sampling)
        return f"{len(episodes):,} episodes in {config.rollouts.demonstrations}"
    check_player(found, config, env)
    return f"{config.rollouts.demonstrations} can begin"


def _template(config: RunSettings, env: GEMEnv) -> str:
    if config.chat.template == "raw":
        return "none: messages are joined as they are"
    if isinstance(env.formatter.rule, AsTemplate):
        return (
            f"contexts are what it shows of earlier turns: {str(env.formatter.properties.rewrites).partition(':')[0]}"
        )
    if config.chat.contexts == "append":
        return "what was sampled and seen is kept (contexts=append)"
    return "append-only: earlier turns are rendered as they were"


def _stops(config: RunSettings, env: GEMEnv) -> Finding:
    stops = build.make_sampling(config, env.formatter).stop_ids or ()
    if not stops and config.sampling.stop_ids is None:
        return Finding("stop ids", "fails", "neither tokenizer nor model names one: responses would never end early")
    if not stops:
        return Finding("stop ids", "ok", "a response ends at max_output_tokens")
    if strange := [i for i in stops if not 0 <= i < len(env.formatter.tokenizer)]:
        return Finding("stop ids", "fails", f"{brief(strange)} are not tokens")
    names = ", ".join(f"{env.formatter.tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in stops)
    return Finding("stop ids", "ok", f"a response ends at {names}")


def _device(config: RunSettings) -> torch.device:
    device = make_accelerator(config).device
    make_numerics(config, device)  # which may be refused there
    return device


def _longest_prompt(env: GEMEnv) -> int:
    """The most tokens that the first prompt of a task has, of each environment of a mixture."""
    return max(_first_prompt(env.slots, index) for index in range(_TASKS))


def _first_prompt(slots: SlotMachine, task: int) -> int:
    """The tokens of the first prompt of a task, or of the player who begins a game."""
    if not isinstance(slots, GameSlots):
        return num_tokens(slots.open(0, task).spans)
    first = task * slots.group_size
    slots.start_match(0, first)
    (seat, *_) = slots.due(0)
    return num_tokens(slots.open(seat, first + seat).spans)


def _room(config: RunSettings, length: int) -> str:
    room = config.env.max_model_len - length
    return (
        f"the longest of {_TASKS} first prompts has {length} tokens; max_model_len={config.env.max_model_len} leaves {room} for "
        f"responses (max_output_tokens={config.sampling.max_output_tokens}) and feedback"
    )


def _memory(config: RunSettings, model: Any, device: torch.device | None) -> Iterator[Finding]:
    # The device may have failed.
    model_there = "this model" if device is not None else "this model on a CPU"
    device = device or torch.device("cpu")
    _, there = trainer_memory(config, device)
    tokens, finding = _tried("memory", lambda: _tokens(config, model, device), lambda _: "")
    if tokens is None:
        yield finding
        return
    source = f"the default for {model_there}" if config.trainer.max_tokens is None else "as given"
    yield Finding("max_tokens", "ok", f"{tokens:,} of a forward and backward pass, {source}")
    config = config.replace(max_tokens=tokens)
    parts, advice = memory_estimate(config, model, device=device), what_to_lower(config, model, there, device=device)
    for name, size in parts.items():
        yield Finding(f"memory: {name}", "ok", _size(size))
    total = sum(parts.values())
    said = f"about {_size(total)} of {_size(there)} (an estimate, at most; docs/memory.md says what lowers it)"
    # A bound from above may be reached by no run.
    yield Finding("memory", "ok", said) if advice is None else Finding("memory", "note", f"{said}: {advice}")
    if (share := config.engine.memory(config, device)) > 0:
        kept = sum(size for name, size in parts.items() if name not in OF_UPDATES)
        yield from _beside(config, share, engine_weights(config, model), kept, device)


def _beside(config: RunSettings, share: int, weights: int, kept: int, device: torch.device) -> Iterator[Finding]:
    """Whether an engine on the trainer's GPU holds its model, and fits beside what the trainer
    keeps while it is awake."""
    total = torch.cuda.mem_get_info(device)[1]
    part, gpus = config.engine.memory_settings
    said = f"its share, {part}={share / total:.2g}, is {_size(share)}, and its weights take {_size(weights)}"
    instead = f": raise it, or take more GPUs ({gpus}) or a smaller model" if weights >= share else ""
    yield Finding("engine's memory", "fails" if instead else "ok", said + instead)
    awake = f"the engine awake beside what the trainer keeps: about {_size(share + kept)} of {_size(total)}"
    over = share + kept > total
    yield Finding("weight sync", "note" if over else "ok", awake + (f": lower {part}" if over else ""))


def _tokens(config: RunSettings, model: Any, device: torch.device) -> int:
    """What a run would take; whether its memory can be estimated shows on the way."""
    memory_estimate(config, model, device=device)
    return config.trainer.max_tokens or default_max_tokens(config, model, device=device)


def _size(size: float) -> str:
    """Bytes for people."""
    unit = next((unit for unit, name in ((2**30, "GiB"), (2**20, "MiB")) if size >= unit), 2**10)
    return f"{size / unit:,.3g} {({2**30: 'GiB', 2**20: 'MiB', 2**10: 'KiB'})[unit]}"
