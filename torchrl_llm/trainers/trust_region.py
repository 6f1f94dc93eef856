"""The bound on how far an optimizer step leads: :class:`TrustRegion`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from accelerate import Accelerator
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import data, keys
from torchrl_llm.functional import kl_estimate
from torchrl_llm.modules.positions import prefix_cost
from torchrl_llm.objectives import TurnLoss
from torchrl_llm.trainers.config import MOST_TOKENS
from torchrl_llm.trainers.distributed import Distributed

ATTEMPTS = 4
"""Lengths of a step that are tried before it is taken back; each costs a scoring pass."""


class TrustRegion:
    """Shortens an optimizer step that moves the policy too far from the one that sampled, and ends
    the update with it.

    A clipped ratio, and a KL that is read before a step, say nothing of where the step leads. Here
    the KL is measured after it, on episodes of the batch, and a step that goes beyond ``target`` is
    shortened until it stays within: as the line search of TRPO does (Schulman et al., 2015,
    arXiv:1502.05477, appendix C). The steps that would follow in the same update lead further away,
    so they are left out, as PPO's early stopping does.

    The forward of the next optimizer step computes with the same weights, so its KL is had for
    nothing: where it is within the target, no pass is spent on those episodes. They decide in all
    other cases and after the update's last step, and the way since they were last asked is what is
    shortened: so they always end within the target.

    The critic's own parameters take the whole step.

    Args:
        loss: its actor network is bounded.
        optimizer: its first group of parameters is the actor's.
        rows: ``[B]``, the rows of the update, with the log-probs that its ratios are taken against.
        target: KL from the policy before the update to the one after it, per action token, in nats.
        share: of the rows that is scored, at least.
        max_tokens: of one scoring pass.
        distributed: the training processes. Default: accelerate's; with FSDP2 it must be the one
            that :class:`Update` was made with, which sharded the weights.
        logprobs_match_trainer: whether the policy recorded the log-probs that the actor would
            compute with the weights before the update. Where it did not and the rows have no
            ``"old_log_prob"``, they are scored. Default: it did, unless mixed precision computes in
            another one here.
    """

    def __init__(
        self,
        loss: TurnLoss,
        optimizer: torch.optim.Optimizer,
        rows: TensorDictBase,
        target: float,
        *,
        share: float = 0.25,
        max_tokens: int = MOST_TOKENS,
        distributed: Distributed | None = None,
        logprobs_match_trainer: bool | None = None,
    ) -> None:
        self.target, self.distributed = target, distributed or Distributed.of(Accelerator())
        self._actor, self._max_tokens = loss.actor_network, max_tokens
        # Whether the loss's KL is a mean over action tokens, as the target is; one of your own may
        # say nothing of it.
        self._reads_next = getattr(loss, "weighting", None) == "token"
        # Evenly spaced, because groups are neighbors; the same rows, however many processes share
        # them.
        chosen = data.spaced_rows(self.distributed.own_rows(rows), int(1 / share), self.distributed.process_group)
        chosen = self.distributed.nonempty(chosen, rows)
        self._rows = chosen.select(*self._actor.in_keys, keys.ATTENTION_MASK)
        self._actions = chosen[keys.TURN_IDS] >= 0
        self._parameters: list[Tensor] = optimizer.param_groups[0]["params"]
        self._kl, self._shares = 0.0, list[float]()
        # Where the steps began that are not measured yet, and how many they are.
        self._start, self._open = list[Tensor](), 0
        known = keys.OLD_LOG_PROB if keys.OLD_LOG_PROB in chosen else keys.SAMPLE_LOG_PROB
        # Where the sampler computes other log-probs, the difference would count as a step of the
        # policy.
        match = not self.distributed.autocasts if logprobs_match_trainer is None else logprobs_match_trainer
        scored = known == keys.SAMPLE_LOG_PROB and not match
        self._old = self._score() if scored else chosen[known]

    def take(self, step: Callable[[], object]) -> None:
        """Let ``step`` move the actor; :meth:`settle` says how much of it is kept."""
        if not self._open:
            self._start = [parameter.detach().clone() for parameter in self._parameters]
        self._open += 1
        step()

    def settle(self, kl: Tensor | None) -> bool:
        """Keep the share of the last steps that stays within the target; returns whether they were
        shortened, and so end the update.

        Args:
            kl: from the old policy to the present one on the next minibatch; ``None``: not known.
        """
        if not self._open or (kl is not None and self._reads_next and kl.item() <= self.target):
            return False
        self._kl = self.kl()
        # Not ">": a KL may be nan.
        share = 1.0 if self._kl <= self.target else self._shorten()
        self._shares += [share] * self._open
        self._open = 0
        return share < 1

    def metrics(self) -> dict[str, float]:
        """The KL after the last step, and the mean share that was kept of the steps; nothing if all
        steps were skipped."""
        shares = self._shares
        return {"policy/kl_update": self._kl, "optim/step_share": sum(shares) / len(shares)} if shares else {}

    def _shorten(self) -> float:
        """Go back to where the KL is within the target, in a straight line; returns the share of
        the way that is left."""
        share = 1.0
        for _ in range(ATTEMPTS):
            # The KL grows about with the square of the length. 0.9 aims below the target. The
            # bounds keep a bad estimate from hardly moving, or from giving up the step at once.
            factor = min(0.9, max(0.1, 0.9 * math.sqrt(self.target / self._kl))) if math.isfinite(self._kl) else 0.1
            share *= factor
            # One at a time and in place: a list of all, or of the steps, would take as much memory
            # again.
            self._move(start + factor * (now - start) for now, start in zip(self._parameters, self._start, strict=True))
            if self._kl <= self.target:
                return share
        self._move(self._start)
        return 0.0

    @torch.no_grad()
    def _move(self, values: Iterable[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            # In place: the optimizer and a policy that samples with these weights hold the tensors.
            parameter.copy_(value)
        self._kl = self.kl()

    @torch.no_grad()
    def kl(self) -> float:
        """KL from the policy before the update to the present one, per action token, estimated on
        the tokens sampled (k3)."""
        # In this order of its arguments k3 is KL(old || new).
        return self.distributed.all_reduce_mean(kl_estimate(self._old, self._score(), "k3")[self._actions])

    @torch.no_grad()
    def _score(self) -> Tensor:
        distributed, cost = self.distributed, prefix_cost(self._actor)
        with distributed.accelerator.autocast(), distributed.gathered_parameters():
            return data.apply_in_micro_batches(self._actor, self._rows.copy(), self._max_tokens, cost)[keys.LOG_PROB]
