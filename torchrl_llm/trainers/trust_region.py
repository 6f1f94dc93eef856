"""How far one update may move the policy: :class:`TrustRegion`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_llm import data, keys
from torchrl_llm.functional import kl_estimate
from torchrl_llm.modules.positions import prefix_cost
from torchrl_llm.trainers.base import TrainerBase

T = TypeVar("T")

ATTEMPTS = 4
"""Lengths of a step that are tried before it is taken back; each costs a scoring pass."""


class Unbounded:
    """Takes every optimizer step as it is."""

    def take(self, step: Callable[[], T]) -> T:
        """Take ``step``, and return what it returns."""
        return step()

    def settle(self, kl: Tensor | None) -> bool:
        """Whether the last step was shortened: none is."""
        return False

    def metrics(self) -> dict[str, float]:
        """None: nothing is measured."""
        return {}


class TrustRegion:
    """Shortens an optimizer step that moves the policy too far from the one that sampled, and ends
    the update with it.

    A clipped ratio, and a KL that is read before a step, say nothing of where the step leads. Here
    the KL is measured after it, on episodes of the batch, and a step that goes beyond
    ``config.target_kl`` is shortened until it stays within: as the line search of TRPO does
    (Schulman et al., 2015, arXiv:1502.05477, appendix C). The steps that would follow in the same
    update lead further away, so they are left out, as PPO's early stopping does.

    The forward of the next optimizer step computes with the same weights, so its KL is had for
    nothing: where it is within the target, no pass is spent on those episodes. They decide in all
    other cases and after the update's last step, and the way since they were last asked is what is
    shortened: so they always end within the target.

    The critic's own parameters take the whole step.

    Args:
        run: the trainer; the share ``config.target_kl_share`` of the rows is used.
        rows: ``[B]``, those of the update, with the log-probs that its ratios are taken against.
        target: KL from the policy before the update to the one after it, per action token, in nats.
    """

    def __init__(self, run: TrainerBase, rows: TensorDictBase, target: float) -> None:
        self.run, self.target = run, target
        distributed, step = run.distributed, int(1 / run.config.target_kl_share)
        # Evenly spaced, because groups are neighbors; the same rows, however many processes share
        # them.
        chosen = data.spaced_rows(distributed.own_rows(rows), step, distributed.process_group)
        chosen = distributed.nonempty(chosen, rows[:1])
        self._rows = chosen.select(*run.loss.actor_network.in_keys, keys.ATTENTION_MASK)
        self._actions = chosen[keys.TURN_IDS] >= 0
        self._parameters: list[Tensor] = run.optimizer.param_groups[0]["params"]
        self._kl, self._shares = 0.0, list[float]()
        # Where the steps began that are not measured yet, and how many they are.
        self._start, self._open = list[Tensor](), 0
        self._old = self._old_log_prob(chosen)

    def _old_log_prob(self, rows: TensorDictBase) -> Tensor:
        if keys.OLD_LOG_PROB in rows:
            return rows[keys.OLD_LOG_PROB]
        # Where the sampler computes other log-probs, the difference would count as a step of the
        # policy.
        return rows[keys.SAMPLE_LOG_PROB] if self.run.logprobs_match_trainer else self._score()

    @property
    def _reads_next(self) -> bool:
        """Whether the loss's KL is a mean over action tokens, as the target is; one of your own may
        say nothing of it."""
        return getattr(self.run.loss, "weighting", None) == "token"

    def take(self, step: Callable[[], T]) -> T:
        """Let ``step`` move the actor, and return what it returns; :meth:`settle` says how much of
        it is kept."""
        if not self._open:
            self._start = [parameter.detach().clone() for parameter in self._parameters]
        self._open += 1
        return step()

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
        return self.run.distributed.all_reduce_mean(kl_estimate(self._old, self._score(), "k3")[self._actions])

    @torch.no_grad()
    def _score(self) -> Tensor:
        run, actor = self.run, self.run.loss.actor_network
        with run.accelerator.autocast(), run.distributed.gathered_parameters():
            limit = run.config.micro_batch_tokens
            rows = data.apply_in_micro_batches(actor, self._rows.copy(), limit, prefix_cost(actor))
            return rows[keys.LOG_PROB]
