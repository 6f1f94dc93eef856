"""Batches of whole episodes without a barrier between turns: :class:`AsyncTurnCollector`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrl.envs import EnvBase

from torchrl_llm.collectors._threads import ThreadExecutor
from torchrl_llm.collectors.collector import EpisodeCollector
from torchrl_llm.envs.env import GEMEnv
from torchrl_llm.modules.policy import TurnPolicy

STEP_TIMEOUT = 60.0
"""Seconds that an environment may take, unless another limit is given."""


class AsyncTurnCollector(EpisodeCollector):
    """Plays every slot at its own pace: an environment steps as soon as its own turn is done.

    Responses are asked for one by one (:meth:`TurnPolicy.submit`, :meth:`TurnPolicy.poll`), environments are called in
    threads, and a slot is refilled as soon as its episode ends. Batches are those of
    :class:`~torchrl_llm.collectors.TurnCollector`: B tasks in the order dealt, whole groups, rows ``[B]``.

    With ``max_staleness=0`` (on-policy) a batch is played by one version of the weights and nothing is in flight when it
    is delivered. With ``max_staleness=k`` up to ``(k + 1) B`` tasks are out at a time, and unfinished episodes go on
    with the new weights; ``"policy_version"`` tells which weights sampled which token. A task is dealt only if the
    batch it will be in comes at most k updates later, provided that there is one update a batch; so short episodes are
    not favored. Whatever else happens to the weights, it is checked at delivery: an episode with a token more than k
    versions old is dropped with its group, counted in :attr:`dropped`, and further tasks fill the batch.

    An environment that raises, returns something malformed or takes more than ``step_timeout`` ends its own episode
    (logged, counted in :attr:`faults`): the episode has no true reward, so its group is dropped and further tasks fill
    the batch. Environments that declare ``thread_safe = True`` are called in parallel, others one at a time
    (:class:`~torchrl_llm.envs.TextEnv`).

    Args:
        env: a :class:`~torchrl_llm.envs.GEMEnv`, or a function that makes it. Its slots bound what is played at a time.
        policy: a :class:`~torchrl_llm.modules.policy.TurnPolicy`.
        batch_size: episodes B of a batch.
        max_staleness: how many versions old a token may be at delivery; default 0.
        num_threads: threads that call environments; default one a slot, 32 at most. 0 calls them in the thread that drives
            the policy: the fastest for environments that answer in microseconds, but without time limit.
        step_timeout: seconds that one reset or step may take; waiting for other environments does not count. Default 60.
        max_faults: failed episodes tolerated for one batch; one more raises the first of them. Default 16.
        background: a thread goes on playing while the caller trains. Needs a policy with weights of its own
            (``policy.owns_weights``). Default: ``max_staleness > 0 and policy.owns_weights``. Otherwise everything runs within
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
        ...     print(batch["turn", "mask"].int().tolist())
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        >>> collector.shutdown()
    """

    def __init__(
        self,
        env: GEMEnv | Callable[[], GEMEnv],
        policy: TurnPolicy,
        *,
        batch_size: int,
        max_staleness: int = 0,
        num_threads: int | None = None,
        step_timeout: float = STEP_TIMEOUT,
        background: bool | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["background"] = max_staleness > 0 and policy.owns_weights if background is None else background
        super().__init__(env, policy, batch_size=batch_size, max_staleness=max_staleness, **kwargs)
        check_slots(self.env)
        shared = "False: the policy's weights are the trainer's (policy.owns_weights is False)"
        self._check(
            num_threads=(num_threads is None or num_threads >= 0, num_threads, ">= 0"),
            step_timeout=(step_timeout > 0, step_timeout, "> 0 seconds"),
            background=(policy.owns_weights or not self.background, self.background, shared),
        )
        self._executor = ThreadExecutor(
            self.env,
            policy,
            self._queue.next,
            greedy=self._greedy,
            num_threads=num_threads,
            step_timeout=step_timeout,
            on_fault=self._queue.fail,
        )


def check_slots(env: EnvBase) -> None:
    """Refuse environments whose slots cannot be played one by one."""
    if not isinstance(env, GEMEnv):
        raise TypeError(
            f"env is a {type(env).__name__}; expected a GEMEnv, whose slots can be played one by one. What a "
            "transform would do belongs into postproc or the replay buffer's transform."
        )
