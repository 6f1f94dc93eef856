"""Today's date in prompts, fixed for a run: :func:`with_template_date`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from typing import Any

from torchrl_llm.rendering import ChatTemplateError, Renderer
from torchrl_llm.runs.config import RunConfig
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.utils.options import ConfigError


def with_template_date(
    config: RunConfig, saved: Mapping[str, Any] | None, tokenizer: Any, distributed: Distributed
) -> RunConfig:
    """The settings with a ``template_date``, the same on all ranks, if the chat template shows one.

    A given day counts. Else a resumed run takes the day that it was saved with, unless
    ``accept_changes`` names it. Else it is today.

    Args:
        config: the settings.
        saved: those of the checkpoint that the run continues; ``None``: it is new.
        tokenizer: has the chat template.
        distributed: the training processes.

    Raises:
        ConfigError: a day is given, and the template shows none.
    """
    if not _shows_date(config, tokenizer):
        if config.template_date is not None:
            raise ConfigError(
                f"template_date={config.template_date!r} does nothing: the chat template shows no date. Leave it out."
            )
        return config
    if config.template_date is not None:
        return config
    known = None if saved is None or "template_date" in config.accept_changes else saved.get("template_date")
    # The first rank's: midnight may lie between two processes.
    return replace(config, template_date=known or distributed.all_gather([date.today().isoformat()])[0])


def _shows_date(config: RunConfig, tokenizer: Any) -> bool:
    if config.template == "raw":
        return False
    try:
        kwargs = config.chat_template_kwargs
        return Renderer(tokenizer, system_prompt=config.system_prompt, chat_template_kwargs=kwargs).shows_date()
    except ChatTemplateError:  # the environment says so, if it uses the template
        return False
