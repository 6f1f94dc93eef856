"""Batches of episodes that were collected before: :class:`RecordedCollector`."""

from __future__ import annotations

import hashlib
import logging
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torchrl.envs import EnvBase

from torchrl_llm.collectors._queue import EpisodeQueue, RolloutExecutor
from torchrl_llm.collectors.collector import EpisodeCollector
from torchrl_llm.episode import Episode
from torchrl_llm.modules.policy import TurnPolicy

logger = logging.getLogger(__name__)


class RecordedCollector(EpisodeCollector):
    """Delivers given episodes, all of them once in an order of chance, then again in another one:
    data to imitate.

    It is a :class:`~torchrl_llm.collectors.TurnCollector` that plays nothing: batches, counters,
    ranks and resume are the same. The place in the order is the number of the environment's task,
    whose ids the rows get: workers that share a stream of tasks share the orders.

    Args:
        env: a :class:`~torchrl_llm.envs.GEMEnv`; its sampler counts the tasks, and it is never
            stepped.
        policy: the one that is trained; it stamps the rows with its version.
        episodes: finished ones, as :func:`~torchrl_llm.data.read_transcripts` reads them.
        seed: of the orders, >= 0. Default 0.
        kwargs: ``batch_size`` and more, see :class:`~torchrl_llm.collectors.TurnCollector`.

    Raises:
        ValueError: there are no episodes.

    Examples:
        >>> from torchrl_llm.data import episode_from_messages
        >>> from torchrl_llm.envs import GEMEnv
        >>> from torchrl_llm.testing.environments import StopOrGo
        >>> from torchrl_llm.testing.policies import ScriptedPolicy
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> env = GEMEnv(StopOrGo, tokenizer=tokenizer, num_envs=1, max_output_tokens=8)
        >>> asked = [{"role": "user", "content": "2 + 2?"}]
        >>> episodes = [
        ...     episode_from_messages([*asked, {"role": "assistant", "content": text}], env.formatter) for text in "45"
        ... ]
        >>> policy = ScriptedPolicy(lambda *_: "", tokenizer=tokenizer)
        >>> collector = RecordedCollector(env, policy, episodes, batch_size=2, total_batches=1)
        >>> for rows in collector:
        ...     print(sorted(tokenizer.decode(row[turn_ids == 0]) for row, turn_ids in zip(rows["tokens"], rows["turn_ids"])))
        ['4<|im_end|>', '5<|im_end|>']
    """

    def __init__(
        self, env: EnvBase, policy: TurnPolicy, episodes: Sequence[Episode], *, seed: int = 0, **kwargs: Any
    ) -> None:
        if not episodes:
            raise ValueError("There are no episodes to deliver: give one at least.")
        super().__init__(env, policy, **kwargs)
        if self.group_size != 1:
            raise ValueError(f"The group size is {self.group_size}; expected 1: recorded episodes are of any tasks.")
        self._digest = _digest_of(episodes)
        self._executor = RecordedExecutor(self.env, self._queue, episodes, policy, seed)

    def state_dict(self) -> OrderedDict:
        """As any collector's, and the digest of the episodes."""
        return OrderedDict(super().state_dict(), episodes=self._digest)

    def load_state_dict(self, state_dict: OrderedDict, **kwargs: Any) -> None:
        """Continue; a warning says if the episodes are others, for the run does not end in the same
        bytes then."""
        if state_dict.get("episodes", self._digest) != self._digest:
            logger.warning(
                "The recorded episodes are not those that the checkpoint was made with: the run goes on with the new ones, and does "
                "not end as it would have with the old ones."
            )
        super().load_state_dict(state_dict, **kwargs)


def _digest_of(episodes: Sequence[Episode]) -> str:
    digest = hashlib.sha256()
    for episode in episodes:
        actions = [(turn.segment, turn.start, len(turn.tokens)) for turn in episode.turns]
        digest.update(repr((actions, episode.rewards, bool(episode.success), bool(episode.truncated))).encode())
        for context in episode.contexts:
            digest.update(context.astype("int64").tobytes())
    return digest.hexdigest()


class RecordedExecutor(RolloutExecutor):
    """Ends each episode at once, as the one that the order has in its place.

    Args:
        env: its task sampler numbers the episodes.
        queue: gets the episodes.
        episodes: the given ones.
        policy: its version is stamped on the tokens.
        seed: of the orders.
    """

    in_flight = 0

    def __init__(
        self, env: EnvBase, queue: EpisodeQueue, episodes: Sequence[Episode], policy: TurnPolicy, seed: int
    ) -> None:
        self._env, self._queue, self._policy = env, queue, policy
        self._episodes, self._seed = episodes, seed
        self._epoch, self._order = -1, [0]

    def step(self) -> bool:
        while (episode := self._queue.next()) is not None:
            # Not episode.index, which every worker counts for itself.
            self._fill(episode, self._given(episode.episode_id - self._env.task_sampler.base))
        return False

    def _given(self, place: int) -> Episode:
        epoch, place = divmod(place, len(self._episodes))
        if epoch != self._epoch:
            order = [*range(len(self._episodes))]
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._epoch, self._order = epoch, order
        return self._episodes[self._order[place]]

    def _fill(self, episode: Episode, given: Episode) -> None:
        for turn in given.turns:
            versions = turn.versions * 0 + self._policy.policy_version
            episode.add(turn._replace(versions=versions))
        for name in ("task_id", "rewards", "contexts", "stop_reason", "terminated", "truncated", "success"):
            setattr(episode, name, getattr(given, name))

    def release(self, episode: Episode) -> None:
        """Nothing: no episode runs."""

    def clear(self) -> None:
        """Nothing: no episode runs."""

    def close(self, timeout: float) -> None:
        """Nothing: there is nothing to close."""
