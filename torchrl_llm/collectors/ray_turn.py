"""Batches of whole episodes from workers on Ray: :class:`RayTurnCollector`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchrl_llm.collectors._cluster import Cluster, RayCluster
from torchrl_llm.collectors._ray import RayExecutor, WorkerLostError
from torchrl_llm.collectors.async_turn import STEP_TIMEOUT, slots_of
from torchrl_llm.collectors.collector import EpisodeCollector
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.utils.options import Count, Natural, Positive

__all__ = ["RayTurnCollector", "WorkerLostError"]


class RayTurnCollector(EpisodeCollector):
    """Collects on N Ray actors, each with an environment and a policy of its own.

    Batches are the same as of :class:`~torchrl_llm.collectors.AsyncTurnCollector`: B tasks in the
    order sampled, whole groups, with ``max_staleness`` and faults as there. Tasks are sampled here
    and sent to the worker that has least to do, and weights go with them; so with
    ``max_staleness=0`` the episodes are the same for any number of workers.

    A worker that dies is replaced, and its tasks are run again, from their start: each task is
    delivered once, whichever worker is lost. Workers end with the process that made them.

    TorchRL's ``RayCollector`` is not used: it returns the batch of whichever worker is ready first,
    so short episodes would be favored; its state belongs to workers which continue meanwhile; and
    the loss of a worker ends it. Its ``RayReplayBuffer`` fits, as ``replay_buffer``.

    Args:
        env: the environment here, a :class:`~torchrl_llm.envs.GEMEnv`, or a function that makes it.
            It samples the tasks, and runs none.
        policy: the policy here. Its ``sampling`` and ``policy_version`` count; it does not sample
            for this collector.
        make_env: makes a worker's environment; default ``env``, where that is a function.
        make_policy: makes a worker's policy. Functions are sent to the workers with cloudpickle.
        num_workers: how many.
        batch_size: episodes B of a batch.
        max_staleness: how many versions old a token may be at delivery; default 0.
        worker_options: of Ray's actors; default ``{"num_cpus": 1}``.
        num_threads, step_timeout, max_faults: see
            :class:`~torchrl_llm.collectors.AsyncTurnCollector`; threads are each worker's own.
        worker_timeout: seconds without an answer, such as one step of its policy takes, after which
            a worker counts as lost. Default 600.
        start_timeout: seconds that a worker may take to start; later ones are only waited for if no
            other is up. Default 600.
        max_losses: how often in a row a worker may be lost without having finished an episode.
            Default 3.
        background: a thread continues to collect while the caller trains. Default:
            ``max_staleness > 0``.
        weight_sync_schemes: ``{"policy": RayWeightSync(...)}``, see
            :class:`~torchrl_llm.weight_update.RayWeightSync`; default none: workers keep the
            weights that ``make_policy`` gave them.
        total_frames, total_batches, replay_buffer, postproc, exploration_type, pre_collect_hook,
            post_collect_hook: see :class:`~torchrl_llm.collectors.TurnCollector`.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: Ray is not running.
        ValueError: a setting makes no sense, or the workers' environments or policies are not those
            here.
        WorkerLostError: a worker does not start, or is lost again and again.
        EnvironmentFault: at ``next()``, more than ``max_faults`` episodes failed.

    What a worker raises is raised here. Any error at ``next()`` shuts the collector down.

    Examples:
        >>> ray.init()  # doctest: +SKIP
        >>> sync = RayWeightSync(model, adapter, policy=policy)  # doctest: +SKIP
        >>> collector = RayTurnCollector(  # doctest: +SKIP
        ...     make_env, policy, make_policy=make_policy, num_workers=4, batch_size=64, weight_sync_schemes={"policy": sync})
        >>> for batch in collector:  # doctest: +SKIP
        ...     train_on(batch)
        ...     collector.update_policy_weights_()
    """

    runs_here = False
    _executor: RayExecutor
    _make_cluster: Callable[[Mapping[str, Any]], Cluster] = RayCluster

    def __init__(
        self,
        env: GEMEnv | Callable[[], GEMEnv],
        policy: TurnPolicy,
        *,
        make_env: Callable[[], GEMEnv] | None = None,
        make_policy: Callable[[], TurnPolicy],
        num_workers: Count,
        max_staleness: Natural = 0,
        worker_options: Mapping[str, Any] | None = None,
        num_threads: Natural | None = None,
        step_timeout: Positive = STEP_TIMEOUT,
        worker_timeout: Positive = 600.0,
        start_timeout: Positive = 600.0,
        max_losses: Natural = 3,
        background: bool | None = None,
        **kwargs: Any,
    ) -> None:
        # Ray itself reserves a CPU for an actor only while it starts: any number would share one.
        # Before anything else is made: without Ray all of it would be for nothing.
        cluster = self._make_cluster({"num_cpus": 1} if worker_options is None else worker_options)
        make_env = make_env or (None if isinstance(env, GEMEnv) else env)
        if make_env is None:
            raise ValueError(
                f"{type(self).__name__}: make_env is None; expected a function, since env is the environment here and stays "
                "here."
            )
        background = max_staleness > 0 if background is None else background
        super().__init__(env, policy, max_staleness, False, background, **kwargs)
        slots_of(self.env)  # or raise
        self._scheme: Any = (self._weight_sync_schemes or {}).get("policy")
        make_worker = {
            "make_env": make_env,
            "make_policy": make_policy,
            "install": None if self._scheme is None else self._scheme.install,
            "greedy": self._greedy,
            "num_threads": num_threads,
            "step_timeout": step_timeout,
        }
        self._executor = RayExecutor(
            self._queue,
            make_worker,
            num_workers=num_workers,
            cluster=cluster,
            # A function: the sampler is replaced by set_seed, and in an adaptive mixture after each
            # batch.
            task_sampler=lambda: self.env.task_sampler,
            weights=self._weights,
            timeout=worker_timeout,
            start_timeout=start_timeout,
            max_losses=max_losses,
        )
        try:
            self._check_workers()
        except ValueError:
            # Nobody gets the collector, so nobody else could end its workers.
            self._executor.close(0.0)
            raise

    @property
    def lost_workers(self) -> int:
        """How many workers were lost so far."""
        return self._executor.lost

    @property
    def parity_gap(self) -> float:
        """What the last worker that got weights found, in nats
        (:class:`~torchrl_llm.weight_update.ParityCheck`); NaN before."""
        return self._executor.parity_gap

    @property
    def logprobs_match_trainer(self) -> bool:
        """Whether a scorer computes the very log-probs that the workers record; see
        :attr:`TurnPolicy.logprobs_match_trainer`."""
        return all(worker.info.logprobs_match_trainer for worker in self._executor.workers if worker.info is not None)

    def metrics(self) -> dict[str, float]:
        """The metrics of every collector, the workers lost, and :attr:`parity_gap`."""
        own = {"data/lost_workers": float(self.lost_workers), "policy/parity_gap": self.parity_gap}
        return super().metrics() | own

    def stats(self) -> dict[str, int | float | bool]:
        """The counters of :class:`~torchrl_llm.collectors.AsyncTurnCollector`, and the workers
        lost."""
        return super().stats() | {"lost_workers": self.lost_workers}

    def _weights(self) -> tuple[int, Any] | None:
        """Version and reference of the weights to sample with."""
        current = None if self._scheme is None else self._scheme.current
        wanted, sent = self.policy.policy_version, 0 if current is None else current[0]
        if wanted - sent > self.max_staleness:
            raise RuntimeError(
                f"The policy's version is {wanted}, and the workers have been sent {sent}: nothing that they sample would be new "
                "enough. Pass weight_sync_schemes={'policy': RayWeightSync(...)}, and call update_policy_weights_() after "
                "each update instead of policy.weights_changed()."
            )
        return current

    def _maybe_fallback_update(self, policy_or_weights: Any = None, *, model_id: str | None = None) -> None:
        raise RuntimeError(
            "The workers have policies of their own, and nothing sends them weights: pass weight_sync_schemes={'policy': "
            "RayWeightSync(...)}."
        )

    def _check_workers(self) -> None:
        env, policy = self.env, self.policy
        expected = {"group_size": env.group_size, "max_model_len": env.max_model_len, "sampling": policy.sampling}
        for worker in self._executor.workers:
            for name, here in expected.items():
                if (there := getattr(worker.info, name)) != here:
                    raise ValueError(
                        f"The {worker.name} has {name} {there!r}, but here it is {here!r}: make_env and make_policy have to "
                        "make there what is here."
                    )
