"""SlotCache: what is written where, and what stays when rows move, grow and are copied."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm.modules.hf._kv_cache import SlotCache
from torchrl_llm.modules.prefixes import common_prefix


def states(positions, *, heads=2, dim=3):
    """Keys that say their own position, and values that say head + 10 * position;
    ``[n, heads, q, dim]``."""
    keys = positions[:, None, :, None].float().expand(-1, heads, -1, dim)
    return keys, torch.arange(heads).view(1, -1, 1, 1) + 10 * keys


def write(cache, positions, *, width, rows=None, **shape):
    positions = torch.tensor(positions)
    cache.aim(positions, width=width, rows=None if rows is None else torch.tensor(rows))
    return cache.update(*states(positions, **shape), 0)


def filled(lengths):
    cache = SlotCache()
    cache.arrange(np.arange(len(lengths)) + 100, max(lengths))
    for row, length in enumerate(lengths):
        write(cache, [list(range(length))], width=length, rows=[row])
        cache._layers[0][0][row] += 1000 * row
        cache.lengths[row] = length
        cache.tokens[row, :length] = np.arange(length) + 1000 * row
    return cache


def holds(cache, row, slot, length):
    number = slot - 100
    assert cache.slots[row] == slot
    assert cache.lengths[row] == length
    assert cache.tokens[row, :length].tolist() == [1000 * number + p for p in range(length)]
    keys = cache._layers[0][0][row, :, :length]
    assert torch.equal(keys, (1000 * number + torch.arange(length)).float().view(1, -1, 1).expand_as(keys))


class TestSlotCache:
    def test_each_token_goes_to_its_own_position(self):
        cache = SlotCache()
        cache.arrange(np.array([4, 9]), 10)
        keys, values = write(cache, [[0, 1, 2], [5, 6, 7]], width=8)
        assert keys.shape == values.shape == (2, 2, 8, 3)
        assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
        assert keys[1, 1, :, 2].tolist() == [0, 0, 0, 0, 0, 5, 6, 7]
        assert values[1, :, 6, 0].tolist() == [60, 61]

    def test_rows_can_be_chosen(self):
        cache = SlotCache()
        cache.arrange(np.arange(3), 4)
        keys, _ = write(cache, [[3], [1]], width=4, rows=[2, 0])
        assert keys[:, 0, :, 0].tolist() == [[0, 0, 0, 3], [0, 1, 0, 0]]
        assert cache._layers[0][0][1].eq(0).all()

    def test_padding_is_dumped_where_nobody_looks(self):
        cache = SlotCache()
        cache.arrange(np.arange(1), 63)  # 64 columns, the smallest allocation
        write(cache, [[1, 2, -3, -2]], width=63)
        keys = cache._layers[0][0][0, 0, :, 0]
        assert keys[:63].tolist() == [0, 1, 2] + [0] * 60
        assert keys[63] < 0

    def test_layers_may_differ_in_heads(self):
        cache = SlotCache()
        cache.arrange(np.arange(2), 4)
        positions = torch.tensor([[1], [2]])
        cache.aim(positions, width=3)
        for layer, heads in enumerate((1, 4)):
            keys, _ = cache.update(*states(positions, heads=heads), layer)
            assert keys[:, -1, :, 0].tolist() == [[0, 1, 0], [0, 0, 2]]

    def test_arranging_keeps_what_slots_hold(self):
        cache = filled([5, 3, 7, 2])
        cache.arrange(np.array([102, 100]), 7)
        holds(cache, 0, 102, 7)
        holds(cache, 1, 100, 5)
        cache.arrange(np.array([103, 777, 101]), 7)
        holds(cache, 0, 103, 2)
        assert (cache.slots[1], cache.lengths[1]) == (777, 0)
        holds(cache, 2, 101, 3)
        assert sorted(cache.slots.tolist()) == [100, 101, 102, 103, 777]

    def test_growing_keeps_what_slots_hold(self):
        cache = filled([5, 3])
        cache.arrange(np.array([100, 101, 5]), 500)
        assert cache.tokens.shape[1] > 500
        holds(cache, 0, 100, 5)
        holds(cache, 1, 101, 3)
        write(cache, [[499]] * 3, width=500)

    def test_copy(self):
        cache = filled([5, 3, 7])
        cache.copy(np.array([2]), np.array([0]), 4)
        keys = cache._layers[0][0][0, 0, :5, 0]
        assert keys.tolist() == [2000, 2001, 2002, 2003, 4]
        holds(cache, 2, 102, 7)

    def test_drop_frees_the_memory(self):
        cache = filled([5])
        cache.drop()
        assert not cache._layers
        assert cache.tokens.size == 0


class TestCommonPrefix:
    @given(st.data())
    def test_is_what_a_loop_finds(self, data):
        n, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
        rows = st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=n, max_size=n)
        a, b = np.array(data.draw(rows)), np.array(data.draw(rows))
        limit = np.array(data.draw(st.lists(st.integers(0, width), min_size=n, max_size=n)))
        expected = [next((i for i in range(width) if a[k, i] != b[k, i] or i >= limit[k]), width) for k in range(n)]
        assert common_prefix(a, b, limit).tolist() == expected
