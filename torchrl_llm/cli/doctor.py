"""Say what is installed, what a run would compute on, and whether settings would run; nothing is
trained or written.

    torchrl-llm doctor
    torchrl-llm doctor --config examples/configs/ppo_llm.yaml --device cuda

With settings it loads the tokenizer and the environment, checks the chat template, the stop ids and
the longest first prompt, and estimates the memory from the shapes of the model. Weights are not
loaded. Exits with 1 if something would fail.
"""

from __future__ import annotations

import json
from argparse import Namespace
from importlib import import_module
from types import ModuleType

from torchrl_llm.cli._installation import Finding, installation
from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.terminal import say


def add_arguments(parser: ArgumentParser) -> None:
    """Add the settings."""
    parser.add_switch("--json", "print the findings as JSON")
    settings = _imported("torchrl_llm.runs.flags")
    if isinstance(settings, ModuleType):
        parser.usage, parser.noun = settings.USAGE, "setting"
        settings.add_settings(parser)
    else:  # run() says why
        parser.noun = "flag while the settings cannot be imported"
        parser.add_argument("--config", metavar="FILE", help="a YAML file of settings, which cannot be checked")


def run(arguments: Namespace) -> int:
    """Check and print."""
    found = [*installation(), *_checks(arguments)]
    if arguments.json:
        say(json.dumps([finding._asdict() for finding in found], indent=2))
    else:
        width = max(len(finding.name) for finding in found)
        for finding in found:
            say(f"{finding.state:<5}  {finding.name:<{width}}  {finding.text}")
    return int(any(finding.state == "fails" for finding in found))


def _checks(arguments: Namespace) -> list[Finding]:
    # Packages of versions that do not fit together may fail to import: what is installed is said
    # all the same.
    fit, settings = _imported("torchrl_llm.cli._fit"), _imported("torchrl_llm.runs.flags")
    if not (isinstance(fit, ModuleType) and isinstance(settings, ModuleType)):
        return [Finding("import", "fails", f"{fit}")]
    found = [*fit.devices()]
    if settings.given_settings(arguments):
        found += fit.fit(settings.run_settings_of(arguments))
    return found


def _imported(name: str) -> ModuleType | str:
    """A module; or why it cannot be imported."""
    try:
        return import_module(name)
    except Exception as error:  # noqa: BLE001  libraries that do not fit together raise anything, and it is what doctor says
        return f"{type(error).__name__}: {error}"
