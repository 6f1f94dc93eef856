"""The schema of keys: padding, trimming and the views follow it, and nothing guesses from a
width."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm import keys
from torchrl_llm.data import cat_rows, micro_batches
from torchrl_llm.keys import KeySpec, declare_row_key


@pytest.fixture(autouse=True)
def schema(monkeypatch):
    monkeypatch.setattr(keys, "ROW_VIEW", dict(keys.ROW_VIEW))


def rows(lengths, **more):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
    return TensorDict({"attention_mask": mask, "tokens": mask.long(), **more}, batch_size=[len(lengths)])


def test_every_constant_is_declared():
    found = {name: value for name, value in vars(keys).items() if name.isupper() and isinstance(value, str | tuple)}
    # What is counted of a response depends on the chat template and the tools.
    names = {value for name, value in found.items() if not name.endswith("_COLUMNS") and value[0] != "extra"}
    assert names == {*keys.TURN_VIEW, *keys.ROW_VIEW}
    assert all(name == spec.name for view in (keys.TURN_VIEW, keys.ROW_VIEW) for name, spec in view.items())


def test_a_key_of_ones_own_is_trimmed_and_padded_as_declared():
    declare_row_key(KeySpec("score", "token", torch.float32, "me", "", fill=-7))
    declare_row_key(KeySpec("embedding", "row", torch.float32, "me", ""))
    # as wide as the tokens
    narrow = rows([2, 1], score=torch.ones(2, 2), embedding=torch.ones(2, 2))
    wide = rows([3], score=torch.ones(1, 3), embedding=torch.ones(1, 2))
    both = cat_rows([narrow, wide])
    assert both["score"].tolist() == [[1, 1, -7], [1, 1, -7], [1, 1, 1]]
    assert both["embedding"].shape == (3, 2)
    parts = micro_batches(narrow, 2)
    assert [(part["score"].shape, part["embedding"].shape) for part in parts] == [((1, 2), (1, 2)), ((1, 1), (1, 2))]


def test_a_key_of_a_turn_needs_no_declaration():
    one, two = ({"mask": torch.ones(1, n) > 0, "judged": torch.ones(1, n)} for n in (1, 2))
    assert cat_rows([rows([3], turn=one), rows([3], turn=two)])["turn", "judged"].tolist() == [[1, 0], [1, 1]]


def test_a_key_that_nothing_is_known_of_is_refused():
    with pytest.raises(KeyError, match="declare_row_key"):
        micro_batches(rows([2], mine=torch.ones(1, 2)), 8)
    assert micro_batches(rows([2], mine=torch.ones(1)), 8)[0]["mine"].shape == (1,)


def test_wrong_declarations():
    with pytest.raises(ValueError, match="expected 'row'"):
        declare_row_key(KeySpec("x", "response", torch.float32, "me", ""))
    with pytest.raises(ValueError, match="declared already"):
        declare_row_key(KeySpec("tokens", "turn", torch.float32, "me", ""))
