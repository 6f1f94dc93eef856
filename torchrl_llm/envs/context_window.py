"""The context of an episode's next turn, and whether a response has room behind it:
:class:`ContextWindow`.

The rules that select from an episode are in :mod:`~torchrl_llm.envs.contexts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchrl_llm.envs.chat import ChatFormatter
from torchrl_llm.envs.contexts import Append, ContextRule, RequestingRule, Slide, Span, num_tokens, selected
from torchrl_llm.keys import StopReason

Overflow = Literal["truncate", "slide"]


@dataclass(eq=False, kw_only=True)
class ContextWindow:
    """Makes contexts by the rule of the template, the rule of the user, and the rule for what
    overflows. It holds no episode.

    Attributes:
        formatter: whose template has a rule, and which the rules ask.
        max_model_len, max_output_tokens, context_rule, overflow: see
            :class:`~torchrl_llm.envs.GEMEnv`.
        rebuilds: whether there may be contexts that do not extend the one before.
        request: of a context rule that may ask the policy something before a turn
            (:class:`~torchrl_llm.envs.RequestingRule`); ``None``: it never does.
    """

    formatter: ChatFormatter
    max_model_len: int
    max_output_tokens: int
    context_rule: ContextRule | None
    overflow: Overflow

    def __post_init__(self) -> None:
        slide = [Slide()] if self.overflow == "slide" else []
        rules = (self.formatter.rule, self.context_rule or Append(), *slide)
        self._rules = [rule for rule in rules if type(rule) is not Append]
        self.rebuilds = bool(self._rules)
        self.request = self.context_rule.request if isinstance(self.context_rule, RequestingRule) else None

    def problem_of(self, first: Sequence[Span]) -> str | None:
        """Why the first context of an episode cannot be used; ``None``: a response fits behind
        it."""
        length = num_tokens(first)
        if length + self.max_output_tokens <= self.max_model_len:
            return None
        return (
            f"the first prompt has {length} tokens; with a response of max_output_tokens={self.max_output_tokens} it "
            f"does not fit into max_model_len={self.max_model_len}. Raise max_model_len, lower max_output_tokens, or "
            "shorten the system prompt"
        )

    def following(
        self, spans: list[Span], context: list[Span], length: int, new: list[Span], reason: StopReason
    ) -> tuple[StopReason, Sequence[Span] | None]:
        """The context behind ``new`` spans, and whether the episode ends for want of room.

        Args:
            spans: the episode before them.
            context: what of it the last turn saw.
            length: tokens of ``context``.
            new: the last response and the message that follows it.
            reason: why the episode is cut off, or that it runs.

        Returns:
            ``reason``, or ``CONTEXT`` where the episode would run and no response fits; and the
            next context, which opens a new segment; ``None``: it grows by ``new``.
        """
        runs, room = reason == StopReason.RUNNING, self.max_model_len - self.max_output_tokens
        if not self._rules:
            full = runs and length + num_tokens(new) > room
            return StopReason.CONTEXT if full else reason, None
        if not runs and self._rules == [Slide()] and length + num_tokens(new) <= self.max_model_len:
            return reason, None
        after = selected(self._rules, [*spans, *new], self.formatter, room)
        if runs and num_tokens(after) > room:
            reason = StopReason.CONTEXT
        # A critic values what would follow an episode that was cut off by its last context, which
        # has to hold all of the last feedback, if there is room at all.
        if num_tokens(after) > self.max_model_len and self.overflow == "slide":
            after = Slide()(after, self.formatter, self.max_model_len)
        return reason, None if after == context + new else after
