"""A run with a third engine by settings of its own, in a process whose package has them:

    python third_run.py SETTINGS

Prints what it saw, as JSON."""

import json
import sys
from pathlib import Path

import torch

import torchrl_llm
from torchrl_llm.cli import _fit
from torchrl_llm.runs import ConfigError, RunSettings, build_run
from torchrl_llm.runs.memory import empty_model, trainer_memory
from torchrl_llm.runs.schema import settings_schema


def main() -> None:
    """Train with the third engine and print what was seen."""
    # Only the package of that process has it.
    from torchrl_llm.runs import ThirdSettings

    config = RunSettings.from_values(**json.loads(sys.argv[1]))
    assert isinstance(config.engine, ThirdSettings)
    run = build_run(config)
    history = run.trainer.train()
    run.close()
    saved = RunSettings.from_yaml(config.output.output_dir / "config.yaml")
    try:
        refused = str(config.replace(collector="self_play", group_size=2))
    except ConfigError as error:
        refused = str(error)

    torch.cuda.mem_get_info = lambda _: (2**30, 2**30)
    gpu = torch.device("cuda", 0)
    findings = [*_fit.fit(config), *_fit._memory(config.replace(max_tokens=256), empty_model(config), gpu)]
    seen = {
        "package": str(Path(torchrl_llm.__file__).parent),
        "policy": type(run.policy).__name__,
        "versions": [metrics["policy/version"] for metrics in history],
        "gaps": [metrics["policy/log_prob_gap"] for metrics in history],
        "saved": str(saved.engine),
        "described": settings_schema()["properties"]["engine"]["properties"]["third_kind"],
        "refused": refused,
        "free": trainer_memory(config, gpu)[0],
        "findings": {each.name: each.text for each in findings},
    }
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
