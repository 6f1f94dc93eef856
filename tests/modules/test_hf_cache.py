"""What HFPolicy keeps between turns: contexts, shared and reused, but nothing that changes an
answer."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tiny_policies import batch_of, make_model, make_policy, play, random_rows, same

from torchrl_llm import keys
from torchrl_llm.modules.engine import NonFiniteLogitsError


class TestStatelessness:
    """Nothing but weights, prompt and the noise key decides what is said."""

    rows = random_rows([11, 3, 1, 19, 7, 30])

    def test_neighbours_order_and_slot_do_not_matter(self):
        model = make_model()
        all_ids, all_log_probs = play(make_policy(model), self.rows)
        for chosen in ([5], [3, 0], [4, 5, 0, 1]):
            policy = make_policy(model)
            for _ in range(2):  # the second time from the cache
                found = play(policy, [self.rows[i] for i in chosen], episodes=chosen)
                same(found, ([all_ids[i] for i in chosen], [all_log_probs[i] for i in chosen]))

    def test_noise_depends_on_seed_episode_and_turn(self):
        model = make_model()
        rows = [self.rows[0]] * 3
        first = play(make_policy(model), rows)[0]
        assert first[0] != first[1] != first[2] != first[0]
        assert play(make_policy(model), rows, turn=1)[0] != first
        assert play(make_policy(model, seed=1), rows)[0] != first
        assert play(make_policy(model), rows, episodes=[1, 0, 2])[0] == [first[1], first[0], first[2]]

    def test_global_generators_are_neither_read_nor_moved(self):
        policy = make_policy()
        before = torch.get_rng_state()
        first = play(policy, self.rows)
        assert torch.equal(before, torch.get_rng_state())
        torch.rand(3)
        same(play(policy, self.rows), first)

    def test_turns_from_the_cache_equal_turns_computed_afresh(self):
        model = make_model()
        policy, rows = make_policy(model, stop_ids=(2, 3, 4, 5, 6, 7, 8)), list(self.rows)
        for turn in range(5):
            fresh = make_policy(model, stop_ids=(2, 3, 4, 5, 6, 7, 8))
            ids, log_probs = play(policy, rows, turn=turn)
            same((ids, log_probs), play(fresh, rows, turn=turn))
            feedback = random_rows([4, 2, 9, 1, 5, 40], seed=turn + 1)
            rows = [row + response + more for row, response, more in zip(rows, ids, feedback, strict=True)]
            rows[turn] = random_rows([6 + turn], seed=99 + turn)[0]  # a slot is refilled
            if turn == 2:
                rows = rows[::-1]  # every slot has a context that it never saw

    def test_slots_that_come_and_go(self):
        model = make_model()
        policy = make_policy(model)
        rows = random_rows([11, 3, 9, 19, 7, 5])
        for turn, idle in enumerate([(), (0, 3), (1,), (0, 1, 2, 4), (2, 5), ()]):
            now = [[] if i in idle else row for i, row in enumerate(rows)]
            ids, log_probs = play(policy, now, turn=turn)
            assert [len(response) for response in ids] == [0 if i in idle else 8 for i in range(6)]
            same((ids, log_probs), play(make_policy(model), now, turn=turn))
            rows = [row + response + [9] if response else row for row, response in zip(rows, ids, strict=True)]

    def test_more_slots_than_before(self):
        model = make_model()
        policy = make_policy(model)
        play(policy, self.rows[:2])
        same(play(policy, self.rows), play(make_policy(model), self.rows))

    def test_a_shorter_or_edited_prompt_is_not_answered_from_the_cache(self):
        model = make_model()
        policy = make_policy(model)
        row = self.rows[5]
        play(policy, [row])
        for changed in (row[:10], row[:-1], [*row[:4], 33, *row[5:]], [*row, 12]):
            same(play(policy, [changed]), play(make_policy(model), [changed]))

    def test_an_error_in_mid_turn_leaves_nothing_half_written(self):
        model = make_model()
        policy, row = make_policy(model), self.rows[5]
        ids, _ = play(policy, [row])
        calls = iter(range(100))

        def fail(*_):
            if next(calls) == 2:
                raise KeyboardInterrupt

        hook = model.model.norm.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            play(policy, [self.rows[3]])
        hook.remove()
        same(play(policy, [row + ids[0]]), play(make_policy(model), [row + ids[0]]))


class TestSharing:
    """Equal prompts and prefixes are computed once."""

    @pytest.fixture
    def counted(self):
        model = make_model()
        policy = make_policy(model, max_output_tokens=1)
        seen = []
        model.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        return model, policy, seen

    def test_members_of_a_group(self, counted):
        model, policy, seen = counted
        one, two = random_rows([40, 30])
        rows = [one, two, one, one, two]
        found = play(policy, rows)
        assert sum(seen) == 80  # two rows of 40
        same(found, play(make_policy(model, max_output_tokens=1), rows))

    def test_a_prefix_that_all_begin_with(self, counted):
        model, policy, seen = counted
        common, *tails = random_rows([100, 9, 8, 8])
        rows = [common + tail for tail in tails]
        found = play(policy, rows)
        assert sum(seen) == 100 + 3 * 9
        same(found, play(make_policy(model, max_output_tokens=1), rows))

    def test_a_prefix_that_another_slot_holds(self, counted):
        model, policy, seen = counted
        common, *tails = random_rows([100, 8, 8])
        play(policy, [common + tails[0], [5]])
        seen.clear()
        rows = [common + tails[0], common + tails[1]]
        found = play(policy, rows)
        assert sum(seen) == 2 * 8
        same(found, play(make_policy(model, max_output_tokens=1), rows))

    def test_a_slot_lends_no_more_than_it_has_computed(self):
        model = make_model()
        policy, row = make_policy(model), random_rows([40])[0]
        ids, _ = play(policy, [row, [5]])
        # the last token of a response was never fed to the model
        rows = [[], row + ids[0] + [8, 9]]
        same(play(policy, rows, turn=1), play(make_policy(model), rows, turn=1))

    def test_only_new_tokens_are_computed_and_long_prompts_apart_from_short_ones(self, counted):
        _, policy, seen = counted
        rows = random_rows([60, 50, 40])
        ids, _ = play(policy, rows)
        assert seen.pop() == 3 * 60
        rows = [rows[0] + ids[0] + [4, 5], rows[1] + ids[1] + [6], random_rows([70], seed=5)[0]]
        play(policy, rows, turn=1)
        assert sorted(seen) == [2 * 3, 70]

    def test_long_reads_are_split(self, counted, monkeypatch):
        model, policy, seen = counted
        monkeypatch.setattr("torchrl_llm.modules.hf._cached_model._MAX_TOKENS", 32)
        rows = random_rows([50, 20, 7, 9, 31])
        same(play(policy, rows), play(make_policy(model, max_output_tokens=1), rows))
        assert max(seen) <= 32


def change_weights(model, other, how):
    if how == "load":
        model.load_state_dict(other.state_dict())
    elif how == "swap":
        model.load_state_dict(other.state_dict(), assign=True)
    elif how == "one element":
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight[0, 1] += 3
    elif how == "fused":
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW(model.parameters(), lr=0.05, fused=True).step()
    else:
        with torch.no_grad():
            for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
                (parameter if how == "in place" else parameter.data).copy_(new)


class TestWeights:
    rows = random_rows([11, 3, 40])

    @pytest.mark.parametrize("how", ["weights_changed", "in place", "one element", "data", "fused", "load", "swap"])
    def test_new_weights_drop_the_cache(self, how):
        model, other = make_model(), make_model()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.1).add_(0.05)
        policy = make_policy(model)
        play(policy, self.rows)
        change_weights(model, other, how)
        if how == "weights_changed":
            policy.weights_changed()
            assert policy.policy_version == 1
            assert not policy._engine.cache._layers
        same(play(policy, self.rows), play(make_policy(copy.deepcopy(model)), self.rows))

    def test_unchanged_weights_keep_it(self):
        policy = make_policy()
        play(policy, self.rows)
        before = policy._engine.cache._layers[0][0]
        play(policy, self.rows)
        assert policy._engine.cache._layers[0][0] is before
        policy.close()
        assert not policy._engine.cache._layers

    def test_training_goes_on_after_generation(self):
        model = make_model(attention_dropout=0.5).train()
        model.model.layers[0].eval()
        modes = [module.training for module in model.modules()]
        policy = make_policy(model)
        one = play(policy, self.rows)
        assert [module.training for module in model.modules()] == modes
        same(play(make_policy(copy.deepcopy(model).eval()), self.rows), one)
        ids = torch.tensor([self.rows[0]], device=model.device)
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_results_can_meet_autograd(self):
        out = make_policy()(batch_of(self.rows))
        weight = torch.ones(8, requires_grad=True)
        (out[keys.RESPONSE_LOG_PROBS] * weight).sum().backward()
        assert weight.grad is not None

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_a_copy_answers_alike_and_starts_with_an_empty_cache(self, copied):
        policy = make_policy()
        first = play(policy, self.rows)
        twin = copied(policy)
        assert not twin._engine.cache._layers
        with torch.no_grad():
            policy.model.lm_head.weight.zero_()
        same(play(twin, self.rows), first)

    def test_nan_weights_are_an_error_that_leaves_nothing_behind(self):
        model = make_model()
        policy = make_policy(model)
        first = play(policy, self.rows)
        saved = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.fill_(torch.nan)
        with pytest.raises(NonFiniteLogitsError, match="learning rate"):
            play(policy, self.rows)
        model.load_state_dict(saved)
        same(play(policy, self.rows), first)
