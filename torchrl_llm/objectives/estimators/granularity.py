"""What a step of credit is: a turn or a token."""

from __future__ import annotations

from typing import Literal

from torchrl_llm.utils.options import Idle

Granularity = Literal["turn", "token", "auto"]
"""What a step of credit is; "auto": a token in an environment of one turn, and a turn in all
others."""


def step_of(granularity: Granularity, single_turn: bool | None) -> Literal["turn", "token"]:
    """The step that ``granularity`` means.

    Raises:
        ValueError: it is ``"auto"``, and ``single_turn`` is None.
    """
    if granularity != "auto":
        return granularity
    if single_turn is None:
        raise ValueError('granularity="auto" needs single_turn: whether the environment only asks for one turn.')
    return "token" if single_turn else "turn"


TOKEN_IDLE = Idle(("discounted_objective",), {"granularity": ("token",), "gamma": (None,)}, "discount (gamma below 1)")
"""What does nothing per token, in estimators whose default of ``gamma`` is 1 there."""


SINGLE_TURN_IDLE = Idle(("single_turn",), {"granularity": ("turn", "token")}, 'set granularity to "auto"')
"""What only counts where the environment decides what a step is."""
