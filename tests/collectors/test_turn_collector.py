"""TurnCollector: B tasks over N slots."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from scripted_episodes import episodes
from tensordict import TensorDict
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import Compose, RewardScaling, SerialEnv, TransformedEnv
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.objectives import LossModule
from torchrl.trainers import Trainer

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.data import TurnsToSequence, turns_to_rows
from torchrl_llm.envs import EnvironmentFault
from torchrl_llm.testing.environments import Dice, Faulty, StopOrGo

RATE = 0.3


def is_long(episode):
    return random.Random(episode).random() < RATE


def length(episode):
    return 5 if is_long(episode) else 1


def one_or_five(episode, turn, context):
    return "stop" if turn == length(episode) - 1 else "go on"


class TestBatches:
    """What makes a batch on-policy."""

    @pytest.mark.parametrize(
        ("slots", "size", "group"), [(4, 16, 1), (4, 16, 4), (8, 4, 2), (6, 10, 2), (1, 3, 1), (4, 4, 4)]
    )
    def test_exactly_b_whole_conversations_in_task_order(self, make, says, slots, size, group):
        policy = says(one_or_five)
        collector = TurnCollector(make(num_envs=slots, group_size=group), policy, batch_size=size, total_batches=4)
        for i, batch in enumerate(collector):
            assert batch.batch_size[0] == size
            ids = episodes(batch)
            assert ids == list(range(i * size, (i + 1) * size))
            mask = batch[keys.TURN_MASK]
            assert mask.sum(-1).tolist() == [length(episode) for episode in ids]
            assert (mask == (torch.arange(mask.shape[1]) < mask.sum(-1, keepdim=True))).all()
            assert (batch["group_id"] == torch.tensor(ids) // group).all()
            last = mask.sum(-1) - 1
            done = batch[keys.TURN_TERMINATED] | batch[keys.TURN_TRUNCATED]
            assert done[torch.arange(size), last].all()
            assert done.sum() == size
            assert set(batch[keys.POLICY_VERSION][batch[keys.TURN_IDS] >= 0].tolist()) == {i}
            policy.weights_changed()
        assert i == 3

    def test_lengths_have_the_rate_of_the_policy(self, make, says):
        size, batches = 40, 10
        collector = TurnCollector(make(num_envs=8), says(one_or_five), batch_size=size, total_batches=batches)
        played = [batch[keys.TURN_MASK].sum(-1) for batch in collector]
        lengths = torch.cat(played).tolist()
        total = size * batches
        assert lengths == [length(episode) for episode in range(total)]
        assert abs(lengths.count(5) - RATE * total) < 4 * (total * RATE * (1 - RATE)) ** 0.5
        assert 5 in lengths[-8:] or any(is_long(e) for e in range(total - 8)), (
            "long episodes are not dropped at the end"
        )

    def test_rows_are_those_of_a_stock_rollout(self, make, says):
        script = lambda e, t, c: "stop" if t == e % 3 else f"{e}.{t}"  # noqa: E731
        stock = make(num_envs=6, on_done="idle").rollout(4, says(script), break_when_any_done=False)
        expected = turns_to_rows(stock, max_turns=3)
        rows = TurnCollector(make(num_envs=2), says(script), batch_size=6).rollout()
        assert set(rows.keys(True, True)) == set(expected.keys(True, True))
        assert (rows == expected).all()
        assert rows["turn_ids"].amax(-1).tolist() == [0, 1, 2, 0, 1, 2]

    def test_a_batch_does_not_depend_on_the_number_of_slots(self, make, says):
        def rollout(slots):
            script = lambda episode, turn, context: f"{episode}.{turn}"  # noqa: E731
            return TurnCollector(make(partial(Dice, turns=2), num_envs=slots), says(script), batch_size=6).rollout()

        one, six, nine = rollout(1), rollout(6), rollout(9)
        assert (one == six).all()
        assert (one == nine).all()

    def test_padding(self, make, says):
        batch = TurnCollector(make(num_envs=4), says(one_or_five), batch_size=16).rollout()
        padding, idle = ~batch[keys.ATTENTION_MASK], ~batch[keys.TURN_MASK]
        assert padding.any()
        assert idle.any()
        for key in (keys.TURN_IDS, keys.POLICY_VERSION):
            assert (batch[key][padding] == -1).all()
        for key in (keys.TOKENS, keys.SAMPLE_LOG_PROB):
            assert not batch[key][padding].any()
        for key in (keys.TURN_REWARD, keys.TURN_TERMINATED, keys.TURN_STOP_REASON):
            assert not batch[key][idle].any()

    def test_idle_slots_are_not_spoken_for(self, make, says):
        spoken = []

        def script(episode, turn, context):
            spoken.append((episode, turn))
            return one_or_five(episode, turn, context)

        batch = TurnCollector(make(num_envs=8), says(script), batch_size=12).rollout()
        assert len(spoken) == len(set(spoken)) == batch[keys.TURN_MASK].sum()


class TestLimits:
    def test_total_batches(self, make, says):
        collector = TurnCollector(make(num_envs=2), says(one_or_five), batch_size=2, total_batches=3)
        assert len(collector) == 3
        assert len(list(collector)) == 3
        assert list(collector) == []

    def test_total_frames_counts_turns(self, make, says):
        policy = says(lambda episode, turn, context: "stop" if turn == episode % 2 * 3 else "go")
        collector = TurnCollector(make(num_envs=2), policy, batch_size=2, total_frames=11)
        assert [int(batch[keys.TURN_MASK].sum()) for batch in collector] == [5, 5, 5]
        assert collector.stats()["frames"] == 15
        with pytest.raises(TypeError, match="total_batches"):
            len(collector)

    def test_iteration_can_be_left_and_taken_up_again(self, make, says):
        collector = TurnCollector(make(num_envs=2), says(one_or_five), batch_size=2)
        seen = [episodes(next(iter(collector))) for _ in range(2)]
        assert [*seen, episodes(collector.next())] == [[0, 1], [2, 3], [4, 5]]


class TestTorchRL:
    def test_replay_buffer(self, make, says):
        # A buffer's rows have one width.
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(100),
            batch_size=4,
            transform=TurnsToSequence(max_model_len=512, max_turns=5),
        )
        collector = TurnCollector(
            make(num_envs=2), says(one_or_five), batch_size=6, total_batches=2, replay_buffer=buffer
        )
        assert list(collector) == [None, None]
        assert collector.getattr_rb("write_count") == len(buffer) == 12
        stored = buffer[:]
        assert stored["episode_id"].tolist() == list(range(12))
        assert stored[keys.TOKENS].shape == (12, 512)
        assert stored[keys.TURN_MASK].sum(-1).tolist() == [length(episode) for episode in range(12)]

    def test_hooks_and_exploration_type(self, make, says):
        events = []
        collector = TurnCollector(
            make(),
            says(lambda e, t, c: events.append(exploration_type()) or "stop"),
            batch_size=1,
            exploration_type=ExplorationType.DETERMINISTIC,
            pre_collect_hook=lambda: events.append("before"),
            post_collect_hook=lambda batch: events.append(batch.shape),
        )
        collector.rollout()
        assert events == ["before", ExplorationType.DETERMINISTIC, (1,)]

    def test_transformed_env(self, make, says):
        env = TransformedEnv(make(num_envs=2), Compose(RewardScaling(loc=0.0, scale=2.0)))
        collector = TurnCollector(env, says(one_or_five), batch_size=4)
        assert collector.rollout()[keys.TURN_REWARD].sum() == 8
        state = collector.state_dict()
        other = TurnCollector(
            TransformedEnv(make(num_envs=2), Compose(RewardScaling(loc=0.0, scale=2.0))),
            says(one_or_five),
            batch_size=4,
        )
        other.load_state_dict(state)
        assert episodes(other.rollout()) == [4, 5, 6, 7]

    def test_environment_factory(self, make, says):
        assert episodes(TurnCollector(make, says(one_or_five), batch_size=1).rollout()) == [0]

    def test_trainer(self, make, says):
        class Null(LossModule):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(()))

            def forward(self, tensordict):
                return TensorDict({"loss_objective": self.weight * tensordict[keys.TURN_REWARD].mean()})

        transform = TurnsToSequence(max_model_len=512, max_turns=5)
        buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, transform=transform)
        loss = Null()
        collector = TurnCollector(
            make(num_envs=2),
            says(one_or_five),
            batch_size=6,
            replay_buffer=buffer,
        )
        trainer = Trainer(
            collector=collector,
            total_frames=18,
            frame_skip=1,
            optim_steps_per_batch=1,
            loss_module=loss,
            optimizer=torch.optim.SGD(loss.parameters(), lr=1.0),
            progress_bar=False,
            seed=3,
        )
        trainer.register_op("process_optim_batch", lambda batch: buffer.sample())
        trainer.train()
        assert trainer.collected_frames == 18
        assert collector.closed
        assert loss.weight != 0

    def test_update_policy_weights(self, make, says):
        policy = says(one_or_five)
        TurnCollector(make(), policy, batch_size=1).update_policy_weights_()
        assert policy.policy_version == 1


class TestState:
    def test_a_new_collector_continues_with_the_next_task(self, make, says):
        def collector(seed):
            script = lambda episode, turn, context: "x"  # noqa: E731
            env = make(partial(Dice, turns=2), num_envs=3, group_size=1, seed=seed)
            return TurnCollector(env, says(script), batch_size=5, total_batches=3)

        first = collector(4)
        first.rollout()
        state = first.state_dict()
        second = collector(0)
        second.load_state_dict(state)
        rest = list(second)
        assert len(rest) == 2
        assert all((a == b).all() for a, b in zip(first, rest, strict=True))
        assert second.stats() == first.stats()

    def test_set_seed(self, make, says):
        collector = TurnCollector(make(Dice), says(lambda e, t, c: "x"), batch_size=2)
        assert collector.set_seed(5) != 5
        first = collector.rollout()
        assert collector.set_seed(5, static_seed=True) == 5
        assert (collector.rollout() == first).all()

    def test_shutdown_twice(self, make, says):
        collector = TurnCollector(make(), says(one_or_five), batch_size=1)
        collector.shutdown()
        collector.shutdown()
        assert collector.env.is_closed
        with pytest.raises(RuntimeError, match="shut down"):
            collector.rollout()


class TestErrors:
    def test_batch_not_divisible_by_group(self, make, says):
        with pytest.raises(ValueError, match="group size 4"):
            TurnCollector(make(num_envs=4, group_size=4), says(one_or_five), batch_size=6)

    @pytest.mark.parametrize(
        ("collector", "option"),
        [
            (TurnCollector, {"max_staleness": 1}),
            (TurnCollector, {"background": True}),
            (AsyncTurnCollector, {"keep_failed": True}),
        ],
    )
    def test_an_option_of_another_collector(self, make, says, collector, option):
        # They were taken, and had no effect or a wrong one.
        with pytest.raises(TypeError, match=f"{collector.__name__} has no option {next(iter(option))!r}"):
            collector(make(), says(one_or_five), batch_size=1, **option)

    def test_batched_environments(self, make, says):
        with pytest.raises(ValueError, match="one dimension"):
            TurnCollector(SerialEnv(2, make), says(one_or_five), batch_size=2)

    def test_idling_environment(self, make, says):
        with pytest.raises(RuntimeError, match="refill"):
            TurnCollector(make(num_envs=2, on_done="idle"), says(one_or_five), batch_size=4).rollout()

    def test_groups_torn_by_someone_else(self, make, says):
        env = make(num_envs=2, group_size=2)
        env.reset(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2]))
        with pytest.raises(RuntimeError, match="whole"):
            TurnCollector(env, says(one_or_five), batch_size=4).rollout()

    def test_a_fault_ends_iteration_and_closes(self, make, says):
        collector = TurnCollector(make(partial(Faulty, "raise", 1), max_faults=0), says(one_or_five), batch_size=1)
        with pytest.raises(EnvironmentFault, match="turn 1"):
            list(collector)
        assert collector.closed


class TestFaults:
    """Groups of failed episodes are dropped, as the collector without a barrier does."""

    class Sometimes(Faulty):
        def __init__(self, turn, bad):
            super().__init__("raise", 99)
            self._turn, self._bad = turn, bad

        def reset(self, seed=None):
            self.at = self._turn if seed in self._bad else 99
            return super().reset(seed)

    @pytest.mark.parametrize("turn", [-1, 0, 2])
    @pytest.mark.parametrize("group", [1, 2])
    def test_both_collectors_deliver_the_same(self, make, says, turn, group):
        task_sampler = make(num_envs=4, group_size=group).task_sampler
        bad = {task_sampler[i].seed for i in (2, 9)}
        delivered = []
        for kind, options in ((TurnCollector, {}), (AsyncTurnCollector, {"num_threads": 0})):
            env = make(partial(self.Sometimes, turn, bad), num_envs=4, group_size=group, max_turns=4)
            collector = kind(env, says(lambda *_: "x"), batch_size=8, total_batches=2, **options)
            delivered.append([episodes(batch) for batch in collector])
            dropped = collector.dropped
            assert dropped == {"error": 2 * group}
            assert collector.faults["error"] >= 2
            collector.shutdown()
        assert delivered[0] == delivered[1]
        gone = {2, 9} if group == 1 else {2, 3, 8, 9}
        assert [e for batch in delivered[0] for e in batch] == [e for e in range(16 + len(gone)) if e not in gone]

    def test_too_many_for_a_batch_raise(self, make, says):
        env = make(partial(Faulty, "raise", 1), num_envs=2)
        collector = TurnCollector(env, says(one_or_five), batch_size=8, max_faults=1)
        with pytest.raises(EnvironmentFault, match="turn 1") as caught:
            collector.rollout()
        assert any("max_faults=1" in note for note in caught.value.__notes__)

    def test_a_group_that_lacks_a_member_is_dropped(self, make, says):
        class Once(StopOrGo):
            failed = False

            def reset(self, seed=None):
                if seed == bad and not Once.failed:
                    Once.failed = True
                    raise RuntimeError("once")
                return super().reset(seed)

        bad = make(num_envs=2, group_size=2).task_sampler[2].seed
        collector = TurnCollector(make(Once, num_envs=2, group_size=2), says(lambda *_: "stop"), batch_size=6)
        assert episodes(collector.rollout()) == [0, 1, 4, 5, 6, 7]
        assert collector.dropped == {"error": 2}


class TestCounts:
    def test_what_failed_and_was_dropped_is_counted_on_after_a_resume(self, make, says):
        def collect():
            class Sometimes(Faulty):
                def reset(self, seed=None):
                    self.at = 0 if seed == bad else 99
                    return super().reset(seed)

            bad = make(num_envs=2, group_size=2).task_sampler[2].seed
            env = make(partial(Sometimes, "raise"), num_envs=4, group_size=2, max_turns=2)
            return TurnCollector(env, says(one_or_five), batch_size=4)

        one, other = collect(), collect()
        one.rollout()
        other.load_state_dict(one.state_dict())
        assert one.faults == other.faults == {"error": 2}
        assert one.dropped == other.dropped == {"error": 2}


class TestTurnEnd:
    @pytest.mark.parametrize(("stop_ids", "warns"), [((0,), True), ((0, 2), False), ((), False), (None, False)])
    def test_a_policy_that_does_not_stop_at_the_templates_end_of_turn_is_named(
        self, make, says, stop_ids, warns, caplog
    ):
        policy = says(one_or_five)
        policy.sampling = replace(policy.sampling, stop_ids=stop_ids)
        TurnCollector(make(), policy, batch_size=1)
        assert ("ends a turn with '<|im_end|>' (id 2)" in caplog.text) == warns
        assert ("Pass SamplingConfig(stop_ids=(0, 2))" in caplog.text) == warns
