"""SamplingProcessor against formulas written out in numpy; draw and turn_noise against their
laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_llm.modules.sampling import SamplingConfig, SamplingProcessor, draw, likeliest, turn_noise


def processed(logits, *, index=0, context=None, **options):
    sampling = SamplingConfig(**options)
    return SamplingProcessor(sampling)(logits, index=index, context=context)


class TestSamplingProcessor:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0, -1.0], [2.0, 0.0, -3.0, 1.0, 1.5]])

    def test_default_changes_nothing(self):
        assert torch.equal(processed(self.logits), self.logits)

    def test_half_precision_becomes_float32_and_double_stays(self):
        assert processed(self.logits.bfloat16()).dtype == torch.float32
        assert processed(self.logits.double()).dtype == torch.float64

    def test_temperature_divides(self):
        assert torch.allclose(processed(self.logits, temperature=0.5), self.logits * 2)

    def test_top_k_keeps_the_k_likeliest(self):
        kept = processed(self.logits, top_k=2).isfinite()
        assert kept.tolist() == [[False, True, True, False, False], [True, False, False, False, True]]

    @pytest.mark.parametrize("top_p", [0.3, 0.7, 0.95])
    def test_top_p_keeps_the_smallest_set_with_that_mass(self, top_p):
        kept = processed(self.logits, top_p=top_p).isfinite()
        for row, probs in zip(kept, self.logits.softmax(-1), strict=True):
            mass, smallest = probs[row].sum(), probs[row].min()
            assert mass >= top_p
            assert mass - smallest < top_p

    def test_min_p_drops_what_is_unlikely_beside_the_likeliest(self):
        kept = processed(self.logits, min_p=0.2).isfinite()
        probs = self.logits.softmax(-1)
        assert torch.equal(kept, probs >= 0.2 * probs.amax(-1, keepdim=True))

    def test_repetition_penalty_punishes_the_context_once(self):
        out = processed(self.logits, repetition_penalty=2.0, context=torch.tensor([[1, 1, 4], [2, 2, 2]]))
        expected = self.logits.clone()
        expected[0, 1], expected[0, 4], expected[1, 2] = 1.5, -2.0, -6.0
        assert torch.equal(out, expected)

    def test_stop_ids_wait_for_min_output_tokens(self):
        for index, blocked in ((0, True), (1, True), (2, False)):
            out = processed(self.logits, index=index, stop_ids=(1, 4), min_output_tokens=2)
            assert bool(out[:, [1, 4]].isinf().all()) == blocked
            assert torch.equal(out[:, [0, 2, 3]], self.logits[:, [0, 2, 3]])

    def test_the_order_is_penalty_temperature_top_p(self):
        # At temperature 1 the two likeliest hold 0.9 of the mass; at 0.25 the first alone does.
        logits = torch.tensor([[2.0, 1.0, -2.0]])
        assert processed(logits, top_p=0.9).isfinite().sum() == 2
        assert processed(logits, top_p=0.9, temperature=0.25).isfinite().sum() == 1
        penalised = processed(logits, top_p=0.9, temperature=0.25, repetition_penalty=4.0, context=torch.tensor([[0]]))
        assert penalised.isfinite().tolist() == [[True, True, False]]


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation made anew."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out._is_view():
            self.numel = max(self.numel, out.numel())
        return out


class TestDraw:
    @given(st.lists(st.floats(-20, 20), min_size=2, max_size=8), st.floats(0, 1, exclude_max=True), st.data())
    def test_inverts_the_cumulative_distribution(self, logits, uniform, data):
        banned = data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)))
        banned[0] = False
        logits = torch.tensor([logits]).masked_fill(torch.tensor([banned]), -torch.inf)
        ids, log_probs = draw(logits, torch.tensor([uniform], dtype=torch.float64))
        probs = logits[0].double().softmax(-1)
        token = int(ids)
        assert probs[token] > 0
        assert probs[:token].sum() <= uniform + 1e-6
        assert uniform < probs[: token + 1].sum() + 1e-6
        assert float(log_probs) == pytest.approx(float(probs[token].log()), abs=1e-5)

    @pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(1.0, 0.0)])
    def test_never_draws_a_token_of_probability_zero(self, uniform):
        logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
        ids, log_probs = draw(logits, torch.tensor([uniform], dtype=torch.float64))
        assert int(ids) in (1, 3)
        assert torch.allclose(log_probs.exp(), torch.tensor(0.5))

    def test_frequencies_are_the_probabilities(self):
        logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0])
        uniform = turn_noise(seed=0, episode_id=range(200), turn=[0] * 200, width=100).flatten()
        ids, _ = draw(logits.expand(len(uniform), -1), uniform)
        expected = logits.double().softmax(-1) * len(uniform)
        statistic = ((ids.bincount(minlength=5) - expected) ** 2 / expected).sum()
        # chi-square, 4 degrees
        assert torch.special.gammaincc(torch.tensor(4 / 2.0), statistic.float() / 2) > 1e-3

    def test_nan_logits_give_a_nan_log_prob(self):
        _, log_probs = draw(torch.full((1, 3), torch.nan), torch.tensor([0.5], dtype=torch.float64))
        assert log_probs.isnan().all()

    @pytest.mark.parametrize("greedy", [False, True])
    def test_large_vocabularies_are_drawn_from_in_blocks_of_rows(self, greedy):
        # Fresh arrays of all rows cost more than the draw: the allocator returns them to the system
        # after every token.
        logits = torch.randn(8, 2**17, generator=torch.Generator().manual_seed(0))
        uniform = turn_noise(seed=0, episode_id=range(8), turn=[0] * 8, width=1).flatten()
        sample = (lambda x, _: likeliest(x)) if greedy else draw
        with _Largest() as largest:
            ids, log_probs = sample(logits, uniform)
        assert largest.numel < logits.numel()
        alone = [sample(logits[i : i + 1], uniform[i : i + 1]) for i in range(8)]
        assert torch.equal(ids, torch.cat([row[0] for row in alone]))
        assert torch.equal(log_probs, torch.cat([row[1] for row in alone]))

    def test_likeliest(self):
        logits = torch.tensor([[0.0, 2.0, 1.0]])
        ids, log_probs = likeliest(logits)
        assert int(ids) == 1
        assert torch.allclose(log_probs, logits.log_softmax(-1)[0, 1])


class TestTurnNoise:
    @given(st.integers(0, 2**31), st.integers(0, 2**40), st.integers(0, 100), st.integers(1, 9))
    def test_is_a_function_of_the_key_alone(self, seed, episode, turn, width):
        alone = turn_noise(seed=seed, episode_id=[episode], turn=[turn], width=width)
        beside = turn_noise(seed=seed, episode_id=[episode + 1, episode], turn=[turn, turn], width=width + 3)
        assert torch.equal(alone[0], beside[1, :width])
        assert not torch.equal(beside[0], beside[1])

    def test_each_part_of_the_key_counts(self):
        keys = [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)]
        rows = {tuple(turn_noise(seed=s, episode_id=[e], turn=[t], width=2)[0].tolist()) for s, e, t in keys}
        assert len(rows) == 4

    def test_leaves_the_global_generators_alone(self):
        before = np.random.get_state()[1].copy(), torch.get_rng_state()
        turn_noise(seed=0, episode_id=[0], turn=[0], width=4)
        assert np.array_equal(before[0], np.random.get_state()[1])
        assert torch.equal(before[1], torch.get_rng_state())
