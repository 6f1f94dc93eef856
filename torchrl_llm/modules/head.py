"""Log-probs and entropies of a language model's head, with at most one chunk of its logits in
memory: :func:`head_scores`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchrl_llm.modules.lm import causal_lm, logits_factor, soft_cap

_NEVER = -1e30
"""The logit of a token that cannot be sampled. Not minus infinity, which makes the entropy 0 times
infinity."""


class HeldBack(NamedTuple):
    """Tokens that cannot be sampled at some places.

    Attributes:
        places: ``[M]`` bool.
        ids: ``[S]`` int64, which tokens are excluded there.
    """

    places: Tensor
    ids: Tensor


class LinearHead(NamedTuple):
    """A head whose logits are ``factor * (hidden @ weight.T + bias)``.

    Attributes:
        weight: ``[V, H]``.
        bias: ``[V]`` or ``None``.
        factor: of the model's configuration.
    """

    weight: Tensor
    bias: Tensor | None
    factor: float

    @classmethod
    def of(cls, model: nn.Module) -> LinearHead | None:
        """The head of a model; ``None`` if it does more: LoRA, a soft cap, hooks, quantized or
        sharded weights."""
        lm = causal_lm(model)
        head, config = lm.get_output_embeddings(), lm.config.get_text_config()
        hooked = type(head) is nn.Linear and (head._forward_hooks or head._forward_pre_hooks)
        # accelerate's hooks replace forward; torchao's quantized weights are tensors of its own in
        # a plain nn.Linear.
        plain = type(head) is nn.Linear and "forward" not in vars(head) and type(head.weight) in (nn.Parameter, Tensor)
        if not plain or hooked or soft_cap(config):
            return None
        return cls(head.weight, head.bias, logits_factor(config))

    def logits(self, hidden: Tensor) -> Tensor:
        """``[m, V]`` of hidden states ``[m, H]``."""
        logits = nn.functional.linear(hidden, self.weight, self.bias)
        return logits if self.factor == 1 else logits * self.factor


def head_scores(
    hidden: Tensor,
    targets: Tensor,
    head: LinearHead,
    *,
    temperature: float = 1.0,
    held_back: HeldBack | None = None,
    entropy: bool = False,
    chunk_size: int,
) -> tuple[Tensor, ...]:
    """Log-probs of ``targets``, and entropies, from the hidden states before them.

    The logits of ``chunk_size`` tokens at a time are made, once here and once in ``backward`` (an
    only chunk is kept instead): with ``p`` the probabilities, ``H`` their entropy and ``z`` the
    logits, ``d log p_t / d z = onehot(t) - p`` and ``d H / d z = -p (log p + H)``.

    Args:
        hidden: ``[M, H]``.
        targets: ``[M]`` int64.
        head: what makes logits of them.
        temperature: divides the logits.
        held_back: what cannot be sampled; a target among it gets minus infinity.
        entropy: compute the entropies as well.
        chunk_size: tokens whose logits are alive at a time.

    Returns:
        ``(log_prob,)`` or ``(log_prob, entropy)``, each ``[M]``, float32 or wider, in nats.

    Examples:
        >>> head = LinearHead(torch.tensor([[1.0], [0.0]]), None, factor=1.0)
        >>> head_scores(torch.tensor([[0.0], [2.0]]), torch.tensor([0, 1]), head, entropy=True, chunk_size=1)
        (tensor([-0.6931, -2.1269]), tensor([0.6931, 0.3653]))
    """
    places, ids = held_back or (None, None)
    log_prob, entropies = _HeadScores.apply(
        hidden, head.weight, head.bias, targets, places, ids, head.factor, temperature, entropy, chunk_size
    )
    return (log_prob, entropies) if entropy else (log_prob,)


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, places: Tensor | None,
        ids: Tensor | None, factor: float, temperature: float, entropy: bool, chunk_size: int,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.temperature, ctx.chunk_size, ctx.dtype = factor, temperature, chunk_size, hidden.dtype
        none = hidden.new_empty(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
        head, parts, kept = LinearHead(weight, bias, factor), [(none, none, none)], None
        for start in range(0, len(hidden), chunk_size):
            part = slice(start, start + chunk_size)
            logits = head.logits(hidden[part])
            # not the dtype of the inputs under autocast, which backward runs without
            ctx.dtype = logits.dtype
            logits, target = _sampled_from(logits, temperature, places, ids, part), targets[part].unsqueeze(-1)
            # The difference of logits and log-probs, at the target, unless that may be held back,
            # and the difference of two -1e30.
            normalizer = None if places is None else logits.logsumexp(-1)
            at_target = logits.gather(-1, target)
            # one pass, in the memory of the logits
            log_probs = torch.log_softmax(logits, -1, out=logits)
            log_prob = log_probs.gather(-1, target)
            normalizer = (at_target - log_prob).squeeze(-1) if normalizer is None else normalizer
            # An only chunk is cheaper to keep than to make again.
            kept = log_probs if len(hidden) <= chunk_size else None
            parts.append((log_prob.squeeze(-1), _entropy(log_probs) if entropy else normalizer, normalizer))
        log_prob, entropies, normalizer = map(torch.cat, zip(*parts, strict=True))
        if places is not None:
            log_prob = log_prob.masked_fill(log_prob < _NEVER / 2, -torch.inf)
        ctx.save_for_backward(hidden, weight, bias, targets, places, ids, normalizer, entropies, kept)
        return log_prob, entropies if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_prob: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, places, ids, normalizer, entropies, kept = ctx.saved_tensors
        if of_log_prob is None and of_entropy is None:
            return (None,) * 10
        # The constants of the chain here, where they cost nothing, and not on all the logits.
        scale = ctx.factor / ctx.temperature
        of_log_prob = torch.zeros_like(normalizer) if of_log_prob is None else of_log_prob * scale
        of_entropy = None if of_entropy is None else of_entropy * scale
        inputs_needed = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        grads = [torch.zeros_like(x) if needed else None for x, needed in inputs_needed]
        grad_hidden, grad_weight, grad_bias = grads
        head = LinearHead(weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype), ctx.factor)
        for start in range(0, len(hidden), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            inputs = hidden[part].to(ctx.dtype)
            if kept is None:
                log_probs = _sampled_from(head.logits(inputs), ctx.temperature, places, ids, part)
                log_probs = log_probs.sub_(normalizer[part].unsqueeze(-1))
            else:
                log_probs = kept  # autograd's, which a second backward may read
            target, entropy, weight_of = (x[part].unsqueeze(-1) for x in (targets, entropies, of_log_prob))
            if places is not None:  # a target that is held back has a constant for a logit
                weight_of = weight_of.masked_fill(log_probs.gather(-1, target) < _NEVER / 2, 0.0)
            last = None if of_entropy is None else of_entropy[part].unsqueeze(-1)
            grad = _grad_logits(log_probs, target, weight_of, entropy, last, keep=kept is not None).to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ head.weight
            if grad_weight is not None:
                # The product in the dtype of the forward, the sum in the dtype of the weights: [V,
                # H], so in place where they are one.
                if grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.T, inputs)
                else:
                    grad_weight += grad.T @ inputs
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return *grads, *(None,) * 7


def _entropy(log_probs: Tensor) -> Tensor:
    """``[m]`` of ``[m, V]``, by a dot product for each row: the products are not written down."""
    with torch.autocast(log_probs.device.type, enabled=False):  # which would round the factors
        return -torch.bmm(log_probs.exp().unsqueeze(1), log_probs.unsqueeze(2)).flatten()


def _grad_logits(
    log_probs: Tensor, targets: Tensor, of_log_prob: Tensor, entropies: Tensor, of_entropy: Tensor | None, *, keep: bool
) -> Tensor:
    """The gradient ``[m, V]`` of the logits; all others ``[m, 1]``. In the memory of ``log_probs``,
    unless they are to be kept."""
    exp = torch.exp if keep else torch.exp_
    if of_entropy is None:
        grad = exp(log_probs).mul_(-of_log_prob)
    else:
        # -p (g_l + g_H (log p + H)), by one sum for all that is the same along a row.
        constant = -(of_log_prob + of_entropy * entropies)
        grad = torch.addcmul(constant, log_probs, of_entropy, value=-1).mul_(exp(log_probs))
    return grad.scatter_add_(-1, targets, of_log_prob)


def _sampled_from(logits: Tensor, temperature: float, places: Tensor | None, ids: Tensor | None, part: slice) -> Tensor:
    """The logits that tokens are sampled from, of ``part`` of all places, in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        logits.div_(temperature)
    if places is not None:
        logits[places[part].nonzero(), ids] = _NEVER
    return logits
