"""Evaluate a checkpoint in an environment: win rate with its 95 % interval, and the share of the
tasks that it was trained on.

    torchrl-llm eval runs/first --env game:GuessTheNumber-v0-easy --episodes 512
    torchrl-llm eval runs/first/checkpoints/best --episodes 2048 --seed 7 --json

Without flags the newest checkpoint of a run gets the result of the run's last evaluation: the same
tasks, seed and number of episodes.
"""

from __future__ import annotations

import json
from argparse import Namespace

from torchrl_llm.cli._models import add_checkpoint, load
from torchrl_llm.runs.opponents import make_opponent
from torchrl_llm.runs.outputs import comparison_table
from torchrl_llm.runs.saved import find_saved_model
from torchrl_llm.runs.trained_tasks import tasks_of_weights
from torchrl_llm.runs.trust import check_episodes
from torchrl_llm.trainers.evaluation import evaluate
from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.utils.terminal import say


def add_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint, the number of episodes, and settings."""
    parser.add_argument(
        "--episodes", type=int, metavar="N", help="episodes to collect (default: the run's final_episodes, or 512)"
    )
    parser.add_switch("--greedy", "take the likeliest token; each task once")
    parser.add_switch("--json", "print the result as JSON")
    add_checkpoint(parser)


def run(arguments: Namespace) -> int:
    """Evaluate and print."""
    saved = find_saved_model(arguments.checkpoint)
    episodes = vars(arguments).get("episodes")
    if episodes is None:
        episodes = saved.settings.get("final_episodes", 512)
        check_episodes(episodes, saved.path)
    if episodes < 1:
        raise ConfigError(f"--episodes is {episodes}; expected an integer, at least 1.")
    loaded = load(arguments, saved)
    env = loaded.make_env()
    try:
        opponent = None
        if loaded.config.collector == "self_play":
            opponent = make_opponent(loaded.config, env.formatter, loaded.policy.sampling)
        seen = tasks_of_weights(saved.path)
        result = evaluate(env, loaded.policy, episodes, greedy=arguments.greedy, opponent=opponent, seen_tasks=seen)
    finally:
        env.close()
    env_name, seed = loaded.config.env.env_name, loaded.config.trainer.seed
    if arguments.json:
        names = {"checkpoint": arguments.checkpoint, "env_name": env_name, "seed": seed}
        say(json.dumps({**names, "greedy": arguments.greedy, **result.statistics()}, indent=2))
        return 0
    say(f"{arguments.checkpoint} on {env_name}, seed {seed}\n")
    say(comparison_table({"greedy" if arguments.greedy else "sampled": result}))
    for name, value in result.environments.items():
        say(f"{name}: {value:.3f}")
    return 0
