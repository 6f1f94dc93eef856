"""GEMEnv in TorchRL's own environments and collectors."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from gem_episodes import contexts, play
from torchrl.collectors import Collector
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import ParallelEnv, SerialEnv, check_env_specs

from torchrl_llm import keys
from torchrl_llm.data import TurnsToSequence, TurnViewError, turns_to_rows
from torchrl_llm.testing.environments import Dice, StopOrGo


class TestInterop:
    def test_serial_env_samples_disjoint_tasks(self, make, says):
        workers = [partial(make, Dice, num_envs=2, worker=w, num_workers=2) for w in range(2)]
        env = SerialEnv(2, workers)
        check_env_specs(env)
        env.set_seed(0, static_seed=True)
        rollout = env.rollout(9, says("x"), break_when_any_done=False)
        assert rollout.shape == (2, 2, 9)
        assert sorted(rollout["episode_id"].unique().tolist()) == list(range(12))
        reference = contexts(make(), play(make(Dice, num_envs=4), says("x"), 9))
        shown = contexts(make(), rollout)
        assert shown.keys() == reference.keys()
        assert shown == reference

    @pytest.mark.parametrize(
        ("kind", "group_size"), [(SerialEnv, 1), (SerialEnv, 2), pytest.param(ParallelEnv, 2, marks=pytest.mark.extra)]
    )
    def test_workers_with_torchrls_seeds_play_their_own(self, make, says, kind, group_size):
        """Equal factories: ``set_seed`` gives each worker a seed, and with it tasks and ids."""
        env = kind(2, partial(make, Dice, num_envs=2, group_size=group_size))
        env.set_seed(0)
        rollout = env.rollout(6, says("x"), break_when_any_done=False)
        env.close()
        task, group, episode = (rollout[key].flatten() for key in ("task_id", "group_id", "episode_id"))
        assert len(episode.unique()) == 2 * 2 * 2
        assert len(group.unique()) == len(task.unique()) == 8 // group_size
        assert len(torch.stack([group, task]).unique(dim=1).T) == 8 // group_size

    def test_a_seed_names_ids_whatever_came_before(self, make):
        env = make(Dice, num_envs=2, seed=3)
        firsts = []
        for seed in (3, 7, 3, 7, 8):
            env.set_seed(seed)
            firsts.append(env.reset()["episode_id"][0].item())
        assert firsts[0] == firsts[2] == 0
        assert firsts[1] == firsts[3] != firsts[4]
        state = env.state_dict()
        other = make(Dice, num_envs=2, seed=3)
        other.load_state_dict(state)
        assert other.task_sampler[0] == env.task_sampler[0]
        other.set_seed(8)
        assert other.task_sampler == env.task_sampler

    def test_stock_collector(self, make, says):
        collector = Collector(
            make(StopOrGo, num_envs=2), says("stop"), frames_per_batch=8, total_frames=16, trust_policy=True
        )
        batches = list(collector)
        collector.shutdown()
        assert [batch.shape for batch in batches] == [(2, 4), (2, 4)]
        assert torch.cat([b["episode_id"].flatten() for b in batches]).unique().numel() == 16

    def test_stock_collector_of_trajectories(self, make, says):
        collector = Collector(
            make(StopOrGo, num_envs=2),
            says(lambda episode, turn, context: "stop" if turn == episode % 3 else "go"),
            frames_per_batch=8,
            total_frames=-1,
            trajs_per_batch=4,
            traj_format="padded",
            trust_policy=True,
        )
        batch = next(iter(collector))
        collector.shutdown()
        mask = batch["collector", "mask"]
        assert mask.sum(-1).tolist() == (batch["episode_id"][:, 0, 0] % 3 + 1).tolist()

    def test_llm_collector(self, make, says):
        collector = LLMCollector(
            make(StopOrGo, num_envs=2),
            policy=says(lambda episode, turn, context: "stop" if turn == 1 else "go"),
            dialog_turns_per_batch=4,
            total_dialog_turns=8,
        )
        batches = list(collector)
        collector.shutdown()
        assert [batch.numel() for batch in batches] == [4, 4]
        assert all(batch["next", "done"].sum() == 2 for batch in batches)

    def test_llm_collector_of_trajectories(self, make, says):
        collector = LLMCollector(
            make(StopOrGo, num_envs=2),
            policy=says(lambda episode, turn, context: "stop" if turn == episode else "go"),
            yield_completed_trajectories=True,
            dialog_turns_per_batch=2,
            total_dialog_turns=2,
        )
        batches = list(collector)
        collector.shutdown()
        # The collector resets twice before it starts: the tasks 0 and 1 are never played.
        assert [batch["episode_id"].flatten().tolist() for batch in batches] == [[2, 2, 2]]
        assert batches[0]["next", "done"].flatten().tolist() == [False, False, True]


class TestStockCollectorWithIdlingSlots:
    """The on-policy recipe for TorchRL's own collector: B = N, a reset each iteration."""

    def test_every_batch_is_n_whole_conversations_of_one_version(self, make, says):
        n, max_turns, iterations = 12, 5, 8
        long = {episode: hash_coin(episode) for episode in range(n * (iterations + 1))}
        policy = says(lambda episode, turn, context: "stop" if turn == (4 if long[episode] else 0) else "go")
        env = make(StopOrGo, num_envs=n, group_size=4, on_done="idle", max_turns=max_turns)
        collector = Collector(
            env,
            policy,
            frames_per_batch=n * max_turns,
            total_frames=n * max_turns * iterations,
            reset_at_each_iter=True,
            trust_policy=True,
        )
        lengths, played = [], []
        for i, batch in enumerate(collector):
            live = batch[keys.PROMPT_LENGTH].squeeze(-1) > 0
            episode = batch["episode_id"].squeeze(-1)
            ids = episode[:, 0]
            assert ids.tolist() == list(range(int(ids[0]), int(ids[0]) + n))
            assert (batch["group_id"][:, 0, 0] == ids // 4).all()
            assert (episode[live] == ids.unsqueeze(-1).expand_as(episode)[live]).all()
            assert live.sum(-1).tolist() == [5 if long[e] else 1 for e in ids.tolist()]
            assert batch["next", "done"].sum() == n
            version = batch[keys.POLICY_VERSION]
            assert set(version[batch[keys.RESPONSE_MASK]].tolist()) == {i}
            assert not batch[keys.RESPONSE_MASK][~live].any()
            played += ids.tolist()
            lengths += live.sum(-1).tolist()
            policy.weights_changed()
        collector.shutdown()
        assert len(set(played)) == len(lengths) == n * iterations
        assert within_binomial_bound(lengths.count(5), len(lengths))

    def test_batches_of_several_workers_become_rows(self, make, says):
        workers = [partial(make, StopOrGo, num_envs=2, on_done="idle", worker=w, num_workers=2) for w in range(2)]
        policy = says(lambda episode, turn, context: "stop" if turn == episode % 3 else "go")
        buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=TurnsToSequence(), batch_size=8)
        collector = Collector(
            SerialEnv(2, workers),
            policy,
            frames_per_batch=12,
            total_frames=24,
            reset_at_each_iter=True,
            use_buffers=False,
            trust_policy=True,
        )
        for batch in collector:
            assert batch.shape == (2, 2, 3)
            buffer.extend(batch)
        collector.shutdown()
        rows = buffer[:]
        episode = rows[keys.EPISODE_ID]
        # It resets once before it starts.
        assert sorted(episode.tolist()) == [*range(4, 12)]
        assert rows[keys.TURN_MASK].sum(-1).tolist() == (episode % 3 + 1).tolist()

    def test_slots_that_idle_for_ever_are_told(self, make, says):
        env = make(StopOrGo, num_envs=2, on_done="idle")
        collector = Collector(env, says("stop"), frames_per_batch=4, total_frames=8, trust_policy=True)
        first, second = collector
        collector.shutdown()
        assert len(turns_to_rows(first)) == 2
        with pytest.raises(TurnViewError, match="reset_at_each_iter=True"):
            turns_to_rows(second)


def hash_coin(episode, rate=0.3):
    return random.Random(episode).random() < rate


def within_binomial_bound(count, total, rate=0.3):
    """Four standard deviations: a right collector fails once in 16,000 choices of tasks, and these
    are fixed."""
    return abs(count - rate * total) < 4 * (total * rate * (1 - rate)) ** 0.5
