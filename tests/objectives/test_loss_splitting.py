"""Gradients that do not depend on how a batch was cut into micro-batches or shared among
processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conversations import close
from loss_cases import ALGORITHMS, batch_for
from tensordict import TensorDict
from torch.nn.functional import pad

from torchrl_llm.objectives import TurnPolicyLoss, merge, total, write_loss_weights


def widened(rows: TensorDict) -> TensorDict:
    """The same rows with five more columns and two more turns."""
    fills = {"tokens": 0, "attention_mask": False, "turn_ids": -1}
    out = {k: pad(v, (0, 5), value=fills.get(k, 7.0)) for k, v in rows.exclude("turn").items() if v.ndim == 2}
    out |= {k: v for k, v in rows.exclude("turn").items() if v.ndim == 1}
    return TensorDict(out | {"turn": rows["turn"].apply(lambda x: pad(x, (0, 2)))}, rows.batch_size)


def gradient(loss: TurnPolicyLoss, micro_batches) -> tuple[torch.Tensor, TensorDict]:
    loss.zero_grad(set_to_none=False)
    outputs = []
    for micro in micro_batches:
        outputs.append(loss(micro))
        total(outputs[-1]).backward()
    return torch.cat([p.grad.flatten() for p in loss.parameters() if p.grad is not None]), merge(outputs)


def _rank(rank: int, store: str, out: str) -> None:
    """Credit, weights and gradient of every algorithm for the rows of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = {}
    for name, make in ALGORITHMS.items():
        loss = make()
        if hasattr(loss.value_estimator, "process_group"):
            loss.value_estimator.process_group = dist.group.WORLD
        rows = batch_for(loss, slice(0, 3) if rank == 0 else slice(3, 6))
        write_loss_weights(rows, loss, dist.group.WORLD)
        results[name] = gradient(loss, rows.split(2))[0]
    torch.save(results, f"{out}.{rank}")
    dist.destroy_process_group()


class TestSplitting:
    """The gradient of an optimizer batch does not depend on how it is cut, padded or ordered."""

    @pytest.mark.parametrize("row_weight", [None, (0.5, 0.5, 2.0, 0.0, 0.25, 1.0)], ids=["rows", "weighted rows"])
    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_gradient(self, name, row_weight):
        loss = ALGORITHMS[name]()
        rows = batch_for(loss)
        if row_weight:
            rows["row_weight"] = torch.tensor(row_weight)
        whole, figures = gradient(loss, [rows])
        assert whole.abs().max() > 1e-3
        write_loss_weights(rows, loss)
        cuts = {
            "two": [rows[:2], rows[2:]],
            "single": rows.split(1),
            "permuted": [rows[torch.tensor([5, 2, 0])], rows[torch.tensor([4, 1, 3])]],
            "padded": [widened(rows)],
            "padded apart": [widened(rows[:4]), rows[4:]],
        }
        for cut, parts in cuts.items():
            split, merged = gradient(loss, parts)
            assert (split - whole).abs().max() / whole.abs().max() < 1e-10, cut
            for key in set(figures.keys()) - {"ESS", "explained_variance"}:
                close(merged[key], figures[key], atol=1e-6)  # weights are float32

    def test_ranks(self, tmp_path):
        """Half of the rows on each of two processes, groups whole: credit and weights are the same
        as of all rows."""
        args = (str(tmp_path / "store"), str(tmp_path / "out"))
        mp.start_processes(_rank, args, nprocs=2, start_method="fork")
        parts = [torch.load(tmp_path / f"out.{rank}") for rank in range(2)]
        for name, make in ALGORITHMS.items():
            loss = make()
            whole, _ = gradient(loss, [batch_for(loss)])
            summed = parts[0][name] + parts[1][name]
            assert (summed - whole).abs().max() / whole.abs().max() < 1e-10, name

    def test_it_would_depend_on_it_without_the_weights(self):
        loss = ALGORITHMS["grpo"]()
        rows = batch_for(loss)
        whole, _ = gradient(loss, [rows])
        split, _ = gradient(loss, [rows[:2], rows[2:]])
        assert (split - whole).abs().max() / whole.abs().max() > 0.1

    def test_a_row_of_padding_adds_nothing(self):
        loss = ALGORITHMS["ppo"]()
        rows = batch_for(loss)
        whole, _ = gradient(loss, [rows])
        idle = rows[:1].clone()
        idle["turn_ids"] = torch.full_like(idle["turn_ids"], -1)
        write_loss_weights(rows, loss)
        idle["loss_weight"], idle["critic_weight"] = (torch.zeros_like(rows["loss_weight"][:1]) for _ in "12")
        with_idle, _ = gradient(loss, [rows, idle])
        assert torch.equal(with_idle, whole) or (with_idle - whole).abs().max() < 1e-12


class TestTotalAndMerge:
    def test_total_takes_losses_only(self):
        out = TensorDict({"loss_a": torch.tensor(1.0), "loss_b": torch.tensor(2.0), "kl": torch.tensor(4.0)})
        assert total(out).item() == 3
        with pytest.raises(ValueError, match="named loss_"):
            total(TensorDict({"kl": torch.tensor(1.0)}))

    def test_merge_needs_something(self):
        with pytest.raises(ValueError, match="at least one"):
            merge([])
