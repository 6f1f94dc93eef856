"""What sampling with HFPolicy asks of a GPU: how often it waits for one. On the pretended
device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_policies import batch_of, make_model, make_policy, random_rows

from torchrl_llm.modules.hf._kv_cache import SlotCache
from torchrl_llm.testing.pretended_gpu import pretended_gpu

pytestmark = pytest.mark.host  # which pretends a GPU of its own


def waits_of_a_turn(width, **options):
    """Waits of a turn of ``width`` tokens, none of which ends a response, and of what is set up
    once, none."""
    with pretended_gpu() as gpu:
        # Stop ids are held back up to the last token, so no row is taken out of the batch.
        options = {"max_output_tokens": width, "min_output_tokens": width, "stop_ids": (2, 3, 4)} | options
        policy = make_policy(make_model().to("cuda"), **options)
        turn = batch_of(random_rows([5, 9, 7, 11])).to("cuda")
        policy(turn.clone())
        policy.drop_cache()
        gpu.reset()
        policy(turn.clone())
        return gpu.waits.total()


class TestWaits:
    def test_one_in_eight_tokens(self):
        # Of 40 tokens, the look at the last one is spared: the response ends there anyway.
        assert waits_of_a_turn(40) - waits_of_a_turn(8) == 4

    def test_as_many_as_were_asked_for(self):
        assert waits_of_a_turn(33, check_every=1) - waits_of_a_turn(33, check_every=16) == 30

    @pytest.mark.parametrize("layers", [1, 6])
    def test_rows_change_places_by_one_pair_of_indices(self, layers):
        with pretended_gpu() as gpu:
            cache, states = SlotCache(), torch.ones(4, 2, 1, 3, device="cuda")
            cache.arrange(np.arange(4), 8)
            cache.aim(torch.zeros(4, 1, dtype=torch.int64, device="cuda"), width=1)
            for layer in range(layers):
                cache.update(states, states, layer)
            gpu.reset()
            cache.permute(np.array([1, 0, 2, 3]))
            assert gpu.waits.total() == 2
