"""What ``granularity="auto"`` means in the environment of a run: :func:`with_granularity`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torchrl_llm.envs import GEMEnv
from torchrl_llm.objectives.estimators.base import step_of
from torchrl_llm.runs.config import ConfigError, RunConfig
from torchrl_llm.runs.loss_settings import LOSSES
from torchrl_llm.utils.options import options_of


def with_granularity(config: RunConfig, saved: Mapping[str, Any] | None, env: GEMEnv) -> RunConfig:
    """The settings with ``"turn"`` or ``"token"`` in place of ``granularity="auto"``.

    The environment decides by what it declares (:attr:`GEMEnv.single_turn
    <torchrl_llm.envs.GEMEnv.single_turn>`), never the lengths of a batch's episodes: the same
    settings would mean something else from one batch to the next.

    Args:
        config: the settings.
        saved: those of the checkpoint that the run continues; ``None``: it is new.
        env: the environment of training.

    Raises:
        ConfigError: an environment does not say how many responses it takes; a mixture holds both
            kinds; or the checkpoint's run had the other granularity, and ``config.accept_changes``
            does not name it.
    """
    if config.granularity != "auto":
        return config
    meant: Any = _meaning(env)
    if saved is not None and "granularity" not in config.accept_changes:
        before = saved.get("granularity")
        if meant != (before or options_of(LOSSES[config.algo])["granularity"].default):
            raise ConfigError(
                f'granularity="auto" means {meant!r} in this environment, and the checkpoint\'s run had {before!r}: set granularity '
                "to that, or name granularity in accept_changes."
            )
        meant = before  # so that the settings are the checkpoint's to the letter
    settled: dict[str, Any] = {"granularity": meant}
    return replace(config, **settled)


def _meaning(env: GEMEnv) -> Literal["turn", "token"]:
    unknown, single, several = (
        ", ".join(repr(name) for name, each in zip(env.names, env.single_turn, strict=True) if each is kind)
        for kind in (None, True, False)
    )
    if unknown:
        raise ConfigError(
            f'granularity="auto" is "token" where every episode ends with its first response, and {unknown} does not say whether it '
            'does: set granularity to "turn" or "token", or declare it, as single_turn = True or False on the class of the '
            "environment, or as EnvSpec(..., single_turn=...)."
        )
    if single and several:
        raise ConfigError(
            f'granularity="auto" means "token" for {single}, whose episodes have one turn, and "turn" for {several}: set '
            "granularity to one of them for the mixture."
        )
    return step_of("auto", bool(single))
