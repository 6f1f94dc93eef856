"""A new objective in 20 lines: override one method.

    python examples/custom_loss.py --config examples/configs/tiny_grpo_multiturn.yaml

PPO's clip has no gradient beyond its bounds. This one saturates smoothly instead: the log-ratio
passes through a tanh of the same width, so every token keeps a gradient, and the gradient at ratio
1 is the policy gradient's.
"""

from torch import Tensor

from torchrl_llm.modules import ActorCritic
from torchrl_llm.objectives import LLMGRPOLoss
from torchrl_llm.runs import RunSettings, build_run, parse_settings


class SmoothClipLoss(LLMGRPOLoss):
    """GRPO with ``eps * tanh(log_ratio / eps) * advantage`` in place of the clipped ratio."""

    def objective(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """``[B, L]``, to be maximized."""
        return self.clip_high * (log_ratio / self.clip_high).tanh() * advantage


def make_loss(config: RunSettings, models: ActorCritic) -> SmoothClipLoss:
    """The loss of a run, with every setting that ``config`` has for GRPO."""
    return SmoothClipLoss(models.actor, **config.loss_options(SmoothClipLoss))


def main(config: RunSettings) -> list[dict[str, float]]:
    """Train with :class:`SmoothClipLoss`; returns the metrics of every iteration."""
    run = build_run(config, make_loss=make_loss)
    before = run.final_evaluation()
    run.trainer.train()
    after = run.final_evaluation()
    print(f"win rate {before.success:.3f} -> {after.success:.3f} in {run.trainer.iteration} iterations")
    return run.trainer.history


if __name__ == "__main__":
    main(parse_settings(description=__doc__))
