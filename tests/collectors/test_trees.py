"""Trees: episodes that are continued from the middle, as rows. That their credit is unbiased is in
test_exact_gradient.py."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from scripted_episodes import make_env
from torch import Tensor
from torchrl.envs import RewardScaling, TransformedEnv

from torchrl_llm import keys
from torchrl_llm.collectors import Branches, Trees, TurnCollector, adapt_mixture, branch
from torchrl_llm.envs import EnvironmentFault
from torchrl_llm.metrics import credit_metrics, rollout_metrics
from torchrl_llm.objectives import GroupRelative, ReBN, TurnVine
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.utils.options import ConfigError


class Letters:
    """Up to four turns of one letter; "b" ends an episode."""

    def reset(self, seed=None):
        self.said = ""
        return f"Task {seed}.", {}

    def step(self, action):
        self.said += action.strip()[0]
        return "Go on.", float(len(self.said)), self.said[-1] == "b" or len(self.said) == 4, False, {}


class Breaking(Letters):
    """Fails after "ac", in some resets."""

    resets, fails = 0, ()

    def reset(self, seed=None):
        Breaking.resets += 1
        self.number = Breaking.resets
        return super().reset(seed)

    def step(self, action):
        if self.number in Breaking.fails and len(self.said) == 2:
            raise RuntimeError("broken")
        return super().step(action)


def letter(episode: int, turn: int, _: str = "") -> str:
    return random.Random(f"{episode} {turn}").choice("aacb")


@pytest.fixture
def make(tokenizer):
    def make(env=Letters, script=letter, *, num_envs=4, group_size=2, batch_size=24, trees=None, **options):
        env = make_env(env, tokenizer=tokenizer, num_envs=num_envs, group_size=group_size)
        policy = ScriptedPolicy(script, tokenizer=tokenizer, max_output_tokens=4)
        return TurnCollector(env, policy, batch_size=batch_size, trees=trees or Trees(branches=2, depth=3), **options)

    return make


def roots(rows) -> Tensor:
    """The id of the first episode of each row's tree."""
    return rows[keys.TURN_UNIT][:, 0]


def branch_turns(rows) -> Tensor:
    """The turn from which the rows of each row's tree differ; -1: it did not branch."""
    apart = rows[keys.TURN_UNIT] != roots(rows).unsqueeze(1)
    return torch.where(apart.any(1), apart.int().argmax(1), -1)


def said(tokenizer, episode) -> str:
    return "".join(tokenizer.decode(turn.tokens)[0] for turn in episode.turns)


class TestRows:
    def test_groups_are_of_whole_trees(self, make, tokenizer):
        collector = make()
        rows = collector.rollout()
        assert (collector.group_size, len(rows)) == (6, 24)
        assert Counter(rows[keys.GROUP_ID].tolist()) == dict.fromkeys(rows[keys.GROUP_ID].unique().tolist(), 6)
        assert len(set(rows[keys.EPISODE_ID].tolist())) == 24
        # The order that the ranks of a run agree on, so that the same rows share a step however
        # many they are.
        order = [*zip(roots(rows).tolist(), rows[keys.EPISODE_ID].tolist(), strict=True)]
        assert order == sorted(order)
        branched = 0
        for first in range(0, 24, 3):
            tree, root = collector.episodes[first : first + 3], collector.episodes[first]
            turn = int(branch_turns(rows)[first])
            assert roots(rows)[first : first + 3].tolist() == [root.episode_id] * 3
            assert branch_turns(rows)[first : first + 3].tolist() == [turn] * 3
            share = 1.0 if turn < 0 else 1 / 3
            assert rows[keys.ROW_WEIGHT][first : first + 3].tolist() == pytest.approx([share] * 3)
            begun = max(turn, 0)
            for each in tree[1:]:
                assert said(tokenizer, each)[:begun] == said(tokenizer, root)[:begun]
                own = "".join(letter(each.episode_id, k) for k in range(begun, len(each.turns)))
                assert said(tokenizer, each)[begun:] == own
            branched += turn > 0
        assert 0 < branched < 8  # some had ended

    def test_where_a_tree_branches_does_not_depend_on_what_happens_in_it(self, make):
        turns = {}
        for script in ("aaaa", "aaaa", "abbb", "cccc"):
            collector = make(script=lambda _, turn, __, script=script: script[turn])
            rows = collector.rollout()
            for tree, turn in zip(roots(rows).tolist(), branch_turns(rows).tolist(), strict=True):
                turns.setdefault(tree, set()).add(turn)
        # The short ones had ended; all others branched before the same turn.
        assert all(len(each - {-1}) == 1 for each in turns.values())
        assert {turn for each in turns.values() for turn in each} == {-1, 1, 2, 3}

    def test_an_episode_does_not_depend_on_its_neighbors(self, make):
        def played(**options):
            collector = make(**options)
            return {
                each.episode_id: (each.rewards, len(each.turns))
                for each in (collector.rollout(), collector)[1].episodes
            }

        assert played(num_envs=2) == played(num_envs=8)

    def test_equal_states_have_different_continuations(self, make):
        collector = make(script=lambda *_: "a")
        collector.rollout()
        one, other = (each for each in collector.episodes if each.group_id == 0 and each.episode_id < 2)
        found = branch(collector.env, collector.policy, [(one, 2), (other, 2)], count=2)
        assert len({each.episode_id for both in found for each in both}) == 4

    def test_turns_that_are_sampled_once_are_counted(self, make):
        collector = make()
        rows = collector.rollout()
        turn = branch_turns(rows).clamp_min(0).view(-1, 3)[:, 0]
        assert collector.metrics()["data/replayed_turns"] == float(2 * turn.sum())
        other = make()
        other.load_state_dict(collector.state_dict())
        assert other.metrics()["data/replayed_turns"] == float(2 * turn.sum())
        assert other.rollout()[keys.EPISODE_ID].equal(collector.rollout()[keys.EPISODE_ID])


class TestFaults:
    def test_a_continuation_that_fails_costs_its_group(self, make, monkeypatch):
        monkeypatch.setattr(Breaking, "resets", 0)
        quiet = make(Breaking, num_envs=2, script=lambda *_: "a").rollout()
        # Of 8 roots and 16 continuations, one of these fails, and a further group of 2 roots and 4
        # continuations is played.
        monkeypatch.setattr(Breaking, "resets", 0)
        monkeypatch.setattr(Breaking, "fails", (12,))
        collector = make(Breaking, num_envs=2, script=lambda *_: "a")
        rows = collector.rollout()
        assert len(rows) == 24
        lost = {*quiet[keys.GROUP_ID].tolist()} - {*rows[keys.GROUP_ID].tolist()}
        assert len(lost) == 1
        assert set(Counter(rows[keys.GROUP_ID].tolist()).values()) == {6}
        assert Breaking.resets >= 24 + 6
        found = collector.metrics()
        assert (found["data/faults"], found["data/dropped"]) == (1, 6)

    def test_faults_are_counted_over_all_that_is_played_for_a_batch(self, make, monkeypatch):
        """One group after the other, of which one continuation fails: it would never end."""
        monkeypatch.setattr(Breaking, "resets", 0)
        monkeypatch.setattr(Breaking, "fails", range(6, 600, 6))
        with pytest.raises(EnvironmentFault, match="first of 4 failed episodes of the continuations"):
            make(Breaking, script=lambda *_: "a", batch_size=6, max_faults=3, num_envs=2).rollout()

    def test_too_many_of_them_end_the_collection(self, make, monkeypatch):
        monkeypatch.setattr(Breaking, "resets", 0)
        monkeypatch.setattr(Breaking, "fails", range(9, 1000))
        with pytest.raises(EnvironmentFault, match="of the continuations of a batch"):
            make(Breaking, script=lambda *_: "a", max_faults=2).rollout()


class TestRefused:
    def test_options(self, make, tokenizer):
        for wrong in ({"branches": 0}, {"branches": 1, "depth": 0}):
            with pytest.raises(ConfigError):
                Trees(**wrong)
        with pytest.raises(ValueError, match="multiple of the group size 6"):
            make(batch_size=4)
        for wrong in ({"branches": Branches(count=1)}, {"keep_failed": True}):
            with pytest.raises(ValueError, match="trees cannot go with"):
                make(**wrong)
        env = TransformedEnv(make_env(Letters, tokenizer=tokenizer), RewardScaling(0.0, 1.0))
        with pytest.raises(TypeError, match="expected a GEMEnv"):
            TurnCollector(env, ScriptedPolicy(letter, tokenizer=tokenizer), batch_size=6, trees=Trees(branches=1))

    def test_estimators(self, make):
        rows = make().rollout()
        ReBN()(rows.clone())
        with pytest.raises(ValueError, match="such as those of a tree, and TurnVine does not know which"):
            TurnVine()(rows.clone())
        with pytest.raises(ValueError, match='baseline="mean" is biased where rows count as one'):
            GroupRelative(scale="none")(rows.clone())

        class Louder(ReBN):
            pass

        with pytest.raises(ValueError, match=r"an estimator of your own .* says respects_units = True"):
            Louder()(rows.clone())
        single = make(group_size=1).rollout()
        for credit in ("episode", "turn", "state"):
            with pytest.raises(ValueError, match="A group is one unit, such as a single tree"):
                GroupRelative(credit=credit, baseline="leave_one_out", scale="none")(single.clone())


class TestCredit:
    """``GroupRelative`` of rows of trees, turn by turn, against the definition."""

    @pytest.mark.parametrize(("credit", "kind"), [("turn", None), ("state", "prefix"), ("state", "observation")])
    def test_others(self, make, credit, kind):
        """Rows are in the state of an observation at several turns: before their tree branches and
        behind."""
        rows = make(batch_size=36).rollout()
        options = {} if kind is None else {"fallback": "return", "state": kind}
        out = GroupRelative(credit=credit, baseline="leave_one_out", scale="none", **options)(rows.clone())
        reward, mask = rows[keys.TURN_REWARD], rows[keys.TURN_MASK]
        to_go = (reward * mask).flip(1).cumsum(1).flip(1)
        tree, group, turns = (each.tolist() for each in (roots(rows), rows[keys.GROUP_ID], branch_turns(rows)))
        ids, tokens = rows[keys.TURN_IDS].tolist(), rows[keys.TOKENS].tolist()

        def state(i: int, k: int) -> list[int]:
            end = ids[i].index(k)
            begin = end if kind == "observation" else 0
            while kind == "observation" and begin and ids[i][begin - 1] < 0:
                begin -= 1
            return tokens[i][begin:end]

        for i, k in mask.nonzero().tolist():
            apart = 0 <= turns[i] <= k
            others = [
                j for j in range(len(rows)) if group[j] == group[i] and (tree[j] != tree[i] or (apart and j != i))
            ]
            if credit == "turn":
                found = [float(to_go[j, k]) for j in others]
            else:
                found = [
                    float(to_go[j, t]) for j in others for t in range(4) if mask[j, t] and state(j, t) == state(i, k)
                ]
            expected = float(to_go[i, k]) - (sum(found) / len(found) if found else 0.0)
            assert float(out[keys.TURN_ADVANTAGE][i, k]) == pytest.approx(expected, abs=1e-5)
            if credit == "state":
                assert int(out[keys.TURN_NUM_COMPARED][i, k]) == len(found)

    def test_the_order_of_rows_changes_nothing(self, make):
        estimator = GroupRelative(credit="state", baseline="leave_one_out", scale="none")
        rows = make().rollout()
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        shuffled = estimator(rows[order].clone())[keys.TURN_ADVANTAGE]
        torch.testing.assert_close(shuffled, estimator(rows.clone())[keys.TURN_ADVANTAGE][order])


class Coin:
    """Lost by "b" in the first turn, otherwise won in the second."""

    def reset(self, seed=None):
        self.turn = 0
        return "Say.", {}

    def step(self, action):
        self.turn += 1
        over = action[0] == "b" or self.turn == 2
        return "Go on.", float(over and action[0] != "b"), over, False, {}


class TestMetrics:
    """Of the rows of trees more last to the branch than of the policy's episodes."""

    @pytest.fixture
    def collector(self, make):
        def script(episode, turn, _):
            return random.Random(f"{episode} {turn}").choice("ab") if turn == 0 else "a"

        return make([Coin, Coin], script, batch_size=1200, num_envs=16, trees=Trees(branches=3, depth=1))

    def test_are_those_of_the_policy(self, collector):
        rows = collector.rollout()
        won = (rows[keys.TURN_SUCCESS] & rows[keys.TURN_MASK]).any(1)
        rows[keys.SAMPLE_LOG_PROB] = torch.where(won.view(-1, 1), -1.0, -3.0).expand_as(rows[keys.TURN_IDS])
        assert won.float().mean() > 0.62  # 0.69 of them
        rows[keys.ADVANTAGE] = rows[keys.SAMPLE_LOG_PROB]
        figures = rollout_metrics(rows, ["one", "other"]) | credit_metrics(rows)
        first = won[roots(rows) == rows[keys.EPISODE_ID]].float().mean().item()
        for name, expected in (
            ("rollout/reward", 0.5),
            ("rollout/success", 0.5),
            ("rollout/success/one", 0.5),
            ("rollout/turns", 1.5),
        ):
            assert figures[name] == pytest.approx(expected, abs=0.06)
        assert abs(first - 0.5) < 0.06
        turn = branch_turns(rows).view(-1, 4)[:, 0]
        assert figures["credit/branched"] == pytest.approx((turn > 0).float().mean().item())
        assert 0.4 < figures["credit/branched"] < 0.6
        # A letter is one token and the end of the turn another.
        per_turn = figures["rollout/response_length"]
        assert figures["policy/first_turn_entropy"] == pytest.approx(2.0 * per_turn, abs=0.06 * 2 * per_turn)

    def test_a_mixture_learns_from_first_episodes(self, collector):
        rows = collector.rollout()
        adapt_mixture(collector.env, rows)
        first = rows[roots(rows) == rows[keys.EPISODE_ID]]
        won = (first[keys.TURN_SUCCESS] & first[keys.TURN_MASK]).any(1)
        again = replace(collector.env.task_sampler, success=None).learn(first[keys.ENV_ID].tolist(), won.tolist())
        assert collector.env.task_sampler.success == again.success
