"""How a text environment is made, and what it declares: :class:`EnvSpec`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchrl_llm.envs.columns import ExtraKinds, check_kinds
from torchrl_llm.envs.text_env import SuccessBy, TextEnv
from torchrl_llm.envs.tools import Tool
from torchrl_llm.keys import TurnColumn, extra
from torchrl_llm.utils.options import check_value

logger = logging.getLogger(__name__)

_hinted: set[str] = set()


@dataclass(frozen=True)
class EnvSpec:
    """How a text environment is made.

    Attributes:
        name: for messages and metrics; its id, if it has one.
        make: makes one; called once a slot, and again with other keyword arguments in a curriculum
            that has options.
        success_by: which reward decides about success (:class:`~torchrl_llm.envs.GEMEnv`).
        divide: whether the streams of training and evaluation use different rows of its data.
        extras: what it returns in the ``info`` of every step, see :mod:`~torchrl_llm.envs.columns`;
            default nothing. Of a class that is given as a factory, its own attribute ``extras``.
        single_turn: whether every episode ends with its first response, whatever that is; ``None``:
            it is not known. Of a class that is given as a factory, its own attribute
            ``single_turn``.
        tools: that the chat template shows, see :class:`~torchrl_llm.envs.ToolEnv`; default none.
            Of a class that is given as a factory, its own attribute ``tools``.

    Raises:
        ValueError: ``success_by`` is neither ``"last"`` nor ``"return"``.
        TypeError: ``extras`` is not a mapping from names to ``float`` or ``str``, or
            ``single_turn`` is not a boolean.
    """

    name: str
    make: Callable[..., TextEnv]
    success_by: SuccessBy = "last"
    divide: bool = False
    extras: ExtraKinds = field(default_factory=dict, hash=False)
    single_turn: bool | None = None
    tools: Sequence[Tool] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        check_value(f"{self.name}: success_by", self.success_by, SuccessBy)
        check_kinds(self.extras, self.name)
        if self.single_turn not in (None, True, False):
            raise TypeError(f"{self.name}: single_turn is {self.single_turn!r:.80}; expected True, False or None.")

    @classmethod
    def of(cls, make: Callable[..., TextEnv]) -> EnvSpec:
        """That of a class or function, with what it declares."""
        name, declared = getattr(make, "__name__", type(make).__name__), ("extras", "single_turn", "tools")
        return cls(name, make, **{each: getattr(make, each) for each in declared if hasattr(make, each)})

    @property
    def columns(self) -> tuple[TurnColumn, ...]:
        """The columns of its turns beside those that all have."""
        return tuple(TurnColumn(extra(name), kind) for name, kind in self.extras.items())

    def check(self, env: TextEnv) -> None:
        """Warn, once, if an environment that was made declares extras that this does not: those of
        a lambda cannot be seen."""
        # of an environment that declares none it may be anything
        declared = getattr(env, "extras", None)
        unseen = [each for each in declared if each not in self.extras] if isinstance(declared, Mapping) else []
        if unseen and self.name not in _hinted:
            _hinted.add(self.name)
            logger.warning(
                "The environment %r declares the extras %s, which its factory does not show; they are left out. To have "
                "them, pass EnvSpec(name, make, extras=%s.extras).",
                self.name, unseen, type(env).__name__,
            )  # fmt: skip
