"""Where a run's model and tokenizer are: paths and hub ids of the settings, found before anything is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoConfig, AutoTokenizer

from torchrl_llm.options import ConfigError, nearest
from torchrl_llm.smollm2 import smollm2_model_path
from torchrl_llm.tiny import tiny_model_path
from torchrl_llm.trainers.config import RunConfig

_T = TypeVar("_T")

MODELS: dict[str, Callable[[], Path]] = {"tiny": tiny_model_path, "smollm2": smollm2_model_path}
"""Names that ``model_path`` takes beside paths and ids, and what finds the folder. A folder of such a name is ``./tiny``."""


def model_path(config: RunConfig) -> str:
    """What transformers loads the model from: a folder, or an id of a hub. ``"smollm2"`` is made if it is not there.

    Raises:
        ConfigError: ``config.model_path`` is a path without a folder; or ``"smollm2"``, and its files are damaged.
        MissingExtraError: it is ``"smollm2"``, which is not installed.
    """
    name = config.model_path
    return str(MODELS[name]()) if name in MODELS else _located("model_path", name)


def load_model_config(config: RunConfig) -> Any:
    """The model's own settings, as transformers has them.

    Raises:
        ConfigError: ``model_path`` leads nowhere, or to code that ``trust_remote_code`` does not allow.
    """
    path, options = model_path(config), {"trust_remote_code": config.trust_remote_code}
    return _loaded("model_path", config.model_path, lambda: AutoConfig.from_pretrained(path, **options))


def load_tokenizer(config: RunConfig) -> Any:
    """The tokenizer of ``config``; the model's own settings are read too, so that a wrong path is one sentence.

    Raises:
        ConfigError: ``model_path``, ``tokenizer_path`` or ``init_from`` leads nowhere.
    """
    if config.init_from is not None:
        folder = config.init_from.expanduser().absolute()
        _located("init_from", str(folder))
        if (folder / "checkpoints").is_dir() and not (folder / "actor").is_dir():
            last = folder / "checkpoints" / "last"
            raise ConfigError(
                f"init_from is {str(folder)!r}, the folder of a run; expected one of its checkpoints, such as {last}."
            )
    load_model_config(config)
    name = "model_path" if config.tokenizer_path is None else "tokenizer_path"
    given = getattr(config, name)
    source = model_path(config) if config.tokenizer_path is None else _located(name, given)
    trusted = config.trust_remote_code
    return _loaded(name, given, lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=trusted))


def _located(name: str, given: str) -> str:
    """A folder as it is; what cannot be a hub's id is an error, before a hub is asked for it."""
    path = Path(given).expanduser()
    if path.is_dir():
        return str(path)
    # A hub's id has one slash at most.
    if path.is_absolute() or given.startswith((".", "~")) or given.count("/") > 1 or path.exists():
        beside = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
        raise ConfigError(f"{name} is {given!r}: there is no such folder.{nearest(path.name, beside)}")
    return given


def _loaded(name: str, given: str, load: Callable[[], _T]) -> _T:
    try:
        return load()
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        # transformers' own traceback is about its cache and its hub, and as long as a page.
        raise ConfigError(
            f"{name} is {given!r}, which is no folder that transformers can load, and no model of a hub or cache that can be "
            f"reached.{nearest(given, [*MODELS])} It says: {said:.400}"
        ) from None
