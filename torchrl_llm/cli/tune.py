"""Search settings of a run on Ray Tune: a population (PBT), early stopping (ASHA) or random search.

    torchrl-llm tune --config examples/configs/tuning_tiny.yaml --output-dir runs/tuning
    torchrl-llm tune --config examples/configs/tuning_tiny.yaml --output-dir runs/tuning --resume \\
        --trust

A trial is an ordinary run in OUTPUT_DIR/trials, with the settings of base and values drawn from
space. At the end there is a table of the trials, tuning.json, and the report of the best one: its
page, and an evaluation on tasks that nothing else uses.
"""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from torchrl_llm.runs.flags import Flag
from torchrl_llm.tuning import TuningConfig, report_best, summary, tune
from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.options import ConfigError, describe, meanings, options_of
from torchrl_llm.utils.terminal import say


def add_arguments(parser: ArgumentParser) -> None:
    """Add the settings of a search, and how it is run."""
    parser.usage, parser.noun = "%(prog)s [--config FILE] [--FIELD VALUE ...]", "setting"
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file of the fields below")
    parser.add_switch("--resume", "continue the search in output_dir, or start it")
    parser.add_switch(
        "--trust", "output_dir is your own: with --resume Ray Tune reads pickles there, which can run any code"
    )
    parser.add_argument("--address", help="of a Ray cluster, such as auto (default: a Ray on this machine)")
    parser.add_switch("--json", "print tuning.json, and all else to stderr")
    group, meaning = parser.add_argument_group("settings of the search"), meanings(TuningConfig)
    for name, option in options_of(TuningConfig).items():
        default = "" if name in ("base", "space") else f"; default: {option.default}"
        said = f"{meaning[name]} (type: {describe(option.hint)}{default})".replace("%", "%%")
        group.add_argument(f"--{name}", action=Flag, hint=option.hint, metavar="VALUE", help=said)


def run(arguments: Namespace) -> int:
    """Search, and report."""
    given = {name: value for name, value in vars(arguments).items() if name in options_of(TuningConfig)}
    if "config" in arguments:
        tuning = TuningConfig.from_yaml(arguments.config, **given)
    else:
        missing = [f"--{name}" for name in ("base", "space") if name not in given]
        if missing:
            raise ConfigError(f"Nothing says what to search: give --config FILE, or {' and '.join(missing)}.")
        tuning = TuningConfig(**given)
    disable_progress_bar()
    tell = partial(say, stderr=bool(arguments.json))
    grid = tune(tuning, resume=arguments.resume, trust=arguments.trust, address=getattr(arguments, "address", None))
    trials = summary(tuning, grid)
    if any(not each["finished"] and each["error"] is None for each in trials):
        tell(f"The search in {tuning.output_dir} was stopped: the same command with --resume --trust continues it.")
        raise KeyboardInterrupt
    found = report_best(tuning, trials, tell)
    if arguments.json:
        say(json.dumps(found, indent=2))
    return 0
