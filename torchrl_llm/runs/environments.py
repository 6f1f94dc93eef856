"""The environments of a run, from its settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torchrl_llm.collectors.async_turn import STEP_TIMEOUT
from torchrl_llm.envs import EnvSpec, GEMEnv, SelfPlayEnv, resolve_env, with_tools
from torchrl_llm.envs.registry import named_env
from torchrl_llm.envs.tasks import Stream
from torchrl_llm.runs.build import given_options
from torchrl_llm.runs.config import ConfigError, RunSettings
from torchrl_llm.runs.settings import FORMATTER, AsyncRollouts, SelfPlayRollouts
from torchrl_llm.utils.named import find_named, make_named

_ENVIRONMENT = (
    *("max_turns", "max_model_len", "max_output_tokens", "overflow", *FORMATTER),
    *("seed", "max_faults", "success_reward"),
)
"""Settings of every environment of a run."""

_DECIDED = {
    *(*_ENVIRONMENT, "tokenizer", "num_envs", "group_size", "step_timeout"),
    *("stream", "worker", "num_workers", "num_threads"),
}
"""Arguments of environments that a run gives."""


def make_environment(
    config: RunSettings,
    tokenizer: Any,
    make: Callable[..., GEMEnv],
    *,
    stream: Stream,
    group_size: int = 1,
    **shard: int,
) -> GEMEnv:
    """An environment of the run, made by ``make`` from the keyword arguments of
    :class:`~torchrl_llm.envs.GEMEnv`.

    Args:
        shard: ``worker`` and ``num_workers``, where several processes share the tasks.
    """
    options = given_options(config, *_ENVIRONMENT)
    if isinstance(config.rollouts, SelfPlayRollouts):
        group_size = config.rollouts.group_size  # the players of a game, in evaluations too
    else:
        options |= given_options(config, "step_timeout", num_threads="env_threads")
    if isinstance(config.rollouts, AsyncRollouts) and config.rollouts.env_threads != 0:
        options = {"step_timeout": STEP_TIMEOUT} | options  # evaluation allows what training allows
    return make(tokenizer=tokenizer, num_envs=config.slots, group_size=group_size, stream=stream, **shard, **options)


def check_environment(config: RunSettings, env: Any, make_env: Any) -> None:
    """Raise a ``ConfigError`` if :func:`build_run` gets an environment in two ways, or options that
    are of no use to it."""
    if env is not None and make_env is not None:
        raise ConfigError("Both env and make_env are given: the second decides on the environment, so leave env out.")
    if config.env.env_options and (env is not None or make_env is not None):
        raise ConfigError(
            f"env_options={config.env.env_options} are for the environments of env_name, and one is given in Python: leave them out, and "
            "make it with them there."
        )
    if config.env.tools and make_env is not None:
        raise ConfigError(
            f"tools={config.env.tools} does nothing with make_env, which decides on the environments: leave it out."
        )


def stock_env(config: RunSettings, env: Any = None) -> Callable[..., GEMEnv]:
    """Makes the environments of ``config.env.env_name``, or of the factory ``env``, from the
    keyword arguments of ``GEMEnv``.

    An id that names a subclass of ``GEMEnv`` (``torchrl_llm.envs:PromptDatasetEnv``) makes them
    itself, with ``env_options``.

    Raises:
        ConfigError: such a class stands in a mixture, plays no games and is to, or gets what
            settings decide.
    """
    names = [config.env.env_name] if isinstance(config.env.env_name, str) else config.env.env_name
    named = [] if env is not None else map(named_env, names)
    own = [kind for kind in named if isinstance(kind, type) and issubclass(kind, GEMEnv)]
    if own:
        return _own_env(config, own[0], names)
    # Ids are resolved here: workers on Ray may not have registered the family.
    sources = env or [_with_options(name, config.env.env_options) for name in names]
    if config.env.tools:
        sources = _with_tools(config, sources if isinstance(sources, list | tuple) else [sources])
    kind = SelfPlayEnv if config.collector == "self_play" else GEMEnv
    return partial(kind, sources, weights=config.env.env_weights, divide=True)


def _own_env(config: RunSettings, kind: type[GEMEnv], names: list[str]) -> Callable[..., GEMEnv]:
    """Makes the environments of a subclass of ``GEMEnv`` that the settings name."""
    if len(names) > 1 or config.env.env_weights is not None:
        raise ConfigError(
            f"env_name names {kind.__name__}, which makes its environments itself: name it alone, without env_weights."
        )
    if config.collector == "self_play" and not issubclass(kind, SelfPlayEnv):
        raise ConfigError(
            f"env_name names {kind.__name__}, which is no SelfPlayEnv, and collector is 'self_play': choose another."
        )
    if config.env.tools:
        raise ConfigError(
            f"env_name names {kind.__name__}, which makes its environments itself, and tools={config.env.tools}: leave tools out, and give "
            "them to it there."
        )
    if decided := sorted(config.env.env_options.keys() & _DECIDED):
        raise ConfigError(f"env_options has {', '.join(decided)}, which other settings of a run decide: leave it out.")
    return partial(make_named, "env_name", names[0], kind, **config.env.env_options)


def _with_tools(config: RunSettings, sources: Sequence[Any]) -> list[EnvSpec]:
    """Environments whose policy may call the tools that the settings name."""
    if config.collector == "self_play":
        raise ConfigError("tools are of environments with one player, and collector is 'self_play': leave them out.")
    found = {name: find_named("tools", name, "a function, or of a class of tools") for name in config.env.tools or ()}
    # Functions alone have no state: they are not made again, and read again, in each episode.
    has_state = any(isinstance(each, type) for each in found.values())
    tools = partial(_made_tools, found) if has_state else [*found.values()]
    return [with_tools(source, tools) for source in sources]


def _made_tools(found: Mapping[str, Any]) -> list[Any]:
    """Functions as they are, and an object of each class, by the names that settings give."""
    return [make_named("tools", name, each) if isinstance(each, type) else each for name, each in found.items()]


def _with_options(name: str, options: dict[str, Any]) -> EnvSpec:
    spec = resolve_env(name)
    if named_env(name) is not None:
        try:
            inspect.signature(spec.make).bind_partial(**options)
        except TypeError as error:
            raise ConfigError(f"env_name is {name!r}, which does not take env_options={options}: {error}.") from error
    return replace(spec, make=partial(spec.make, **options)) if options else spec
