"""Talk to a checkpoint: free text through the model's own chat template, streamed as it is sampled.

    torchrl-llm chat runs/first
    echo "Guess a number." | torchrl-llm chat runs/first --temperature 0.7

A line is a message, but for commands, which begin with "/": /reset begins another conversation,
/exit (or the end of the input) ends. Ctrl-C stops a response, and ends where none is written. It
samples as in training, but for the lengths: a response may have 512 tokens, a conversation as many
as the model has positions.
"""

from __future__ import annotations

from argparse import Namespace

from torchrl_llm.cli._conversation import Conversation, ConversationFullError
from torchrl_llm.cli._models import add_checkpoint, load
from torchrl_llm.cli._terminal import Terminal
from torchrl_llm.envs import ControlTokenError
from torchrl_llm.runs.flags import given_settings
from torchrl_llm.runs.saved import OF_THE_MODEL, SavedModel, find_saved_model, positions
from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.hints import nearest

COMMANDS = ("/reset", "/exit")
_RESPONSE = 512


def add_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint and the settings of a conversation."""
    parser.add_switch("--greedy", "take the likeliest token")
    add_checkpoint(parser, OF_THE_MODEL)


def run(arguments: Namespace) -> int:
    """Talk until the input ends."""
    terminal = Terminal("chat")
    saved = find_saved_model(arguments.checkpoint)
    conversation = Conversation(
        load(arguments, saved, only_model=True, **_lengths(arguments, saved)), greedy=arguments.greedy
    )
    if terminal.interactive:
        terminal.show(f"{arguments.checkpoint}: {', '.join(COMMANDS)}, Ctrl-C stops a response", style="dim")
    while (message := terminal.ask("> ")) not in (None, "/exit"):
        if message == "/reset":
            conversation.reset()
            terminal.show("(another conversation)", style="dim")
        elif message.startswith("/"):
            terminal.complain(f"{message!r} is not a command.{nearest(message, COMMANDS)}")
        elif message.strip():
            _answer(terminal, conversation, message)
    return 0


def _lengths(arguments: Namespace, saved: SavedModel) -> dict[str, int]:
    """The lengths of a conversation and of a response, where they are not given."""
    given = given_settings(arguments)
    model = {name: given[name] for name in ("model_path", "trust_remote_code") if name in given}
    length = given.get("max_model_len") or positions(saved.config(only_model=True, **model))
    response = given.get("max_output_tokens") or min(_RESPONSE, length // 2)
    return {"max_model_len": length, "max_output_tokens": response}


def _answer(terminal: Terminal, conversation: Conversation, message: str) -> None:
    try:
        terminal.stream(conversation.reply(message))
    except KeyboardInterrupt:
        # Of somebody who types it stops the response; otherwise it is meant for the command.
        if not terminal.interactive:
            raise
    except ConversationFullError as error:
        terminal.complain(f"{error} /reset begins another one.")
    except ControlTokenError as error:
        terminal.complain(str(error))
