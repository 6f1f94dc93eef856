"""An evaluation as users see it."""

import torch
from tensordict import TensorDict

from torchrl_llm.metrics import Evaluation


class TestRepr:
    def test_it_does_not_grow_with_the_episodes(self):
        measured = {"success": 0.5, "success_ci95": (0.4, 0.6), "reward": 0.5, "turns": 2.0, "response_length": 7.0}
        printed = repr(
            Evaluation(
                episodes=512,
                **measured,
                outcomes="01" * 256,
                task_digest="0" * 16,
                beginnings="0123abcd" * 512,
                rows=TensorDict({"tokens": torch.zeros(512, 8)}, batch_size=[512]),
                texts={1: "a text of the environment" * 100},
            )
        )
        assert printed.startswith("Evaluation(episodes=512, success=0.5, success_ci95=(0.4, 0.6)")
        assert len(printed) < 300
