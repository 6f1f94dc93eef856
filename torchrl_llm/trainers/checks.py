"""Whether the parts of a trainer go together: :func:`check_parameters`, :func:`check_options`."""

from __future__ import annotations

import torch

from torchrl_llm.modules.policy import TurnPolicy
from torchrl_llm.objectives import TurnPolicyLoss
from torchrl_llm.trainers.collector_view import corrects_sampler
from torchrl_llm.trainers.config import ConfigError, TrainerConfig


def check_parameters(loss: TurnPolicyLoss, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that steps other parameters than the loss trains, which would run without a word.

    Raises:
        ConfigError: names some of the parameters that are left out.
    """
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {id(parameter): name for name, parameter in loss.named_parameters() if parameter.requires_grad}
    idle = sorted(trained[each] for each in trained.keys() - stepped)
    if idle or stepped - trained.keys():
        listed = ", ".join(idle[:3]) + (", ..." if len(idle) > 3 else "")
        raise ConfigError(
            f"The optimizer steps {len(stepped - trained.keys())} parameters that are none of {type(loss).__name__}'s trainable "
            f"ones, and leaves out {len(idle)} that are{f' ({listed})' if idle else ''}. Make the loss of the networks whose "
            "parameters the optimizer has (build_run: models.actor and models.critic), and set requires_grad_(False) on what "
            "is not to be trained."
        )


def check_options(
    config: TrainerConfig, loss: TurnPolicyLoss, optimizer: torch.optim.Optimizer, policy: TurnPolicy
) -> None:
    """Refuse settings of the loop that do not go with the other parts.

    Raises:
        ConfigError: names the setting and what to do.
    """
    if config.critic_warmup and loss.critic_network is None:
        raise ConfigError(
            f"critic_warmup={config.critic_warmup}, but {type(loss).__name__} has no critic: leave it 0, or use LLMPPO."
        )
    if config.critic_warmup and len(optimizer.param_groups) < 2:
        raise ConfigError(
            f"critic_warmup={config.critic_warmup} steps the optimizer's second group of parameters, and there is one: give "
            "the critic's a group of their own, after the actor's."
        )
    limit = policy.sampling.max_output_tokens
    if config.overlong_buffer is not None and config.overlong_buffer > limit:
        raise ConfigError(
            f"overlong_buffer={config.overlong_buffer} is more than a response has, {limit} tokens: lower it, or raise the "
            "policy's max_output_tokens."
        )
    if config.old_log_probs == "sampler" and (loss.sampler_correction or corrects_sampler(loss.value_estimator)):
        raise ConfigError(
            'old_log_probs="sampler" leaves no gap between sampler and trainer to correct for: use "auto" or '
            '"scorer", or no correction.'
        )
