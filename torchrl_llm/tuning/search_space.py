"""What is tuned, and how: :class:`TuningConfig` and the space of settings that it searches. Nothing
here needs Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal, Self

from torchrl_llm.modules.sampling import SamplingConfig
from torchrl_llm.runs import RunSettings
from torchrl_llm.runs.config import HOW_TO_RUN, INITIAL_WEIGHTS
from torchrl_llm.runs.settings import ChatSettings, EnvSettings, EvaluationSettings, ModelSettings, names_of
from torchrl_llm.runs.settings_file import read_settings
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.options import Checked, ConfigError, Count, Natural, NonNegative, Positive, fits
from torchrl_llm.utils.sections import settings_in, settings_of

_BUDGET = ("max_iterations", "max_seconds", "stop_at_success")
"""How long a trial lasts is the tuning's to say: all trials get the same episodes."""

_SCORE = (
    *(name for name in (*names_of(ChatSettings), *names_of(EnvSettings)) if name != "num_envs"),
    *names_of(EvaluationSettings),
    *("seed", "step_timeout", "opponent"),
)
"""Settings that change what an evaluation measures: with them in a space scores could not be
compared."""

_NOT_TUNED = {
    **dict.fromkeys(_SCORE, "it changes what the evaluations measure, and scores could not be compared"),
    **dict.fromkeys(
        names_of(SamplingConfig),
        "evaluations sample by it too: the trial that samples most sharply or longest would win, whatever it has learned",
    ),
    **dict.fromkeys((*_BUDGET, "max_steps"), "it changes how long a trial lasts, and all get the same episodes"),
    **dict.fromkeys(HOW_TO_RUN, "it changes no number of a run"),
    **dict.fromkeys(("evaluation_interval", "checkpoint_interval"), "it changes no weight of a run"),
}

_FIXED = (*INITIAL_WEIGHTS, *names_of(ModelSettings), "group_size")
"""Settings that a resumed run cannot change (the last, because the tasks of a checkpoint are in
groups of that size)."""

_BRINGING = {"loss_class": "loss", "estimator": "loss", "collector": "rollouts", "policy": "engine"}
"""Settings that bring defaults of others with them, and the section of these."""

_MOST_COMBINATIONS = 1024
"""Corners of the space that are checked before anything runs."""


@dataclass(frozen=True)
class Dimension:
    """The values of one setting.

    Attributes:
        kind: ``"loguniform"`` and ``"uniform"`` draw numbers between two bounds, ``"choice"`` one
            of the values.
        values: the two bounds, or the choices.
    """

    kind: Literal["loguniform", "uniform", "choice"]
    values: tuple[Any, ...]

    def clip(self, value: Any) -> Any:
        """The value within the bounds; a choice stays as it is.

        Examples:
            >>> Dimension("uniform", (0.0, 1.0)).clip(1.2), Dimension("choice", (1, 2)).clip(2)
            (1.0, 2)
        """
        if self.kind == "choice":
            return value
        return min(max(value, self.values[0]), self.values[1])


@dataclass(kw_only=True)
class TuningConfig(Checked):
    """A search over the settings of runs: what varies, what stays, and for how long.

    A trial is a run with the settings of ``base`` and one value of each dimension of ``space``. A
    generation of a trial is ``episodes`` episodes of training and one evaluation, on the same tasks
    for all trials and with the same sampling.

    Raises:
        ConfigError: the space is wrong, or does not go together with ``base`` or ``scheduler``; the
            message says what to do.
    """

    base: Path
    """YAML file with the settings that all trials share, as for torchrl-llm train --config. In a
    file of settings a relative path counts from the folder of that file."""
    space: dict[str, Any]
    """Setting -> {loguniform: [low, high]}, {uniform: [low, high]} or {choice: [value, ...]}."""
    output_dir: Path = Path("runs/tuning")
    """Where the trials, their state and tuning.json go."""
    scheduler: Literal["pbt", "asha", "random"] = "pbt"
    """"pbt" trains a population, whose worst trials continue from copies of the best with perturbed
    settings; "asha" stops the worse trials early; "random" trains all to the end."""
    trials: Count = 4
    """Number of trials; for "pbt" the size of the population."""
    generations: Count = 4
    """Evaluations of a trial that is not stopped, with episodes of training before each."""
    episodes: Count = 1024
    """Episodes of training in a generation, a multiple of each batch_size."""
    metric: Literal["success", "reward"] = "success"
    """What is maximized: the success rate or the mean return of the evaluation."""
    seed: Natural = 0
    """Of the values that are drawn. The runs have the seed of base."""
    cpus_per_trial: Positive = 1.0
    """CPUs that a trial asks Ray for."""
    gpus_per_trial: NonNegative = 0.0
    """GPUs that a trial asks Ray for; several may share one."""
    max_failures: Natural = 3
    """How often a trial that was killed or has failed continues from the end of its last
    generation."""

    def __post_init__(self) -> None:
        self.base = Path(self.base).expanduser().absolute()
        self.output_dir = Path(self.output_dir).expanduser().absolute()
        for problem in self._problems():
            raise ConfigError(problem)
        self._check_corners()

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> Self:
        """The settings of a YAML file, and ``changes`` to them.

        Args:
            path: the file, with lines ``field: value``. A relative ``base`` counts from its folder.
            changes: settings that replace the file's.

        Raises:
            ConfigError: the file cannot be read, or a setting is wrong; the message names the line.
        """
        settings = dict(read_settings(Path(path), cls))
        if "base" in settings:
            settings["base"] = Path(path).absolute().parent / Path(settings["base"]).expanduser()
        return cls(**{**settings, **changes})

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that ``base`` gives."""
        return dict(read_settings(self.base, RunSettings))

    @cached_property
    def base_config(self) -> RunSettings:
        """A run with those settings."""
        return RunSettings.from_values(**self.settings)

    @cached_property
    def dimensions(self) -> dict[str, Dimension]:
        """The space, by setting."""
        return {name: _dimension(name, given) for name, given in self.space.items()}

    def iterations(self, sampled: Mapping[str, Any]) -> int:
        """Iterations of a generation with these settings."""
        return self.episodes // sampled.get("batch_size", self.base_config.rollouts.batch_size)

    def run_config(self, folder: Path, sampled: Mapping[str, Any], iterations: int, *, starts: bool) -> RunSettings:
        """The settings of a trial's run up to an iteration.

        Args:
            folder: the run's.
            sampled: setting -> value.
            iterations: where it stops.
            starts: from the beginning, in place of an earlier run there; else it is resumed.
        """
        start: dict[str, Any] = {"overwrite": True}
        if not starts:
            start = {"resume": True, "accept_changes": ["max_iterations"]}
        given = {**self.settings, **sampled, "max_iterations": iterations, "progress": False, "output_dir": folder}
        config = RunSettings.from_values(**{**given, **start})
        if starts or self.scheduler != "pbt":
            return config
        # With another class come its defaults.
        chosen = [section for choice, section in _BRINGING.items() if choice in sampled]
        brought = {name for section in chosen for name in settings_in(RunSettings, section)}
        return config.replace(accept_changes=["max_iterations", *sorted({*sampled, *brought})])

    def _problems(self) -> Iterator[str]:
        if not self.space:
            yield "space is empty: give at least one setting, such as lr_actor: {loguniform: [1e-6, 1e-4]}."
        for name in self.dimensions:
            yield from self._wrong_setting(name)
        for name in (*_BUDGET, "resume", "resume_from", "accept_changes", "overwrite"):
            if name in self.settings:
                yield f"base sets {name}, which the tuning decides (generations, episodes, resume): leave it out of {self.base}."
        for name in ("wandb", "trackio"):
            if self.settings.get(name):
                yield f"base sets {name}, and a copy of a trial would log to the original's run there: leave it out of {self.base}."
        base = self.base_config
        if not base.trainer.evaluation_interval:
            yield "base sets evaluation_interval=0, and trials are compared by evaluations: set it to 1 or more."
        if not base.output.save_checkpoints:
            yield "base sets save_checkpoints=false, and trials continue from checkpoints: leave it out."
        sizes = self.dimensions["batch_size"].values if "batch_size" in self.dimensions else (base.rollouts.batch_size,)
        for size in sizes:
            if self.episodes % size:
                yield f"episodes={self.episodes} is not a multiple of batch_size={size}: a generation is whole iterations."
        if self.scheduler == "pbt" and self.trials < 2:
            yield f"trials={self.trials} is not a population: a trial needs another one to copy. Give at least 2."

    def _wrong_setting(self, name: str) -> Iterator[str]:
        known = settings_of(RunSettings)
        if name not in known:
            yield f"space names {name}: no such setting.{nearest(name, [*known])}"
            return
        if name in _NOT_TUNED:
            yield f"space names {name}, and {_NOT_TUNED[name]}: leave it out."
        if self.scheduler == "pbt" and name in _FIXED:
            yield (
                f"space names {name}, which a resumed run cannot change, and scheduler='pbt' changes settings of runs: leave it "
                "out, or use 'asha' or 'random'."
            )
        dimension = self.dimensions[name]
        if dimension.kind != "choice" and not fits(0.5, known[name].hint) and not fits(1.5, known[name].hint):
            yield f"space draws {name} as {dimension.kind}, and it takes no fractions: use choice, with its values."

    def _check_corners(self) -> None:
        """Make the settings of every corner of the space, so that a value that a run would refuse
        is refused now."""
        names = [*self.dimensions]
        for corner in islice(product(*(each.values for each in self.dimensions.values())), _MOST_COMBINATIONS):
            sampled = dict(zip(names, corner, strict=True))
            try:
                RunSettings.from_values(**{**self.settings, **sampled})
            except ConfigError as error:
                where = ", ".join(f"{name}={value!r}" for name, value in sampled.items())
                raise ConfigError(f"The space holds {where}, which a run refuses: {error}") from error


def _dimension(name: str, given: Any) -> Dimension:
    expected = "expected {loguniform: [low, high]}, {uniform: [low, high]} or {choice: [value, ...]}"
    kind, values = next(iter(given.items())) if isinstance(given, dict) and len(given) == 1 else (None, None)
    if kind not in ("loguniform", "uniform", "choice") or not isinstance(values, list) or not values:
        raise ConfigError(f"space of {name} is {given!r}; {expected}.")
    if kind == "choice":
        return Dimension(kind, tuple(values))
    if len(values) != 2 or not all(fits(value, float) for value in values) or not values[0] < values[1]:
        raise ConfigError(f"space of {name} is {given!r}; expected two numbers, the lower one first.")
    if kind == "loguniform" and values[0] <= 0:
        raise ConfigError(f"space of {name} is {given!r}; loguniform needs bounds above 0.")
    return Dimension(kind, (float(values[0]), float(values[1])))
