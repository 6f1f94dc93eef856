"""Train a language model to write programs with three tools, judged by hidden tests.

    python examples/coding_tools.py --config examples/configs/tiny_coding_tools.yaml
    python examples/coding_tools.py --config examples/configs/tiny_coding_tools.yaml --algo LLMPPO

A function on digits is hidden. The model asks what it makes of a digit, writes a program that is to
do the same, may run it, and says that it is done; then the program has to agree with the function
on all ten digits. The tools are methods of the environment: with a template that writes calls
(Qwen's, Llama's and most others do) the same class trains your model, and yours is written alike.

``model_path: tool-caller`` makes a small model on first use, in ``runs/tool_caller``
(``benchmarks/small_models/make_tool_caller.py``): it knows the form of calls and often writes the
wrong program. Success is measured before and after training; the report goes to ``--output-dir``.
"""

import logging
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

from transformers.utils.logging import disable_progress_bar

from torchrl_llm.envs import ToolError, with_tools
from torchrl_llm.report import run_and_report
from torchrl_llm.runs import Run, RunSettings, build_run, parse_settings

DIGITS = range(10)
OPERATIONS = {
    "plus": lambda x, number: (x + number) % 10,
    "times": lambda x, number: (x * number) % 10,
    "minus": lambda x, number: (number - x) % 10,
}
Operation = Literal["plus", "times", "minus"]


class HiddenFunction:
    """A function on digits, and a program that is to do the same."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        draw = random.Random(seed)
        self._hidden = draw.choice([*OPERATIONS]), draw.choice(DIGITS)
        self._program: tuple[str, int] | None = None
        return "Write the hidden function.", {}

    def hidden_state(self) -> tuple[str, int]:
        return self._hidden

    def ask(self, x: int) -> int:
        """What the hidden function makes of a digit.

        Args:
            x: the digit.
        """
        return apply(self._hidden, x)

    def write(self, operation: Operation, number: int) -> str:
        """Write the program, in place of the one before.

        Args:
            operation: plus (x + number), times (x * number) or minus (number - x), all modulo 10.
            number: a digit.
        """
        check_digit(number)
        self._program = operation, number
        return "Written."

    def run(self, x: int) -> int:
        """What the program makes of a digit.

        Args:
            x: the digit.
        """
        if self._program is None:
            raise ToolError("There is no program.")
        return apply(self._program, x)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """A response without calls: the program is tested, and the episode ends."""
        agrees = self._program is not None and [apply(self._program, x) == apply(self._hidden, x) for x in DIGITS]
        passed = bool(agrees) and all(agrees)
        return "All tests pass." if passed else "A test fails.", float(passed), True, False, {"success": passed}


def apply(program: tuple[str, int], x: int) -> int:
    """What a program, an operation and a number, makes of a digit."""
    check_digit(x)
    return OPERATIONS[program[0]](x, program[1])


def check_digit(x: int) -> None:
    """Refuse what is no digit, as the policy's fault."""
    if x not in DIGITS:
        raise ToolError(f"{x} is no digit.")


CODING = with_tools(HiddenFunction, lambda env: [env.ask, env.write, env.run], max_calls=6)


def main(config: RunSettings) -> dict:
    """Evaluate, train, evaluate, report; returns what ``result.json`` holds."""
    return run_and_report(config, partial(build, config))


def build(config: RunSettings) -> Run:
    """The run of ``config``, which starts from the small model if it asks for that."""
    if config.model.model_path == "tool-caller":
        folder = small_model()
        config = config.replace(model_path=str(folder / "model"), tokenizer_path=str(folder / "tokenizer"))
    return build_run(config, env=CODING)


def small_model(folder: Path = Path("runs/tool_caller")) -> Path:
    """The folder of the small model and its tokenizer, made if it is missing: about a minute."""
    if not folder.exists():
        # Renamed when it is complete: what is stopped here leaves nothing that looks finished.
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        script = Path(__file__).parents[1] / "benchmarks" / "small_models" / "make_tool_caller.py"
        subprocess.run([sys.executable, script, f"--out={unfinished}"], check=True)
        unfinished.rename(folder)
    return folder


if __name__ == "__main__":
    disable_progress_bar()  # transformers' own, for loading and saving: they break ours
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    main(parse_settings(description=__doc__))
