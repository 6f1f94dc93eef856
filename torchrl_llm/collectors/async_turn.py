"""Batches of whole conversations without a barrier between turns: :class:`AsyncTurnCollector`.

Here lives when batches are wanted and handed over, in the caller's thread or with a thread of its own. Which tickets are out
is :mod:`~torchrl_llm.collectors._ledger`'s, how they are played :mod:`~torchrl_llm.collectors._player`'s.
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
from torchrl_llm.collectors._ledger import Ledger
from torchrl_llm.collectors._player import SlotPlayer
from torchrl_llm.envs.gem import GEMEnv
from torchrl_llm.modules.policy import TurnPolicy

logger = logging.getLogger(__name__)

_MAX_THREADS = 32
_SLICE = 1.0  # seconds; every wait looks this often whether it is still worth while


class AsyncTurnCollector(ConversationCollector):
    """Plays every slot at its own pace: an environment steps as soon as its own turn is done.

    Responses are asked for one by one (:meth:`TurnPolicy.submit`, :meth:`TurnPolicy.poll`), environments are called in
    threads, and a slot is refilled as soon as its episode ends. Batches are those of
    :class:`~torchrl_llm.collectors.TurnCollector`: B tickets in the order dealt, whole groups, ``[B, T]``.

    With ``max_staleness=0`` (on-policy) a batch is played by one version of the weights and nothing is in flight when it
    is delivered. With ``max_staleness=k`` up to ``(k + 1) B`` tickets are out at a time, and unfinished episodes go on
    with the new weights; ``"policy_version"`` tells which weights sampled which token. A ticket is dealt only if the
    batch it will be in comes at most k updates later, provided that there is one update a batch; so short episodes are
    not favoured. Whatever else happens to the weights, it is checked at delivery: an episode with a token more than k
    versions old is dropped with its group, counted in :attr:`dropped`, and further tickets fill the batch.

    An environment that raises, returns something malformed or takes more than ``step_timeout`` ends its own episode
    (logged, counted in :attr:`faults`): the episode has no true reward, so its group is dropped and further tickets fill
    the batch. Environments that declare ``thread_safe = True`` are called in parallel, others one at a time
    (:class:`~torchrl_llm.envs.TextEnv`).

    Args:
        env: a :class:`~torchrl_llm.envs.GEMEnv`, or a function that makes it. Its slots bound what is played at a time.
        policy: a :class:`~torchrl_llm.modules.policy.TurnPolicy`.
        batch_size: conversations B in a batch.
        max_staleness: how many versions old a token may be at delivery; default 0.
        num_threads: threads that call environments; default one a slot, 32 at most. 0 calls them in the thread that drives
            the policy: the fastest for environments that answer in microseconds, but without time limit.
        step_timeout: seconds that one reset or step may take; waiting for other environments does not count. Default 60.
        max_faults: failed episodes tolerated for one batch; one more raises its error. Default 16.
        background: a thread goes on playing while the caller trains. Needs a policy with weights of its own
            (``policy.concurrent``). Default: ``max_staleness > 0 and policy.concurrent``. Otherwise everything runs within
            ``next()``. What trains meanwhile must not draw from the global generators of ``random`` and ``numpy.random``
            if the environments may (PyTorch's are not concerned).
        total_frames, total_batches, replay_buffer, postproc, exploration_type, weight_sync_schemes, pre_collect_hook,
            post_collect_hook: see :class:`~torchrl_llm.collectors.TurnCollector`.

    Raises:
        TypeError: ``env`` is no GEMEnv.
        ValueError: a setting makes no sense; the message names it.
        EnvironmentFault: at ``next()``, more than ``max_faults`` episodes failed.

    Any error at ``next()`` shuts the collector down.

    Examples:
        >>> from torchrl_llm.testing.environments import StopOrGo
        >>> from torchrl_llm.testing.policies import ScriptedPolicy
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> env = GEMEnv(StopOrGo, tokenizer=tokenizer, num_envs=2, max_output_tokens=32)
        >>> policy = ScriptedPolicy(lambda episode, turn, _: "stop" if turn == episode else "go", tokenizer=tokenizer)
        >>> collector = AsyncTurnCollector(env, policy, batch_size=3, total_batches=1)
        >>> for batch in collector:
        ...     print(batch["collector", "mask"].int().tolist())
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        >>> collector.shutdown()
    """

    env: GEMEnv
    policy: TurnPolicy
    engine_timeout = 600.0
    """Seconds without a sign of life from the background thread (one step of the policy) after which it is given up."""

    def __init__(
        self,
        env: GEMEnv | Callable[[], GEMEnv],
        policy: TurnPolicy,
        *,
        batch_size: int,
        max_staleness: int = 0,
        num_threads: int | None = None,
        step_timeout: float = 60.0,
        max_faults: int = 16,
        background: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(env, policy, batch_size=batch_size, **kwargs)
        if not isinstance(self.env, GEMEnv):
            raise TypeError(
                f"env is a {type(self.env).__name__}; expected a GEMEnv, whose slots can be played one by one. What a "
                "transform would do belongs into postproc or the replay buffer's transform."
            )
        threads = min(self.env.batch_size[0], _MAX_THREADS) if num_threads is None else num_threads
        self.max_staleness = max_staleness
        self.background = max_staleness > 0 and policy.concurrent if background is None else background
        self._check(threads, step_timeout, max_faults)
        self._ledger = Ledger(self.env, vacate=lambda episode: self._player.vacate(episode), max_faults=max_faults)
        self._player = SlotPlayer(
            self.env,
            policy,
            greedy=self.exploration_type in (ExplorationType.DETERMINISTIC, ExplorationType.MODE),
            num_threads=threads,
            step_timeout=step_timeout,
            on_fault=self._ledger.fault,
        )
        self._driver: _Driver | None = None

    def _check(self, num_threads: int, step_timeout: float, max_faults: int) -> None:
        shared = "False: the policy's weights are the trainer's (policy.concurrent is False)"
        checks = {
            "max_staleness": (self.max_staleness >= 0, self.max_staleness, ">= 0"),
            "num_threads": (num_threads >= 0, num_threads, ">= 0"),
            "step_timeout": (step_timeout > 0, step_timeout, "> 0 seconds"),
            "max_faults": (max_faults >= 0, max_faults, ">= 0"),
            "background": (self.policy.concurrent or not self.background, self.background, shared),
        }
        for name, (holds, given, expected) in checks.items():
            if not holds:
                raise ValueError(f"AsyncTurnCollector: {name} is {given!r}; expected {expected}.")

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
