"""States of turns, and returns compared among them, against their definitions written as loops."""

from __future__ import annotations

import pytest
import torch
from conversations import LAYOUT, make_rows
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.objectives import GroupRelative

TURNS = 3


@st.composite
def conversations(draw) -> tuple[Tensor, Tensor]:
    """Tokens and turn ids ``[B, L]`` of few letters, so that prefixes are often equal; some turns
    have no token."""
    rows = draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=TURNS, max_size=TURNS),
            min_size=1,
            max_size=5,
        )
    )
    length = 4 * TURNS
    tokens, turn_ids = torch.zeros(len(rows), length, dtype=torch.int64), torch.full((len(rows), length), -1)
    letters = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    for row, turns in enumerate(rows):
        tokens[row] = torch.tensor(draw(letters))
        at = 0
        for turn, (observed, said) in enumerate(turns):
            at += observed
            turn_ids[row, at : at + said] = turn
            at += said
    return tokens, turn_ids


def prefixes(tokens: Tensor, turn_ids: Tensor) -> list[list[tuple | None]]:
    found = []
    for words, ids in zip(tokens.tolist(), turn_ids.tolist(), strict=True):
        found.append([tuple(words[: ids.index(turn)]) if turn in ids else None for turn in range(TURNS)])
    return found


def observations(tokens: Tensor, turn_ids: Tensor) -> list[list[tuple | None]]:
    found = prefixes(tokens, turn_ids)
    for ids, row in zip(turn_ids.tolist(), found, strict=True):
        for turn, prefix in enumerate(row):
            if prefix is not None:
                acted = [at + 1 for at in range(len(prefix)) if ids[at] >= 0]
                row[turn] = prefix[acted[-1] if acted else 0 :]
    return found


@pytest.mark.parametrize(
    ("numbered", "definition"), [(F.prefix_states, prefixes), (F.observation_states, observations)]
)
@given(conversations())
def test_numbers_are_equal_where_the_texts_are(numbered, definition, drawn):
    states, texts = numbered(*drawn, TURNS).flatten().tolist(), [text for row in definition(*drawn) for text in row]
    pairs = [(s, t) for s, t in zip(states, texts, strict=True) if t is not None]
    for state, text in pairs:
        assert [s == state for s, _ in pairs] == [t == text for _, t in pairs]
        assert state >= 0


class Largest(TorchDispatchMode):
    """The most numbers that a result of an operation has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [each.numel() for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, Tensor)]
        self.numel = max(self.numel, *found, 0)
        return out


@pytest.mark.parametrize("numbered", [F.prefix_states, F.observation_states])
def test_no_tensor_grows_with_the_square_of_the_batch(numbered):
    tokens, turn_ids = torch.randint(0, 2, (1024, 4 * TURNS)), torch.full((1024, 4 * TURNS), -1)
    for turn in range(TURNS):
        turn_ids[:, 4 * turn + 2 : 4 * turn + 4] = turn
    with Largest() as largest:
        states = numbered(tokens, turn_ids, TURNS)
        group = torch.arange(1024) // 4
        F.state_relative(torch.rand(1024, TURNS), states, group, torch.ones(1024, TURNS) > 0)
    assert largest.numel <= 4 * tokens.numel()


def test_the_states_of_a_batch_are_found_once():
    found = []

    class Watched(GroupRelative):
        def states(self, tensordict):
            found.append(1)
            return super().states(tensordict)

    rows = make_rows(LAYOUT, group_size=2)
    out = Watched(credit="state", baseline="leave_one_out", scale="none")(rows)
    assert "_states" not in out
    assert found == [1]


@pytest.mark.parametrize("fallback", ["turn", "return"])
@given(st.data())
def test_a_turn_is_compared_with_the_other_episodes_in_its_state(fallback, data):
    size = data.draw(st.integers(1, 6))

    def drawn(numbers: st.SearchStrategy) -> list[list]:
        return data.draw(st.lists(st.lists(numbers, min_size=TURNS, max_size=TURNS), min_size=size, max_size=size))

    score = torch.tensor(drawn(st.integers(-4, 4)), dtype=torch.float64)
    state, acted = drawn(st.integers(0, 2)), drawn(st.booleans())
    group = data.draw(st.lists(st.integers(5, 6), min_size=size, max_size=size))
    expected, num_compared = torch.zeros_like(score), torch.zeros(size, TURNS, dtype=torch.int64)
    for i in range(size):
        others = [j for j in range(size) if j != i and group[j] == group[i]]
        for k in range(TURNS):
            if acted[i][k]:
                same = [score[j, t] for j in others for t in range(TURNS) if acted[j][t] and state[j][t] == state[i][k]]
                at_turn = [score[j, k] if acted[j][k] else 0.0 for j in others] if fallback == "turn" else []
                compared, num_compared[i, k] = same or at_turn, len(same)
                expected[i, k] = score[i, k] - (sum(compared) / len(compared) if compared else 0.0)
    mask = torch.tensor(acted)
    score[~mask] = torch.nan  # never read
    result = F.state_relative(score, torch.tensor(state), torch.tensor(group), mask, fallback, partial="allow")
    torch.testing.assert_close(result, expected)
    assert F.num_compared(torch.tensor(state), torch.tensor(group), mask).equal(num_compared)


def rows(**extra: Tensor) -> TensorDict:
    yes, no = torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.bool)
    turn = {"reward": torch.tensor([[0.0, 1.0], [0.0, 3.0]]), "mask": yes, "terminated": yes, "truncated": no}
    turn |= {"extra": extra} if extra else {}
    made = {"tokens": torch.zeros(2, 3, dtype=torch.int64), "turn_ids": torch.tensor([[-1, 0, 1]] * 2), "turn": turn}
    return TensorDict({**made, "group_id": torch.tensor([4, 4])}, [2])


STATES = {"credit": "state", "baseline": "leave_one_out", "scale": "none"}


class TestEstimator:
    def test_an_extra_of_text_is_a_state(self):
        estimator = GroupRelative(**STATES, state="room", fallback="return")
        alone = estimator(rows(room=torch.tensor([[1, 2], [3, 4]])))[keys.TURN_ADVANTAGE]
        assert alone.tolist() == [[1.0, 1.0], [3.0, 3.0]]
        crossed = estimator(rows(room=torch.tensor([[1, 2], [2, 4]])))[keys.TURN_ADVANTAGE]
        assert crossed.tolist() == [[1.0, -2.0], [2.0, 3.0]]

    def test_how_many_were_compared_is_written(self):
        estimator = GroupRelative(**STATES, state="room")
        written = estimator(rows(room=torch.tensor([[1, 2], [2, 4]])))
        assert keys.TURN_NUM_COMPARED in estimator.out_keys
        assert written[keys.TURN_NUM_COMPARED].tolist() == [[0, 1], [1, 0]]
        assert keys.TURN_NUM_COMPARED not in GroupRelative().out_keys

    def test_what_is_no_state_is_refused(self):
        with pytest.raises(KeyError, match=r"rooom.* is not an extra of these rows, which have .*room"):
            GroupRelative(**STATES, state="rooom")(rows(room=torch.ones(2, 2, dtype=torch.int64)))
        with pytest.raises(TypeError, match="'room' is a number"):
            GroupRelative(**STATES, state="room")(rows(room=torch.ones(2, 2)))

    @pytest.mark.parametrize("options", [{}, {"baseline": "leave_one_out"}, {"scale": "none"}])
    def test_biased_options_are_refused(self, options):
        with pytest.raises(ValueError, match='give baseline="leave_one_out" and scale="none"'):
            GroupRelative(credit="state", **options)

    def test_groups_must_be_whole(self):
        with pytest.raises(ValueError, match="Expected 3 episodes in every group"):
            GroupRelative(**STATES, group_size=3)(rows())

    def test_rows_may_be_none(self):
        assert GroupRelative(**STATES)(rows()[:0])[keys.TURN_ADVANTAGE].shape == (0, 2)
