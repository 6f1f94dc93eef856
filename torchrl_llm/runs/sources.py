"""Where a run's model and tokenizer are: paths and hub ids of the settings, found before anything
is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoConfig, AutoTokenizer

from torchrl_llm.modules.hf.settings import ATTENTION
from torchrl_llm.modules.lm import max_positions
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.smollm2 import smollm2_model_path
from torchrl_llm.runs.tiny import tiny_model_path
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.options import ConfigError

_T = TypeVar("_T")

MODELS: dict[str, Callable[[], Path]] = {"tiny": tiny_model_path, "smollm2": smollm2_model_path}
"""Names that ``model_path`` takes beside paths and ids, and what finds the folder. A folder of such
a name is ``./tiny``."""


def model_path(config: RunSettings) -> str:
    """What transformers loads the model from: a folder, or an id of a hub. ``"smollm2"`` is made if
    it is not there.

    Raises:
        ConfigError: ``config.model.model_path`` is a path without a folder; or ``"smollm2"``, and
            its files are damaged.
        MissingExtraError: it is ``"smollm2"``, which is not installed.
    """
    return _source("model_path", config.model.model_path)


def load_model_config(config: RunSettings) -> Any:
    """The model's own settings, as transformers has them.

    Raises:
        ConfigError: ``model_path`` leads nowhere, or to code that ``trust_remote_code`` does not
            allow.
    """
    path, options = model_path(config), {"trust_remote_code": config.model.trust_remote_code}
    found = _loaded("model_path", config.model.model_path, lambda: AutoConfig.from_pretrained(path, **options))
    if config.model.attn_implementation is None:
        _check_attention(found, config.model.model_path)
    return found


def _check_attention(found: Any, given: str) -> None:
    """Refuse a model whose files ask for another attention than PyTorch's: transformers may fetch
    its code from a hub."""
    for part in (found, *(getattr(found, name, None) for name in found.sub_configs)):
        asked = getattr(part, "_attn_implementation", None)
        if asked not in (None, *ATTENTION):
            raise ConfigError(
                f"model_path is {given!r}, whose files ask for the attention {asked!r}, which may be code of a hub: give "
                f"attn_implementation, {' or '.join(ATTENTION)} for PyTorch's own."
            )


def check_length(config: RunSettings, length: int) -> None:
    """Raise if contexts may be longer than the model has positions.

    Args:
        config: names the model.
        length: the ``max_model_len`` of the run.

    Raises:
        ConfigError: it is more. An engine, which may know more kinds of positions, says so itself.
    """
    most = max_positions(load_model_config(config).get_text_config())
    if not config.engine.owns_weights and length > most:
        raise ConfigError(
            f"max_model_len is {length}, and the model {config.model.model_path!r} has {most} positions: lower it, or take "
            "a model with more."
        )


def load_tokenizer(config: RunSettings) -> Any:
    """The tokenizer of ``config``, with its chat template; the model's own settings are read too,
    so that a wrong path is one sentence.

    Raises:
        ConfigError: ``model_path``, ``tokenizer_path`` or ``init_from`` leads nowhere.
    """
    if config.weights.init_from is not None:
        _check_init_from(config.weights.init_from.expanduser().absolute())
    load_model_config(config)
    name = "model_path" if config.model.tokenizer_path is None else "tokenizer_path"
    given = getattr(config.model, name)
    source = _source(name, given)
    trusted = config.model.trust_remote_code
    tokenizer = _loaded(name, given, lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=trusted))
    if config.chat.chat_template is not None:
        tokenizer.chat_template = config.chat.chat_template
    return tokenizer


def _check_init_from(folder: Path) -> None:
    _located("init_from", str(folder))
    if (folder / "actor").is_dir():
        return
    last = folder / "checkpoints" / "last"
    if (folder / "checkpoints").is_dir():
        raise ConfigError(
            f"init_from is {str(folder)!r}, the folder of a run; expected one of its checkpoints, such as {last}."
        )
    raise ConfigError(
        f"init_from is {str(folder)!r}, which has no folder actor; expected a checkpoint of a run, or what "
        "ActorCritic.save_pretrained wrote. A whole model is what model_path takes."
    )


def _source(name: str, given: str) -> str:
    """What transformers loads from: a folder, or an id of a hub."""
    return str(MODELS[given]()) if given in MODELS else _located(name, given)


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
    except Exception as error:  # noqa: BLE001  transformers and tokenizers raise anything of files that are damaged
        said = " ".join(str(error).split())
        # transformers' own traceback is about its cache and its hub, and as long as a page.
        raise ConfigError(
            f"{name} is {given!r}, which is not a folder that transformers can load, and no model of a hub or cache that can be "
            f"reached.{nearest(given, [*MODELS])} It says: {said:.400}"
        ) from None
