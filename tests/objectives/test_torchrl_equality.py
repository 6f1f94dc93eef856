"""The estimators against TorchRL's own functions, with a decision of a conversation as the step in
time.

All conversations of a batch are packed into one trajectory with done flags, as TorchRL takes them:
gaps in the mask are left out, a turn without an action token adds its reward and its discount to
the decision before it, and a truncated conversation ends without being terminated.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from conversations import DOUBLE, LAYOUT, law, layouts, make_rows
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    reward2go,
    td_lambda_advantage_estimate,
    td_lambda_return_estimate,
    vec_generalized_advantage_estimate,
    vec_td_lambda_return_estimate,
    vtrace_advantage_estimate,
)

from torchrl_llm import functional as F
from torchrl_llm.objectives import ReBN, TurnGAE, TurnVTrace

unit = st.floats(0.0, 1.0)


class Steps(NamedTuple):
    """The decisions of a batch in one line, ``[1, N, 1]`` each, and the rows and turns they came
    from."""

    rows: list[int]
    turns: list[int]
    gamma: Tensor
    value: Tensor
    next_value: Tensor
    reward: Tensor
    done: Tensor
    terminated: Tensor

    @property
    def returns(self) -> tuple[Tensor, ...]:
        """What TorchRL calls next_state_value, reward, done and terminated."""
        return self.next_value, self.reward, self.done, self.terminated

    def column(self, x: Tensor) -> Tensor:
        return x[self.rows, self.turns].view(1, -1, 1)


def conversations(layout: list, seed: int) -> TensorDict:
    """The rows of the layout, and one more, so that there is a decision."""
    return make_rows([*layout, [(True, 1, 2)] * len(layout[0])], seed)


def line(numbers: list) -> Tensor:
    flags = isinstance(numbers[0], bool)
    return torch.tensor(numbers, dtype=torch.bool if flags else DOUBLE).view(1, -1, 1)


def decisions(rows: TensorDict, gamma: float) -> Steps:
    turn, ids = rows["turn"], rows["turn_ids"]
    steps = []
    for b in range(len(rows)):
        played = turn["mask"][b].nonzero().flatten().tolist()
        acted = [p for p, t in enumerate(played) if (ids[b] == t).any()]
        values = [float(rows["state_value"][b, (ids[b] == played[p]).nonzero()[0, 0]]) for p in acted]
        truncated = bool(turn["truncated"][b].any())
        for k, (p, after) in enumerate(itertools.pairwise([*acted, None])):
            end = len(played) if after is None else after
            reward = sum(gamma**i * float(turn["reward"][b, played[p + i]]) for i in range(end - p))
            # Where it is not used, the next value may be anything.
            following = float(rows["bootstrap_value"][b]) if after is None else values[k + 1]
            last = after is None
            steps.append((b, played[p], gamma ** (end - p), values[k], following, reward, last, last and not truncated))
    columns = list(zip(*steps, strict=True))
    return Steps(list(columns[0]), list(columns[1]), *(line(list(x)) for x in columns[2:]))


def equal(actual: Tensor, expected: Tensor, steps: Steps, atol: float = 1e-9) -> None:
    """``actual`` ``[B, T]`` holds ``expected`` at the decisions and 0 elsewhere."""
    filled = torch.zeros_like(actual)
    filled[steps.rows, steps.turns] = expected.flatten()
    torch.testing.assert_close(actual, filled, rtol=0, atol=atol)


def everyone_acts(layout: list) -> list:
    return [[(played, gap, max(tokens, 1)) for played, gap, tokens in row] for row in layout]


class TestTurnGAE:
    @law(layouts(), unit, unit)
    def test_generalized_advantage_estimate(self, case, gamma, lmbda):
        rows = conversations(*case)
        steps = decisions(rows, gamma)
        out = TurnGAE(gamma=gamma, lmbda=lmbda, whiten=False)(rows)
        # Its coefficients are float32, unless gamma is a float64 tensor.
        advantage, target = generalized_advantage_estimate(steps.gamma, lmbda, steps.value, *steps.returns)
        equal(out["turn", "advantage"], advantage, steps)
        equal(out["turn", "value_target"], target, steps)

    @law(layouts(), unit, unit)
    def test_td_lambda(self, case, gamma, lmbda):
        rows = conversations(*case)
        steps = decisions(rows, gamma)
        out = TurnGAE(gamma=gamma, lmbda=lmbda, whiten=False)(rows)
        target = td_lambda_return_estimate(steps.gamma, lmbda, *steps.returns)
        advantage = td_lambda_advantage_estimate(steps.gamma, lmbda, steps.value, *steps.returns)
        equal(out["turn", "value_target"], target, steps)
        equal(out["turn", "advantage"], advantage, steps)

    @law(layouts(), st.floats(0.1, 1.0), st.floats(0.1, 1.0))
    def test_vectorised(self, case, gamma, lmbda):
        """TorchRL's ``vec_`` functions: float32 coefficients, cut where they fall below 1e-7; one
        discount for all."""
        rows = conversations(everyone_acts(case[0]), case[1])
        steps = decisions(rows, gamma)
        out = TurnGAE(gamma=gamma, lmbda=lmbda, whiten=False)(rows)
        advantage, target = vec_generalized_advantage_estimate(gamma, lmbda, steps.value, *steps.returns)
        equal(out["turn", "advantage"], advantage, steps, atol=1e-5)
        equal(out["turn", "value_target"], target, steps, atol=1e-5)
        target = vec_td_lambda_return_estimate(gamma, lmbda, *steps.returns)
        equal(out["turn", "value_target"], target, steps, atol=1e-5)

    @law(layouts(), unit, unit)
    def test_tokens_as_steps(self, case, gamma, lmbda):
        """The same with each action token as a row's turn, its reward where the turn's is paid."""
        rows = conversations(*case)
        ids = rows["turn_ids"]
        actions = ids >= 0
        ends = actions & (actions.flip(1).cumsum(1).flip(1) == 1)
        cut = rows["turn", "truncated"].any(1, keepdim=True)
        tokens = rows.exclude("turn").update(
            {
                "turn_ids": torch.where(actions, torch.arange(ids.shape[1]), -1),
                "turn": {
                    "mask": actions,
                    "reward": F.token_rewards(rows["turn", "reward"], ids, rows["turn", "mask"]),
                    "terminated": ends & ~cut,
                    "truncated": ends & cut,
                },
            }
        )
        steps = decisions(tokens, gamma)
        out = TurnGAE(gamma=gamma, lmbda=lmbda, whiten=False, granularity="token")(rows)
        advantage, target = generalized_advantage_estimate(steps.gamma, lmbda, steps.value, *steps.returns)
        equal(out["advantage"], advantage, steps)
        equal(out["value_target"], target, steps)


class TestReBN:
    @law(layouts(), st.floats(0.01, 1.0))
    def test_reward2go(self, case, gamma):
        """Every played turn is a step of time. TorchRL cuts powers of gamma below 1e-7, and takes
        no gamma that small."""
        rows = conversations(*case)
        mask, ids = rows["turn", "mask"], rows["turn_ids"]
        acted = mask & (F.turn_lengths(ids, mask.shape[1]) > 0)
        played = mask.nonzero(as_tuple=True)
        done = (mask.flip(1).cumsum(1).flip(1) == 1)[played]
        returns = torch.zeros(mask.shape, dtype=DOUBLE)
        returns[played] = reward2go(rows["turn", "reward"][played].view(-1, 1), done.view(-1, 1), gamma).flatten()
        plain = ReBN(gamma=gamma, normalize_over="none")(rows.clone())
        for figure in ("advantage", "value_target"):
            torch.testing.assert_close(plain["turn", figure], returns * acted, rtol=0, atol=1e-6)
        if acted.sum() > 1:
            scale = returns[acted].std() + 1e-8
            expected = torch.where(acted, (returns - returns[acted].mean()) / scale, 0.0)
            torch.testing.assert_close(
                ReBN(gamma=gamma)(rows)["turn", "advantage"], expected, rtol=0, atol=1e-5 / scale
            )


class TestTurnVTrace:
    # TorchRL takes its thresholds in float32: here such that it does not round.
    @law(layouts(), unit, *(st.sampled_from([0.25, 0.75, 1.0, 1.5, 4.0]) for _ in "rc"))
    def test_vtrace_advantage_estimate(self, case, gamma, rho, c):
        """TorchRL's docstring names log_pi the collecting policy; in its code it is the present
        one, as here."""
        rows = conversations(*case)
        # further from the sampler's, so that all thresholds bind
        rows["old_log_prob"] = rows["theta"]
        steps = decisions(rows, gamma)
        out = TurnVTrace(gamma=gamma, rho_clip=rho, c_clip=c)(rows)
        log_pi, log_mu = (
            steps.column(F.turn_sum(rows[key], rows["turn_ids"], rows["turn", "mask"].shape[1]))
            for key in ("old_log_prob", "sample_log_prob")
        )
        advantage, target = vtrace_advantage_estimate(
            steps.gamma, log_pi, log_mu, steps.value, *steps.returns, rho_thresh=rho, c_thresh=c
        )
        equal(out["turn", "advantage"], advantage, steps)
        equal(out["turn", "value_target"], target, steps)

    def test_on_policy_it_is_gae_with_lambda_one(self):
        rows = make_rows(LAYOUT)
        rows["old_log_prob"] = rows["sample_log_prob"]
        gae = TurnGAE(gamma=0.9, lmbda=1.0, whiten=False)(rows.clone())
        vtrace = TurnVTrace(gamma=0.9)(rows)
        for figure in ("advantage", "value_target"):
            torch.testing.assert_close(vtrace["turn", figure], gae["turn", figure], rtol=0, atol=1e-12)


def test_the_batch_has_what_is_claimed():
    """Gaps, turns without tokens in the middle and at the end, terminated and truncated rows."""
    rows = make_rows(LAYOUT)
    steps = decisions(rows, 0.5)
    assert set(steps.gamma.flatten().tolist()) == {0.5, 0.25}
    assert len(steps.rows) < int(rows["turn", "mask"].sum()) < rows["turn", "mask"].numel()
    assert 0 < int(steps.terminated.sum()) < int(steps.done.sum()) == len(rows)
