"""All settings of a run under flat names: :class:`RunConfig`, and which settings contradict each
other.

A YAML file and the command line of ``examples/multiturn.py`` have exactly the names of its fields,
which :mod:`torchrl_llm.runs.settings` declares. Contradictions are errors at construction. Nothing
here loads a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

from tensordict.nn import TensorDictModuleBase

from torchrl_llm import objectives
from torchrl_llm.envs.chat import read_date
from torchrl_llm.modules.policy import SamplingConfig
from torchrl_llm.objectives.checks import wrong_penalty
from torchrl_llm.runs import settings, wrong_settings
from torchrl_llm.runs.idle_settings import IDLE
from torchrl_llm.runs.loss_settings import (
    LOSSES,
    NO_ACTOR,
    NO_CRITIC,
    LossConfig,
    LossOptions,
    estimator_of,
    loss_settings,
)
from torchrl_llm.runs.settings import Algorithm, names_of
from torchrl_llm.runs.settings_file import read_settings, write_settings
from torchrl_llm.trainers.config import NOTHING_TO_CORRECT, TrainerConfig
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.options import ConfigError, Idle, brief_repr, meanings, options_class, options_of

SamplingSettings: Any = options_class(
    "SamplingSettings", options_of(SamplingConfig), meanings(SamplingConfig), "How responses are sampled."
)


def shown_default(name: str, algo: Algorithm | None = None) -> str:
    """The default of a setting as text; for an option of the losses, the default of each loss, or
    of the loss of ``algo`` alone.

    Examples:
        >>> shown_default("epochs"), shown_default("clip_epsilon"), shown_default("kl_in")
        ('1', '0.2', 'loss (LLMPPO, GRPO), reward (LLMREINFORCE)')
        >>> shown_default("gamma")
        '0.99 (LLMPPO), 0.9 (LLMREINFORCE), 1.0 (GRPO, SFT)'
        >>> shown_default("gamma", "GRPO")
        '1.0'
    """
    if name not in names_of(LossOptions):
        return str(options_of(RunConfig)[name].default)
    algorithms: dict[str, list[str]] = {}
    for each in LOSSES:
        if name in (options := loss_settings(each)) and algo in (None, each):
            default = options[name].default
            if default is None and name in options_of(kind := estimator_of(each)):
                default = getattr(kind(), name)  # which decides it when it is made
            algorithms.setdefault(str(default), []).append(each)
    if len(algorithms) == 1:
        return next(iter(algorithms))
    return ", ".join(f"{default} ({', '.join(algos)})" for default, algos in algorithms.items())


_FOR_THIS_START = ("resume", "resume_from", "accept_changes", "overwrite")
"""Settings about the start of a run. They are not saved, because a saved file is read by a later
start."""

_MOST_SLOTS = 256
"""Environments of a process by default where vLLM samples, as in other systems: its step takes
about as long for 256 as for 16."""

PYTHON_PARTS = ("env", "make_env", "make_loss")
"""Arguments of ``build_run`` that a run depends on as on its settings; ``accept_changes`` may name
them too."""

HOW_TO_RUN = (*names_of(settings.OutputConfig), *names_of(settings.RayConfig))
"""Settings that change no number of a run: a resumed run may differ in them."""


def _kept_by_json(value: Any) -> bool:
    try:
        # a tuple equals no list here, nor a number its text
        return repr(json.loads(json.dumps(value))) == repr(value)
    except (TypeError, ValueError):
        return False


def _template_text(given: str) -> str:
    """The text of a chat template, which is given, or the path of its file."""
    if settings.is_template(given):
        return given
    path = Path(given).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path that cannot be one
        beside = [str(each) for each in path.parent.glob("*.jinja")]
        raise ConfigError(
            f"chat_template is {given!r:.200}, which is not a Jinja template (it has neither {{{{ nor {{%) and no file that can be "
            f"read ({error}).{nearest(given, beside)}"
        ) from error
    if not settings.is_template(text):
        raise ConfigError(
            f"chat_template is {given!r}, and that file holds no Jinja template: it has neither {{{{ nor {{%."
        )
    return text


@dataclass(kw_only=True)
class RunConfig(
    settings.OutputConfig,
    settings.ReportConfig,
    settings.OptimConfig,
    LossConfig,
    settings.RolloutConfig,
    settings.RayConfig,
    settings.EngineConfig,
    SamplingSettings,
    settings.EnvConfig,
    settings.TemplateConfig,
    settings.ModelConfig,
    settings.WeightsConfig,
    TrainerConfig,
):
    """A whole run: model, environment, sampling, algorithm and loop, for
    :func:`~torchrl_llm.runs.build_run`.

    It has the fields of its bases, from the last to the first.
    """

    idle: ClassVar[tuple[Idle, ...]] = IDLE

    __repr__ = brief_repr

    def __new__(cls, *args: Any, **options: Any) -> Self:
        config = super().__new__(cls, *args, **options)
        # In __post_init__ a 1 that was given looks like the default.
        if options.get("collector") == "self_play" and options.get("group_size") == 1:
            raise ConfigError(
                'group_size=1 with collector="self_play", where it is the number of players of a game: expected at least 2; leave it '
                "out for 2."
            )
        return config

    def __post_init__(self) -> None:
        self.output_dir = Path(self.output_dir).expanduser()
        self.init_from = None if self.init_from is None else Path(self.init_from).expanduser()
        self.chat_template = None if self.chat_template is None else _template_text(self.chat_template)
        for name in ("clip_epsilon", "sampler_bounds", "stop_ids"):
            # YAML has lists only, and settings that were saved must equal those that are read
            # again.
            if isinstance(value := getattr(self, name), list):
                setattr(self, name, tuple(value))
        if self.resume_from is not None:
            self.resume, self.resume_from = True, Path(self.resume_from).expanduser()
        if self.collector == "self_play" and self.group_size == 1:
            self.group_size = 2
        super().__post_init__()
        self.sampling()  # raises what SamplingConfig says of its fields
        self._check_estimator()
        self._check_loss()

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.resume and self.overwrite:
            yield "resume continues a run and overwrite starts a new one: give one of them."
        for name in ("chat_template_kwargs", "env_options"):
            if not _kept_by_json(getattr(self, name)):
                yield (
                    f"{name} is {getattr(self, name)!r}; expected text keys, and values that JSON has (lists, not tuples), because "
                    "checkpoints keep the settings."
                )
        read_date(self.template_date)
        yield from self._wrong_changes()
        yield from self._wrong_folders()
        yield from self._wrong_sizes()
        yield from self._wrong_rollout()
        yield from wrong_settings.wrong_self_play(self) if self.collector == "self_play" else ()
        yield from wrong_settings.wrong_branches(self)
        yield from wrong_settings.wrong_trees(self)
        yield from wrong_settings.wrong_engine(self)
        yield from self._wrong_model()

    def _wrong_changes(self) -> Iterator[str]:
        names = [*vars(self), *PYTHON_PARTS]
        for name in self.accept_changes:
            if name not in names:
                yield f"accept_changes names {name}: no such setting.{nearest(name, names)}"
        fixed = [name for name in self.accept_changes if name in names_of(settings.WeightsConfig)]
        if fixed:
            yield (
                f"accept_changes names {', '.join(fixed)}, but a resumed run has the weights that its checkpoint began with: leave "
                "out what changes them, or start another run with init_from."
            )

    def _wrong_folders(self) -> Iterator[str]:
        replaced = self.output_dir.expanduser().absolute()
        for name in ("init_from", "teacher", "demonstrations") if self.overwrite else ():
            given = getattr(self, name)
            if given is not None and Path(given).expanduser().absolute().is_relative_to(replaced):
                yield f"{name}={str(given)!r} lies in output_dir={str(self.output_dir)!r}, which overwrite=true replaces: choose another."

    def _wrong_sizes(self) -> Iterator[str]:
        group, length = self.group_size, self.max_output_tokens
        if self.batch_size % group:
            yield f"batch_size={self.batch_size} is not a multiple of group_size={group}, and a group must not be cut: use one."
        if self.slots % self._begun:
            yield f"num_envs={self.num_envs} is not a multiple of {self._begun}, the episodes of a group that begin together: use one."
        for given, name in ((self.dynamic_sampling, "dynamic_sampling"), (self.algo == "GRPO", "GRPO")):
            if given and group < 2:
                yield f"{name} compares the episodes of one task: group_size={group}, expected at least 2."
        if self.minibatch_size is not None and self.batch_size % self.minibatch_size:
            yield (
                f"minibatch_size={self.minibatch_size} does not divide batch_size={self.batch_size}: optimizer steps would differ "
                "in size."
            )
        if length >= self.max_model_len:
            yield (
                f"max_output_tokens={length} leaves no room for a prompt in max_model_len={self.max_model_len}: lower the first or "
                "raise the second."
            )
        if self.overlong_buffer is not None and self.overlong_buffer > length:
            yield (
                f"overlong_buffer={self.overlong_buffer} is more than a response has, max_output_tokens={length}: lower the first "
                "or raise the second."
            )

    def _wrong_rollout(self) -> Iterator[str]:
        stale = self.max_staleness or 0
        if self.step_timeout is not None and self.env_threads == 0:
            yield (
                f"step_timeout={self.step_timeout} with env_threads=0: a call in the main thread cannot be left. Give it a thread, "
                "or leave env_threads out."
            )
        if stale and self.old_log_probs == "sampler":
            yield f'max_staleness={stale} with old_log_probs="sampler": the sampler may have had older weights. Use "auto".'
        if self.old_log_probs == "sampler" and (self.sampler_correction is not None or self._corrects_sampler):
            yield NOTHING_TO_CORRECT
        if stale and self.adaptive_mixture:
            yield f"adaptive_mixture adapts between batches, and max_staleness={stale} leaves none between them: choose one."
        if self.collector == "ray" and self.demonstrations is not None:
            yield f"demonstrations={self.demonstrations!r} are collected in this process: leave collector='ray' out."
        chosen = (self.demonstrations, self.min_return, self.estimator, None if self.imitate == "all" else self.imitate)
        if self.algo == "SFT" and chosen == (None,) * len(chosen):
            yield (
                "algo='SFT' without demonstrations would imitate all that the model itself says, which teaches nothing: give "
                'demonstrations, or choose among its own episodes with imitate="success", imitate="return" or min_return.'
            )
        if self.dynamic_sampling and self.algo == "SFT":
            yield f"dynamic_sampling={self.dynamic_sampling} compares the episodes of a group, and SFT does not: leave it out."

    def _wrong_model(self) -> Iterator[str]:
        for name in ("init_reference", "refresh_reference"):
            if self.teacher is not None and getattr(self, name):
                yield f"{name} is about the reference of the KL, and teacher={self.teacher!r} is that: leave one of them out."
        if self.offload_base and not self.lora_r:
            yield "offload_base moves the frozen base of LoRA, and lora_r=0 trains all weights: leave it out."
        if self.offload_base and self.quantization is not None:
            yield f"quantization={self.quantization!r} keeps a part of the base on the GPU, which offload_base would move: choose one."
        if self.compile and self.gradient_checkpointing:
            yield "compile and gradient_checkpointing exclude each other: choose one."
        if self.policy == "hf" and self.attn_implementation not in (None, *settings.ATTENTION):
            yield (
                f"attn_implementation={self.attn_implementation!r} takes no mask, and policy='hf' samples with one: leave it out. "
                "PyTorch's own attention (sdpa), which is the default, runs flash attention on a GPU too, and computes what rows "
                "share once."
            )
        if self.quantization is not None and not self.lora_r:
            yield f"quantization={self.quantization!r} is for LoRA: lora_r=0 would train the weights that it rounds."
        # PEFT reads a string as a regular expression of whole module paths, which a bare name never
        # matches.
        if isinstance(self.lora_targets, str) and self.lora_targets.isidentifier():
            yield (
                f"lora_targets is {self.lora_targets!r}; expected a list of names, [{self.lora_targets}], a regular expression "
                'that matches whole module paths, or "all-linear".'
            )

    def _check_estimator(self) -> None:
        chosen = self.value_estimator()
        if chosen is None:
            return
        if self.algo != "LLMPPO" and issubclass(chosen, objectives.CriticEstimator):
            raise ConfigError(
                f"estimator={self.estimator!r} needs a critic, and algo={self.algo!r} has none: use LLMPPO."
            )
        own, known = options_of(estimator_of(self.algo)), options_of(chosen)
        unused = tuple(name for name in names_of(LossOptions) if name in own and name not in known)
        instead = "choose an estimator that has the option"
        Idle(unused, {"estimator": (self.estimator,)}, instead).check(vars(self), dict.fromkeys(unused))

    @property
    def _corrects_sampler(self) -> bool:
        chosen = self.value_estimator()
        return chosen is not None and chosen.corrects_sampler

    def _check_loss(self) -> None:
        """Raise what the loss and its estimator say of their options, before models are loaded for
        them."""
        # What "auto" means, and whether the settings fit that, is known when the run is built.
        known: dict[str, Any] = {"granularity": "turn"} if self.granularity == "auto" else {}
        checked = replace(self, **known) if known else self
        try:
            loss = checked.make_loss(NO_ACTOR, NO_CRITIC)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
        penalty = wrong_penalty(self.overlong_penalty, loss.value_estimator)
        for problem in (*penalty, *wrong_settings.idle_kl(self, loss)):
            raise ConfigError(problem)

    def make_loss(
        self,
        actor: TensorDictModuleBase,
        critic: TensorDictModuleBase | None = None,
        joint: TensorDictModuleBase | None = None,
    ) -> objectives.TurnLoss:
        """The algorithm's loss with its value estimator; settings that are ``None`` keep the
        class's default.

        Args:
            actor: see :class:`~torchrl_llm.objectives.TurnLoss`.
            critic, joint: LLMPPO's, see :class:`~torchrl_llm.objectives.LLMPPOLoss`; the other
                algorithms leave them out.
        """
        options = self.loss_options()
        if self.algo == "LLMPPO":
            options |= {"critic": critic, "joint": joint}
        return LOSSES[self.algo](actor, **options)

    def loss_options(self, loss_class: type[objectives.TurnLoss] | None = None) -> dict[str, Any]:
        """The keyword arguments of the algorithm's loss, with its estimator; fields that are
        ``None`` are left to the classes.

        Args:
            loss_class: what they are for, if not the stock loss: a subclass of it.

        Returns:
            Names and values, with which ``loss_class(models.actor, **options)`` is made (LLMPPO:
            ``models.critic`` follows the actor, and ``joint=models.joint`` saves a forward where
            they share a trunk).

        Raises:
            ConfigError: ``loss_class`` is the loss of another algorithm, whose settings these are
                not; or ``granularity`` is ``"auto"`` still.

        Examples:
            >>> options = RunConfig(algo="GRPO", group_size=4, kl_coeff=0.0, scale="none").loss_options()
            >>> options["kl_coeff"], options["estimator"].scale, options["estimator"].group_size
            (0.0, 'none', 4)
        """
        stock = LOSSES[self.algo]
        if loss_class is not None and not issubclass(loss_class, stock):
            raise ConfigError(
                f"The settings of algo={self.algo!r} are those of {stock.__name__}, which {loss_class.__name__} is not a subclass "
                "of: choose the algorithm that it is one of, or make it from fields of the config by hand."
            )
        kind = self.value_estimator() or (loss_class or stock).default_value_estimator
        given = {name: value for name in names_of(LossOptions) if (value := getattr(self, name)) is not None}
        given |= {"group_size": self.group_size}
        values = options_of(loss_class or stock)
        options = {name: value for name, value in given.items() if name in values}
        if (
            "sampler_correction" in values
            and self.max_staleness
            and self.sampler_correction is None
            and not self._corrects_sampler
        ):
            options = {"sampler_correction": "truncate", "sampler_bounds": 2.0} | options
        if options.get("clip_value") == 0:
            options["clip_value"] = None
        # Where both have a weight of the KL, the loss gives the estimator its own.
        shared = {"kl_coeff"} & values.keys()
        credit = {name: value for name, value in given.items() if name in options_of(kind) and name not in shared}
        if credit.get("granularity") == "auto":
            raise ConfigError(
                'granularity="auto" is decided by the environment, when the run is built: take the config that make_loss(config, '
                'models) gets, or set granularity to "turn" or "token".'
            )
        return options | {"estimator": kind(**credit)}

    def value_estimator(self) -> type[objectives.TurnEstimator] | None:
        """The class that :attr:`estimator` names; ``None``: the algorithm's own.

        Raises:
            ConfigError: there is no such class, or it is not a
                :class:`~torchrl_llm.objectives.TurnEstimator`.
        """
        if self.estimator is None:
            return None
        name = self.estimator if ":" in self.estimator else f"torchrl_llm.objectives:{self.estimator}"
        try:
            found = resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"estimator is {self.estimator!r}, which cannot be imported ({error}); expected a class of torchrl_llm.objectives, "
                'or "package.module:Name".'
            ) from error
        if not (isinstance(found, type) and issubclass(found, objectives.TurnEstimator)):
            raise ConfigError(f"estimator={self.estimator!r} is {found!r}; expected a subclass of TurnEstimator.")
        return found

    @property
    def slots(self) -> int:
        """``num_envs``, or, where none is given and none was chosen, the number in a run of one
        process."""
        return self.num_envs or self.default_num_envs()

    def default_num_envs(self, processes: int = 1) -> int:
        """The environments of each training process (of its workers on Ray, of each) where
        ``num_envs`` is not given.

        Args:
            processes: training processes.

        Examples:
            >>> RunConfig().default_num_envs(), RunConfig(policy="vllm", batch_size=128).default_num_envs(processes=2)
            (16, 64)
        """
        workers = (self.ray_workers or 2) if self.collector == "ray" else 1
        most = min(_MOST_SLOTS, self.batch_size // (processes * workers)) if self.policy == "vllm" else 16
        return most - most % self._begun or self._begun

    @property
    def _begun(self) -> int:
        """The episodes of a group that begin together: trees are continued later."""
        return max(1, self.group_size // (1 + self.tree_branches))

    @property
    def has_reference(self) -> bool:
        """Whether the loss, or its estimator, takes a KL to a reference policy."""
        return "kl_coeff" in loss_settings(self.algo) and self.kl_coeff != 0

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """The settings of a YAML file, such as a run's ``config.yaml``.

        Args:
            path: the file, with lines ``field: value``.

        Raises:
            ConfigError: the file cannot be read, or a setting is wrong; the message names the line.

        Examples:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     RunConfig(algo="GRPO", group_size=4).save(path := f"{folder}/config.yaml")
            ...     RunConfig.from_yaml(path) == RunConfig(algo="GRPO", group_size=4)
            True
        """
        return cls(**dict(read_settings(Path(path), options_of(cls))))

    def save(self, path: str | Path) -> None:
        """Write the settings to a YAML file that :meth:`from_yaml` and ``--config`` read.

        Those about the start of a run (``resume``, ``overwrite``) are left out: a later start reads
        the file.

        Args:
            path: the file; an older one is replaced atomically.
        """
        settings = {name: value for name, value in self.as_json().items() if name not in _FOR_THIS_START}
        write_settings(settings, Path(path))

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON has them: paths as text, tuples as lists."""
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    def sampling(self) -> SamplingConfig:
        """The sampling settings of training."""
        return SamplingConfig(**{name: getattr(self, name) for name in names_of(SamplingSettings)})
