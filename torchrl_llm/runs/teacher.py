"""The reference of a run, if it is not the model of its beginning.

A teacher of on-policy distillation: :func:`check_teacher`, :func:`load_teacher`; what the actor
was: :class:`RefreshReference`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl_llm.modules import ActorCritic, SamplingConfig, TokenScorer, enable_prefix_sharing
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.saved import SavedModel, find_saved_model, for_run, load_saved_model
from torchrl_llm.runs.sources import MODELS, check_length, load_tokenizer
from torchrl_llm.trainers import Callback
from torchrl_llm.utils.options import ConfigError


def load_teacher(config: RunSettings, sampling: SamplingConfig) -> TokenScorer:
    """The frozen scorer of ``config.model.teacher``, which the KL of the run is to;
    :func:`check_teacher` goes before.

    Args:
        config: the settings of the run.
        sampling: how the student samples; the teacher's distribution is changed alike (temperature
            and so on).

    Raises:
        ConfigError: there is no such model.
        CheckpointError, WeightsError: the files are damaged, or of another model.
    """
    loaded = load_saved_model(*find_teacher(config))
    model: Any = loaded.models.model
    sharing = enable_prefix_sharing(model) if config.model.share_prefixes and not config.model.compile else None
    options: dict[str, Any] = {"prefixes": sharing, "chunk_logits": config.model.chunk_logits}
    return TokenScorer(model, sampling, adapter=loaded.models.adapter, frozen=True, **options)


def check_teacher(config: RunSettings, tokenizer: Any) -> None:
    """Raise what is wrong with the setting ``teacher``, if there is one, before weights are loaded.

    Args:
        config: the settings of the run.
        tokenizer: the student's.

    Raises:
        ConfigError: there is no such model, its tokenizer is another, or it has fewer positions
            than ``max_model_len``.
    """
    if config.model.teacher is None:
        return
    try:
        settings = find_teacher(config)[1]
        check_length(settings, config.env.max_model_len)
        own = load_tokenizer(settings)
    except ConfigError as error:
        raise ConfigError(f"teacher={config.model.teacher!r}: {error}") from error
    _check_tokenizer(config, tokenizer, own)


def find_teacher(config: RunSettings) -> tuple[SavedModel, RunSettings]:
    """The model of ``config.model.teacher``, and the settings that it is loaded with.

    Args:
        config: the settings of the run.

    Raises:
        ConfigError: there is no such folder, or no model in it.
        CheckpointError: the checkpoint is damaged.

    Examples:
        >>> find_teacher(RunSettings.from_values(teacher="tiny"))[1].weights.lora_r
        0
    """
    given = str(config.model.teacher)
    changes = for_run(config)
    path = Path(given).expanduser()
    # A path that leads nowhere is not a hub's id, and find_saved_model says so.
    if given in MODELS or path.is_dir() or path.is_absolute() or given.startswith(".") or given.count("/") != 1:
        saved = find_saved_model(given)
        return saved, saved.config(only_model=True, **changes)
    of_hub = SavedModel(path=path, weights=path, tokenizer=None)
    return of_hub, RunSettings.from_values(model_path=given, lora_r=0, **changes)


def _check_tokenizer(config: RunSettings, student: Any, teacher: Any) -> None:
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return
    other = sorted((token for token in ours if theirs.get(token) != ours[token]), key=ours.__getitem__)
    example = f", such as {other[0]!r}: {ours[other[0]]} and {theirs.get(other[0])}" if other else ""
    raise ConfigError(
        f"teacher={config.model.teacher!r} has another tokenizer: {len(theirs)} tokens, and the student's has {len(ours)}, of which "
        f"{len(other)} have another id{example}. A teacher scores the student's own tokens: take one of the same family."
    )


class RefreshReference(Callback):
    """Makes the reference what the actor is, every ``interval`` iterations.

    Args:
        models: with a reference of its own weights.
        interval: iterations between refreshes, >= 1.
    """

    def __init__(self, models: ActorCritic, interval: int) -> None:
        self.models, self.interval = models, interval

    def on_iteration(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.iteration % self.interval == 0:
            self.models.refresh_reference()
