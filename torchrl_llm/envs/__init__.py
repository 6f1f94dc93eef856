"""Text environments as TorchRL environments: chat rendering, tasks and rewards.

Policies, losses and collectors share the keys of :mod:`torchrl_llm.keys` with them, and nothing
else.
"""

from torchrl_llm.envs.answers import MissingThinkingError
from torchrl_llm.envs.chat import CHATML, ChatFormatter, ControlTokenError, compose_message
from torchrl_llm.envs.columns import Extras, text_key
from torchrl_llm.envs.context_window import ContextWindow
from torchrl_llm.envs.contexts import (
    Append,
    AsTemplate,
    ContextRule,
    KeepLast,
    RequestingRule,
    ShowsAnswers,
    Slide,
    Span,
    Summarize,
)
from torchrl_llm.envs.dataset import PromptDatasetEnv, PromptFormatter, RowTaskSampler, read_rows, train_test_split
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.envs.env_spec import EnvSpec
from torchrl_llm.envs.faults import (
    EnvironmentFault,
    EnvironmentUnavailableError,
    FaultCounter,
    PromptTooLongError,
    UnknownEnvironmentError,
)
from torchrl_llm.envs.games import Game, GameSlots, SelfPlayEnv
from torchrl_llm.envs.gem_catalog import GEM_CLASSES, MissingGEMError, divide_rows
from torchrl_llm.envs.isolation import IsolatedEnv
from torchrl_llm.envs.lockstep import Lockstep
from torchrl_llm.envs.registry import register_env_family, resolve_env
from torchrl_llm.envs.response import Response
from torchrl_llm.envs.rewards import RewardError, RewardTimeoutError, Row, WantedColumns
from torchrl_llm.envs.seen_tasks import SeenTasks
from torchrl_llm.envs.slots import Reply, Slot, SlotMachine
from torchrl_llm.envs.success import SuccessRule
from torchrl_llm.envs.tasks import Stage, TaskIdentity, TaskSampler, TaskSpec, task_of
from torchrl_llm.envs.template_probe import NotAppendOnlyError
from torchrl_llm.envs.template_properties import TemplateProperties
from torchrl_llm.envs.text_env import TextEnv, TextStep
from torchrl_llm.envs.tool_calls import BadCall, ToolCall
from torchrl_llm.envs.tool_env import ToolEnv, with_tools
from torchrl_llm.envs.tools import ToolError, ToolService, ToolSet
from torchrl_llm.rendering import ChatTemplateError, MissingChatTemplateError

__all__ = [
    "CHATML",
    "GEM_CLASSES",
    "Append",
    "AsTemplate",
    "BadCall",
    "ChatFormatter",
    "ChatTemplateError",
    "ContextRule",
    "ContextWindow",
    "ControlTokenError",
    "EnvSpec",
    "EnvironmentFault",
    "EnvironmentUnavailableError",
    "Extras",
    "FaultCounter",
    "GEMEnv",
    "Game",
    "GameSlots",
    "IsolatedEnv",
    "KeepLast",
    "Lockstep",
    "MissingChatTemplateError",
    "MissingGEMError",
    "MissingThinkingError",
    "NotAppendOnlyError",
    "PromptDatasetEnv",
    "PromptFormatter",
    "PromptTooLongError",
    "Reply",
    "RequestingRule",
    "Response",
    "RewardError",
    "RewardTimeoutError",
    "Row",
    "RowTaskSampler",
    "SeenTasks",
    "SelfPlayEnv",
    "ShowsAnswers",
    "Slide",
    "Slot",
    "SlotMachine",
    "Span",
    "Stage",
    "SuccessRule",
    "Summarize",
    "TaskIdentity",
    "TaskSampler",
    "TaskSpec",
    "TemplateProperties",
    "TextEnv",
    "TextStep",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "ToolService",
    "ToolSet",
    "UnknownEnvironmentError",
    "WantedColumns",
    "compose_message",
    "divide_rows",
    "read_rows",
    "register_env_family",
    "resolve_env",
    "task_of",
    "text_key",
    "train_test_split",
    "with_tools",
]
