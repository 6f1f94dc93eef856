"""Train a language model on questions with checkable answers, and measure it on held-out ones
before and after.

    python examples/reasoning.py --config examples/configs/tiny_reasoning.yaml
    python examples/reasoning.py --config examples/configs/tiny_reasoning.yaml --algo LLMPPO
    python examples/reasoning.py --config examples/configs/tiny_reasoning.yaml --resume

The questions are arithmetic made offline, divided into train and test; ``model_path: arithmetic``
makes a small model that is often wrong. For your own, change ``splits`` and ``reward_fn``. The
report goes to ``--output-dir``.
"""

import logging
from functools import partial

from arithmetic import arithmetic_splits, make_student
from transformers.utils.logging import disable_progress_bar

from torchrl_llm.envs import PromptDatasetEnv
from torchrl_llm.report import run_and_report
from torchrl_llm.runs import Run, RunSettings, build_run, parse_settings


def reward_fn(completion: str, answer: str, question: str) -> float:
    """1.0 for the answer and nothing else."""
    return float(completion.strip() == answer)


def main(config: RunSettings) -> dict:
    """Evaluate, train, evaluate, report; returns what ``result.json`` holds."""
    return run_and_report(config, partial(build, config))


def build(config: RunSettings) -> Run:
    """The run of ``config``, with its questions and, if it asks for one, a model made from them."""
    splits = arithmetic_splits(seed=config.trainer.seed)
    if config.model.model_path == "arithmetic":
        config = with_student(config, splits["train"])
    return build_run(config, make_env=partial(PromptDatasetEnv, splits, reward_fn))


def with_student(config: RunSettings, rows: list[dict[str, str]]) -> RunSettings:
    """``config`` with a small model that learned from ``rows``, made in ``output_dir`` unless a
    resumed run has it."""
    model_path, tokenizer_path = config.output.output_dir / "student", config.output.output_dir / "student_tokenizer"
    if not (config.output.resume and model_path.exists()):
        model, tokenizer = make_student(rows, seed=config.trainer.seed)
        model.save_pretrained(model_path)
        tokenizer.save_pretrained(tokenizer_path)
    return config.replace(model_path=str(model_path), tokenizer_path=str(tokenizer_path))


if __name__ == "__main__":
    disable_progress_bar()  # transformers' own, for loading and saving: they break ours
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    main(parse_settings(description=__doc__))
