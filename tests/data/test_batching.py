"""Minibatches, micro-batches and what runs in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_llm import keys
from torchrl_llm.data import apply_in_micro_batches, micro_batches, minibatches, padding_share
from torchrl_llm.modules import TokenScorer, TurnCritic
from torchrl_llm.modules.prefixes import PrefixCost


def make_rows(lengths: list[int], width: int = 20, num_turns: int = 3) -> TensorDict:
    batch = len(lengths)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 30, (batch, width), generator=generator)
    turn_ids = torch.where(mask & (torch.arange(width) % 4 > 1), torch.arange(width) // 4, -1)
    return TensorDict(
        {
            keys.TOKENS: tokens * mask,
            keys.ATTENTION_MASK: mask,
            keys.TURN_IDS: turn_ids,
            keys.TURN_REWARD: torch.rand(batch, num_turns, generator=generator),
            keys.EPISODE_ID: torch.arange(batch),
        },
        batch_size=[batch],
    )


class TestMicroBatches:
    @settings(deadline=None, max_examples=50)
    @given(
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
        max_tokens=st.integers(1, 120),
        num_turns=st.sampled_from([3, 20]),
    )
    def test_every_row_once_within_the_budget_and_trimmed(self, lengths, max_tokens, num_turns):
        rows = make_rows(lengths, num_turns=num_turns)
        parts = micro_batches(rows, max_tokens)
        seen = torch.cat([part[keys.EPISODE_ID] for part in parts])
        assert sorted(seen.tolist()) == list(range(len(lengths)))
        for part in parts:
            longest = int(part[keys.ATTENTION_MASK].sum(-1).max())
            assert part[keys.TOKENS].shape == part[keys.TURN_IDS].shape == (len(part), longest)
            assert part[keys.TOKENS].numel() <= max_tokens or len(part) == 1
            index = part[keys.EPISODE_ID]
            for key in (keys.TOKENS, keys.TURN_IDS, keys.ATTENTION_MASK):
                assert torch.equal(part[key], rows[key][index, :longest])
            # also where T == L
            assert torch.equal(part[keys.TURN_REWARD], rows[keys.TURN_REWARD][index])
        assert rows[keys.TOKENS].shape == (len(lengths), 20)
        total = sum(part[keys.TOKENS].numel() for part in parts)
        assert padding_share(parts) == pytest.approx(1 - sum(lengths) / total)

    def test_sorting_saves_padding(self):
        parts = micro_batches(make_rows([20, 2, 20, 2, 20, 2]), 40)
        assert [(len(part), part[keys.TOKENS].shape[1]) for part in parts] == [(2, 20), (2, 20), (2, 2)]
        assert padding_share(parts) == pytest.approx(1 - 66 / 84)

    def test_bad_budget(self):
        with pytest.raises(ValueError, match="max_tokens is 0"):
            micro_batches(make_rows([3]), 0)


class TestMinibatches:
    def test_shuffled_by_the_generator_alone(self):
        rows = make_rows(list(range(1, 11)))
        state = torch.get_rng_state()
        first = minibatches(rows, 4, generator=torch.Generator().manual_seed(1))
        again = minibatches(rows, 4, generator=torch.Generator().manual_seed(1))
        other = minibatches(rows, 4, generator=torch.Generator().manual_seed(2))
        assert torch.equal(state, torch.get_rng_state())
        order = [part[keys.EPISODE_ID].tolist() for part in first]
        assert order == [part[keys.EPISODE_ID].tolist() for part in again]
        assert order != [part[keys.EPISODE_ID].tolist() for part in other]
        assert sorted(row for part in order for row in part) == list(range(10))
        assert [len(part) for part in order] == [4, 3, 3]

    def test_without_generator_in_order(self):
        parts = minibatches(make_rows([1, 2, 3]), 8)
        assert [part[keys.EPISODE_ID].tolist() for part in parts] == [[0, 1, 2]]
        with pytest.raises(ValueError, match="size is 0"):
            minibatches(make_rows([1]), 0)


class TestApplyInMicroBatches:
    @pytest.mark.parametrize("max_tokens", [1, 45, 10_000])
    def test_same_results_as_at_once_at_full_width(self, max_tokens):
        config = Qwen2Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Qwen2ForCausalLM(config).eval()
        rows = make_rows([7, 18, 3, 12, 18])
        critic = TurnCritic(model)
        torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
        for module in (TokenScorer(model, entropy=True), critic):
            expected = module(rows.clone())
            apply_in_micro_batches(module, rows, max_tokens)
            for key in module.out_keys:
                assert not rows[key].requires_grad
                assert rows[key].shape == expected[key].shape
                torch.testing.assert_close(rows[key], expected[key].detach(), rtol=0, atol=1e-5)
        assert rows[keys.STATE_VALUE].abs().sum() > 0

    def test_results_of_before_are_replaced(self):
        calls = []

        def module(td):
            calls.append(len(td))
            return td.set("log_prob", td[keys.TOKENS].double() * len(calls))

        module.in_keys, module.out_keys = [keys.TOKENS], ["log_prob"]
        rows = make_rows([3, 5])
        for _ in range(2):
            apply_in_micro_batches(module, rows, 100)
        assert torch.equal(rows["log_prob"], rows[keys.TOKENS] * 2.0)


class TestSharedPrefixes:
    COST = PrefixCost(stage=10, context=0.0, key=0.0, key_size=0.0, max_length=20)

    def rows(self, length: int = 20) -> TensorDict:
        """Four games of four rows each, dealt out in turn; the rows of a game differ in their last
        two tokens."""
        rows = make_rows([length] * 16, width=length)
        rows[keys.TOKENS][4:, : length - 2] = rows[keys.TOKENS][:4, : length - 2].repeat(3, 1)
        return rows

    def test_rows_that_share_go_together_and_count_once(self):
        parts = micro_batches(self.rows(), 30, self.COST)
        assert sorted((part[keys.EPISODE_ID] % 4).tolist() for part in parts) == [[game] * 4 for game in range(4)]
        assert len(micro_batches(self.rows(), 30)) == 16

    def test_rows_beyond_the_longest_are_cut_by_their_length(self):
        assert len(micro_batches(self.rows(22), 30, self.COST)) == 16

    def test_rows_that_share_too_little_are_sorted_by_length(self):
        rows = make_rows([20, 20, 20, 20])
        expected = [part[keys.EPISODE_ID].tolist() for part in micro_batches(rows, 40)]
        dear = replace(self.COST, stage=100)
        assert [part[keys.EPISODE_ID].tolist() for part in micro_batches(rows, 40, dear)] == expected
