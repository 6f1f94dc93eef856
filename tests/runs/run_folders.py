"""What the tests of output folders share: a run that is over, and what lies in its folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from small_runs import small_config
from test_checkpoint import RUN

from torchrl_llm.runs import ConfigError, build_run

SETTINGS = RUN | {"max_iterations": 3, "keep_checkpoints": 3, "evaluation_interval": 0}


def finished_run(place: Path) -> Path:
    """The folder of a run of three iterations that is over, with a report."""
    run = build_run(small_config(place, **SETTINGS))
    run.begin()
    for name in ("evaluation_before.json", "conversations_before.md", "result.json", "wandb_id"):
        (run.config.output.output_dir / name).write_text("{}")
    run.trainer.train()
    return run.config.output.output_dir


def config(folder: Path, **settings):
    return small_config(folder.parent, **SETTINGS | settings)


def checkpoint(folder: Path, iteration: int) -> Path:
    return folder / "checkpoints" / f"checkpoint-{iteration:012d}"


def names(folder: Path) -> list[int]:
    return sorted(int(path.name[-3:]) for path in (folder / "checkpoints").glob("checkpoint-*"))


def no_loggers() -> list:
    return []


def forked(do: Callable[[], object]) -> int:
    """The exit code of another process that does ``do``: 3 if it is refused because the folder is
    in use."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            do()
            code = 0
        except ConfigError as error:
            code = 3 if "in use by another run" in str(error) else 4
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
