"""What collectors of episodes that end in any order share: :class:`StreamCollector`.

Here lives when batches are wanted and handed over, in the caller's thread or with a thread of its own. Which tickets are out
is :mod:`~torchrl_llm.collectors._ledger`'s, how they are played a player's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_llm.collectors._base import ConversationCollector
from torchrl_llm.collectors._episode import Episode, batch_of
from torchrl_llm.collectors._ledger import Ledger, Player
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.modules.policy import TurnPolicy

logger = logging.getLogger(__name__)

_SLICE = 1.0  # seconds; every wait looks this often whether it is still worth while


class StreamCollector(ConversationCollector):
    """Deals tickets to a player and delivers batches in the order dealt; subclasses make the player.

    The arguments are those of :class:`~torchrl_llm.collectors.AsyncTurnCollector`.
    """

    env: GEMEnv
    policy: TurnPolicy
    _player: Player
    engine_timeout = 600.0
    """Seconds without a sign of life from the background thread (one step of the policy) after which it is given up."""

    def __init__(
        self,
        env: GEMEnv | Callable[[], GEMEnv],
        policy: TurnPolicy,
        *,
        batch_size: int,
        max_staleness: int,
        max_faults: int,
        background: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(env, policy, batch_size=batch_size, **kwargs)
        if not isinstance(self.env, GEMEnv):
            raise TypeError(
                f"env is a {type(self.env).__name__}; expected a GEMEnv, whose slots can be played one by one. What a "
                "transform would do belongs into postproc or the replay buffer's transform."
            )
        self.max_staleness, self.background = max_staleness, background
        self._check(
            max_staleness=(max_staleness >= 0, max_staleness, ">= 0"),
            max_faults=(max_faults >= 0, max_faults, ">= 0"),
        )
        self._ledger = Ledger(self.env, vacate=lambda episode: self._player.vacate(episode), max_faults=max_faults)
        self._driver: _Driver | None = None

    def _check(self, **settings: tuple[bool, Any, str]) -> None:
        for name, (holds, given, expected) in settings.items():
            if not holds:
                raise ValueError(f"{type(self).__name__}: {name} is {given!r}; expected {expected}.")

    @property
    def _greedy(self) -> bool:
        return self.exploration_type in (ExplorationType.DETERMINISTIC, ExplorationType.MODE)

    # ------------------------------------------------------------------ what happened

    @property
    def dropped(self) -> Counter[str]:
        """Episodes dealt and not delivered: "stale", or of a group with an "error" or a "timeout"."""
        return Counter(self._ledger.dropped)

    @property
    def faults(self) -> Counter[str]:
        """Episodes whose environment failed, by "error" and "timeout"."""
        return Counter(self._ledger.faults)

    @property
    def in_flight(self) -> int:
        """Calls of environments and requests to the policy that are not answered yet."""
        return self._player.in_flight

    def stats(self) -> dict[str, int | float | bool]:
        """TorchRL's counters, and those of :attr:`dropped` and :attr:`faults`."""
        counts = {f"dropped/{reason}": n for reason, n in self.dropped.items()}
        counts |= {f"faults/{reason}": n for reason, n in self.faults.items()}
        return super().stats() | counts

    # ------------------------------------------------------------------ playing

    def _collect(self) -> TensorDictBase:
        try:
            episodes = self._fetch()
        except Exception:
            self.shutdown(raise_on_error=False)
            raise
        batch = batch_of(
            episodes,
            width=self.env.max_model_len,
            output_width=self.policy.sampling.max_output_tokens,
            slides=self.env.overflow == "slide",
        )
        return batch.to(self.env.device)

    def _fetch(self) -> list[Episode]:
        if self.background:
            if self._driver is None:
                self._driver = _Driver(self._round, self._player.wake, self.exploration_type)
            return self._driver.fetch(self.engine_timeout)
        while True:
            batch, _ = self._round(True)
            if batch is not None:
                return batch

    def _round(self, wanted: bool) -> tuple[list[Episode] | None, bool]:
        """A round of play; a batch if it is ``wanted`` and complete, and whether anything is in flight."""
        if wanted and (batch := self._take()) is not None:
            return batch, True
        # While the caller trains, one more update lies between a ticket dealt now and its batch.
        room = (self.max_staleness + wanted) * self.batch_size
        busy = self._player.round(partial(self._ledger.deal, room))
        return (self._take() if wanted else None), busy

    def _take(self) -> list[Episode] | None:
        return self._ledger.take(self.batch_size, self.policy.policy_version, self.max_staleness)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the background thread asks nothing of the policy (for an evaluation between batches); what is in flight stays.

        Without a background thread nothing runs between batches anyway.
        """
        if self._driver is None:
            yield
        else:
            with self._driver.paused(self.engine_timeout):
                yield

    # ------------------------------------------------------------------ what TorchRL asks of a collector

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment's tickets and deal from the first; what is in flight is forgotten. Returns the next seed."""
        with self.paused():
            self._player.clear()
            self._ledger.clear()
            return super().set_seed(seed, static_seed)

    def state_dict(self) -> OrderedDict:
        """The counters, and the first ticket not delivered: those in flight are dealt again.

        With ``max_staleness=0`` and between batches nothing is in flight, and a run goes on exactly.
        """
        with self.paused():
            env = OrderedDict(tickets=asdict(self.env.tickets), num_dealt=self._ledger.next_index(), slots=[])
            counts = {"dropped": dict(self._ledger.dropped), "faults": dict(self._ledger.faults)}
            return OrderedDict(env_state_dict=env, frames=self._frames, iter=self._iter, **counts)

    def load_state_dict(self, state_dict: OrderedDict, **kwargs: Any) -> None:
        """Go on with the ticket that comes next in ``state_dict``; what is in flight is forgotten."""
        with self.paused():
            self._player.clear()
            self._ledger.clear()
            self.env.load_state_dict(state_dict["env_state_dict"])
            self._frames, self._iter = state_dict["frames"], state_dict["iter"]
            self._ledger.dropped = Counter(state_dict.get("dropped", {}))
            self._ledger.faults = Counter(state_dict.get("faults", {}))

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Stop playing, cancel what the policy was asked, let the threads end, close the environment.

        A second call does nothing. Environments that hang are left behind, without the global random generators if they
        had them; the policy stays open.

        Args:
            timeout: seconds to wait for the policy's step in the background, and for calls of environments; default 10,
                or ``step_timeout`` if that is less.
            close_env: close the environment; default True.
            raise_on_error: raise if something does not stop; otherwise it is logged. Default True.
        """
        if self.closed:
            return
        patience = 10.0 if timeout is None else timeout
        stopped = self._driver is None or self._driver.stop(patience)
        self._player.close(patience)
        if stopped:
            self._cancel()
        super().shutdown(timeout, close_env, raise_on_error)
        if not stopped:
            message = "The policy's step has not come back; its thread was left behind. Close the policy's engine."
            if raise_on_error:
                raise TimeoutError(message)
            logger.error(message)

    def _cancel(self) -> None:
        try:
            self.policy.cancel()
        except Exception:
            # An engine that died has nothing to cancel; its own error is the one to be seen.
            logger.exception("The policy could not cancel its requests.")


class _Driver:
    """A thread that plays on while the caller trains, and hands it batches when it waits for them."""

    def __init__(
        self,
        round_: Callable[[bool], tuple[list[Episode] | None, bool]],
        wake: Callable[[], None],
        exploration_type: ExplorationType,
    ) -> None:
        self._round, self._wake, self._exploration_type = round_, wake, exploration_type
        self._change = threading.Condition()
        self._wanted = self._idle = self._stopping = False
        self._pauses = 0
        self._batch: list[Episode] | None = None
        self._error: BaseException | None = None
        self._sign = time.monotonic()
        self._thread = threading.Thread(target=self._drive, name="torchrl_llm collector", daemon=True)
        self._thread.start()

    def fetch(self, patience: float) -> list[Episode]:
        """The next batch. Raises what the thread raised."""
        with self._change:
            self._wanted = True
            self._change.notify_all()
            self._wake()
            while self._batch is None:
                self._check(patience)
                self._change.wait(_SLICE)
            batch, self._batch = self._batch, None
            return batch

    @contextmanager
    def paused(self, patience: float) -> Iterator[None]:
        """Between two rounds, and no further."""
        with self._change:
            self._pauses += 1
            self._change.notify_all()
            self._wake()
            try:
                while not self._idle and self._thread.is_alive():
                    self._check(patience)
                    self._change.wait(_SLICE)
            except BaseException:
                self._pauses -= 1
                raise
        try:
            yield
        finally:
            with self._change:
                self._pauses -= 1
                self._change.notify_all()

    def stop(self, timeout: float) -> bool:
        """Whether the thread ended within ``timeout`` seconds."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
            self._wake()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _check(self, patience: float) -> None:
        if self._error is not None:
            raise self._error
        silent = time.monotonic() - self._sign
        if not self._thread.is_alive() or silent > patience:
            raise RuntimeError(f"The policy has not come back from a step for {silent:.0f} s. Is its engine alive?")

    def _drive(self) -> None:
        try:
            with torch.no_grad(), set_exploration_type(self._exploration_type):
                while self._may_go_on():
                    self._hand_over(*self._round(self._wanted))
        except BaseException as error:  # noqa: BLE001 (raised again by whoever waits)
            with self._change:
                self._error = error
                self._change.notify_all()

    def _may_go_on(self) -> bool:
        with self._change:
            while self._pauses and not self._stopping:
                self._idle = True
                self._change.notify_all()
                self._change.wait(_SLICE)
                self._sign = time.monotonic()
            self._idle = False
            self._sign = time.monotonic()
            return not self._stopping

    def _hand_over(self, batch: list[Episode] | None, busy: bool) -> None:
        with self._change:
            if batch is not None:
                self._batch, self._wanted = batch, False
                self._change.notify_all()
            elif not (busy or self._wanted or self._pauses or self._stopping):
                self._change.wait(_SLICE)
