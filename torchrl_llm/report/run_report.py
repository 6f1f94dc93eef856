"""The report of a run with an evaluation before and after it: ``report.html``, ``episodes.md``,
``result.json``.

The scripts in ``examples/`` are calls of :func:`run_and_report`, which builds a run, trains,
reports and closes it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchrl_llm.metrics.paired import OTHER_GAMES, PairedComparison, paired_comparison
from torchrl_llm.report.page import EPISODES, NAME, write_report
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.flags import resume_command
from torchrl_llm.runs.outputs import comparison_table, percent, write_json
from torchrl_llm.runs.recording import Kind
from torchrl_llm.runs.run import Run
from torchrl_llm.runs.run_json import read_json
from torchrl_llm.runs.saved import settings_for_use, write_settings_beside
from torchrl_llm.trainers.evaluation import Evaluation
from torchrl_llm.utils import terminal
from torchrl_llm.utils.interrupts import Interrupted, catch_signals, interruptible
from torchrl_llm.utils.options import ConfigError

try:
    import resource
except ImportError:  # no POSIX system
    resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)


def run_and_report(
    config: RunSettings, build: Callable[[], Run], *, say: Callable[[str], None] = terminal.say
) -> dict[str, Any]:
    """Build a run, evaluate, train, evaluate, and write the report to ``config.output.output_dir``.

    Ctrl-C and SIGTERM end the run in good order: it is saved, the report says how far it came, and
    a line how to go on.

    Args:
        config: the settings of the run.
        build: makes it, such as ``partial(build_run, config)``.
        say: gets the lines for the terminal; default: printed.

    Returns:
        The content of ``result.json``; of several processes the main one writes it, and the others
        return an empty dictionary.

    Raises:
        Interrupted: by a signal, after the report is written as far as the run came.
    """
    report = RunReport(say)
    with catch_signals(resume_command(config)):
        # Without ranks, which meet only while the run is built.
        run = interruptible(build)
        try:
            report.before = before = evaluate_before(run)
            if before is not None and run.trainer.distributed.is_main:
                won, share = f"{before.success:.3f}", percent(before.task_overlap)
                say(f"before training, {before.episodes} episodes: win rate {won}, trained on {share}")
            run.trainer.train()
            report.after = run.final_evaluation()
            result = report.write(run, run.trainer.stop_reason)
            # All processes end together: one that ends at once after a collective, while PyTorch's
            # threads still release what they sent, is aborted now and then ("terminate called
            # without an active exception"), and its launcher ends the rest.
            run.trainer.accelerator.wait_for_everyone()
            return result
        except Interrupted as interrupted:
            report.write(run, f"interrupted by {interrupted.name}")
            raise
        finally:
            run.close()
            run.trainer.accelerator.end_training()


def evaluate_before(run: Run) -> Evaluation | None:
    """Evaluate the untrained model.

    A resumed run reads what it found in ``evaluation_before.json``. A run that continues a
    checkpoint of another folder has no such evaluation: ``None``.
    """
    run.begin()
    path = run.config.output.output_dir / "evaluation_before.json"
    if run.config.output.resume and path.exists():
        return _read_evaluation(path)
    if run.trainer.iteration:
        return None
    before = run.final_evaluation()
    if run.trainer.distributed.is_main:
        _record(run, before, "before")
        write_json(before.statistics(), path)
    return before


def _read_evaluation(path: Path) -> Evaluation:
    problems: list[str] = []
    statistics = read_json(path, problems)
    try:
        evaluation = Evaluation(**statistics)
    except TypeError as error:  # entries that there are not, or one that is missing
        problems.append(str(error).partition(" ")[2])
    if problems:
        raise ConfigError(
            f"{path} is not an evaluation that a run has written ({' '.join(problems)}): move it away, and resume again."
        )
    return evaluation


@dataclass
class RunReport:
    """Writes the report of a run.

    Attributes:
        say: gets the lines for the terminal.
        before: the evaluation before training; ``None``: there is none.
        after: the evaluation after training; ``None``: there is none (yet).
        started: seconds of wall clock and of CPU when the report was begun, which ``wall_s`` and
            ``cpu_s`` count from.
    """

    say: Callable[[str], None]
    before: Evaluation | None = None
    after: Evaluation | None = None
    started: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), time.process_time()))

    def write(self, run: Run, stop_reason: str | None) -> dict[str, Any]:
        """Write the report on the main process, of an interrupted run as far as it came; return the
        content of ``result.json``."""
        if not run.trainer.distributed.is_main:
            return {}
        out, title = run.config.output.output_dir, f"{run.config.algo} on {run.config.env.env_name}"
        paired = self._paired()
        result = {**self._result(run, stop_reason), "paired": paired and asdict(paired)}
        write_json(result, out / "result.json")
        if self.after is None:
            # of an earlier end, before a resume
            (out / "evaluation_after.json").unlink(missing_ok=True)
        else:
            _record(run, self.after, "after")
            write_json(self.after.statistics(), out / "evaluation_after.json")
            if run.config.output.export_merged:
                _export_merged(run, out / "merged")
        both = {"before": self.before, "after": self.after}
        evaluations = {when: each for when, each in both.items() if each is not None}
        table = f"\n\n{comparison_table(evaluations)}\n" if evaluations else ""
        table += f"{paired}\n" if paired else ""
        table += f"{OTHER_GAMES}\n" if result["same_games"] is False else ""
        self.say(f"\n{title}: {stop_reason}{table}")
        _write_page(out)
        wanted = (NAME, "result.json", EPISODES)
        self.say(f"report: {out}/ ({', '.join(name for name in wanted if (out / name).exists())})")
        return result

    def _paired(self) -> PairedComparison | None:
        """``None``: an evaluation is missing, of an earlier version, or of other tasks."""
        if self.before is None or self.after is None:
            return None
        try:
            return paired_comparison(self.before, self.after)
        except ValueError as error:
            # A run may be resumed with another environment or number of episodes, and its report
            # must not be lost to that.
            logger.warning("no paired comparison: %s", error)
            return None

    def _same_games(self) -> bool | None:
        """``None``: an evaluation is missing, or of a version whose digest leaves out what the game
        depends on."""
        found = [each for each in (self.before, self.after) if each is not None and each.beginnings is not None]
        return found[0].task_digest == found[1].task_digest if len(found) == 2 else None

    def _result(self, run: Run, stop_reason: str | None) -> dict[str, Any]:
        before, after, (wall, cpu) = self.before, self.after, self.started
        names = ("success", "reward", "turns", "penalized")
        return {
            **{name: run.config.values()[name] for name in ("algo", "seed", "env_name")},
            **{f"{name}_before": before and getattr(before, name) for name in names},
            **{f"{name}_after": after and getattr(after, name) for name in names},
            "success_before_ci95": before and before.success_ci95,
            "success_ci95": after and after.success_ci95,
            "same_games": self._same_games(),
            "evaluation_tasks": after and after.tasks,
            "evaluation_task_overlap": after and after.task_overlap,
            "evaluation_faults": after and after.faults,
            "episodes": run.trainer.episodes,
            "iterations": run.trainer.iteration,
            "started": run.open_folder.info["started"],
            "stop_reason": stop_reason,
            "wall_s": round(time.perf_counter() - wall, 1),
            "cpu_s": round(time.process_time() - cpu, 1),
            "peak_rss_mb": _peak_rss_mb(),
        }


def _peak_rss_mb() -> int | None:
    """The most memory that this process has held, in MB; ``None``: the system does not tell."""
    if resource is None:
        return None
    # In bytes on macOS, in kilobytes elsewhere.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit


def _record(run: Run, evaluation: Evaluation, when: Kind) -> None:
    if run.recorder is not None:
        run.recorder.record_evaluation(run.trainer, evaluation.rows, when, evaluation.texts)


def _export_merged(run: Run, folder: Path) -> None:
    run.models.export_merged(folder, run.tokenizer)
    # As an export has them: the folder may be copied elsewhere, and config.yaml has only the label
    # of an environment.
    from_python = run.checkpoints.env_from_python
    write_settings_beside(settings_for_use(run.config.as_json(), env_from_python=from_python), folder)


def _write_page(folder: Path) -> None:
    """Write ``report.html`` and ``episodes.md``; an error is logged, because the run and its other
    files must not be lost to it."""
    try:
        write_report(folder)
    except Exception:
        logger.exception(
            "report.html or episodes.md could not be written; everything else was, and write_report(%r) tries again",
            str(folder),
        )
