"""Credit of a batch that two processes share equals the credit of all its rows: real processes,
gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conversations import LAYOUT, close, make_rows

from torchrl_llm import keys
from torchrl_llm.data import zero_weight_rows
from torchrl_llm.objectives import GroupRelative, NoCredit, ReBN, RoleRelative, TurnGAE, TurnVine

ESTIMATORS = {
    "rebn": ReBN,
    "gae": TurnGAE,
    "batch scale": lambda: GroupRelative(scale="batch"),
    "batch scale by turn": lambda: GroupRelative(scale="batch", credit="turn"),
    "whitened": lambda: GroupRelative(scale="none", whiten=True),
    "no credit": lambda: NoCredit(kl_coeff=0.3),
    "vine": TurnVine,
    "roles": RoleRelative,
    "roles by turn": lambda: RoleRelative(credit="turn"),
}
PARTS = {"halves": (slice(0, 2), slice(2, 6)), "nothing here": (slice(0, 0), slice(0, 6))}


def batch(name):
    """Six rows in groups of two; of one episode where groups are not what is compared."""
    rows = make_rows(LAYOUT, group_size=1 if name == "vine" else 2)
    rows[keys.SAMPLED_VALUE] = torch.where(
        torch.rand(rows[keys.TURN_MASK].shape, generator=torch.Generator().manual_seed(1)) < 0.5, torch.nan, 0.25
    ).double()
    rows[keys.turn_extra("role")] = (
        torch.tensor([7, 9, 7, 7, 9, 3]).unsqueeze(1).expand(rows[keys.TURN_MASK].shape).clone()
    )
    return rows


def _rank(rank: int, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = {}
    for cut, parts in PARTS.items():
        for name, make in ESTIMATORS.items():
            estimator = make()
            estimator.process_group = dist.group.WORLD
            rows = batch(name)
            own = rows[parts[rank]]
            # As a trainer does where a rank has none.
            lent = own if len(own) else zero_weight_rows(rows[:2])
            results[cut, name] = estimator(lent.clone())["advantage"][: len(own)]
    torch.save(results, f"{out}.{rank}")
    dist.destroy_process_group()


class TestRanks:
    @pytest.fixture(scope="class")
    def ranks(self, tmp_path_factory):
        where = tmp_path_factory.mktemp("ranks")
        args = (str(where / "store"), str(where / "out"))
        mp.start_processes(_rank, args, nprocs=2, start_method="fork")
        return [torch.load(where / f"out.{rank}") for rank in range(2)]

    @pytest.mark.parametrize("cut", PARTS)
    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_credit_is_that_of_all_rows(self, ranks, name, cut):
        whole = ESTIMATORS[name]()(batch(name))["advantage"]
        assert whole.abs().max() > 1e-2
        found = torch.cat([each[cut, name] for each in ranks])
        close(found, whole)
