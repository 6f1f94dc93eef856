"""The LM head's scores and their own backward, against autograd on plain logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tiny_models import make_model

from torchrl_llm.modules.head import HeldBack, LinearHead, head_scores
from torchrl_llm.modules.scorer import entropy_of


def case(count, seed=0, dtype=torch.float64, *, bias=True):
    generator = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()  # noqa: E731
    return new(count, 4), new(7, 4), new(7) if bias else None, torch.randint(7, (count,), generator=generator)


def plain(hidden, weight, bias, targets, factor, temperature, held_back=None):
    logits = torch.nn.functional.linear(hidden, weight, bias) * factor
    if held_back is not None:
        excluded = torch.zeros(logits.shape[-1], dtype=torch.bool)
        excluded[held_back.ids] = True
        logits = logits.masked_fill(held_back.places.unsqueeze(-1) & excluded, -torch.inf)
    log_probs = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy_of(log_probs)


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(0, 6),
    chunk_size=st.integers(1, 7),
    factor=st.sampled_from([1.0, 0.7]),
    temperature=st.sampled_from([1.0, 1.3]),
    used=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (1.0, -0.4)]),
    bias=st.booleans(),
    held=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_values_and_gradients_are_those_of_plain_logits(count, chunk_size, factor, temperature, used, bias, held):
    hidden, weight, offset, targets = case(count, bias=bias)
    head, held_back = LinearHead(weight, offset, factor), None
    if any(held):
        held_back = HeldBack(torch.tensor(held)[:count], torch.tensor([0, 3]))
        targets = torch.where(held_back.places & ((targets == 0) | (targets == 3)), 5, targets)
    inputs = [x for x in (hidden, weight, offset) if x is not None]
    scales = torch.linspace(0.5, 2, max(count, 1), dtype=torch.float64)[:count]
    results = []
    for log_prob, entropy in (
        head_scores(
            hidden, targets, head, temperature=temperature, held_back=held_back, entropy=True, chunk_size=chunk_size
        ),
        plain(hidden, weight, offset, targets, factor, temperature, held_back),
    ):
        loss = sum(share * (scales * x).sum() for share, x in zip(used, (log_prob, entropy), strict=True) if share)
        results.append([log_prob.detach(), entropy.detach(), *torch.autograd.grad(loss, inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_target_that_is_held_back_cannot_be_sampled_and_has_no_gradient():
    hidden, weight, bias, targets = case(2)
    held_back = HeldBack(torch.tensor([True, False]), targets)
    log_prob, entropy = head_scores(
        hidden, targets, LinearHead(weight, bias, 1.0), held_back=held_back, entropy=True, chunk_size=1
    )
    assert log_prob[0] == -torch.inf
    assert log_prob[1].isfinite()
    assert entropy.isfinite().all()
    (grad,) = torch.autograd.grad(log_prob.sum(), hidden, retain_graph=True)
    assert (grad[0] == 0).all()
    assert (grad[1] != 0).any()
    of_entropy = [
        torch.autograd.grad(x.sum(), hidden)[0]
        for x in (entropy, plain(hidden, weight, bias, targets, 1.0, 1.0, held_back)[1])
    ]
    torch.testing.assert_close(*of_entropy)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk_size", [2, 9])
def test_gradcheck(entropy, chunk_size):
    hidden, weight, bias, targets = case(5)

    def scores(hidden, weight, bias):
        return head_scores(
            hidden, targets, LinearHead(weight, bias, 0.7), temperature=1.3, entropy=entropy, chunk_size=chunk_size
        )

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))


def test_a_graph_that_is_kept_gives_the_same_gradient_twice():
    hidden, weight, bias, targets = case(5)
    log_prob, entropy = head_scores(hidden, targets, LinearHead(weight, bias, 1.0), entropy=True, chunk_size=9)
    first = torch.autograd.grad((log_prob + entropy).sum(), hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad((log_prob + entropy).sum(), hidden)[0])


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_that_of_plain_logits(autocast):
    """Under autocast too, which the backward runs without."""
    dtype = torch.float32 if autocast else torch.bfloat16
    hidden, weight, _, targets = case(6, dtype=dtype, bias=False)
    results = []
    for chunk_size in (2, None):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            scores = (
                plain(hidden, weight, None, targets, 1.0, 1.0)
                if chunk_size is None
                else head_scores(hidden, targets, LinearHead(weight, None, 1.0), entropy=True, chunk_size=chunk_size)
            )
        assert scores[0].dtype == torch.float32
        results.append([*scores, *torch.autograd.grad(sum(x.sum() for x in scores), (hidden, weight))])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_what_needs_no_gradient_gets_none():
    hidden, weight, _, targets = case(5, bias=False)
    head_scores(hidden, targets, LinearHead(weight.detach(), None, 1.0), chunk_size=2)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_heads_that_do_more_are_left_to_autograd():
    assert LinearHead.of(make_model()) is not None
    lora = LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    assert LinearHead.of(get_peft_model(make_model(), lora)) is None
    hooked, capped = make_model(), make_model()
    hooked.lm_head.register_forward_hook(lambda *_: None)
    capped.config.final_logit_softcapping = 30.0
    assert LinearHead.of(hooked) is LinearHead.of(capped) is None
