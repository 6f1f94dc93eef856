"""Settings that a run settles where none are given: :func:`with_num_envs`,
:func:`with_template_date` and :func:`with_granularity`; ``max_tokens`` is in
:mod:`torchrl_llm.runs.memory`.

What the checkpoint of a resumed run has counts, unless ``accept_changes`` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any, Literal

from torchrl_llm.envs import GEMEnv
from torchrl_llm.objectives.estimators.granularity import step_of
from torchrl_llm.rendering import ChatTemplateError, Renderer
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.utils.options import ConfigError


def with_num_envs(config: RunSettings, saved: Mapping[str, Any] | None, distributed: Distributed) -> RunSettings:
    """The settings with a number of ``num_envs``: the given one, the one of the checkpoint
    ``saved``, or the default."""
    if config.env.num_envs is not None:
        return config
    known = None if saved is None or "num_envs" in config.output.accept_changes else saved.get("num_envs")
    return config.replace(num_envs=known or config.default_num_envs(distributed.world_size))


def with_template_date(
    config: RunSettings, saved: Mapping[str, Any] | None, tokenizer: Any, distributed: Distributed
) -> RunSettings:
    """The settings with a ``template_date``, the same on all ranks, if the chat template shows one.

    A given day counts. Else a resumed run takes the day that it was saved with, unless
    ``accept_changes`` names it. Else it is today.

    Args:
        config: the settings.
        saved: settings of the checkpoint that the run continues; ``None``: it is new.
        tokenizer: has the chat template.
        distributed: the training processes.

    Raises:
        ConfigError: a day is given, and the template shows none.
    """
    if not _shows_date(config, tokenizer):
        if config.chat.template_date is not None:
            raise ConfigError(
                f"template_date={config.chat.template_date!r} does nothing: the chat template shows no date. Leave it out."
            )
        return config
    if config.chat.template_date is not None:
        return config
    known = None if saved is None or "template_date" in config.output.accept_changes else saved.get("template_date")
    # The first rank's: midnight may lie between two processes.
    return config.replace(template_date=known or distributed.all_gather([date.today().isoformat()])[0])


def _shows_date(config: RunSettings, tokenizer: Any) -> bool:
    if config.chat.template == "raw":
        return False
    try:
        kwargs = config.chat.chat_template_kwargs
        return Renderer(tokenizer, system_prompt=config.chat.system_prompt, chat_template_kwargs=kwargs).shows_date()
    except ChatTemplateError:  # the environment says so, if it uses the template
        return False


def with_granularity(config: RunSettings, saved: Mapping[str, Any] | None, env: GEMEnv) -> RunSettings:
    """The settings with ``"turn"`` or ``"token"`` in place of ``granularity="auto"``.

    The environment decides by what it declares (:attr:`GEMEnv.single_turn
    <torchrl_llm.envs.GEMEnv.single_turn>`), never the lengths of a batch's episodes: the same
    settings would mean something else from one batch to the next.

    Args:
        config: the settings.
        saved: settings of the checkpoint that the run continues; ``None``: it is new.
        env: the environment of training.

    Raises:
        ConfigError: an environment does not say how many responses it takes; a mixture holds both
            kinds; or the checkpoint's run had the other granularity, and
            ``config.output.accept_changes`` does not name it.
    """
    if getattr(config.loss, "granularity", None) != "auto":
        return config
    meant: Any = _meaning(env)
    if saved is not None and "granularity" not in config.output.accept_changes:
        before = saved.get("granularity")
        if meant != before:
            raise ConfigError(
                f'granularity="auto" means {meant!r} in this environment, and the checkpoint\'s run had {before!r}: set granularity '
                "to that, or name granularity in accept_changes."
            )
    return config.replace(granularity=meant)


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
