"""Text worlds as TorchRL environments: environments, chat rendering and tickets.

Policies, losses and collectors live elsewhere; they meet the environments in :mod:`torchrl_llm.keys`.
"""

from torchrl_llm.envs.chat import (
    CHATML,
    ChatFormatter,
    ChatTemplateError,
    ControlTokenError,
    MissingChatTemplateError,
    NotAppendOnlyError,
    compose_message,
)
from torchrl_llm.envs.dataset import (
    PromptDatasetEnv,
    PromptFormatter,
    RewardError,
    RewardTimeoutError,
    Row,
    RowTickets,
    read_rows,
    train_test_split,
)
from torchrl_llm.envs.game import (
    PAYS_PROGRESS,
    EnvironmentFault,
    EnvironmentUnavailableError,
    Game,
    MissingGEMError,
    TextEnv,
    TextStep,
    UnknownEnvironmentError,
)
from torchrl_llm.envs.gem import GEMEnv, PromptTooLongError, Reply, Slot
from torchrl_llm.envs.tasks import HIDDEN, SeenTasks, Task, divide_rows, task_of
from torchrl_llm.envs.tickets import Ticket, Tickets

__all__ = [
    "CHATML",
    "HIDDEN",
    "PAYS_PROGRESS",
    "ChatFormatter",
    "ChatTemplateError",
    "ControlTokenError",
    "EnvironmentFault",
    "EnvironmentUnavailableError",
    "GEMEnv",
    "Game",
    "MissingChatTemplateError",
    "MissingGEMError",
    "NotAppendOnlyError",
    "PromptDatasetEnv",
    "PromptFormatter",
    "PromptTooLongError",
    "Reply",
    "RewardError",
    "RewardTimeoutError",
    "Row",
    "RowTickets",
    "SeenTasks",
    "Slot",
    "Task",
    "TextEnv",
    "TextStep",
    "Ticket",
    "Tickets",
    "UnknownEnvironmentError",
    "compose_message",
    "divide_rows",
    "read_rows",
    "task_of",
    "train_test_split",
]
