"""Text worlds as TorchRL environments: environments, chat rendering and tickets.

Policies, losses and collectors live elsewhere; they meet the environments in :mod:`torchrl_llm.keys`.
"""

from torchrl_llm.envs.chat import (
    CHATML,
    ChatFormatter,
    ChatTemplateError,
    MissingChatTemplateError,
    NotAppendOnlyError,
    compose_message,
)
from torchrl_llm.envs.game import EnvironmentFault, Game, TextEnv, TextStep, UnknownEnvironmentError
from torchrl_llm.envs.gem import GEMEnv, PromptTooLongError, Reply, Slot
from torchrl_llm.envs.tickets import Ticket, Tickets

__all__ = [
    "CHATML",
    "ChatFormatter",
    "ChatTemplateError",
    "EnvironmentFault",
    "GEMEnv",
    "Game",
    "MissingChatTemplateError",
    "NotAppendOnlyError",
    "PromptTooLongError",
    "Reply",
    "Slot",
    "TextEnv",
    "TextStep",
    "Ticket",
    "Tickets",
    "UnknownEnvironmentError",
    "compose_message",
]
