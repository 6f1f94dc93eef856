"""What says that a run goes wrong, and what to do: :class:`HealthRules`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean

WINDOW = 5
"""Iterations that the mean of the success rate is over: the rate of one batch of a hundred episodes
moves by 0.1 by chance."""
FALL = 0.15
"""Loss of success below the best such mean: healthy runs on GuessTheNumber lost 0.11 at most,
collapses 0.4 and more."""
LONG_UPDATE = 0.05
"""KL per action token, in nats: healthy updates of those runs moved the policy by less than 0.01,
collapses by 0.1 and more."""
SETTLED = 0.02
"""Entropy of the first response, in nats, below which about one in 300 differs from the others."""


REJECTED = 0.5
"""Share of the action tokens that sampler_correction leaves out: for engines whose log-probs differ
by rounding it is far below 0.1."""


SCATTERED = 3.0
"""Growth of the entropy of a token, above :data:`NOISY` nats, that without more success is a policy
that turns to noise."""
NOISY = 1.0


FAR = 0.1
"""KL to the reference, nats per action token, before the first update: 0.00 for a policy that
begins as the reference, up to rounding."""


class HealthRules:
    """Finds, once of each kind, what precedes a collapse, and the collapse itself, in the metrics
    of a run.

    Args:
        teacher: the reference of the KL is a teacher, which is meant to be far away. Default
            ``False``.

    Examples:
        >>> rules = HealthRules()
        >>> [warning.partition(":")[0] for warning in rules.problems({"rollout/success": 0.5, "policy/kl_old": 0.2})]
        ['the update moved the policy by 0.2 nats a token, more than 0.05']
        >>> rules.problems({"rollout/success": 0.5, "policy/kl_old": 0.3})
        []
    """

    def __init__(self, *, teacher: bool = False) -> None:
        self.teacher = teacher
        self._warned: set[str] = set()
        self._iterations = 0
        self._wins: list[float] = []
        self._best = 0.0
        self._without_credit = self._without_gradient = 0
        self._first_mean = self._first_entropy = math.inf
        self._calls = 0.0

    def problems(self, metrics: Mapping[str, float]) -> list[str]:
        """What the metrics of the next iteration say for the first time, each with what to do."""
        self._iterations += 1
        self._wins = [*self._wins, metrics["rollout/success"]][-WINDOW:]
        self._without_credit = self._without_credit + 1 if metrics.get("credit/largest") == 0.0 else 0
        # A critic that is warmed up leaves the actor without one, which is meant.
        still = metrics.get("optim/grad_norm_actor") == 0.0 and "loss/critic" not in metrics
        self._without_gradient = self._without_gradient + 1 if still else 0
        self._calls += metrics.get("data/tool_calls", 0.0)
        if math.isinf(self._first_entropy):
            self._first_entropy = metrics.get("policy/entropy", math.inf)
        found = [(kind, problem) for kind, problem in self._problems(metrics) if kind not in self._warned]
        self._warned |= {kind for kind, _ in found}
        return [problem for _, problem in found]

    def _problems(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        kl = max(metrics.get(name, 0.0) for name in ("policy/kl_old", "policy/kl_update"))
        if kl > LONG_UPDATE:
            yield (
                "long",
                f"the update moved the policy by {kl:.2g} nats a token, more than {LONG_UPDATE}: one such update can undo a run. Set "
                "target_kl to 0.01, which shortens its steps, or lower lr_actor.",
            )
        # Not the mean over the steps of the update, which may have moved the policy that far
        # itself.
        far = metrics.get("policy/kl_reference_start", 0.0)
        if far > FAR and self._iterations == 1 and not self.teacher:
            yield (
                "far",
                f"the policy begins {far:.2g} nats a token away from the reference of the KL, which pulls it back there, over what it was taught "
                "before: with init_from set init_reference, or kl_coeff to 0, unless that is meant.",
            )
        mean = fmean(self._wins) if len(self._wins) == WINDOW else 0.0
        self._best = max(self._best, mean)
        if len(self._wins) == WINDOW and math.isinf(self._first_mean):
            self._first_mean = mean
        if self._best - mean > FALL and len(self._wins) == WINDOW:
            yield (
                "fall",
                f"success fell from {self._best:.2f} to {mean:.2f} (means of {WINDOW} iterations): start again from an earlier "
                "checkpoint with init_from, with target_kl=0.01 or a lower lr_actor.",
            )
        yield from self._nothing_learned(metrics, mean)
        if "data/tool_calls" in metrics and not self._calls and self._iterations >= WINDOW:
            yield (
                "no calls",
                f"the environment has tools, and no response of {WINDOW} iterations called one: what is never tried is never learned. Read in "
                "the report what is written in place of calls, say in the system prompt when to call a tool, or begin with a model that does "
                "(torchrl-llm warmup).",
            )
        entropy, success = metrics.get("policy/first_turn_entropy", SETTLED), metrics["rollout/success"]
        # A policy that wins nearly always may settle.
        if entropy < SETTLED and success < 0.9:
            yield (
                "settled",
                f"the first response is nearly always the same (policy/first_turn_entropy {entropy:.2g}) and success is {success:.2f}: "
                "what is never tried is never learned. Start again with a KL that falls (kl_coeff=0.1, kl_kind=k2, kl_in=loss, "
                "kl_decay_fraction=0.8), with a higher entropy_coeff and entropy_target, or with a lower lr_actor.",
            )

    def _nothing_learned(self, metrics: Mapping[str, float], mean: float) -> Iterator[tuple[str, str]]:
        rejected = metrics.get("policy/sampler_rejected", 0.0)
        if rejected > REJECTED:
            yield (
                "rejected",
                f"sampler_correction leaves out {rejected:.0%} of the tokens, which teach nothing. Over a turn or a sequence the ratios of the tokens "
                "are multiplied, and with top_p, top_k or min_p each is the share of the probability that was sampled from: set "
                'sampler_level="token", wider sampler_bounds or sampler_correction="truncate", or sample without truncation.',
            )
        # Advantages of 0 alone are not a fault: with a teacher they are meant, and where all
        # episodes are won.
        if self._without_credit >= WINDOW and not any(self._wins):
            yield (
                "no credit",
                f"no episode was won and no turn had an advantage for {WINDOW} iterations: rewards teach nothing. Begin with a model that wins "
                "at times (torchrl-llm warmup), with easier tasks or rewards on the way, or compare more episodes (group_size).",
            )
        elif self._without_gradient >= WINDOW and mean < 0.9 and rejected <= REJECTED:
            yield (
                "no gradient",
                f"the gradient was 0 for {WINDOW} iterations: nothing is learned. Look which terms the loss has left: advantages "
                "(credit/largest), a KL (kl_coeff, kl_decay_fraction), an entropy bonus.",
            )
        entropy, first = metrics.get("policy/entropy", 0.0), self._first_entropy
        if entropy > max(NOISY, SCATTERED * first) and len(self._wins) == WINDOW and mean <= self._first_mean:
            yield (
                "scattered",
                f"the entropy of a token rose from {first:.2f} to {entropy:.2f} nats, and success did not rise: the bonus outweighs the rewards. Lower "
                "entropy_coeff, or bound it with entropy_target.",
            )
