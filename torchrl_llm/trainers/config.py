"""What the loop reads: :class:`TrainerConfig`. Each field is documented where it is declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torchrl_llm.objectives import TurnEstimator, TurnLoss
from torchrl_llm.objectives.checks import wrong_penalty
from torchrl_llm.utils.options import (
    Checked,
    ConfigError,
    Count,
    Idle,
    Natural,
    NonNegative,
    Positive,
    PositiveShare,
    Range,
    Share,
)

OldLogProbs = Literal["auto", "sampler", "scorer"]

NOTHING_TO_CORRECT = (
    'old_log_probs="sampler" leaves no gap between sampler and trainer to correct for: use "auto" or "scorer", or no '
    "correction."
)
"""Of settings with a sampler correction, and of a trainer whose loss has one."""

MOST_TOKENS = 16_384
"""The largest ``max_tokens`` that is taken where none is given."""


@dataclass(kw_only=True)
class TrainerConfig(Checked):
    """The loop of training: what :class:`~torchrl_llm.trainers.LLMTrainer` reads."""

    epochs: Count = 1
    """Passes over each batch."""
    minibatch_size: Count | None = None
    """Episodes per optimizer step; None takes the whole batch in one step."""
    max_tokens: Count | None = None
    """Tokens (padding included) of one forward and backward pass. It bounds memory and never
    changes the gradient. Rows are not cut: those that share may have an eighth more than the
    longest. None takes a number for the shapes of the model and the device, whatever the memory of
    the machine: the power of two up to 16384 whose activations take about 4 GiB on a CPU, a quarter
    of a GPU's memory; and at least max_model_len. A resumed run keeps its number. (LLMTrainer, made
    without build_run, takes 16384.)"""
    old_log_probs: OldLogProbs = "auto"
    """The denominator of ratios: the "sampler"'s log-probs, or those that the "scorer" gives the
    tokens before the update (one more forward pass); "auto" takes the sampler's where they are the
    scorer's anyway."""
    critic_warmup: Natural = 0
    """Iterations at the start in which only the critic learns, of a shared trunk its head alone
    (LLMPPO)."""
    dynamic_sampling: Natural = 0
    """0 is off; else learn only from groups that the estimator gives an advantage (GRPO: groups
    whose returns differ, before overlong_penalty), and collect up to this many batches an iteration
    until there are enough of them."""
    overlong_filter: bool = False
    """Leave episodes that a length limit has cut out of the update; credit still counts them."""
    overlong_penalty: NonNegative = 0.0
    """Taken from the reward of a response that reaches max_output_tokens, less of it before; 0 is
    off. Not with scale="mean" and imitate="return", which take no negative returns."""
    overlong_buffer: Count | None = None
    """Tokens before the limit over which that penalty grows; None takes the whole length."""
    # inf clips nothing, and the norm is still logged.
    max_grad_norm: Annotated[float, Range("(0, inf]")] = 1.0
    """Gradients are clipped to this 2-norm, actor and critic apart."""
    target_kl: Positive | None = None
    """KL from the policy before an update to the one after it, per action token, in nats: a step
    that goes further is shortened, and is the update's last. None sets no bound."""
    # After each step a quarter costs 7 % of an iteration of LLMREINFORCE, 8 % of GRPO's, 1 % of
    # LLMPPO's (CPU, 128 episodes).
    target_kl_share: PositiveShare = 0.25
    """Share of the batch's episodes, at least, on which that KL is measured, by a scoring pass:
    after the last step, and where the next step's minibatch shows a KL beyond it."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The learning rates' course after the warm-up, over ``max_steps``."""
    warmup_fraction: Share = 0.0
    """Share of ``max_steps`` over which the learning rates rise from 0. A run that max_iterations
    ends far earlier is warned of."""
    min_lr_fraction: Share = 0.0
    """The cosine schedule ends at this share of the learning rate."""
    lr_decay_fraction: PositiveShare = 1.0
    """The cosine schedule falls over this last share of ``max_steps``, and is constant before; 1:
    from the warm-up on."""
    min_entropy_fraction: Share = 0.0
    """The loss's entropy_target falls to this share of it, in a straight line over ``max_steps``; 1
    leaves it as it is."""
    kl_decay_fraction: PositiveShare | None = None
    """Share of ``max_steps`` over which the weight of the KL to the reference falls from
    ``kl_coeff`` to 0, in a straight line; None leaves it as it is. From there on the reference is
    not scored, and policy/kl_reference not logged."""
    max_steps: Count = 100_000
    """Turns to collect in training; the run ends with the iteration that reaches it."""
    max_iterations: Count | None = None
    """Cap on iterations; None sets none."""
    max_seconds: Positive | None = None
    """Cap on wall-clock time, checked between iterations; None sets none."""
    stop_at_success: PositiveShare | None = None
    """End the run when the sampled evaluation's success rate reaches this; None never does."""
    evaluation_interval: Natural = 10
    """Iterations between evaluations; 0 evaluates only before and after the run."""
    checkpoint_interval: Natural = 10
    """Iterations between checkpoints; 0 saves only after the best evaluation and at the end."""
    seed: Natural = 0
    """Of minibatch order (and, in :class:`RunSettings`, of everything else)."""

    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(("overlong_buffer",), {"overlong_penalty": (0,)}, "set overlong_penalty"),
        Idle(("target_kl_share",), {"target_kl": (None,)}, "set target_kl"),
        Idle(("min_lr_fraction", "lr_decay_fraction"), {"schedule": ("constant",)}, 'set schedule to "cosine"'),
        Idle(
            ("schedule", "min_lr_fraction", "lr_decay_fraction"),
            {"warmup_fraction": (1,)},
            "let the warm-up end earlier",
        ),
        Idle(("stop_at_success",), {"evaluation_interval": (0,)}, "set evaluation_interval to 1 or more"),
    )

    def __post_init__(self) -> None:
        for problem in self._contradictions():
            raise ConfigError(problem)

    @property
    def micro_batch_tokens(self) -> int:
        """``max_tokens``, or 16,384 where none is given and none was chosen."""
        return MOST_TOKENS if self.max_tokens is None else self.max_tokens

    def _contradictions(self) -> Iterator[str]:
        """What is wrong with these settings together, and what to do."""
        if self.max_iterations is not None and self.critic_warmup > self.max_iterations:
            yield (
                f"critic_warmup={self.critic_warmup} is more than max_iterations={self.max_iterations}: the policy would never "
                "learn. Lower the first or raise the second."
            )


def wrong_settings(config: TrainerConfig, loss: TurnLoss, *, num_groups: int, max_output_tokens: int) -> Iterator[str]:
    """What is wrong with settings of the loop for the parts of a trainer, and what to do.

    Args:
        config: the settings.
        loss: with its value estimator.
        num_groups: the optimizer's groups of parameters.
        max_output_tokens: tokens of the longest response.

    Examples:
        >>> from torchrl_llm.modules import TokenScorer
        >>> from torchrl_llm.objectives import LLMGRPOLoss
        >>> from torchrl_llm.testing.enumerable import tiny_lm
        >>> loss = LLMGRPOLoss(TokenScorer(tiny_lm(0)), kl_coeff=0.0)
        >>> next(wrong_settings(TrainerConfig(critic_warmup=2), loss, num_groups=1, max_output_tokens=16))
        'critic_warmup=2, but LLMGRPOLoss has no critic: leave it 0, or use LLMPPO.'
    """
    buffer = config.overlong_buffer
    estimator = loss.value_estimator if isinstance(loss.value_estimator, TurnEstimator) else None
    yield from wrong_warmup(config, loss, num_groups=num_groups)
    if config.min_entropy_fraction and loss.entropy_target is None:
        yield (
            f"min_entropy_fraction={config.min_entropy_fraction} is a share of the loss's entropy_target, and it has none: set it, "
            "or leave min_entropy_fraction out."
        )
    # An estimator may take the KL out of the rewards instead, with the loss's kl_fraction.
    holds_kl = estimator is not None and estimator.kl_coeff != 0
    if config.kl_decay_fraction is not None and not (loss.kl_coeff or holds_kl):
        yield (
            f"kl_decay_fraction={config.kl_decay_fraction} lowers the loss's kl_coeff, which is 0: set it, or leave "
            "kl_decay_fraction out."
        )
    if buffer is not None and buffer > max_output_tokens:
        yield (
            f"overlong_buffer={buffer} is more than a response has, {max_output_tokens} tokens: lower it, or raise the policy's "
            "max_output_tokens."
        )
    yield from wrong_penalty(config.overlong_penalty, estimator)
    corrects = loss.corrects_sampler or (estimator is not None and estimator.corrects_sampler)
    if config.old_log_probs == "sampler" and corrects:
        yield NOTHING_TO_CORRECT


def wrong_warmup(config: TrainerConfig, loss: TurnLoss, *, num_groups: int) -> Iterator[str]:
    """What keeps ``config.critic_warmup`` from warming up a critic, and what to do; arguments as in
    :func:`wrong_settings`."""
    warmup = config.critic_warmup
    if warmup and loss.critic_network is None:
        yield f"critic_warmup={warmup}, but {type(loss).__name__} has no critic: leave it 0, or use LLMPPO."
    if warmup and num_groups < 2:
        yield (
            f"critic_warmup={warmup} steps the optimizer's second group of parameters, and there is one: give the critic's a "
            "group of their own, after the actor's."
        )
