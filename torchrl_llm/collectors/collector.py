"""The collector of whole episodes: :class:`EpisodeCollector`.

It samples tasks, forms batches and has TorchRL's interface; an executor runs the episodes. The
collectors of this package are this one with an executor each.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.weight_update import WeightSyncScheme

from torchrl_llm import keys
from torchrl_llm.collectors._background import BackgroundThread
from torchrl_llm.collectors._queue import EpisodeQueue, RolloutExecutor
from torchrl_llm.data import rows_from_episodes
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.episode import Episode
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.stops import HasStopIds, share_stop_ids
from torchrl_llm.utils.interrupts import interruptible
from torchrl_llm.utils.options import Checked, Natural

logger = logging.getLogger(__name__)

_MOST_TEXTS = 2**16
_MOST_CHARACTERS = 2**24


class EpisodeCollector(Checked, BaseCollector):
    """Delivers batches of whole episodes as rows ``[B]`` (:mod:`torchrl_llm.keys`), whole groups,
    in the order sampled.

    Frames are turns. Subclasses make the executor. The arguments are documented at
    :class:`~torchrl_llm.collectors.TurnCollector` and
    :class:`~torchrl_llm.collectors.AsyncTurnCollector`.

    Attributes:
        batch_size, group_size: episodes of a batch, and of a group.
        env_names: the environments of a mixture; empty for an environment that is not a
            :class:`~torchrl_llm.envs.GEMEnv`.
        max_staleness: how many versions old a token may be at delivery.
        background: whether a thread collects while the caller trains.
        runs_here: whether the policy of this process collects.
        episodes: the last batch as it was collected, what :func:`~torchrl_llm.collectors.branch`
            continues.
        texts: hash -> text of the columns in the last batches (:mod:`torchrl_llm.envs.columns`), of
            4,096 characters each at most: the newest 65,536, and of these as many as have 2**24
            characters together.
    """

    init_random_frames = 0  # TorchRL's Trainer reads it
    runs_here = True
    env: Any
    policy: Any
    engine_timeout = 600.0
    """Seconds without a finished step of the policy after which the background thread is given
    up."""
    interruptible: Callable[[Callable[[], TensorDictBase]], TensorDictBase] = staticmethod(interruptible)
    """Calls the collection of a batch; a trainer of several ranks replaces it
    (:mod:`torchrl_llm.utils.interrupts`)."""
    _executor: RolloutExecutor

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        policy: Callable[[TensorDictBase], TensorDictBase],
        max_staleness: int = 0,
        keep_failed: bool = False,
        background: bool = False,
        rows_each: int = 1,
        # the subclasses that can do these have options of their names, and the others must not take
        # them
        /,
        *,
        batch_size: int,
        max_faults: Natural = 16,
        total_frames: int = -1,
        total_batches: int = -1,
        replay_buffer: ReplayBuffer | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        weight_sync_schemes: dict[str, WeightSyncScheme] | None = None,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[TensorDictBase], None] | None = None,
    ) -> None:
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        self.env = env if isinstance(env, EnvBase) else env()
        if len(self.env.batch_size) != 1:
            raise ValueError(
                f"The environment's batch size is {list(self.env.batch_size)}; expected one dimension [N]: give GEMEnv more slots "
                "(num_envs) in place of a SerialEnv or ParallelEnv of several."
            )
        base = base_env(self.env)
        sampled_group = base.group_size if isinstance(base, GEMEnv) else 1
        self.group_size = sampled_group * rows_each
        self.env_names: tuple[str, ...] = base.names if isinstance(base, GEMEnv) else ()
        if batch_size < 1 or batch_size % self.group_size:
            raise ValueError(f"batch_size is {batch_size}; expected a multiple of the group size {self.group_size}.")
        self.policy = policy
        if isinstance(base, GEMEnv) and isinstance(policy, TurnPolicy):
            _check_turn_end(base, policy)
        if isinstance(base, GEMEnv) and isinstance(policy, HasStopIds):
            share_stop_ids(base, policy)
        # requested_frames_per_batch is the name that TorchRL's statistics read.
        self.batch_size = self.requested_frames_per_batch = batch_size
        self._num_wanted = batch_size // rows_each  # episodes that the queue is to deliver
        self.max_staleness, self.background = max_staleness, background
        self.total_frames, self.total_batches = total_frames, total_batches
        self.replay_buffer, self.postproc, self.exploration_type = replay_buffer, postproc, exploration_type
        self.closed = False
        self._frames, self._iter = 0, -1
        self.texts: dict[int, str] = {}
        self.episodes: list[Episode] = []
        self._queue = EpisodeQueue(
            self._next_task, self._release, group_size=sampled_group, max_faults=max_faults, keep_failed=keep_failed
        )
        self._thread: BackgroundThread | None = None
        self._weight_sync_schemes = weight_sync_schemes
        for model_id, scheme in (weight_sync_schemes or {}).items():
            # In this order: connecting sends the first weights.
            if not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=model_id, context=self)
            if not scheme.synchronized_on_sender:
                scheme.connect()

    # ---------------------------------------- iteration

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches, or ``None`` for each batch written to the replay buffer, until a limit is
        reached."""
        while not self._reached_limit():
            batch = self.rollout()
            if self.replay_buffer is None:
                yield batch
            else:
                self.replay_buffer.extend(batch)
                yield None

    def rollout(self) -> TensorDictBase:
        """Collect one batch ``[B]`` (whatever the limits say) and return it; the replay buffer is
        left alone."""
        if self.closed:
            raise RuntimeError("The collector was shut down. Make a new one.")
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        with torch.no_grad(), set_exploration_type(self.exploration_type):
            batch = self.interruptible(self._collect)
        self._frames += int(batch[keys.TURN_MASK].sum())
        self._iter += 1
        if self.postproc is not None:
            batch = self.postproc(batch)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def __len__(self) -> int:
        if self.total_batches < 0:
            raise TypeError("The number of batches is unknown; pass total_batches to fix it.")
        return self.total_batches

    def _reached_limit(self) -> bool:
        return 0 <= self.total_frames <= self._frames or 0 <= self.total_batches <= self._iter + 1

    def _collect(self) -> TensorDictBase:
        try:
            self.episodes = self._next_batch()
        except BaseException as error:
            self._after_error(error)
            raise
        rows = self._rows(self.episodes)
        self._keep_texts(self.episodes)
        return rows if self.env.device is None else rows.to(self.env.device)

    def _rows(self, episodes: list[Episode]) -> TensorDict:
        """The episodes of a batch as rows, on the CPU."""
        return rows_from_episodes(episodes)

    def _keep_texts(self, episodes: list[Episode]) -> None:
        for episode in episodes:
            for key, text in episode.texts.items():
                self.texts.pop(key, None)  # so that it counts as new
                self.texts[key] = text
        # Bounded: a run of days may see any number of states.
        size = sum(map(len, self.texts.values()))
        for key in [*self.texts]:
            if len(self.texts) <= _MOST_TEXTS and size <= _MOST_CHARACTERS:
                break
            size -= len(self.texts.pop(key))

    def _next_batch(self) -> list[Episode]:
        if self.background:
            if self._thread is None:
                self._thread = BackgroundThread(self._step, self._executor.wake)
            return self._thread.fetch(self.engine_timeout)
        while (batch := self._step(wanted=True)[0]) is None:
            pass
        return batch

    def _step(self, wanted: bool) -> tuple[list[Episode] | None, bool]:
        """Run the executor once; a batch if it is ``wanted`` and complete, and whether anything is
        in flight."""
        if wanted and (batch := self._pop_batch()) is not None:
            return batch, True
        # While the caller trains, one more update lies between a task sampled now and its batch.
        self._queue.limit = (self.max_staleness + wanted) * self._num_wanted
        busy = self._executor.step()
        return (self._pop_batch() if wanted else None), busy

    def _pop_batch(self) -> list[Episode] | None:
        version = self.policy.policy_version if isinstance(self.policy, TurnPolicy) else 0
        return self._queue.pop_batch(self._num_wanted, version, self.max_staleness)

    def _next_task(self) -> Episode:
        index = self.env.slots.next_task()
        return Episode(index, *self.env.task_sampler[index][:3])

    def _release(self, episode: Episode) -> None:
        self._executor.release(episode)

    def _after_error(self, error: BaseException) -> None:
        # Requests and calls are still in flight, and the thread is gone. After an interrupt the
        # caller decides.
        if isinstance(error, Exception):
            self.shutdown(raise_on_error=False)

    @property
    def _greedy(self) -> bool:
        return self.exploration_type in (ExplorationType.DETERMINISTIC, ExplorationType.MODE)

    def paused(self) -> AbstractContextManager[None]:
        """Inside, the background thread does not call the policy (for an evaluation between
        batches); what is in flight stays.

        Without a background thread nothing runs between batches.
        """
        return nullcontext() if self._thread is None else self._thread.paused(self.engine_timeout)

    def set_curriculum(
        self, *, weights: Sequence[float] | None = None, options: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Change what is sampled, from the next group on; tasks already sampled stay as they are.

        To be called between batches, such as by a :class:`~torchrl_llm.trainers.Callback` in
        ``on_iteration``; of several processes by each. Workers on Ray get it with their next tasks.
        With ``max_staleness=0`` that is the next batch, exactly. With more, where a batch is
        collected during an update, the group depends on how far the collection was. See
        :meth:`~torchrl_llm.envs.GEMEnv.set_curriculum`.
        """
        env = base_env(self.env)
        if not isinstance(env, GEMEnv):
            raise TypeError(f"The environment is a {type(env).__name__}; a curriculum needs a GEMEnv.")
        with self.paused():
            env.set_curriculum(weights=weights, options=options)

    # ---------------------------------------- read by a trainer

    @property
    def logprobs_match_trainer(self) -> bool:
        """Whether a scorer computes the very log-probs that are recorded; see
        :attr:`TurnPolicy.logprobs_match_trainer`."""
        return bool(self.policy.logprobs_match_trainer) if isinstance(self.policy, TurnPolicy) else True

    def metrics(self) -> dict[str, float]:
        """Counts so far, by the names of :data:`torchrl_llm.metrics.METRICS`. A run adds them up
        over its processes; of metrics that a subclass adds it logs the mean."""
        return {"data/dropped": float(self.dropped.total()), "data/faults": float(self.faults.total())}

    @property
    def dropped(self) -> Counter[str]:
        """Episodes sampled and not delivered: "stale", or of a group with an "error", a "timeout"
        or a "context"."""
        return Counter(self._queue.dropped)

    @property
    def faults(self) -> Counter[str]:
        """Episodes whose environment failed, by "error", "timeout" and "context"."""
        return Counter(self._queue.faults.counts)

    @property
    def in_flight(self) -> int:
        """Calls, requests or episodes that environments and policy work on between batches."""
        return self._executor.in_flight

    # ---------------------------------------- the interface of TorchRL

    def stats(self) -> dict[str, int | float | bool]:
        """TorchRL's counters, and the counts of :attr:`dropped` and :attr:`faults`."""
        counts = {f"dropped/{reason}": n for reason, n in self.dropped.items()}
        return super().stats() | counts | {f"faults/{reason}": n for reason, n in self.faults.items()}

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer."""
        # TorchRL's Trainer counts frames by this where iteration yields None.
        return getattr(self.replay_buffer, attr)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the tasks and sample from the first; what is in flight is forgotten. Returns the
        next seed, as TorchRL does."""
        with self.paused():
            self._forget()
            return int(self.env.set_seed(seed, static_seed=static_seed))

    def state_dict(self) -> OrderedDict:
        """The counters, and the first task not delivered: those in flight are sampled again.

        With ``max_staleness=0`` and between batches nothing is in flight, and a run continues
        exactly.
        """
        with self.paused():
            counts = {"dropped": dict(self._queue.dropped), "faults": dict(self._queue.faults.counts)}
            return OrderedDict(env_state_dict=self._env_state(), frames=self._frames, iter=self._iter, **counts)

    def load_state_dict(self, state_dict: OrderedDict, **kwargs: Any) -> None:
        """Continue with the task that comes next in ``state_dict``; what is in flight is
        forgotten."""
        with self.paused():
            self._forget()
            _load_env_state(self.env, state_dict["env_state_dict"])
            self._frames, self._iter = state_dict["frames"], state_dict["iter"]
            self._queue.dropped = Counter(state_dict["dropped"])
            self._queue.faults.counts = Counter(state_dict["faults"])

    def _forget(self) -> None:
        self._executor.clear()
        self._queue.clear()

    def _env_state(self) -> OrderedDict:
        count = self.env.num_sampled
        # Nothing in flight: from the start of a group that was dropped half sampled.
        first = next(
            (episode.index for episode in self._queue.episodes.values()), count - count % self._queue.group_size
        )
        return OrderedDict(task_sampler=asdict(self.env.task_sampler), num_sampled=first, slots=[])

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Stop collecting, cancel the requests to the policy, let the threads end, close the
        environment.

        A second call does nothing. Environments that hang are left behind, without the global
        random generators if they had them; the policy stays open.

        Args:
            timeout: seconds to wait for the policy's step in the background, and for calls of
                environments; default 10, or ``step_timeout`` if that is less.
            close_env: close the environment; default True.
            raise_on_error: raise if something does not stop; otherwise it is logged. Default True.
        """
        if self.closed:
            return
        timeout = 10.0 if timeout is None else timeout
        # The thread first: it must not step an executor that is closed.
        stopped = self._thread is None or self._thread.stop(timeout)
        self._executor.close(timeout)
        # Only once the thread has ended: a policy need not be safe for two threads.
        if stopped and isinstance(self.policy, TurnPolicy) and self.policy.pending:
            _cancel(self.policy)
        self.closed = True
        if close_env:
            # Whatever env.is_closed says: TorchRL takes an environment for closed until it says
            # otherwise.
            self.env.close(raise_if_closed=False)
        if not stopped:
            message = "The policy's step has not come back; its thread was left behind. Close the policy's engine."
            if raise_on_error:
                raise TimeoutError(message)
            logger.error(message)

    def _maybe_fallback_update(self, policy_or_weights: Any = None, *, model_id: str | None = None) -> None:
        # The policy is in this process: without weights given it already has them.
        if policy_or_weights is not None:
            weights = self._extract_weights_if_needed(policy_or_weights, model_id or "policy")
            TensorDict.from_module(self.policy).data.update_(weights.data)
        if isinstance(self.policy, TurnPolicy):
            self.policy.weights_changed()


def base_env(env: EnvBase) -> EnvBase:
    """The environment beneath transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def _load_env_state(env: EnvBase, state: OrderedDict) -> None:
    if isinstance(env, TransformedEnv):
        _load_env_state(env.base_env, state["base"])
        env.transform.load_state_dict(state["transform"])
    else:
        env.load_state_dict(state)


def _cancel(policy: TurnPolicy) -> None:
    try:
        policy.cancel()
    except Exception:
        # An engine that died has nothing to cancel; its own error is the one to be seen.
        logger.exception("The policy could not cancel its requests.")


def _check_turn_end(env: GEMEnv, policy: TurnPolicy) -> None:
    """Warn if the policy stops at some ids, but not at the one that the environment's chat template
    ends a turn with."""
    formatter, stops = env.formatter, policy.stop_ids
    if not stops or not formatter.end_of_turn_ids or formatter.end_of_turn_ids[0] in stops:
        return
    end, names = formatter.end_of_turn_ids[0], formatter.tokenizer.convert_ids_to_tokens
    logger.warning(
        "The chat template ends a turn with %r (id %d), where the policy does not stop: its stop ids are %s. Responses will "
        "run on to max_output_tokens. Pass SamplingConfig(stop_ids=%s); in a run that is the setting stop_ids.",
        names(end), end, dict(zip(stops, names(list(stops)), strict=True)), tuple(sorted({end, *stops})),
    )  # fmt: skip
