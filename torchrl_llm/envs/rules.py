"""What decides, beside the task, which game an episode is: :func:`rules_of`."""

from __future__ import annotations

from typing import Any

from torchrl_llm.envs.contexts import Append
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.utils.fingerprint import fingerprint

_LIMITS = ("max_turns", "max_model_len", "max_output_tokens", "overflow", "success_reward")
_TEXT = ("template", "system_prompt", "chat_template_kwargs", "missing_thinking", "template_date")


def rules_of(env: GEMEnv) -> dict[str, Any]:
    """What an episode of a task depends on beside what the policy writes, and what counts as won,
    as plain data.

    Equal rules and equal tasks are the same game in every process. How many slots there are, time
    limits and workers decide nothing, and how the policy samples is the policy's.

    Args:
        env: the environment.

    Returns:
        The environments of the mixture (name, :func:`~torchrl_llm.utils.fingerprint.fingerprint` of
        what makes them, which reward decides about success), limits, and how messages are rendered.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> from torchrl_llm.testing.worlds import Coins
        >>> one, other = (GEMEnv(Coins, tokenizer=byte_tokenizer(), num_envs=n, max_turns=n) for n in (1, 2))
        >>> {name for name in rules_of(one) if rules_of(one)[name] != rules_of(other)[name]}
        {'max_turns'}
    """
    formatter = env.formatter
    rules = [formatter.rule, env.context_rule]
    chat_template = formatter.tokenizer.chat_template if formatter.template == "chat" else None
    return {
        "kind": f"{type(env).__module__}:{type(env).__qualname__}",
        "environments": [[spec.name, fingerprint(spec.make), spec.success_by] for spec in env.mixture],
        **{name: getattr(env, name) for name in _LIMITS},
        **{name: getattr(formatter, name) for name in _TEXT},
        "chat_template": chat_template,
        # As the setting was named, and nothing more where contexts grow: results of before stay
        # comparable.
        "history": "append" if formatter.contexts == "append" else "refuse",
        **({} if rules == [Append(), None] else {"contexts": [*map(fingerprint, rules)]}),
    }
