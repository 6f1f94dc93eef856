"""RecordedCollector: every episode once an epoch, in an order of the seed's, shared by workers and
continued by a resume."""

from __future__ import annotations

import pytest
import torch

from torchrl_llm import keys
from torchrl_llm.collectors import RecordedCollector
from torchrl_llm.data import episode_from_messages, rows_from_episodes
from torchrl_llm.envs import GEMEnv
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy

COUNT = 7


@pytest.fixture
def env(tokenizer):
    return lambda **options: GEMEnv(StopOrGo, tokenizer=tokenizer, max_output_tokens=8, **options)


@pytest.fixture
def given(env):
    """Episodes that say their number, in one to three turns."""
    spoken = [[{"role": "user", "content": "Count."}, *number(i)] for i in range(COUNT)]
    formatter = env().formatter
    return [episode_from_messages(each, formatter, reward=i, success=i % 2 == 0) for i, each in enumerate(spoken)]


def number(i):
    turn = [{"role": "assistant", "content": f"{i}!"}, {"role": "user", "content": "Once more."}]
    return (turn * 3)[: 2 * (i % 3) + 1]


@pytest.fixture
def make(env, given, tokenizer):
    def make(*, episodes=given, shard=None, policy=None, **options):
        policy = policy or ScriptedPolicy(lambda *_: "", tokenizer=tokenizer)
        return RecordedCollector(env(**shard or {}), policy, episodes, **{"batch_size": 4, **options})

    return make


@pytest.fixture
def said(tokenizer):
    """The numbers that a batch's episodes say."""
    return lambda batch: [
        int(tokenizer.decode(row[ids == 0]).partition("!")[0])
        for row, ids in zip(batch["tokens"], batch["turn_ids"], strict=True)
    ]


def order(collector, said, batches):
    return [n for _ in range(batches) for n in said(collector.rollout())]


class TestOrder:
    @pytest.mark.parametrize("size", [1, 4, COUNT, 2 * COUNT])
    def test_every_episode_once_an_epoch_and_each_epoch_another_order(self, make, said, size):
        numbers = order(make(batch_size=size), said, -(-3 * COUNT // size))
        epochs = [numbers[i * COUNT : (i + 1) * COUNT] for i in range(3)]
        assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
        assert len({*map(tuple, epochs), tuple(range(COUNT))}) == 4

    def test_it_is_the_seeds_and_not_the_batch_sizes(self, make, said):
        same = [order(make(seed=3, batch_size=size), said, 12 // size) for size in (2, 4, 12)]
        assert same[0] == same[1] == same[2]
        assert len({tuple(order(make(seed=seed), said, 3)) for seed in (0, 1, 2, 2**50, 2**50 + 1)}) == 5

    def test_the_global_generators_are_left_alone(self, make):
        before = torch.get_rng_state()
        make().rollout()
        assert torch.equal(before, torch.get_rng_state())

    def test_a_state_in_the_middle_continues(self, make, said):
        whole = make(seed=1)
        first = order(whole, said, 2)
        state = whole.state_dict()
        rest = [whole.rollout() for _ in range(4)]
        other = make(seed=1)
        other.load_state_dict(state)
        again = [other.rollout() for _ in range(4)]
        assert [n for batch in rest for n in said(batch)][:8] != first
        assert [said(batch) for batch in rest] == [said(batch) for batch in again]
        assert [batch["episode_id"].tolist() for batch in again] == [[*range(4 * i, 4 * i + 4)] for i in range(2, 6)]
        assert whole.stats()["frames"] == other.stats()["frames"]

    def test_workers_share_the_epochs(self, make, said):
        one = order(make(seed=2, batch_size=2), said, 9)
        workers = [make(seed=2, batch_size=1, shard={"worker": w, "num_workers": 2}) for w in range(2)]
        shares = [order(worker, said, 9) for worker in workers]
        assert [n for pair in zip(*shares, strict=True) for n in pair] == one
        assert sorted(one[:COUNT]) == list(range(COUNT))


class TestBatches:
    def test_rows_are_those_of_the_episodes(self, make, given, said, tokenizer):
        policy = ScriptedPolicy(lambda *_: "", tokenizer=tokenizer)
        collector = make(policy=policy, batch_size=COUNT)
        for version in range(2):
            batch = collector.rollout()
            assert batch["episode_id"].tolist() == list(range(version * COUNT, (version + 1) * COUNT))
            expected = rows_from_episodes([episode(given[n], i) for i, n in enumerate(said(batch))])
            own = {"episode_id", "group_id", keys.POLICY_VERSION, keys.SAMPLE_LOG_PROB}
            assert set(batch.keys(True, True)) == set(expected.keys(True, True))
            assert (batch.exclude(*own) == expected.exclude(*own)).all()
            assert batch[keys.SAMPLE_LOG_PROB].isnan().equal(batch[keys.TURN_IDS] >= 0)
            assert batch[keys.POLICY_VERSION][batch[keys.TURN_IDS] >= 0].unique().tolist() == [version]
            policy.weights_changed()
        assert all((turn.versions == 0).all() for each in given for turn in each.turns), "the given ones are kept"

    def test_it_stops_after_total_batches(self, make):
        collector = make(total_batches=3)
        assert [len(batch) for batch in collector] == [4, 4, 4]
        assert [*collector] == []

    def test_groups_are_refused(self, make):
        with pytest.raises(ValueError, match="group size is 2; expected 1"):
            make(shard={"num_envs": 2, "group_size": 2})

    def test_no_episodes_are_refused(self, make):
        with pytest.raises(ValueError, match="no episodes"):
            make(episodes=[])


def episode(given, index):
    """A copy with ids of its own, which rows must have."""
    given.episode_id = given.group_id = index
    return given
