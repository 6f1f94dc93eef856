"""The start of a run: its folder and the checkpoint that it continues, checked before anything is
built."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torchrl.record.loggers import Logger

from torchrl_llm.collectors.collector import base_env
from torchrl_llm.runs.build import adamw_options
from torchrl_llm.runs.config import HOW_TO_RUN, ConfigError, RunSettings
from torchrl_llm.runs.identity import config_changes, environment
from torchrl_llm.runs.migrate import settings_of_now
from torchrl_llm.runs.outputs import write_json
from torchrl_llm.runs.run_folder import RunFolder
from torchrl_llm.runs.trackers import make_loggers, rewind_tensorboard
from torchrl_llm.trainers.callbacks import Callback
from torchrl_llm.trainers.trainer import LLMTrainer
from torchrl_llm.utils.interrupts import run_begins
from torchrl_llm.utils.options import brief
from torchrl_llm.utils.sections import settings_in

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """The checkpoint that a run continues.

    Attributes:
        path: its folder.
        manifest: what :func:`~torchrl_llm.runs.verify` returned for it.
    """

    path: Path
    manifest: dict[str, Any]


def find_start(config: RunSettings, folder: RunFolder, python_parts: Mapping[str, str]) -> Start | None:
    """The checkpoint to continue, if any; ``folder`` and the checkpoint are checked, and nothing is
    changed.

    Args:
        config: the settings.
        folder: the run's.
        python_parts: names of what the run is given besides, as
            :class:`~torchrl_llm.runs.CheckpointStore` has them.

    Raises:
        ConfigError: the run differs from the checkpoint's in what ``config.output.accept_changes``
            does not name, or the checkpoint is of version 0.1.0.
    """
    folder.check()
    checkpoints = folder.checkpoints
    latest = checkpoints.latest()
    if not config.output.resume:
        if latest is not None and not config.output.overwrite:
            raise ConfigError(
                f"{config.output.output_dir} holds a run already (checkpoint {latest}): resume=true continues it, overwrite=true "
                "replaces it, or choose another output_dir."
            )
        return None
    if config.output.resume_from is None:
        start = latest
    else:
        start = config.output.resume_from.resolve()
        if start.parent == checkpoints.directory.resolve():
            start = checkpoints.directory / start.name
        elif latest is not None:
            raise ConfigError(
                f"resume_from is {config.output.resume_from}, but {config.output.output_dir} holds another run (checkpoint {latest}): "
                "resume=true without resume_from continues that one, or choose another output_dir."
            )
    if start is None:
        return None
    manifest = checkpoints.verify(start)
    if "env_from_python" not in manifest["metadata"]:  # 0.1.0 did not say
        raise ConfigError(
            f"{start} was saved by version 0.1.0 of torchrl_llm, whose runs this version cannot continue: start a run from its "
            f"weights, with init_from: {start} and another output_dir."
        )
    if "optimizer" not in manifest["components"]:
        raise ConfigError(f"{start} holds weights only (save_optimizer=False): start a run from them with init_from.")
    before = settings_of_now(manifest["metadata"]["config"])
    if (before["algo"], before["estimator"]) == (config.algo, config.loss.estimator):
        before = config.loss.defaults() | before
    manifest["metadata"]["config"] = before
    _check_same(config, python_parts, manifest["metadata"], start)
    return Start(start, manifest)


def _check_same(config: RunSettings, python_parts: Mapping[str, str], saved: dict[str, Any], start: Path) -> None:
    # Of a checkpoint that an earlier version wrote it is not known what its run was given. A
    # setting that there was not yet has its default, which is what that run did.
    # Another collector or policy has settings of its own: what there was not, or is no more, counts
    # as its default.
    of_parts = {**settings_in(RunSettings, "rollouts"), **settings_in(RunSettings, "engine")}
    defaults = {name: option.default for name, option in of_parts.items()}
    before = {**defaults, **saved["config"], **saved.get("python_parts", python_parts)}
    present_settings = {**defaults, **config.as_json(), **python_parts}
    changes = config_changes(before, present_settings, ignore=[*HOW_TO_RUN, *config.output.accept_changes])
    if changes:
        listed = "; ".join(f"{name} was {brief(old)}, is {brief(new)}" for name, (old, new) in changes.items())
        raise ConfigError(
            f"The settings differ from those of {start}: {listed}. Use the old ones, or name those that are meant to differ: "
            f"accept_changes: [{', '.join(changes)}], or --accept-changes '[{','.join(changes)}]'."
        )
    present = environment()
    different = [name for name in present if saved["environment"].get(name) != present[name]]
    if different:
        logger.warning(
            "resuming %s under another %s: the run continues, but not in the same bytes", start, " and ".join(different)
        )


class OpenFolder(Callback):
    """Opens the run's folder and its loggers when training begins; building a run changes nothing
    on disk.

    Args:
        config: the settings.
        folder: the run's.
        start: the checkpoint that it continues, if any.
        info: the content of ``run.json``.
    """

    def __init__(self, config: RunSettings, folder: RunFolder, start: Path | None, info: Mapping[str, Any]) -> None:
        self.config, self.folder, self.start, self.info, self.opened = config, folder, start, info, False
        # the folder stays locked when training ends, because the caller writes there
        self.until_close = False

    def on_start(self, trainer: LLMTrainer) -> None:
        if self.opened:
            trainer.distributed.on_main(self.folder.lock)
        else:
            self.opened = True
            trainer.distributed.on_main(lambda: self._open(trainer))
            run_begins()

    def on_end(self, trainer: LLMTrainer) -> None:
        if self.opened and trainer.distributed.is_main:
            # Without run_and_report nothing else tells a run that has ended from one that was
            # killed.
            ended = {"stop_reason": trainer.stop_reason or "interrupted, or ended by an error"}
            with suppress(OSError):  # the report of a run must not hide why it ends
                write_json({**self.info, **ended}, self.config.output.output_dir / "run.json")
        if not self.until_close:
            self.folder.close()

    def _open(self, trainer: LLMTrainer) -> None:
        loggers = self.folder.open(self.start, self._begin_files)
        if self.start is not None:
            for target in loggers:
                rewind_tensorboard(target, _logged_steps(trainer))
        # the caller may have added some since the run was built
        trainer.loggers = (*loggers, *trainer.loggers)

    def _begin_files(self) -> list[Logger]:
        """Write the first files of the folder; if this fails, the folder is put back as it was."""
        self.config.save(self.config.output.output_dir / "config.yaml")
        write_json(self.info, self.config.output.output_dir / "run.json")
        return make_loggers(self.config)


def accept_changes(config: RunSettings, trainer: LLMTrainer, saved: dict[str, Any]) -> None:
    """Apply the settings that ``config.output.accept_changes`` names and that the checkpoint's
    state has overwritten."""
    for group in trainer.optimizer.param_groups:
        # Without the learning rates, which the schedule sets before each update.
        group |= adamw_options(config)
    changes: dict[str, Any] = {}
    if saved.get("adaptive_mixture") and not config.env.adaptive_mixture:
        changes["success"] = None  # the last rates would decide for ever
    if saved["seed"] != config.trainer.seed:  # a second resume finds the new seed in its checkpoint
        trainer.generator.manual_seed(config.trainer.seed)
        # The next tasks have the new seed; the counter continues, so that ids stay unique.
        changes["seed"] = config.trainer.seed
    if changes:
        env: Any = base_env(trainer.collector.env)
        env.task_sampler = replace(env.task_sampler, **changes)


def _logged_steps(trainer: LLMTrainer) -> int:
    """Turns up to the last iteration that was logged."""
    if trainer.unfinished is None:
        return trainer.steps
    return int(trainer.history[-1]["rollout/steps"]) if trainer.history else 0
