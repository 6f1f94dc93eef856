"""Trained models in folders, read for use and not for training: :func:`find_saved_model`,
:func:`load_saved_model`.

A run is continued from its checkpoint by :mod:`torchrl_llm.runs.checkpoint`. Here only the actor is
loaded, with the settings that it was trained with, from what runs, exports or transformers have
written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_llm.envs import ChatFormatter, EnvSpec, GEMEnv, UnknownEnvironmentError, register_env_family
from torchrl_llm.modules import ActorCritic, HFPolicy, load_actor_critic, weights
from torchrl_llm.modules.hf.settings import ATTENTION
from torchrl_llm.modules.lm import max_positions
from torchrl_llm.modules.sampling import SamplingConfig
from torchrl_llm.runs import build
from torchrl_llm.runs.checkpoint import CheckpointStore
from torchrl_llm.runs.checkpoint_files import verify
from torchrl_llm.runs.config import HOW_TO_RUN, RunSettings
from torchrl_llm.runs.device import choose_device
from torchrl_llm.runs.environments import check_environment, make_environment, stock_env
from torchrl_llm.runs.migrate import settings_of_now
from torchrl_llm.runs.run_folder import MARK
from torchrl_llm.runs.settings import FORMATTER, ChatSettings, EnvSettings, names_of
from torchrl_llm.runs.settings_file import read_settings, write_settings
from torchrl_llm.runs.sources import MODELS, load_model_config, load_tokenizer, model_path
from torchrl_llm.runs.trust import check_base, check_kept
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.options import ConfigError, check_value
from torchrl_llm.utils.sections import in_sections, settings_of

SETTINGS = "run_config.yaml"
"""The settings of its run in the folder of an exported model, and in a run's own ``merged``."""

USED = (
    # of training, as it learns from results
    *(name for name in (*names_of(ChatSettings), *names_of(EnvSettings)) if name != "adaptive_mixture"),
    *(*names_of(SamplingConfig), "seed", "dtype", "device", "attn_implementation", "trust_remote_code"),
    *("quantization", "step_timeout", "env_threads", "max_faults", "opponent"),
)
"""The settings that a trained model is used with; all others are of training."""

OF_THE_MODEL = (
    *("max_model_len", *names_of(SamplingConfig), "seed", *names_of(ChatSettings)),
    *("dtype", "device", "attn_implementation", "trust_remote_code", "quantization"),
)
"""The names in :data:`USED` that are left where it only samples, without an environment."""

# The device is of another machine, perhaps, and code that comes with a model is run where somebody
# says so.
_NOT_KEPT = ("device", "trust_remote_code")


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A trained model in a folder.

    Attributes:
        path: the checkpoint, or the folder of the model.
        weights: the folder with an adapter in PEFT's format, or with a whole model in
            transformers'.
        tokenizer: the folder with the tokenizer; ``None``: an adapter has its base's.
        settings: of the run that trained it, as JSON has them; empty: not known.
        metadata: of a checkpoint: iteration, turns, success rate, versions; empty otherwise.
    """

    path: Path
    weights: Path
    tokenizer: Path | None
    settings: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter on a base model, and not a whole model."""
        return weights.holds_adapter(self.weights)

    def config(self, *, only_model: bool = False, **changes: Any) -> RunSettings:
        """The settings to use the model with: its run's, as far as they are not about
        training.

        Settings that would import, connect to or execute something are kept of no folder
        (:mod:`torchrl_llm.runs.trust`).

        Args:
            only_model: keep no settings of environments (:data:`OF_THE_MODEL`).
            changes: settings of :data:`USED` that are to differ; and ``model_path``, for the base
                of an adapter.

        Raises:
            ConfigError: they contradict each other, ``model_path`` is given for a whole model, or
                the folder asks for what only ``changes`` may ask for.
        """
        # The players of a game of self-play are a group, and batches and slots hold whole groups.
        game = ("group_size", "batch_size") if self.settings.get("collector") == "self_play" else ()
        names = OF_THE_MODEL if only_model else (*USED, "collector", *game)
        left_out = {*_NOT_KEPT, *changes}
        # of updates beside a vLLM engine: models sample here
        if self.settings.get("attn_implementation") not in ATTENTION:
            left_out.add("attn_implementation")
        if "model_path" in changes and not self.is_adapter:
            raise ConfigError(f"model_path does nothing with {self.path}, which holds a whole model: leave it out.")
        base = {"model_path": str(self.weights), "lora_r": 0}
        if self.is_adapter:
            named = weights.read_adapter(self.weights).config.base_model_name_or_path
            base = {"model_path": self.settings.get("model_path", named)}
            if "model_path" not in changes:
                check_base(base["model_path"], self.path)
        else:
            left_out |= {"quantization", "dtype"}  # the files have a dtype of their own
        same = "env_name" in changes and changes["env_name"] == self.settings.get("env_name")
        if "env_name" in changes and not same:
            left_out |= {"env_weights", "env_options", "tools"}
        kept = {name: self.settings[name] for name in names if name in self.settings.keys() - left_out}
        # The folder's options of an environment that its user names are asked for as the folder's.
        named = {"env_name": changes["env_name"]} if same and kept.get("env_options") else {}
        check_kept({**kept, **named}, self.path)
        tokenizer = {} if self.tokenizer is None else {"tokenizer_path": str(self.tokenizer)}
        return RunSettings.from_values(**{**base, **tokenizer, **kept, **changes})


def find_saved_model(path: str | Path) -> SavedModel:
    """The trained model in a folder.

    Args:
        path: a run's folder (its newest checkpoint counts), a checkpoint, or a folder with a model
            or an adapter, such as an export or a run's ``merged``. ``"tiny"`` is the small model of
            the package, ``"smollm2"`` :func:`SmolLM2-135M-Instruct
            <torchrl_llm.runs.smollm2.smollm2_model_path>`.

    Raises:
        ConfigError: there is none.
        CheckpointError: the checkpoint is damaged.
        MissingExtraError: it is ``"smollm2"``, which is not installed.

    Examples:
        >>> find_saved_model("tiny").config(env_name="game:Wordle-v0").env.env_name
        'game:Wordle-v0'
    """
    given = str(path)
    path = MODELS[given]() if given in MODELS else Path(path).expanduser().absolute()
    if not path.is_dir():
        beside = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
        raise ConfigError(f"The checkpoint is '{given}': there is no such folder.{nearest(path.name, beside)}")
    if (path / MARK).is_file() or (path / "checkpoints").is_dir():
        newest = CheckpointStore(path / "checkpoints", models=None).latest()
        if newest is None:
            raise ConfigError(f"{path} is the folder of a run without a checkpoint: train with save_checkpoints.")
        return find_saved_model(newest)
    if (path / "sums.json").is_file():
        metadata = verify(path)["metadata"]
        from_python = bool(metadata.get("env_from_python"))
        settings = settings_for_use(_checked(metadata["config"], path), env_from_python=from_python)
        return SavedModel(
            path=path, weights=path / "actor", tokenizer=path / "tokenizer", settings=settings, metadata=metadata
        )
    if not weights.has_weights(path):
        raise ConfigError(
            f"{path} holds no checkpoint and no model: expected the folder of a run, a checkpoint, or a model in the format "
            "of transformers or PEFT."
        )
    return SavedModel(path=path, weights=path, tokenizer=_tokenizer_beside(path), settings=_settings_beside(path))


def _checked(settings: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The settings of a checkpoint. :class:`RunSettings` checks those that it is used with; here
    are those that are shown."""
    options, known = settings_of(RunSettings), settings_of_now(settings)
    for name in ("algo", "lora_r", "model_path", "env_name", "final_episodes", "evaluation_episodes"):
        check_value(f"{path}: {name}", known[name], options[name].hint)
    return known


def for_run(config: RunSettings) -> dict[str, Any]:
    """The settings of a run that hold for each model that it loads beside its own, whatever that
    one was trained with."""
    options = {"device": config.model.device, "trust_remote_code": config.model.trust_remote_code}
    attention = config.model.attn_implementation
    return options | ({"attn_implementation": attention} if attention in ATTENTION else {})


def settings_for_use(settings: Mapping[str, Any], *, env_from_python: bool) -> dict[str, Any]:
    """The settings of a run for the use of its model.

    Args:
        settings: as JSON has them.
        env_from_python: its environment was given as an object; then ``env_name`` says so, because
            the label alone would name another environment, or the default one.
    """
    names = settings["env_name"]
    label = f"python:{names if isinstance(names, str) else ','.join(names)}"
    return {**settings, **({"env_name": label} if env_from_python else {})}


def write_settings_beside(settings: Mapping[str, Any], folder: Path) -> None:
    """Write the settings of a run into the folder of its model, without those about how it was
    run."""
    kept = {name: value for name, value in settings.items() if name not in HOW_TO_RUN}
    write_settings(in_sections(RunSettings, kept), folder / SETTINGS)


def _from_python(env_id: str) -> EnvSpec:
    raise UnknownEnvironmentError(
        f"{env_id!r} was given to its run as an object (build_run(env=...) or make_env=...), and no id makes it: name an "
        "environment with --env, or evaluate in Python (LoadedModel.make_env takes the object)."
    )


register_env_family("python", _from_python)


def _tokenizer_beside(path: Path) -> Path | None:
    """The folder of the tokenizer of a model; ``None`` for an adapter that was saved without
    one."""
    adapter_alone = weights.holds_adapter(path) and not any(path.glob("tokenizer*"))
    return None if adapter_alone else path


def _settings_beside(path: Path) -> dict[str, Any]:
    """The settings of the run that an exported model is of."""
    file = path / SETTINGS
    # No RunSettings is made of them: it would import the estimator that they name, and the folder
    # may be a stranger's.
    return settings_of_now(dict(read_settings(file, RunSettings, by_name=True))) if file.is_file() else {}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A trained model that can be sampled from.

    Attributes:
        config: the settings that it is used with.
        tokenizer: its tokenizer.
        formatter: renders messages as in training.
        models: the actor alone.
        policy: samples with it.
    """

    config: RunSettings
    tokenizer: Any
    formatter: ChatFormatter
    models: ActorCritic
    policy: HFPolicy

    def make_env(self, env: Any = None, *, make_env: Callable[..., GEMEnv] | None = None) -> GEMEnv:
        """An environment of the settings, with the tasks of a run's last evaluation.

        Args:
            env, make_env: see :func:`environment_of`.
        """
        return environment_of(self.config, self.tokenizer, env=env, make_env=make_env)


def environment_of(
    config: RunSettings, tokenizer: Any = None, *, env: Any = None, make_env: Callable[..., GEMEnv] | None = None
) -> GEMEnv:
    """An environment of the settings, with the tasks of a run's last evaluation.

    Args:
        config: the settings.
        tokenizer: the model's; ``None``: it is loaded.
        env, make_env: what :func:`~torchrl_llm.runs.build_run` got, for a run whose environment was
            given in Python.

    Raises:
        UnknownEnvironmentError: it was given in Python, and is not given here.
        ConfigError: both ``env`` and ``make_env`` are given.
    """
    check_environment(config, env, make_env)
    make = make_env or stock_env(config, env)
    return make_environment(config, tokenizer or load_tokenizer(config), make, stream="test")


def positions(config: RunSettings) -> int:
    """The tokens that the model of the settings has positions for; where it does not say,
    ``config.env.max_model_len``."""
    most = max_positions(load_model_config(config).get_text_config())
    return config.env.max_model_len if math.isinf(most) else int(most)


def load_saved_model(saved: SavedModel, config: RunSettings) -> LoadedModel:
    """Load a trained model; with the same settings it samples the same tokens as in its run.

    Args:
        saved: the model.
        config: the settings to use it with, of :meth:`SavedModel.config`.

    Raises:
        ConfigError: tokenizer or base model cannot be found.
        WeightsError: its files are damaged, or of another model.

    Examples:
        >>> from torchrl_llm.trainers import evaluate
        >>> saved = find_saved_model("tiny")
        >>> loaded = load_saved_model(saved, saved.config(device="cpu", max_output_tokens=16, num_envs=4))
        >>> evaluate(loaded.make_env(), loaded.policy, 4).episodes
        4
    """
    with reading(saved.path):
        tokenizer = load_tokenizer(config)
        formatter = ChatFormatter(tokenizer, **{name: getattr(config.chat, name) for name in FORMATTER})
        sampling = build.make_sampling(config, formatter)
        formatter.stop_ids = sampling.stop_ids or ()
        models = load_actor_critic(
            model_path(config),
            tokenizer=tokenizer,
            lora=weights.read_adapter(saved.weights).config if saved.is_adapter else None,
            sampling=sampling,
            device=choose_device(config),
            **build.given_options(config, *build.MODEL),
            master_weights=False,
            share_prefixes=False,
        )
        if saved.is_adapter:
            model: Any = models.model
            weights.load_adapters(model, {"actor": saved.weights})
        policy = HFPolicy(models.model, tokenizer, sampling, adapter=models.adapter, seed=config.trainer.seed)
        return LoadedModel(config=config, tokenizer=tokenizer, formatter=formatter, models=models, policy=policy)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, what other packages raise of files that are damaged or of another kind is an error of
    these files.

    Raises:
        WeightsError: the message names the folder ``path``.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, re.error) as error:
        if type(error).__module__.partition(".")[0] == "torchrl_llm":
            raise
        raise weights.WeightsError(
            f"The files of the model in {path} are damaged, or of another kind: {type(error).__name__}: {error}"
        ) from error
