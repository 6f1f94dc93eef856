"""All settings of a run: :class:`RunSettings`, and which of them contradict each other.

A YAML file has its sections, which :mod:`torchrl_llm.runs.settings` declares, and the command line
the names of their fields. Contradictions are errors at construction. Nothing here loads a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

from tensordict.nn import TensorDictModuleBase

from torchrl_llm import objectives
from torchrl_llm.envs.chat import read_date
from torchrl_llm.modules.engine_settings import CustomSettings
from torchrl_llm.modules.hf.settings import HFSettings
from torchrl_llm.modules.policy import SamplingConfig
from torchrl_llm.modules.vllm.settings import VLLMSettings
from torchrl_llm.objectives.checks import wrong_penalty
from torchrl_llm.runs import settings as parts
from torchrl_llm.runs import wrong_settings
from torchrl_llm.runs.idle_settings import IDLE
from torchrl_llm.runs.loss_settings import GRPO, LLMPPO, LLMREINFORCE, NO_ACTOR, NO_CRITIC, SFT, LossSettings
from torchrl_llm.runs.settings_file import read_settings, write_settings
from torchrl_llm.trainers.config import NOTHING_TO_CORRECT, TrainerConfig
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.named import call_named
from torchrl_llm.utils.options import ConfigError, Idle, brief_repr, options_of
from torchrl_llm.utils.sections import (
    Alternative,
    Sectioned,
    choices_of,
    in_sections,
    section_of,
    sections_of,
    settings_of,
)


def shown_default(name: str, algo: parts.Algorithm | None = None) -> str:
    """The default of a setting as text; where a section has one of several classes, the default of
    each that has the setting, or of the loss of ``algo`` alone.

    Examples:
        >>> shown_default("epochs"), shown_default("clip_epsilon"), shown_default("kl_in")
        ('1', '0.2', 'loss (LLMPPO, GRPO), reward (LLMREINFORCE)')
        >>> shown_default("gamma")
        '0.99 (LLMPPO), 0.9 (LLMREINFORCE), 1.0 (GRPO, SFT)'
        >>> shown_default("gamma", "GRPO"), shown_default("group_size")
        ('1.0', '1 (turn, async, ray), 2 (self_play)')
    """
    section = section_of(RunSettings, name)
    if section is None or section not in choices_of(RunSettings).values():
        return str(settings_of(RunSettings)[name].default)
    classes: dict[str, list[str]] = {}
    for each in cast(tuple[type[Alternative], ...], sections_of(RunSettings)[section]):
        if name in (options := options_of(each)) and algo in (None, each.known_as):
            default = options[name].default
            estimator = each.stock.default_value_estimator if issubclass(each, LossSettings) else object
            if default is None and name in options_of(estimator):
                default = getattr(estimator(), name)  # which decides it when it is made
            classes.setdefault(str(default), []).append(each.known_as)
    if len(classes) == 1:
        return next(iter(classes))
    return ", ".join(f"{default} ({', '.join(names)})" for default, names in classes.items())


_FOR_THIS_START = ("resume", "resume_from", "accept_changes", "overwrite")
"""Settings about the start of a run. They are not saved, because a saved file is read by a later
start."""

_MOST_SLOTS = 256
"""Environments of a process by default where an engine samples, as in other systems: a step of
vLLM's takes about as long for 256 as for 16."""

PYTHON_PARTS = ("env", "make_env", "make_loss")
"""Arguments of ``build_run`` that a run depends on as on its settings; ``accept_changes`` may name
them too."""

INITIAL_WEIGHTS = ("algo", *parts.names_of(parts.WeightsSettings))
"""Settings about the initial weights, which a resumed run cannot change."""

HOW_TO_RUN = (
    # Callbacks may act on the run.
    *(name for name in parts.names_of(parts.OutputSettings) if name != "callbacks"),
    *("ray_workers", "ray_worker_cpus", "ray_worker_gpus"),
)
"""Settings that change no number of a run: a resumed run may differ in them."""


def _kept_by_json(value: Any) -> bool:
    try:
        # a tuple equals no list here, nor a number its text
        return repr(json.loads(json.dumps(value))) == repr(value)
    except (TypeError, ValueError):
        return False


@dataclass(kw_only=True)
class RunSettings(Sectioned):
    """A whole run, for :func:`~torchrl_llm.runs.build_run`: a section for each part. Of some parts
    there are several kinds, and the class of their section says which one it is."""

    model: parts.ModelSettings = field(default_factory=parts.ModelSettings)
    weights: parts.WeightsSettings = field(default_factory=parts.WeightsSettings)
    chat: parts.ChatSettings = field(default_factory=parts.ChatSettings)
    env: parts.EnvSettings = field(default_factory=parts.EnvSettings)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollouts: parts.TurnRollouts | parts.AsyncRollouts | parts.RayRollouts | parts.SelfPlayRollouts = field(
        default_factory=parts.TurnRollouts
    )
    engine: HFSettings | VLLMSettings | CustomSettings = field(default_factory=HFSettings)
    loss: LLMPPO | LLMREINFORCE | GRPO | SFT = field(default_factory=LLMPPO)
    optim: parts.OptimSettings = field(default_factory=parts.OptimSettings)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: parts.EvaluationSettings = field(default_factory=parts.EvaluationSettings)
    output: parts.OutputSettings = field(default_factory=parts.OutputSettings)

    idle: ClassVar[tuple[Idle, ...]] = IDLE

    __repr__ = brief_repr

    @property
    def algo(self) -> parts.Algorithm:
        """The algorithm, the class of ``loss``."""
        return cast(parts.Algorithm, self.loss.known_as)

    @property
    def policy(self) -> Literal["hf", "vllm", "custom"]:
        """What samples, the class of ``engine``: "hf", the model itself, "vllm", an engine that
        gets the weights after every update, or "custom", one of your own."""
        return cast(Literal["hf", "vllm", "custom"], self.engine.known_as)

    @property
    def collector(self) -> Literal["turn", "async", "ray", "self_play"]:
        """How batches are collected, the class of ``rollouts``. "turn" steps all environments
        together, a turn at a time; "async" lets no episode wait for another; "ray" does so on
        workers, of a Ray that is running; "self_play" plays all seats of games of several
        players."""
        return cast(Literal["turn", "async", "ray", "self_play"], self.rollouts.known_as)

    def __post_init__(self) -> None:
        for problem in self._contradictions():
            raise ConfigError(problem)
        self._check_estimator()
        self._check_loss()

    def _contradictions(self) -> Iterator[str]:
        """What is wrong with these settings together, and what to do."""
        if self.output.resume and self.output.overwrite:
            yield "resume continues a run and overwrite starts a new one: give one of them."
        for name, value in self.values().items():
            if isinstance(value, Mapping) and not _kept_by_json(value):
                yield (
                    f"{name} is {value!r}; expected text keys, and values that JSON has (lists, not tuples), because "
                    "checkpoints keep the settings."
                )
        read_date(self.chat.template_date)
        yield from self._wrong_changes()
        yield from self._wrong_folders()
        yield from self._wrong_sizes()
        yield from self._wrong_rollout()
        yield from wrong_settings.wrong_self_play(self) if self.collector == "self_play" else ()
        yield from wrong_settings.wrong_branches(self)
        yield from wrong_settings.wrong_trees(self)
        yield from self.engine.problems(self)
        yield from self._wrong_model()

    def _wrong_changes(self) -> Iterator[str]:
        names = [*settings_of(type(self)), *PYTHON_PARTS]
        for name in self.output.accept_changes:
            if name not in names:
                yield f"accept_changes names {name}: no such setting.{nearest(name, names)}"
        fixed = [name for name in self.output.accept_changes if name in INITIAL_WEIGHTS]
        if fixed:
            yield (
                f"accept_changes names {', '.join(fixed)}, but a resumed run has the weights that its checkpoint began with: leave "
                "out what changes them, or start another run with init_from."
            )

    def _wrong_folders(self) -> Iterator[str]:
        replaced = self.output.output_dir.expanduser().absolute()
        for name in ("init_from", "teacher", "demonstrations") if self.output.overwrite else ():
            given = self.values()[name]
            if given is not None and Path(given).expanduser().absolute().is_relative_to(replaced):
                yield f"{name}={str(given)!r} lies in output_dir={str(self.output.output_dir)!r}, which overwrite=true replaces: choose another."

    def _wrong_sizes(self) -> Iterator[str]:
        group, length = self.rollouts.group_size, self.sampling.max_output_tokens
        if self.rollouts.batch_size % group:
            yield f"batch_size={self.rollouts.batch_size} is not a multiple of group_size={group}, and a group must not be cut: use one."
        if self.slots % (started := self.rollouts.num_started):
            yield f"num_envs={self.env.num_envs} is not a multiple of {started}, the episodes of a group that begin together: use one."
        for given, name in ((self.trainer.dynamic_sampling, "dynamic_sampling"), (self.algo == "GRPO", "GRPO")):
            if given and group < 2:
                yield f"{name} compares the episodes of one task: group_size={group}, expected at least 2."
        if self.trainer.minibatch_size is not None and self.rollouts.batch_size % self.trainer.minibatch_size:
            yield (
                f"minibatch_size={self.trainer.minibatch_size} does not divide batch_size={self.rollouts.batch_size}: optimizer steps would differ "
                "in size."
            )
        if length >= self.env.max_model_len:
            yield (
                f"max_output_tokens={length} leaves no room for a prompt in max_model_len={self.env.max_model_len}: lower the first or "
                "raise the second."
            )
        if self.trainer.overlong_buffer is not None and self.trainer.overlong_buffer > length:
            yield (
                f"overlong_buffer={self.trainer.overlong_buffer} is more than a response has, max_output_tokens={length}: lower the first "
                "or raise the second."
            )

    def _wrong_rollout(self) -> Iterator[str]:
        stale = self.rollouts.staleness
        if stale and self.trainer.old_log_probs == "sampler":
            yield f'max_staleness={stale} with old_log_probs="sampler": the sampler may have had older weights. Use "auto".'
        corrected = getattr(self.loss, "sampler_correction", None) or self.loss.estimator_type().corrects_sampler
        if self.trainer.old_log_probs == "sampler" and corrected:
            yield NOTHING_TO_CORRECT
        if stale and self.env.adaptive_mixture:
            yield f"adaptive_mixture adapts between batches, and max_staleness={stale} leaves none between them: choose one."
        chosen = self.loss if isinstance(self.loss, SFT) and self.rollouts.demonstrations is None else None
        if chosen and (chosen.min_return, chosen.estimator, chosen.imitate) == (None, None, "all"):
            yield (
                "algo='SFT' without demonstrations would imitate all that the model itself says, which teaches nothing: give "
                'demonstrations, or choose among its own episodes with imitate="success", imitate="return" or min_return.'
            )
        if self.trainer.dynamic_sampling and self.algo == "SFT":
            yield f"dynamic_sampling={self.trainer.dynamic_sampling} compares the episodes of a group, and SFT does not: leave it out."

    def _wrong_model(self) -> Iterator[str]:
        for name in ("init_reference", "refresh_reference"):
            if self.model.teacher is not None and self.values()[name]:
                yield f"{name} is about the reference of the KL, and teacher={self.model.teacher!r} is that: leave one of them out."
        if self.model.compile and self.model.gradient_checkpointing:
            yield "compile and gradient_checkpointing exclude each other: choose one."
        if self.model.quantization is not None and not self.weights.lora_r:
            yield f"quantization={self.model.quantization!r} is for LoRA: lora_r=0 would train the weights that it rounds."
        # PEFT reads a string as a regular expression of whole module paths, which a bare name never
        # matches.
        if isinstance(self.weights.lora_targets, str) and self.weights.lora_targets.isidentifier():
            yield (
                f"lora_targets is {self.weights.lora_targets!r}; expected a list of names, [{self.weights.lora_targets}], a regular expression "
                'that matches whole module paths, or "all-linear".'
            )

    def _check_estimator(self) -> None:
        chosen = self.loss.estimator_type()
        if self.algo != "LLMPPO" and issubclass(chosen, objectives.CriticEstimator):
            raise ConfigError(
                f"estimator={self.loss.estimator!r} needs a critic, and algo={self.algo!r} has none: use LLMPPO."
            )
        own, known = options_of(self.loss.stock.default_value_estimator), options_of(chosen)
        unused = tuple(name for name in self.loss.changed() if name in own and name not in known)
        instead = "choose an estimator that has the option"
        Idle(unused, {"estimator": (self.loss.estimator,)}, instead).check(self.values(), {})

    def _check_loss(self) -> None:
        """Raise what the loss and its estimator say of their options, before models are loaded for
        them."""
        # What "auto" means, and whether the settings fit that, is known when the run is built.
        checked = self.replace(granularity="turn") if getattr(self.loss, "granularity", None) == "auto" else self
        try:
            loss = checked.make_loss(NO_ACTOR, NO_CRITIC)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
        penalty = wrong_penalty(self.trainer.overlong_penalty, loss.value_estimator)
        for problem in (*penalty, *wrong_settings.idle_kl(self, loss)):
            raise ConfigError(problem)

    def make_loss(
        self,
        actor: TensorDictModuleBase,
        critic: TensorDictModuleBase | None = None,
        joint: TensorDictModuleBase | None = None,
    ) -> objectives.TurnLoss:
        """The algorithm's loss with its value estimator.

        Args:
            actor: see :class:`~torchrl_llm.objectives.TurnLoss`.
            critic, joint: LLMPPO's, see :class:`~torchrl_llm.objectives.LLMPPOLoss`; the other
                algorithms leave them out.
        """
        options = self.loss_options()
        if self.algo == "LLMPPO":
            options |= {"critic": critic, "joint": joint}
        kind = self.loss.loss_type()
        return call_named("loss_class", self.loss.loss_class or kind.__name__, kind, actor, **options)

    def loss_options(self, loss_class: type[objectives.TurnLoss] | None = None) -> dict[str, Any]:
        """The keyword arguments of the algorithm's loss, with its estimator. What is a default is
        left to the classes, because a ``loss_class`` may have another one.

        Args:
            loss_class: what they are for, if not the loss of the settings: a subclass of the
                algorithm's.

        Returns:
            Names and values, with which ``loss_class(models.actor, **options)`` is made (LLMPPO:
            ``models.critic`` follows the actor, and ``joint=models.joint`` saves a forward where
            they share a trunk).

        Raises:
            ConfigError: ``loss_class`` is the loss of another algorithm, whose settings these are
                not; or ``granularity`` is ``"auto"`` still.

        Examples:
            >>> options = RunSettings.from_values(algo="GRPO", group_size=4, kl_coeff=0.0, scale="none").loss_options()
            >>> options["kl_coeff"], options["estimator"].scale, options["estimator"].group_size
            (0.0, 'none', 4)
        """
        stock, loss_class = self.loss.stock, loss_class or self.loss.loss_type()
        if not issubclass(loss_class, stock):
            raise ConfigError(
                f"The settings of algo={self.algo!r} are those of {stock.__name__}, which {loss_class.__name__} is not a subclass "
                "of: choose the algorithm that it is one of, or make it from fields of the config by hand."
            )
        kind = loss_class.default_value_estimator if self.loss.estimator is None else self.loss.estimator_type()
        given = self.loss.changed() | {"group_size": self.rollouts.group_size}
        values = options_of(loss_class)
        options = {name: value for name, value in given.items() if name in values}
        is_unset = getattr(self.loss, "sampler_correction", None) is None
        if "sampler_correction" in values and is_unset and self.rollouts.staleness and not kind.corrects_sampler:
            options = {"sampler_correction": "truncate", "sampler_bounds": 2.0} | options
        # Where both have a weight of the KL, the loss gives the estimator its own.
        shared = {"kl_coeff"} & values.keys()
        credit = {name: value for name, value in given.items() if name in options_of(kind) and name not in shared}
        if credit.get("granularity") == "auto":
            raise ConfigError(
                'granularity="auto" is decided by the environment, when the run is built: take the config that make_loss(config, '
                'models) gets, or set granularity to "turn" or "token".'
            )
        name = self.loss.estimator or kind.__name__
        estimator = call_named("estimator", name, kind, **credit, **self.loss.estimator_options)
        return options | self.loss.loss_options | {"estimator": estimator}

    @property
    def slots(self) -> int:
        """``num_envs``, or, where none is given and none was chosen, the number in a run of one
        process."""
        return self.env.num_envs or self.default_num_envs()

    def default_num_envs(self, processes: int = 1) -> int:
        """The environments of each training process (of its workers on Ray, of each) where
        ``num_envs`` is not given.

        Args:
            processes: training processes.

        Examples:
            >>> vllm = RunSettings.from_values(policy="vllm", batch_size=128)
            >>> RunSettings().default_num_envs(), vllm.default_num_envs(processes=2)
            (16, 64)
        """
        share = self.rollouts.batch_size // (processes * self.rollouts.num_collectors)
        most = min(_MOST_SLOTS, share) if self.engine.owns_weights else 16
        started = self.rollouts.num_started
        return most - most % started or started

    @property
    def has_reference(self) -> bool:
        """Whether the loss, or its estimator, takes a KL to a reference policy."""
        return getattr(self.loss, "kl_coeff", 0) != 0

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """The settings of a YAML file, such as a run's ``config.yaml``.

        Args:
            path: the file, with lines ``field: value`` in sections.

        Raises:
            ConfigError: the file cannot be read, or a setting is wrong; the message names the line.

        Examples:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     RunSettings.from_values(lr_actor=1e-4).save(path := f"{folder}/config.yaml")
            ...     RunSettings.from_yaml(path).optim
            OptimSettings(lr_actor=0.0001, lr_critic=None, lr_loss=None, weight_decay=0.0, adam_beta2=0.999)
        """
        return cls.from_values(**dict(read_settings(Path(path), cls)))

    def save(self, path: str | Path) -> None:
        """Write the settings to a YAML file that :meth:`from_yaml` and ``--config`` read.

        Those about the start of a run (``resume``, ``overwrite``) are left out: a later start reads
        the file.

        Args:
            path: the file; an older one is replaced atomically.
        """
        settings = {name: value for name, value in self.as_json().items() if name not in _FOR_THIS_START}
        write_settings(in_sections(type(self), settings), Path(path))

    def as_json(self) -> dict[str, Any]:
        """The settings by name as JSON has them: paths as text, tuples as lists."""
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in self.values().items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
