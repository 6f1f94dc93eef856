"""Watch a checkpoint in an environment turn by turn, or be the player or the environment yourself.

    torchrl-llm play runs/first
    torchrl-llm play runs/first --episodes 3 --json
    torchrl-llm play --as player --env game:GuessTheNumber-v0-easy
    torchrl-llm play runs/first --as environment

The first episodes are the same as of `torchrl-llm eval` with the same seed. As the player you
answer in the model's place. As the environment you write what follows each of the model's
responses; the first message is the environment's. /exit, or the end of the input, ends.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from torchrl_llm.cli._conversation import Conversation, ConversationFullError, text_of
from torchrl_llm.cli._models import add_checkpoint, load
from torchrl_llm.cli._terminal import Terminal
from torchrl_llm.envs import GEMEnv
from torchrl_llm.keys import StopReason
from torchrl_llm.modules.engine import TurnRequest
from torchrl_llm.modules.sampling import SamplingConfig
from torchrl_llm.runs.flags import given_settings
from torchrl_llm.runs.saved import LoadedModel, SavedModel, environment_of, find_saved_model
from torchrl_llm.runs.settings import names_of
from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.utils.terminal import say

Answer = Callable[[GEMEnv], "list[int] | None"]
"""The ids of the next response in slot 0; ``None``: there is none."""

_LOADING = {"dtype", "device", "attn_implementation", "quantization"}
_OF_MODEL = {"greedy", *names_of(SamplingConfig), *_LOADING} - {"max_output_tokens"}
"""What does nothing where no model answers. ``max_output_tokens`` says which prompts leave room."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint, who plays, and settings."""
    add_checkpoint(parser, optional=True)
    parser.add_argument(
        "--as", dest="role", choices=("model", "player", "environment"), default="model", help="who you are (default: model, which you watch)"
    )  # fmt: skip
    parser.add_argument("--episodes", type=int, metavar="N", help="episodes (default: 1)")
    parser.add_switch("--greedy", "take the likeliest token")
    parser.add_switch("--json", "print each episode as a line of JSON")


def run(arguments: Namespace) -> int:
    """Play."""
    _check(arguments)
    terminal = Terminal("play", stderr=arguments.json)
    saved = find_saved_model(arguments.checkpoint or "tiny")
    if saved.settings.get("collector") == "self_play":
        raise ConfigError(
            f"{arguments.checkpoint} was trained on games of several players, and play shows one conversation: read its run report, or "
            "let torchrl-llm eval play its games against another (--opponent)."
        )
    if arguments.role == "environment":
        return _be_the_environment(terminal, arguments, saved)
    answer: Answer
    if arguments.role == "player":
        config = saved.config(**given_settings(arguments), num_envs=1)
        if config.chat.template == "chat":  # nobody types thoughts
            config = config.replace(missing_thinking="empty")
        env, answer = environment_of(config), _typed(terminal)
    else:
        loaded = load(arguments, saved, num_envs=1)
        env, answer = loaded.make_env(), _sampled(terminal, loaded, greedy=arguments.greedy)
    try:
        for index in range(vars(arguments).get("episodes", 1)):
            played = play(env, index, answer, terminal)
            if arguments.json:
                say(json.dumps(played))
            if not played["stop_reason"]:  # nobody answers any more
                break
    finally:
        env.close()
    return 0


def _check(arguments: Namespace) -> None:
    """Raise what is wrong or does nothing."""
    if vars(arguments).get("episodes", 1) < 1:
        raise ConfigError(f"--episodes is {arguments.episodes}; expected an integer, at least 1.")
    if arguments.role != "player" and arguments.checkpoint is None:
        raise ConfigError("CHECKPOINT is missing: only --as player needs none.")
    useless = {"model": set[str](), "player": _OF_MODEL, "environment": {"json", "episodes"}}[arguments.role]
    # A switch that is not given is there, and false; 0 and None are given.
    idle = [name for name, value in vars(arguments).items() if name in useless and value is not False]
    if idle:
        why = {"player": "no model answers", "environment": "nothing is rewarded or ends"}[arguments.role]
        raise ConfigError(f"--{idle[0]} does nothing with --as {arguments.role}, where {why}: leave it out.")


def play(env: GEMEnv, index: int, answer: Answer, terminal: Terminal) -> dict[str, Any]:
    """One episode, shown while it is played.

    Args:
        env: of one slot.
        index: of the task.
        answer: gives the responses.
        terminal: where it is shown.

    Returns:
        Its turns and its end, as JSON has them; ``stop_reason`` is empty if ``answer`` had no more
        responses.
    """
    env.slots.start(0, index, env.slots.open(0, index))
    turns: list[dict[str, Any]] = []
    _show_message(terminal, env)
    while env.slots[0].live:
        message, response = _message(env), answer(env)
        if response is None:
            return {"task": index, "turns": turns, "return": env.slots[0].total, "stop_reason": "", "success": False}
        reply = env.slots.answer(0, response)
        env.slots.advance(0, response, reply)
        turns.append({"message": message, "response": env.formatter.decode(response), "reward": reply.step.reward})
        terminal.show(f"reward {reply.step.reward:g}", style="green" if reply.step.reward > 0 else "dim")
        _show_message(terminal, env)
    slot = env.slots[0]
    reason = slot.stop_reason.name.lower().replace("_", " ")
    terminal.show(f"{reason} after {slot.turn} turn{'s' * (slot.turn != 1)}, return {slot.total:g}\n", style="bold")
    success = slot.stop_reason == StopReason.WON
    return {"task": index, "turns": turns, "return": slot.total, "stop_reason": reason, "success": success}


def _message(env: GEMEnv) -> str:
    """What the environment of the slot has said last."""
    slot = env.slots[0]
    return slot.envs[slot.task_spec.env_id].message


def _show_message(terminal: Terminal, env: GEMEnv) -> None:
    terminal.show(f"environment: {_message(env)}", style="cyan")


def _sampled(terminal: Terminal, loaded: LoadedModel, *, greedy: bool) -> Answer:
    """Responses of the model, shown while they are sampled."""

    def answer(env: GEMEnv) -> list[int]:
        slot, response = env.slots[0], list[int]()
        # The ids of task and turn key the noise, as in an evaluation.
        request = TurnRequest(0, env.slots.context(0).copy(), slot.task_spec.episode_id, slot.turn, greedy)
        terminal.show("model: ", end="")
        terminal.stream(text_of(loaded.formatter, loaded.policy.stream(request), response))
        return response

    return answer


def _typed(terminal: Terminal) -> Answer:
    """Responses that are typed."""

    def answer(env: GEMEnv) -> list[int] | None:
        while (line := terminal.ask("you: ")) not in (None, "/exit"):
            if not terminal.interactive:
                terminal.show(f"you: {line}")
            try:
                return [*env.formatter.answer(line)]
            except ValueError as error:  # a control token, or half a character
                terminal.complain(str(error))
        return None

    return answer


def _be_the_environment(terminal: Terminal, arguments: Namespace, saved: SavedModel) -> int:
    loaded = load(arguments, saved, num_envs=1)
    conversation, env = Conversation(loaded, greedy=arguments.greedy), loaded.make_env()
    try:
        env.slots.start(0, 0, env.slots.open(0, 0))
        _show_message(terminal, env)
        message: str | None = _message(env)
    finally:
        env.close()
    while message not in (None, "/exit"):
        terminal.show("model: ", end="")
        try:
            terminal.stream(conversation.reply(message))
        except ConversationFullError as error:
            terminal.complain(str(error))
            break
        message = terminal.ask("environment: ")
    return 0
