"""The objectives of other systems that are compared with, token by token against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from conversations import DOUBLE, close, table_actor
from published_objectives import DPPO, GMPO, IPO, SAPO
from tensordict import TensorDict

OLD = [0.5, 0.1, 0.6, 0.05]


def gradient(kind: type, new: list[float], advantage: float) -> torch.Tensor:
    """Of the objective's sum, for the log-prob of each of four tokens of one turn."""
    theta = torch.tensor([[0.0, *new]], dtype=DOUBLE).log().nan_to_num(neginf=0.0).requires_grad_()
    rows = {
        "turn_ids": torch.tensor([[-1, 0, 0, 0, 0]]),
        "sample_log_prob": torch.tensor([[1.0, *OLD]], dtype=DOUBLE).log(),
        "advantage": torch.tensor([[0.0, *[advantage] * 4]], dtype=DOUBLE),
        "theta": theta,
    }
    loss = kind(table_actor(), kl_coeff=0.0, weighting="constant", weight_constant=1.0)
    loss(TensorDict(rows, [1]))["loss_objective"].backward()
    return -theta.grad[0, 1:]


NEW = [0.9, 0.15, 0.3, 0.05]
"""More likely by much, by a ratio of 1.5 but little, less likely by much, and unchanged."""
RATIO = [new / old for new, old in zip(NEW, OLD, strict=True)]


@pytest.mark.parametrize("advantage", [2.0, -2.0])
class TestGradients:
    def test_sapo(self, advantage):
        tau = 1.0 if advantage > 0 else 1.05
        gates = [1 / (1 + math.exp(-tau * (r - 1))) for r in RATIO]
        close(
            gradient(SAPO, NEW, advantage), [4 * g * (1 - g) * r * advantage for g, r in zip(gates, RATIO, strict=True)]
        )

    @pytest.mark.parametrize("kind", [DPPO, IPO])
    def test_masks_of_probabilities(self, kind, advantage):
        up, down = (advantage > 0, advantage < 0) if kind is DPPO else (True, True)
        kept = [not up, True, not down, True]
        close(gradient(kind, NEW, advantage), [k * r * advantage for k, r in zip(kept, RATIO, strict=True)])

    def test_gmpo(self, advantage):
        logs = [math.log(r) for r in RATIO]
        bound = [min(x, 0.4) if advantage > 0 else max(x, -0.4) for x in logs]
        mean = math.exp(sum(bound) / 4)
        close(gradient(GMPO, NEW, advantage), [(b == x) * mean * advantage for b, x in zip(bound, logs, strict=True)])
