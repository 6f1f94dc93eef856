"""The policy loss: every option against a token-by-token definition, and what is refused."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from conversations import DOUBLE, LAYOUT, close, law, layouts, make_rows, table_actor, table_critic
from hypothesis import strategies as st
from made_losses import made
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from torchrl_llm.objectives import GroupRelative, LLMPPOLoss, ReBN, TurnGAE, TurnPolicyLoss, total

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
        return out | ({} if o["sampler_correction"] is None else self.corrected())

    def corrected(self) -> dict[str, float]:
        """The means over tokens as the loss weighs them, whatever its scale is."""
        kind = self.o["ratio_level"] if self.o["unit_weight"] == "equal" else self.o["weighting"]
        weights = [(self.weight(kind, b, i), self.correction(b, i)) for b, i in self.tokens]
        whole = sum(w for w, _ in weights) or 1.0
        means = {
            "sampler_rejected": sum(w for w, c in weights if c == 0),
            "sampler_weight": sum(w * c for w, c in weights),
        }
        return {name: torch.tensor(value / whole, dtype=DOUBLE) for name, value in means.items()}

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
            ({"gamma": 99}, "TurnGAE.gamma is 99; expected a number, between 0 and 1"),
            ({"lmbda": 7}, "TurnGAE.lmbda is 7"),
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
            made(LLMPPOLoss, table_actor(), table_critic(), **options)

    def test_a_misspelt_option_names_the_nearest_also_in_a_subclass(self):
        class Own(LLMPPOLoss):
            def __init__(self, *networks, width=1, **options):
                super().__init__(*networks, **options)

        for cls in (LLMPPOLoss, Own):
            with pytest.raises(TypeError, match=rf"{cls.__name__} has no option 'cliping'\. Did you mean 'clipping'\?"):
                cls(table_actor(), table_critic(), cliping="none")
            with pytest.raises(TypeError, match=rf"gamma=0.9 is .* give {cls.__name__} estimator=TurnGAE\(gamma=0.9\)"):
                cls(table_actor(), table_critic(), gamma=0.9)
        assert Own(table_actor(), table_critic(), width=2, clipping="none").clipping == "none"

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

    @pytest.mark.parametrize(
        ("change", "error", "said"),
        [
            (lambda x: x.mean(), ValueError, r"Changed.objective returned the shape \[\]; expected that of log_ratio"),
            (lambda x: None, TypeError, "Changed.objective returned None; expected a tensor"),
            (lambda x: x.detach(), ValueError, "Changed.objective returned a tensor without a gradient"),
            (lambda x: x.round().long(), ValueError, r"without a gradient \(torch.int64\)"),
            (lambda x: x.to("meta"), ValueError, "returned a tensor on meta; log_ratio is on cpu"),
        ],
        ids=["shape", "none", "detached", "whole numbers", "device"],
    )
    def test_an_objective_that_cannot_be_learned_from_is_refused(self, change, error, said):
        class Changed(TurnPolicyLoss):
            def objective(self, log_ratio, advantage):
                return change(log_ratio * advantage)

        rows = make_rows(LAYOUT)
        rows["theta"].requires_grad_()
        with pytest.raises(error, match=said):
            Changed(table_actor())(rows)

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
            ({"sampler_correction": "truncate"}, "give a cap"),
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
            made(TurnPolicyLoss, table_actor(), **options)

    def test_an_entropy_bonus_needs_an_actor_that_writes_the_entropy(self):
        actor = TensorDictModule(lambda x: x, in_keys=["theta"], out_keys=["log_prob"])
        with pytest.raises(ValueError, match="entropy=True"):
            TurnPolicyLoss(actor, entropy_coeff=0.1)
        assert "entropy" not in TurnPolicyLoss(actor)(make_rows(LAYOUT))

    @pytest.mark.parametrize(("key", "hint"), [("advantage", "value estimator"), ("ref_log_prob", "kl_coeff=0")])
    def test_missing_keys_say_what_to_do(self, key, hint):
        with pytest.raises(KeyError, match=rf"{key}.*{hint}"):
            TurnPolicyLoss(table_actor(), kl_coeff=0.1)(make_rows(LAYOUT).exclude(key))
