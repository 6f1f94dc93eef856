"""Attention of a stage in pieces: blocks of queries, a few prefixes at a time, copies that no
backward keeps."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from test_prefix_attention import assert_same, gradients, make_rows, shared, tokens_computed
from tiny_models import make_model
from torch import Tensor

from torchrl_llm.modules import TokenScorer, stage_attention
from torchrl_llm.modules.adapters import enable_gradient_checkpointing
from torchrl_llm.modules.stage_attention import Copied, StageMask


def scores(model, rows, prefixes) -> list[Tensor]:
    """Log-probs, and the gradients of a sum of them."""
    log_prob = TokenScorer(model, prefixes=prefixes)(rows.clone())["log_prob"]
    return [log_prob, *gradients(model, log_prob)]


@pytest.fixture
def pieces(monkeypatch):
    """Bounds so small that rows of 26 tokens are computed in many pieces."""
    monkeypatch.setattr(stage_attention, "_MASK", 64)
    monkeypatch.setattr(stage_attention, "_LEAST_BLOCK", 3)
    monkeypatch.setattr(stage_attention, "_ALIGNMENT", 1)
    monkeypatch.setattr(stage_attention, "_COPIED", 1)


class TestPieces:
    @pytest.mark.parametrize("window", [None, 6])
    def test_scores_and_gradients_are_those_of_plain_rows(self, exact_norms, pieces, window):
        fields = (
            {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
        )
        model, rows = make_model(**fields), make_rows(1, batch=12)
        plain = scores(model, rows, None)
        assert_same(scores(model, rows, shared(model)), plain, 1e-10)
        enable_gradient_checkpointing(model)
        assert_same(scores(model, rows, shared(model)), plain, 1e-10)

    @pytest.mark.parametrize("window", [None, 5])
    @pytest.mark.parametrize("start", [0, 7])
    def test_masks_are_parts_of_one(self, pieces, start, window):
        mask = StageMask.of(start, 11, groups=2, window=window, dtype=torch.float32, device=torch.device("cpu"))
        query, column = torch.arange(start, start + 11).repeat_interleave(2)[:, None], torch.arange(start + 11)
        wanted = (column <= query) & (column > query - (window or 99))
        found = torch.zeros_like(wanted)
        blocks = list(mask.blocks())
        assert len(blocks) > 2
        for rows, seen, values in blocks:
            found[rows, :seen] = values == 0
            assert torch.isin(values, torch.tensor([0.0, -torch.inf])).all()
        assert torch.equal(found, wanted)


class TestLongRows:
    def test_of_more_than_8192_tokens_share_with_masks_that_do_not_grow_with_their_square(self, monkeypatch):
        masks = []
        of = StageMask.of
        monkeypatch.setattr(StageMask, "of", lambda *given, **more: masks.append(of(*given, **more)) or masks[-1])
        model = make_model(torch.float32, num_hidden_layers=1, max_position_embeddings=16384)
        tokens = torch.randint(3, 48, (2, 9000), generator=torch.Generator().manual_seed(0))
        tokens[1, :7000] = tokens[0, :7000]
        turn_ids = torch.where(torch.arange(9000) < 7000, -1, 0).expand(2, -1)
        rows = TensorDict(tokens=tokens, attention_mask=torch.ones(2, 9000).bool(), turn_ids=turn_ids, batch_size=[2])
        sharing, counts = shared(model), tokens_computed(model)
        with torch.no_grad():
            plain, found = (TokenScorer(model, prefixes=x)(rows.clone())["log_prob"] for x in (None, sharing))
        assert counts == [2 * 8999, 7000 + 2 * 1999]
        assert_same([found], [plain], 1e-4)
        assert max(mask.values.numel() for mask in masks) <= 1.1 * 2**23


class TestCopies:
    def test_a_backward_keeps_none_of_them(self):
        """They were most of what rows with a long common prefix kept: keys and values of the whole
        prefix, once for each row."""
        model, rows = make_model(torch.float32), make_rows()
        out = TokenScorer(model, prefixes=shared(model))(rows)["log_prob"].sum()
        nodes, kept = [out.grad_fn], []
        for node in nodes:
            nodes += [parent for parent, _ in node.next_functions if parent is not None and parent not in nodes]
            if hasattr(node, "_raw_saved_key") and node._saved_attn_mask is not None:
                kept += [type(node._raw_saved_key.data), type(node._raw_saved_value.data)]
        assert set(kept) == {Copied}
