"""The losses: every option against a token-by-token definition, and gradients that do not know how a batch was cut."""

from __future__ import annotations

import copy
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conversations import DOUBLE, LAYOUT, law, layouts, make_actor, make_critic, make_rows, table_actor, table_critic
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.nn.functional import pad
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value import GAE

import torchrl_llm.objectives as package
from torchrl_llm.objectives import (
    GroupRelative,
    LLMGRPOLoss,
    LLMPPOLoss,
    LLMReinforceLoss,
    ReBN,
    TurnGAE,
    TurnPolicyLoss,
    TurnVTrace,
    merge,
    total,
    write_loss_weights,
)
from torchrl_llm.objectives import functional as F


def close(actual, expected, atol=1e-10):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-10, atol=atol)


OPTIONS = st.fixed_dictionaries(
    {
        "clipping": st.sampled_from(["ppo", "cispo", "none"]),
        "clip_epsilon": st.sampled_from([0.2, (0.05, 0.4)]),
        "dual_clip": st.sampled_from([None, 1.5]),
        "ratio_level": st.sampled_from(["token", "turn", "sequence"]),
        "ratio_reduction": st.sampled_from(["sum", "mean"]),
        "unit_weight": st.sampled_from(["by_tokens", "equal"]),
        "weighting": st.sampled_from(["token", "turn", "sequence", "constant"]),
        "kl_coeff": st.sampled_from([0.0, 0.3]),
        "kl_kind": st.sampled_from(["k2", "k3"]),
        "entropy_coeff": st.sampled_from([0.0, 0.2]),
        "entropy_target": st.sampled_from([None, 0.5]),
        "sampler_correction": st.sampled_from([None, "truncate", "mask", "reject"]),
        "sampler_level": st.sampled_from(["token", "turn", "sequence"]),
        "sampler_reduction": st.sampled_from(["sum", "mean"]),
    }
).map(
    lambda o: (
        o
        | ({} if o["clipping"] == "ppo" else {"dual_clip": None})
        | {"sampler_bounds": {None: None, "truncate": 1.02}.get(o["sampler_correction"], (0.95, 1.05))}
        | ({"weighting": "token"} if o["unit_weight"] == "equal" else {})
        | ({"weight_constant": 7.0} if o["unit_weight"] != "equal" and o["weighting"] == "constant" else {})
    )
)


class Naive:
    """The definitions, one token at a time."""

    def __init__(self, rows: TensorDict, theta, **options) -> None:
        self.ids, self.rows, self.theta, self.o = rows["turn_ids"].tolist(), rows, theta, options
        self.tokens = [(b, i) for b, row in enumerate(self.ids) for i, k in enumerate(row) if k >= 0]

    def members(self, level: str, b: int, i: int) -> list[tuple[int, int]]:
        if level == "token":
            return [(b, i)]
        return [(c, j) for c, j in self.tokens if c == b and (level == "sequence" or self.ids[b][i] == self.ids[c][j])]

    def weight(self, kind: str, b: int, i: int) -> float:
        rows = len({c for c, _ in self.tokens})
        if kind == "constant":
            return 1 / (rows * self.o["weight_constant"])
        units = {
            "token": len(self.tokens),
            "sequence": rows,
            "turn": len({(c, self.ids[c][j]) for c, j in self.tokens}),
        }
        return 1 / (units[kind] * len(self.members(kind, b, i)))

    def losses(self) -> dict[str, torch.Tensor]:
        o, rows, zero = self.o, self.rows, torch.zeros((), dtype=DOUBLE)
        low, high = o["clip_epsilon"] if isinstance(o["clip_epsilon"], tuple) else (o["clip_epsilon"],) * 2
        level, out = (
            o["ratio_level"],
            dict.fromkeys(("loss_objective", "loss_kl", "loss_entropy", "clip_fraction"), zero),
        )
        for b, i in self.tokens:
            log_ratio, unit = self.theta[b, i] - rows["old_log_prob"][b, i], self.members(level, b, i)
            pooled = sum(self.theta[c] - rows["old_log_prob"][c] for c in unit)
            ratio = (pooled / (len(unit) if o["ratio_reduction"] == "mean" else 1)).exp()
            a = rows["advantage"][b, i]
            objective = self.objective(ratio, a, low, high)
            w = self.weight(level if o["unit_weight"] == "equal" else o["weighting"], b, i)
            once = level != "token" and o["ratio_reduction"] == "sum" and o["unit_weight"] == "by_tokens"
            c = self.correction(b, i)
            d = rows["ref_log_prob"][b, i] - self.theta[b, i]
            kl = d**2 / 2 if o["kl_kind"] == "k2" else d.exp() - d - 1
            out["loss_objective"] = out["loss_objective"] - w * c * objective / (len(unit) if once else 1)
            out["loss_kl"] = out["loss_kl"] + o["kl_coeff"] * w * c * log_ratio.exp().detach() * kl
            entropy = -self.theta[b, i] / 2  # what table_actor writes
            paid = (
                entropy
                if o["entropy_target"] is None
                else min(entropy, torch.tensor(o["entropy_target"], dtype=DOUBLE))
            )
            out["loss_entropy"] = out["loss_entropy"] - o["entropy_coeff"] * w * paid
            if o["clipping"] == "cispo":
                clipped = not 1 - low <= ratio <= 1 + high
            else:
                clipped = bool(objective != ratio * a)
            out["clip_fraction"] = out["clip_fraction"] + w * float(clipped)
        return out

    def objective(self, ratio, a, low: float, high: float):
        if self.o["clipping"] == "none":
            return ratio * a
        if self.o["clipping"] == "cispo":
            return ratio.detach().clamp(1 - low, 1 + high) * a * ratio.log()
        surrogate = min(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
        bounded = self.o["dual_clip"] is not None and a < 0
        return max(surrogate, self.o["dual_clip"] * a) if bounded else surrogate

    def correction(self, b: int, i: int) -> float:
        kind, bounds = self.o["sampler_correction"], self.o["sampler_bounds"]
        if kind is None:
            return 1.0
        unit = self.members(self.o["sampler_level"], b, i)
        gap = sum(self.rows["old_log_prob"][c].item() - self.rows["sample_log_prob"][c].item() for c in unit)
        weight = math.exp(gap / (len(unit) if self.o["sampler_reduction"] == "mean" else 1))
        if kind == "truncate":
            return min(weight, bounds)
        return (weight if kind == "mask" else 1.0) if bounds[0] <= weight <= bounds[1] else 0.0


class Lenient(TurnPolicyLoss):
    """Takes options that do nothing, to see that they do nothing."""

    idle = ()


class TestTurnPolicyLoss:
    @law(layouts(max_rows=3, max_turns=3), OPTIONS, examples=60)
    def test_every_option_means_what_it_says(self, case, options):
        rows = make_rows(*case)
        theta = rows["theta"].clone().requires_grad_()
        expected = Naive(rows, theta, **options).losses()
        out = Lenient(table_actor(), **options)(rows.clone().set("theta", theta))
        assert ("loss_kl" in out) == (options["kl_coeff"] > 0)
        assert ("loss_entropy" in out) == (options["entropy_coeff"] > 0)
        for key, value in out.items():
            if key in expected:
                close(value, expected[key].detach(), atol=2e-6)  # weights are float32
        (gradient,) = torch.autograd.grad(total(out), theta)
        if rows["turn_ids"].amax() >= 0:
            (exact,) = torch.autograd.grad(sum(v for k, v in expected.items() if k.startswith("loss_")), theta)
            torch.testing.assert_close(gradient, exact.nan_to_num(), rtol=1e-6, atol=1e-6)
        assert gradient.isfinite().all()

    @law(OPTIONS, st.floats(-1e3, 1e3), st.sampled_from([0.0, 1.0]), examples=100)
    def test_losses_and_gradients_are_finite_however_far_the_policy_went(self, options, gap, spread):
        rows = make_rows(LAYOUT).apply(lambda x: x.float() if x.is_floating_point() else x)
        noise = torch.rand(rows["turn_ids"].shape, generator=torch.Generator().manual_seed(0))
        rows["advantage"][0] = 0.0
        theta = (rows["old_log_prob"] + gap * (1 - spread * noise)).requires_grad_()
        rows["sample_log_prob"] = rows["old_log_prob"] - gap
        out = Lenient(table_actor(), **options)(rows.set("theta", theta))
        assert all(value.isfinite().all() for value in out.values()), dict(out)
        (gradient,) = torch.autograd.grad(total(out), theta)
        assert gradient.isfinite().all()

    @pytest.mark.parametrize(
        ("options", "moved"),
        [
            ({"clip_epsilon": 0.05}, "loss_objective"),
            ({"clip_epsilon": (0.2, 0.5)}, "loss_objective"),
            ({"clip_epsilon": (0.5, 0.2)}, "loss_objective"),
            ({"ratio_level": "turn"}, "loss_objective"),
            ({"ratio_level": "sequence"}, "loss_objective"),
            ({"weighting": "turn"}, "loss_objective"),
            ({"weighting": "sequence"}, "loss_objective"),
            ({"weighting": "constant", "weight_constant": 8.0}, "loss_objective"),
            ({"kl_coeff": 0.2}, "loss_kl"),
            ({"kl_kind": "k2"}, "loss_kl"),
            ({"entropy_coeff": 0.2}, "loss_entropy"),
            ({"entropy_coeff": 0.1, "entropy_target": 0.5}, "loss_entropy"),
            ({"clipping": "cispo"}, "loss_objective"),
            ({"clipping": "none"}, "loss_objective"),
            ({"dual_clip": 1.21}, "loss_objective"),
            ({"sampler_correction": "truncate", "sampler_bounds": 1.0}, "loss_objective"),
            ({"sampler_correction": "truncate", "sampler_bounds": 1.0}, "loss_kl"),
            ({"sampler_correction": "mask", "sampler_bounds": (0.95, 1.05)}, "loss_objective"),
            ({"sampler_correction": "reject", "sampler_bounds": (0.95, 1.05)}, "loss_objective"),
        ],
        ids=str,
    )
    def test_no_option_is_ignored(self, options, moved):
        rows, base = make_rows(LAYOUT), {"kl_coeff": 0.1, "entropy_coeff": 0.1}
        before = TurnPolicyLoss(table_actor(), **base)(rows)[moved]
        after = TurnPolicyLoss(table_actor(), **base | options)(rows)[moved]
        assert (before - after).abs() > 1e-5

    @pytest.mark.parametrize(
        ("name", "values"), [("sampler_level", ("token", "turn", "sequence")), ("sampler_reduction", ("sum", "mean"))]
    )
    def test_no_option_of_the_correction_is_ignored(self, name, values):
        base = {"sampler_correction": "truncate", "sampler_bounds": 1.0, "sampler_level": "turn"}
        results = [
            TurnPolicyLoss(table_actor(), **base | {name: v})(make_rows(LAYOUT))["loss_objective"] for v in values
        ]
        assert all((a - b).abs() > 1e-5 for a, b in itertools.combinations(results, 2))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"gamma": 99}, "LLMPPOLoss.gamma is 99; expected a number, between 0 and 1"),
            ({"lmbda": 7}, "LLMPPOLoss.lmbda is 7"),
            ({"kl_coeff": -0.1}, "LLMPPOLoss.kl_coeff is -0.1"),
            ({"critic_coeff": "0.5"}, "LLMPPOLoss.critic_coeff is '0.5'; expected a number"),
            ({"weighting": "turns"}, "'token', 'turn', 'sequence', 'constant'"),
            ({"kl_in": "reward", "kl_kind": "k2"}, "kl_kind='k2' does nothing with kl_in='reward'"),
            ({"clipping": "none", "clip_epsilon": 0.3}, "clip_epsilon=0.3 does nothing with clipping='none'"),
            ({"sampler_level": "turn"}, "sampler_level='turn' does nothing with sampler_correction=None"),
            ({"ratio_reduction": "sum"}, "ratio_reduction='sum' does nothing with ratio_level='token'"),
        ],
    )
    def test_types_ranges_and_options_without_effect(self, options, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            LLMPPOLoss(table_actor(), table_critic(), **options)

    def test_a_misspelt_option_names_the_nearest_also_in_a_subclass(self):
        class Own(LLMPPOLoss):
            def __init__(self, *networks, width=1, **options):
                super().__init__(*networks, **options)

        for cls in (LLMPPOLoss, Own):
            with pytest.raises(TypeError, match=rf"{cls.__name__} has no option 'gama'\. Did you mean 'gamma'\?"):
                cls(table_actor(), table_critic(), gama=0.9)
        assert Own(table_actor(), table_critic(), width=2, gamma=0.5).value_estimator.gamma == 0.5

    def test_estimators_check_their_options_too(self):
        with pytest.raises(TypeError, match="Did you mean 'lmbda'"):
            TurnGAE(lmda=0.9)
        with pytest.raises(ValueError, match=r"ReBN\.gamma is 1\.5"):
            ReBN(gamma=1.5)
        loss = LLMPPOLoss(table_actor(), table_critic())
        assert loss.make_value_estimator(GroupRelative, partial="allow").value_estimator.gamma == 1.0

    def test_cispo_keeps_the_gradient_that_ppo_takes(self):
        rows = make_rows([[(True, 1, 2)]])
        action = rows["turn_ids"] >= 0
        rows["advantage"] = action.double()
        theta = (rows["old_log_prob"] + 1.0).requires_grad_()  # ratio e, far above the bound
        for clipping, expected in (("ppo", 0.0), ("cispo", 1.2), ("none", math.e)):
            out = TurnPolicyLoss(table_actor(), clipping=clipping)(rows.clone().set("theta", theta))
            (gradient,) = torch.autograd.grad(total(out), theta)
            close(gradient[action], torch.full((2,), -expected / 2, dtype=DOUBLE))
            assert out["clip_fraction"] == float(clipping != "none")

    @pytest.mark.parametrize("option", [{"ratio_reduction": "sum"}, {"unit_weight": "equal"}], ids=str)
    def test_unit_options_count_once_units_are_pooled(self, option):
        rows = make_rows(LAYOUT)
        for level, differs in (("token", False), ("turn", True), ("sequence", True)):
            plain = Lenient(table_actor(), ratio_level=level)(rows)["loss_objective"]
            other = Lenient(table_actor(), ratio_level=level, **option)(rows)["loss_objective"]
            assert ((plain - other).abs() > 1e-4) == differs

    def test_the_ratio_is_against_the_old_log_prob_if_there_is_one(self):
        rows = make_rows(LAYOUT)
        old = TurnPolicyLoss(table_actor())(rows)
        sample = TurnPolicyLoss(table_actor())(rows.exclude("old_log_prob"))
        renamed = rows.clone().set("sample_log_prob", rows["old_log_prob"]).exclude("old_log_prob")
        assert (old["loss_objective"] - sample["loss_objective"]).abs() > 1e-4
        close(TurnPolicyLoss(table_actor())(renamed)["loss_objective"], old["loss_objective"])
        # Against the sampler itself there is nothing to correct.
        close(
            TurnPolicyLoss(table_actor(), sampler_correction="truncate", sampler_bounds=0.5)(
                rows.exclude("old_log_prob")
            )["loss_objective"],
            0.5 * sample["loss_objective"],
        )

    def test_diagnostics(self):
        rows = make_rows(LAYOUT)
        action = rows["turn_ids"] >= 0
        out = TurnPolicyLoss(table_actor(), kl_coeff=0.1)(rows)
        log_ratio = (rows["theta"] - rows["old_log_prob"])[action]
        d = (rows["ref_log_prob"] - rows["theta"])[action]
        close(out["kl"], (log_ratio.exp() * (d.exp() - d - 1)).mean(), atol=1e-6)
        close(out["kl_approx"], (log_ratio.exp() - log_ratio - 1).mean(), atol=1e-6)
        close(out["entropy"], -rows["theta"][action].mean() / 2, atol=1e-6)
        ratio = log_ratio.exp()
        close(out["ESS"], ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()), atol=1e-6)
        close(out["weight"], 1.0, atol=1e-6)
        assert not any(value.requires_grad for key, value in out.items() if not key.startswith("loss_"))

    def test_on_policy_the_gradient_is_the_policy_gradient(self):
        rows = make_rows(LAYOUT)
        theta = rows["old_log_prob"].clone().requires_grad_()
        total(TurnPolicyLoss(table_actor())(rows.clone().set("theta", theta))).backward()
        action = rows["turn_ids"] >= 0
        close(theta.grad, torch.where(action, -rows["advantage"] / action.sum(), 0.0), atol=1e-8)

    def test_a_custom_objective_is_one_method(self):
        class Vanilla(TurnPolicyLoss):
            def objective(self, log_ratio, advantage):
                return log_ratio * advantage

        rows = make_rows(LAYOUT)
        out, action = Vanilla(table_actor())(rows), rows["turn_ids"] >= 0
        expected = ((rows["theta"] - rows["old_log_prob"]) * rows["advantage"])[action].mean()
        close(out["loss_objective"], -expected, atol=1e-6)

    def test_an_objective_of_another_shape_is_refused(self):
        class Mean(TurnPolicyLoss):
            def objective(self, log_ratio, advantage):
                return (log_ratio * advantage).mean()

        with pytest.raises(ValueError, match=r"Mean.objective returned the shape \[\]; expected that of log_ratio"):
            Mean(table_actor())(make_rows(LAYOUT))

    def test_nothing_is_written_into_the_rows(self):
        rows = make_rows(LAYOUT)
        before = rows.clone()
        LLMPPOLoss(table_actor(), table_critic())(rows)
        assert set(rows.keys(True)) == set(before.keys(True))
        assert all(
            torch.equal(rows[k].nan_to_num(), before[k].nan_to_num()) for k in ("state_value", "sample_log_prob")
        )

    def test_a_batch_without_actions_has_a_zero_gradient(self):
        rows = make_rows([[(True, 2, 0)], [(False, 1, 0)]])
        theta = rows["theta"].clone().requires_grad_()
        out = LLMPPOLoss(table_actor(), table_critic(), entropy_coeff=0.1)(rows.set("theta", theta))
        total(out).backward()
        assert (theta.grad == 0).all()
        assert all(value == 0 for value in out.values())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ratio_level": "word"}, "'token', 'turn', 'sequence'"),
            ({"kl_coeff": 0.1, "kl_kind": "k1"}, "no gradient in expectation"),
            ({"kl_kind": "k4"}, "'k1', 'k2', 'k3'"),
            ({"clip_epsilon": (0.2, -0.1)}, "clip_epsilon"),
            ({"weighting": "constant"}, "takes a constant"),
            ({"ratio_level": "turn", "unit_weight": "equal", "weighting": "sequence"}, "weighs by turn"),
            ({"clipping": "tight"}, "'ppo', 'cispo', 'none'"),
            ({"clipping": "cispo", "dual_clip": 3.0}, "does nothing with clipping='cispo'"),
            ({"dual_clip": 1.1}, "expected a ratio > 1"),
            ({"sampler_correction": "truncate"}, "go together"),
            ({"sampler_bounds": 2.0}, "does nothing with sampler_correction=None"),
            ({"sampler_correction": "truncate", "sampler_bounds": (0.5, 2.0)}, "takes a cap"),
            ({"sampler_correction": "mask", "sampler_bounds": 2.0}, r"takes \(low, high\)"),
            ({"sampler_correction": "truncate", "sampler_bounds": 0.0}, "0 <= low < high"),
            ({"sampler_correction": "drop", "sampler_bounds": 2.0}, "'truncate', 'mask', 'reject'"),
            ({"clip_advantage": 0.0}, "clip_advantage"),
        ],
        ids=str,
    )
    def test_wrong_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            TurnPolicyLoss(table_actor(), **options).make_value_estimator()

    def test_an_entropy_bonus_needs_an_actor_that_writes_the_entropy(self):
        actor = TensorDictModule(lambda x: x, in_keys=["theta"], out_keys=["log_prob"])
        with pytest.raises(ValueError, match="entropy=True"):
            TurnPolicyLoss(actor, entropy_coeff=0.1)
        assert "entropy" not in TurnPolicyLoss(actor)(make_rows(LAYOUT))

    @pytest.mark.parametrize(("key", "hint"), [("advantage", "value estimator"), ("ref_log_prob", "kl_coeff=0")])
    def test_missing_keys_say_what_to_do(self, key, hint):
        with pytest.raises(KeyError, match=rf"{key}.*{hint}"):
            TurnPolicyLoss(table_actor(), kl_coeff=0.1)(make_rows(LAYOUT).exclude(key))


ALGORITHMS = {
    "ppo": lambda: LLMPPOLoss(make_actor(), make_critic(), entropy_coeff=0.01),
    "ppo_token_granularity": lambda: LLMPPOLoss(
        make_actor(), make_critic(), granularity="token", clip_epsilon=(0.1, 0.3)
    ),
    "ppo_turn_ratio": lambda: LLMPPOLoss(make_actor(), make_critic(), ratio_level="turn", unit_weight="equal"),
    "ppo_mean_value": lambda: LLMPPOLoss(make_actor(), make_critic(), value_reduction="mean", weighting="sequence"),
    "reinforce": lambda: LLMReinforceLoss(
        make_actor(), sampler_correction="truncate", sampler_bounds=2.0, entropy_coeff=0.01
    ),
    "reinforce_sum_ratio": lambda: LLMReinforceLoss(make_actor(), ratio_level="turn", ratio_reduction="sum"),
    "grpo": lambda: LLMGRPOLoss(make_actor()),
    "gspo": lambda: LLMGRPOLoss(make_actor(), ratio_level="sequence", unit_weight="equal"),
    "cispo": lambda: LLMGRPOLoss(make_actor(), clipping="cispo", credit="turn", kl_in="reward"),
    "dual_clip": lambda: LLMReinforceLoss(make_actor(), dual_clip=1.3, kl_in="loss", normalize_over="none"),
    "icepop": lambda: LLMGRPOLoss(make_actor(), sampler_correction="mask", sampler_bounds=(0.9, 1.5)),
    "rejection": lambda: LLMPPOLoss(
        make_actor(),
        make_critic(),
        sampler_correction="reject",
        sampler_bounds=(0.8, 1.3),
        sampler_level="sequence",
        sampler_reduction="mean",
        kl_in="reward",
    ),
    "vtrace": lambda: LLMPPOLoss(make_actor(), make_critic(), clipping="none").make_value_estimator(TurnVTrace),
    "dr_grpo": lambda: LLMGRPOLoss(make_actor(), scale="none", weighting="constant", weight_constant=8.0, kl_kind="k2"),
}


def batch_for(loss: TurnPolicyLoss, part: slice = slice(None)) -> TensorDict:
    """Six conversations (or part of them) with old log-probs near the model's, and the estimator's figures."""
    rows = make_rows(LAYOUT, group_size=3)
    with torch.no_grad():
        log_prob = loss.actor_network(rows.select(*loss.actor_network.in_keys))["log_prob"]
    for key, scale in (("sample_log_prob", 0.5), ("old_log_prob", 0.3), ("ref_log_prob", 0.2)):
        rows[key] = log_prob + scale * rows["theta_value"].nan_to_num()
    del rows["state_value"], rows["bootstrap_value"]
    rows = rows[part]
    loss.value_estimator(rows)
    if "state_value" in rows:  # a critic that has moved since, on both sides of its clip
        rows["state_value"] = rows["state_value"] + 0.3 * rows["theta"].nan_to_num()
    return rows


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

    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_gradient(self, name):
        loss = ALGORITHMS[name]()
        rows = batch_for(loss)
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
        """Half of the rows on each of two processes, groups whole: credit and weights are those of all rows."""
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


class TestLLMPPOLoss:
    @pytest.mark.parametrize("granularity", ["turn", "token"])
    @pytest.mark.parametrize("clip_value", [None, 0.3])
    def test_the_critic_term(self, granularity, clip_value):
        rows = make_rows(LAYOUT)
        ids = rows["turn_ids"].tolist()
        loss = LLMPPOLoss(
            table_actor(),
            table_critic(),
            granularity=granularity,
            clip_value=clip_value,
            critic_coeff=0.7,
            whiten=False,
        )
        rows = loss.value_estimator(rows)
        terms, clipped = [], []
        for b, row in enumerate(ids):
            for k in sorted(set(row) - {-1}):
                tokens = [i for i, turn in enumerate(row) if turn == k]
                for i in tokens if granularity == "token" else tokens[:1]:
                    v, old, target = (rows[key][b, i] for key in ("theta_value", "state_value", "value_target"))
                    near = v if clip_value is None else old + (v - old).clamp(-clip_value, clip_value)
                    terms.append(0.5 * max((v - target) ** 2, (near - target) ** 2))
                    clipped.append(float(clip_value is not None and abs(v - old) > clip_value))
        out = loss(rows)
        close(out["loss_critic"], 0.7 * sum(terms) / len(terms), atol=1e-6)
        close(out["value_clip_fraction"], sum(clipped) / len(clipped), atol=1e-6)

    @pytest.mark.parametrize("reduction", ["first", "mean", "last"])
    def test_the_value_is_pooled_as_in_the_estimator(self, reduction):
        rows = make_rows(LAYOUT)
        loss = LLMPPOLoss(table_actor(), table_critic(), value_reduction=reduction, clip_value=None)
        loss.value_estimator(rows)
        turns = rows["turn", "mask"].shape[1]
        value = F.turn_reduce(rows["theta_value"], rows["turn_ids"], turns, reduction)
        acted = F.turn_lengths(rows["turn_ids"], turns) > 0
        error = (value - rows["turn", "value_target"]).square()
        out = loss(rows)
        close(out["loss_critic"], 0.25 * error[acted].mean(), atol=1e-6)
        expected = F.explained_variance(value, rows["turn", "value_target"], acted)
        close(out["explained_variance"], expected, atol=1e-6)

    def test_the_old_value_and_target_are_frozen(self):
        rows = make_rows(LAYOUT)
        loss = LLMPPOLoss(table_actor(), table_critic())
        loss.value_estimator(rows)
        for key in ("state_value", "value_target"):
            rows[key] = rows[key].nan_to_num().requires_grad_()
        theta = rows["theta_value"].clone().requires_grad_()
        loss(rows.set("theta_value", theta))["loss_critic"].backward()
        assert theta.grad.abs().sum() > 0
        assert rows["state_value"].grad is None
        assert rows["value_target"].grad is None

    def test_one_weight_without_the_other_is_an_error(self):
        rows = make_rows(LAYOUT)
        rows["loss_weight"] = F.loss_weights(rows["turn_ids"])
        with pytest.raises(KeyError, match=r"critic_weight.*write_loss_weights"):
            LLMPPOLoss(table_actor(), table_critic())(rows)

    def test_options_reach_the_estimator(self):
        loss = LLMPPOLoss(
            table_actor(), table_critic(), gamma=0.5, lmbda=0.6, granularity="auto", single_turn=True, whiten=False
        )
        estimator = loss.value_estimator
        assert isinstance(estimator, TurnGAE)
        assert (estimator.gamma, estimator.lmbda, estimator.granularity, estimator.whiten) == (0.5, 0.6, "token", False)
        assert estimator.value_network is loss.critic_network

    def test_defaults(self):
        loss = LLMPPOLoss(table_actor(), table_critic())
        assert (loss.kl_coeff, loss.kl_kind, loss.kl_in, loss.critic_coeff, loss.clip_value) == (
            0.01,
            "k3",
            "loss",
            0.5,
            0.2,
        )
        assert (loss.ratio_level, loss.weighting, loss.clip_low, loss.clip_high) == ("token", "token", 0.2, 0.2)
        assert (loss.value_estimator.gamma, loss.value_estimator.lmbda) == (0.99, 0.95)
        with pytest.raises(ValueError, match="clip_value"):
            LLMPPOLoss(table_actor(), table_critic(), clip_value=0.0)


class TestLLMReinforceLoss:
    def test_the_kl_is_in_the_reward_and_not_in_the_loss(self):
        loss = LLMReinforceLoss(table_actor(), gamma=0.5, kl_coeff=0.3)
        assert isinstance(loss.value_estimator, ReBN)
        assert (loss.value_estimator.gamma, loss.value_estimator.kl_coeff) == (0.5, 0.3)
        out = loss(make_rows(LAYOUT))
        assert "loss_kl" not in out
        assert "kl" in out
        in_loss = LLMReinforceLoss(table_actor(), kl_coeff=0.3, kl_in="loss", normalize_over="none")
        assert "loss_kl" in in_loss(make_rows(LAYOUT))
        assert (in_loss.value_estimator.kl_coeff, in_loss.value_estimator.normalize_over) == (0.0, "none")
        assert LLMReinforceLoss(table_actor()).value_estimator.gamma == 0.9


class TestLLMGRPOLoss:
    def test_options_reach_the_estimator(self):
        options = {"baseline": "leave_one_out", "scale": "none", "group_size": 3, "partial": "allow"}
        estimator = LLMGRPOLoss(table_actor(), gamma=0.5, credit="turn", **options).value_estimator
        assert isinstance(estimator, GroupRelative)
        assert (estimator.gamma, estimator.credit) == (0.5, "turn")
        assert {name: estimator.options[name] for name in options} == options

    def test_gspo_is_the_sequence_mean_of_one_clipped_term_per_conversation(self):
        rows = make_rows(LAYOUT)
        ids = rows["turn_ids"]
        rows["advantage"] = torch.arange(6.0, dtype=DOUBLE)[:, None].expand(ids.shape) - 2.5
        action = ids >= 0
        log_ratio = torch.where(action, rows["theta"] - rows["old_log_prob"], 0.0).sum(1) / action.sum(1)
        objective, _ = F.clipped_objective(log_ratio, rows["advantage"][:, 0], 0.2, 0.2)
        out = LLMGRPOLoss(table_actor(), ratio_level="sequence", unit_weight="equal")(rows)
        close(out["loss_objective"], -objective.mean(), atol=1e-6)


class TestTorchRL:
    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_keys_and_dispatch(self, name):
        loss = ALGORITHMS[name]()
        rows = batch_for(loss)
        out = loss(rows)
        assert set(out.keys()) == set(loss.out_keys)
        assert out.batch_size == torch.Size([])
        if loss.sampler_correction is None:
            rows["sample_log_prob"] = rows["old_log_prob"]
            values = loss(**{key: rows[key] for key in loss.in_keys})
            assert len(values) == len(loss.out_keys)
            for key, value in zip(loss.out_keys, values, strict=True):
                close(value.detach(), out[key].detach())

    def test_set_keys_moves_loss_and_estimator_alike(self):
        loss = LLMPPOLoss(table_actor(), table_critic())
        rows = make_rows(LAYOUT)
        expected = loss(loss.value_estimator(rows.clone()))
        loss.set_keys(advantage=("x", "advantage"), value_target="target", turn_ids="turns", loss_weight=("w", "loss"))
        assert loss.value_estimator.tensor_keys.advantage == ("x", "advantage")
        moved = rows.exclude("advantage", "value_target").rename_key_("turn_ids", "turns")
        moved = write_loss_weights(loss.value_estimator(moved), loss)
        assert ("w", "loss") in moved.keys(True)
        for key, value in loss(moved).items():
            close(value, expected[key])
        with pytest.raises(ValueError, match="not an accepted tensordict key"):
            loss.set_keys(nonsense="x")

    @pytest.mark.parametrize("kind", ["k2", "k3"])
    def test_a_share_of_the_kl_is_that_share_of_its_weight(self, kind):
        rows = make_rows(LAYOUT)
        whole, share = (LLMGRPOLoss(table_actor(), kl_coeff=kl_coeff, kl_kind=kind) for kl_coeff in (0.1, 0.4))
        assert share.kl_fraction == 1.0
        share.kl_fraction = 0.25
        for key, value in share(rows).items():
            close(value, whole(rows)[key])

    def test_the_share_of_the_kl_is_the_estimators_too(self):
        rows, loss = make_rows(LAYOUT), LLMReinforceLoss(table_actor(), kl_coeff=0.4)
        for share in (0.25, 0.0):
            loss.kl_fraction = share
            expected = ReBN(gamma=loss.gamma, kl_coeff=0.4 * share)(rows.clone())["advantage"]
            close(loss.value_estimator(rows.clone())["advantage"], expected)
            close(loss.make_value_estimator().value_estimator(rows.clone())["advantage"], expected)

    def test_an_estimator_that_would_lose_the_kl_is_refused(self):
        loss = LLMReinforceLoss(table_actor(), kl_coeff=0.1)
        for estimator in (ReBN(), GAE(gamma=0.9, lmbda=0.9, value_network=table_critic())):
            with pytest.raises(ValueError, match="the KL would be lost"):
                loss.make_value_estimator(estimator)
        assert loss.make_value_estimator(GroupRelative).value_estimator.kl_coeff == 0.1
        LLMReinforceLoss(table_actor(), kl_coeff=0.0).make_value_estimator(ReBN())

    def test_an_estimator_that_corrects_for_the_sampler_does_so_alone(self):
        corrected = {"clipping": "none", "sampler_correction": "truncate", "sampler_bounds": 2.0}
        for options in ({}, {"clipping": "cispo"}, corrected):
            with pytest.raises(ValueError, match="count twice"):
                LLMPPOLoss(table_actor(), table_critic(), **options).make_value_estimator(TurnVTrace)

    def test_make_value_estimator(self):
        loss = LLMPPOLoss(table_actor(), table_critic(), lmbda=0.7)
        assert loss.make_value_estimator(TurnGAE, gamma=0.5) is loss
        assert (loss.value_estimator.gamma, loss.value_estimator.lmbda) == (0.5, 0.7)
        loss.make_value_estimator(ValueEstimators.GAE, lmbda=0.1)
        assert isinstance(loss.value_estimator, TurnGAE)
        assert loss.value_estimator.lmbda == 0.1
        own = ReBN(gamma=0.3)
        assert loss.make_value_estimator(own).value_estimator is own
        loss.make_value_estimator(GroupRelative, partial="allow")
        assert loss.value_estimator.options["partial"] == "allow"
        loss.make_value_estimator(GAE, gamma=0.9, lmbda=0.9, value_network=None)
        assert isinstance(loss.value_estimator, GAE)
        with pytest.raises(NotImplementedError, match="TD0"):
            loss.make_value_estimator(ValueEstimators.TD0)
        with pytest.raises(ValueError, match="takes no hyperparameters"):
            loss.make_value_estimator(own, gamma=0.2)

    def test_the_granularity_of_a_new_estimator_reaches_the_critic_term(self):
        rows = make_rows(LAYOUT)
        loss = LLMPPOLoss(table_actor(), table_critic())
        turn = loss(loss.value_estimator(rows.clone()))["loss_critic"]
        loss.make_value_estimator(TurnGAE, granularity="token", gamma=0.99)
        token = loss(loss.value_estimator(rows.clone()))["loss_critic"]
        same = LLMPPOLoss(table_actor(), table_critic(), granularity="token", gamma=0.99)
        close(token, same(same.value_estimator(rows.clone()))["loss_critic"])
        assert (turn - token).abs() > 1e-4

    def test_plain_submodules(self):
        actor, critic = make_actor(), make_critic()
        loss = LLMPPOLoss(actor, critic)
        assert not loss.functional
        assert {id(p) for p in loss.parameters()} == {id(p) for m in (actor, critic) for p in m.parameters()}
        assert all(name.startswith(("actor_network.", "critic_network.")) for name in loss.state_dict())
        clone = copy.deepcopy(loss)
        clone.load_state_dict(loss.state_dict())

    @pytest.mark.parametrize("name", ["ppo", "reinforce", "grpo"])
    def test_a_step_down_the_loss_lowers_it(self, name):
        loss = ALGORITHMS[name]()
        rows = batch_for(loss)
        optimizer = torch.optim.SGD(loss.parameters(), lr=1e-5)
        before = total(loss(rows))
        before.backward()
        optimizer.step()
        assert total(loss(rows)) < before

    def test_an_estimator_without_a_critic_key_still_feeds_every_loss(self):
        for estimator, make in itertools.product((TurnGAE, ReBN, GroupRelative), (LLMReinforceLoss, LLMGRPOLoss)):
            loss = make(table_actor(), kl_coeff=0.0).make_value_estimator(estimator)
            rows = loss.value_estimator(make_rows(LAYOUT, group_size=3))
            assert loss(rows)["loss_objective"].isfinite()


class TestTotalAndMerge:
    def test_total_takes_losses_only(self):
        out = TensorDict({"loss_a": torch.tensor(1.0), "loss_b": torch.tensor(2.0), "kl": torch.tensor(4.0)})
        assert total(out).item() == 3
        with pytest.raises(ValueError, match="named loss_"):
            total(TensorDict({"kl": torch.tensor(1.0)}))

    def test_merge_needs_something(self):
        with pytest.raises(ValueError, match="at least one"):
            merge([])


def test_the_three_files_are_thin():
    folder = Path(package.__file__).parent
    assert all(len((folder / f"{name}.py").read_text().splitlines()) <= 120 for name in ("ppo", "reinforce", "grpo"))
