"""Plans of shared prefixes against a trie of dictionaries, and costs against counting."""

import tracemalloc
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from torchrl_llm.modules import prefixes
from torchrl_llm.modules.prefixes import PrefixCost, SortedRows, choose_cuts, pack_rows, plan_prefixes

FREE = PrefixCost(stage=0, context=0, key=0)
KEYS = PrefixCost(stage=0.1, context=0.1, key=0.2)
COSTS = [FREE, KEYS, PrefixCost(stage=3, context=0.1, key=0.2), PrefixCost(stage=0.5, context=0, key=0)]


@st.composite
def batches(draw, max_rows: int = 9):
    """Rows over two or three ids, so that many prefixes are shared."""
    rows = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=max_rows))
    width = max(map(len, rows)) + draw(st.integers(0, 2))
    # 7: what stands in the padding must not matter
    tokens = np.array([row + [7] * (width - len(row)) for row in rows])
    return tokens, np.array([len(row) for row in rows])


def prefixes_of(tokens: np.ndarray, ends: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(row[:i]) for row, end in zip(tokens.tolist(), ends, strict=True) for i in range(1, end + 1)}


def columns_of(plan):
    """Every prefix of a plan with every column in which it has a token of its own."""
    return [(node, stage.start + i) for stage in plan.stages for node in stage.keys for i in range(stage.width)]


class TestPlan:
    @given(batches(), st.sampled_from(COSTS))
    @settings(deadline=None)
    def test_every_token_of_a_row_is_in_the_plan_after_the_tokens_before_it(self, batch, cost):
        tokens, ends = batch
        plan = plan_prefixes(tokens, ends, cost)
        if plan is None:
            return
        for row, places, end in zip(tokens, plan.places, ends, strict=True):
            assert (plan.tokens[places[:end]] == row[:end]).all()
            assert (plan.positions[places[:end]] == np.arange(end)).all()
        first = 0
        for stage in plan.stages:
            # The keys of each prefix are its own tokens from column 0 on, the last of them its
            # places in this stage.
            own = stage.keys[:, stage.start :]
            assert own.ravel().tolist() == list(range(first, first := first + own.size))
            assert (plan.positions[stage.keys] == np.arange(stage.start + stage.width)).all()
        assert first == len(plan.tokens)
        # A token attends to the tokens of its own row, in whatever prefix it is computed.
        seen = {node[column]: node[: column + 1] for node, column in columns_of(plan)}
        for places, end in zip(plan.places, ends, strict=True):
            for column in range(end):
                assert (seen[places[column]] == places[: column + 1]).all()

    @given(batches())
    @settings(deadline=None)
    def test_without_costs_of_stages_there_is_one_token_a_prefix(self, batch):
        tokens, ends = batch
        plan = plan_prefixes(tokens, ends, FREE)
        wanted = len(prefixes_of(tokens, ends))
        plain = len(tokens) * ends.max()
        if plan is None:
            assert wanted == plain
        else:
            # A row that ends within a stage is padded to its end, and a cut there costs nothing.
            assert len(plan.tokens) == wanted

    def test_rows_that_share_nothing_are_plain(self):
        rows = np.arange(12).reshape(3, 4)
        assert plan_prefixes(rows, np.full(3, 4), PrefixCost(stage=0.1, context=0.01, key=0.01)) is None

    def test_a_cut_has_to_be_worth_its_stage(self):
        rows = np.array([[1, 1, 1, 2], [1, 1, 1, 3]])
        ends = np.array([4, 4])
        assert plan_prefixes(rows, ends, PrefixCost(stage=4, context=0, key=0)) is None
        plan = plan_prefixes(rows, ends, PrefixCost(stage=1, context=0, key=0))
        assert [(stage.start, stage.width, len(stage.keys)) for stage in plan.stages] == [(0, 3, 1), (3, 1, 2)]

    @pytest.mark.parametrize("order", [1, -1])
    def test_a_trunk_that_sheds_a_branch_at_every_turn_is_not_cut_at_each(self, order):
        """Whether branches stand before or behind it in the order of ids."""
        trunk = np.arange(100, 160)
        rows, ends = np.zeros((6, 60), np.int64), np.array([20, 28, 36, 44, 52, 1])
        for turn, row in enumerate(rows[:5]):
            row[: 10 + 8 * turn] = trunk[: 10 + 8 * turn]
            row[10 + 8 * turn : 20 + 8 * turn] = 130 + order * 100 + np.arange(10)
        rows[5] = trunk  # of which one token counts, a prefix of all
        plan = plan_prefixes(rows, ends, KEYS)
        assert len(plan.tokens) == 42 + 5 * 10
        assert [len(stage.keys) for stage in plan.stages] == [1] * 5
        assert sorted(stage.width for stage in plan.stages) == [10, 10, 10, 10, 52]

    def test_the_choice_reads_token_counts_and_not_the_clock(self):
        rows, ends = np.tile(np.arange(20), (8, 1)), np.full(8, 20)
        rows[:, 15:] += np.arange(8)[:, None]
        cost = PrefixCost(stage=1, context=0, key=0)
        assert choose_cuts(*SortedRows.of(rows, ends)[2:], cost).columns.tolist() == [0, 15, 20]

    @pytest.mark.parametrize("ids", [[0, 255, 256, 65535, 65536, 2**31 - 2], [3, 1, 2]])
    def test_order_is_that_of_the_ids(self, ids):
        tokens = np.array([[i] for i in ids])
        assert SortedRows.of(tokens, np.ones(len(ids), int)).tokens.ravel().tolist() == sorted(ids)


FORKS_AND_ENDS = (
    np.array(
        [
            [0, 0, 0, 0, 0, 0],
            [0, 1, 7, 7, 7, 7],
            [1, 0, 7, 7, 7, 7],
            [0, 2, 2, 2, 1, 7],
            [1, 1, 0, 0, 0, 7],
            [0, 2, 2, 2, 0, 0],
        ]
    ),
    np.array([6, 2, 2, 5, 5, 6]),
)
"""A cut at column 3, where none of them forks or ends, would be cheaper by 0.3 %: the later stage
would have less to attend to."""


class TestCuts:
    @given(batches(), st.sampled_from(COSTS))
    @example(FORKS_AND_ENDS, COSTS[1])
    @settings(deadline=None)
    def test_nodes_cost_and_optimum(self, batch, cost):
        """The nodes by counting prefixes, and no other choice of cuts where rows fork or end is
        cheaper (by trying all)."""
        tokens, ends = batch
        rows = SortedRows.of(tokens, ends)
        cuts = choose_cuts(rows.ends, rows.shared, cost)

        def nodes(start: int, end: int) -> int:
            found = {tuple(row[: min(end, n)]) for row, n in zip(tokens.tolist(), ends, strict=True) if n > start}
            return sum(not any(a != b and b[: len(a)] == a for b in found) for a in found)

        def price(columns: list[int]) -> float:
            return sum(float(cost.stages(np.array(nodes(a, b)), np.array(a), b)) for a, b in pairwise(columns))

        columns = cuts.columns.tolist()
        assert cuts.nodes.tolist() == [nodes(a, b) for a, b in pairwise(columns)]
        assert cuts.cost == pytest.approx(price(columns))
        longest = int(ends.max())
        inner = {*rows.shared.tolist(), *rows.ends.tolist()} - {0, longest}
        choices = ([0, *sorted(chosen), longest] for n in range(len(inner) + 1) for chosen in combinations(inner, n))
        assert cuts.cost <= min(map(price, choices)) + 1e-9


class TestMany:
    """Where rows fork and end at more columns than are looked at."""

    @given(batches(max_rows=14), st.sampled_from(COSTS), st.integers(1, 4))
    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_a_plan_over_some_of_the_columns_holds_every_token(self, monkeypatch, batch, cost, most):
        monkeypatch.setattr(prefixes, "_MOST_COLUMNS", most)
        tokens, ends = batch
        plan = plan_prefixes(tokens, ends, cost)
        rows = SortedRows.of(tokens, ends)
        cuts = choose_cuts(rows.ends, rows.shared, cost)
        assert cuts.columns[0] == 0
        assert cuts.columns[-1] == ends.max()
        if plan is not None:
            for row, places, end in zip(tokens, plan.places, ends, strict=True):
                assert plan.tokens[places[:end]].tolist() == row[:end].tolist()
                assert plan.positions[places[:end]].tolist() == list(range(end))

    def test_a_chain_of_prefixes_takes_no_memory_that_grows_with_its_square(self):
        """4,000 rows, each the beginning of the next: the table of all their columns had 128 MB,
        three times."""
        ends = np.arange(100, 4100)
        shared = np.append(ends[:-1], 0)
        tracemalloc.start()
        cuts = choose_cuts(ends, shared, PrefixCost(stage=200, context=1e-3, key=0.05))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50e6
        assert cuts.columns[0] == 0
        assert cuts.columns[-1] == 4099


class TestPack:
    @given(batches(max_rows=14), st.integers(1, 40), st.sampled_from(COSTS))
    @settings(deadline=None)
    def test_forwards_hold_all_rows_and_keep_to_the_bound(self, batch, bound, cost):
        rows = SortedRows.of(*batch)
        spans, price = pack_rows(rows, bound, cost)
        assert [i for start, end in spans for i in range(start, end)] == list(range(len(rows.ends)))
        longest, total = rows.ends.max(), 0.0
        most = max(bound, 9 * longest // 8)
        for start, end in spans:
            part = rows.part(start, end)
            cuts = choose_cuts(part.ends, part.shared, cost)
            assert cuts.size <= most or end == start + 1
            assert (end - start) * part.ends.max() <= 16 * most or end == start + 1
            total += cuts.cost
        assert price == pytest.approx(total)

    @pytest.mark.parametrize("length", [3700, 4096, 4161, 6000])
    def test_rows_of_about_the_bound_keep_what_they_share(self, length):
        """Eight rows that differ in their last 50 tokens: the eighth of them was a forward of its
        own from 3,800 tokens on."""
        cost = PrefixCost(stage=100, context=2e-3, key=0.06)
        rows = np.tile(np.arange(length), (8, 1))
        rows[:, -50:] += np.arange(8)[:, None]
        assert pack_rows(SortedRows.of(rows, np.full(8, length)), 4096, cost)[0] == [(0, 8)]
