"""What the tests of numbers out of other projects' published tests share, and where these numbers
stand.

Only numbers are quoted, with the test that holds them (where that writes a formula, its figure).
Where a definition differs from ours, the test says how and holds the figures of both. Sources, each
at the commit where its numbers stand:

- rlax: google-deepmind/rlax 4c5d25b, ``rlax/_src/{multistep,vtrace}_test.py``
- Tianshou: thu-ml/tianshou f240205, ``test/base/test_returns.py``
- torchtune: pytorch/torchtune bd2a0fc, ``tests/torchtune/rlhf/test_rewards.py``,
  ``.../loss/test_ppo_loss.py``
- SkyRL: NovaSky-AI/SkyRL a956457, ``tests/backends/skyrl_train/utils/test_ppo_utils.py``,
  ``tests/train/algorithms/test_{losses,off_policy_correction}.py``
- NeMo RL: NVIDIA-NeMo/RL 7ea279a,
  ``tests/unit/algorithms/test_{loss_functions,ppo,grpo,utils,reward_functions}.py``
- verl: volcengine/verl b178a3c, ``tests/trainer/ppo/test_rollout_corr.py``
- tinker-cookbook: thinking-machines-lab/tinker-cookbook 1baf9d2,
  ``tinker_cookbook/rl/advantages_test.py``
- TRL: huggingface/trl f2cd577, ``tests/test_rewards.py``,
  ``tests/experimental/test_ppo_trainer.py``
- Open Instruct: allenai/open-instruct e6c3044, ``open_instruct/test_rl_utils.py``
"""

from __future__ import annotations

import torch
from conversations import DOUBLE
from torch import Tensor


def doubles(*numbers: list) -> Tensor | tuple[Tensor, ...]:
    made = tuple(torch.tensor(x, dtype=DOUBLE) for x in numbers)
    return made if len(made) > 1 else made[0]


def meets(actual: Tensor, published: list | float, digits: int) -> None:
    """Equal to the last of the ``digits`` decimals that were published, which some cut and others
    round."""
    torch.testing.assert_close(actual.to(DOUBLE), doubles(published), rtol=0, atol=10.0**-digits)


def all_of(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)
