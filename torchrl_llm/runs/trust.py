"""What the settings of a folder may ask for, and what only its user may: :func:`check_kept`,
:func:`check_episodes`, :func:`check_base`.

The settings that lie beside a model may be a stranger's. Nothing is imported, connected to or
executed because a folder says so: the user of the folder has to give the setting that names it. A
folder is nobody's own, wherever it lies.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError

from torchrl_llm.runs.settings import is_template
from torchrl_llm.runs.sources import MODELS
from torchrl_llm.utils.options import ConfigError

# GEM's games and the worlds of this package compute, and no more. Of GEM's other families, code:
# and several of rg: execute what the model answers, and the rest load data sets of a hub. python:
# only says that an environment has to be given.
_COMPUTE = ("game", "world", "python")
# Sizes far above all that are of use. Larger ones fill the memory, or end in days.
_MOST = {
    "num_envs": 2**14,
    "env_threads": 2**10,
    "max_model_len": 2**24,
    "max_output_tokens": 2**24,
    "batch_size": 2**20,
}
_MOST_EPISODES = 2**20
_NO_VALUES: tuple[Any, ...] = (None, {}, [])


def check_kept(settings: Mapping[str, Any], folder: Path) -> None:
    """Refuse settings of a folder that would import, connect to or execute something, or that are
    larger than machines are.

    Args:
        settings: those that the folder has, and that its user has not given.
        folder: for the message.

    Raises:
        ConfigError: the message says what is asked for, and which flags allow it.

    Examples:
        >>> check_kept({"opponent": "os:system"}, Path("run"))
        Traceback (most recent call last):
        torchrl_llm.utils.options.ConfigError: run asks for the opponent 'os:system', which is imported and called. A folder may be a
        stranger's, so that this is done only if you name it: if you trust it, add --opponent os:system (in Python,
        config(opponent='os:system')).
    """
    for what, names in _asked(settings):
        given = {name: settings[name] for name in names if settings.get(name) not in _NO_VALUES}
        flags = " ".join(f"--{name.replace('_', '-')} {_as_word(value)}" for name, value in given.items())
        in_python = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigError(
            f"{folder} asks for {what}. A folder may be a stranger's, so that this is done only if you name it: if you trust "
            f"it, add {flags} (in Python, config({in_python}))."
        )


def _asked(settings: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What the settings would import, connect to or execute, and their names."""
    names = settings.get("env_name", [])
    for name in names if isinstance(names, list) else [names]:
        if str(name).removeprefix("gem:").partition(":")[0] not in _COMPUTE:
            what = f"the environment {name!r}, which may import, connect to or execute something"
            yield what, ("env_name", "env_weights", "env_options")
    opponent = settings.get("opponent")
    # A scripted player of the package has no colon, and a path leads to files that are read as
    # data.
    if isinstance(opponent, str) and ":" in opponent and not Path(opponent).expanduser().exists():
        yield f"the opponent {opponent!r}, which is imported and called", ("opponent",)
    if tools := settings.get("tools"):
        yield f"the tools {tools}, which are imported and called", ("tools",)
    template = settings.get("chat_template")
    if template is not None and not is_template(str(template)):  # runs keep the text
        yield f"the chat template in the file {template!r}, which is none of its own", ("chat_template",)
    for name, most in _MOST.items():
        if isinstance(size := settings.get(name), int) and size > most:
            yield f"{name}={size}, and more than {most} is of no use to most machines", (name,)


def check_episodes(episodes: int, folder: Path) -> None:
    """Refuse a number of episodes that a folder asks for, and that would not end.

    Args:
        episodes: of an evaluation.
        folder: for the message.

    Raises:
        ConfigError: there are too many.
    """
    if episodes > _MOST_EPISODES:
        raise ConfigError(
            f"{folder} asks for an evaluation of final_episodes={episodes}, more than {_MOST_EPISODES}. A folder may be a stranger's: "
            "say how many with --episodes."
        )


def _as_word(value: Any) -> str:
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))


def check_base(model: Any, folder: Path) -> None:
    """Refuse to fetch the base model that an adapter's folder names; one that is on this machine is
    taken.

    Args:
        model: what the folder names.
        folder: for the message.

    Raises:
        ConfigError: it would be fetched from a hub.
    """
    if not isinstance(model, str) or model in MODELS or Path(model).expanduser().exists():
        return
    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a path that leads nowhere, which no hub is asked for
        return
    if not isinstance(found, str):
        raise ConfigError(
            f"{folder} is an adapter of the base model {model!r}, which is not on this machine. Nothing is fetched because a folder "
            f"says so: name it with --model-path (in Python, config(model_path=...)), or fetch it first (hf download {shlex.quote(model)})."
        )
