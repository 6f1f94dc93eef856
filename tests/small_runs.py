"""What the tests of the trainer share: settings of a small run, its first batch and files,
environments of one rule."""

from pathlib import Path

import torch
from tensordict.nn import TensorDictModule

from torchrl_llm.runs import RunSettings

SMALL = {
    "model_path": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 256,
    "max_output_tokens": 16,
    "num_envs": 8,
    "batch_size": 8,
    "lora_r": 0,
    "kl_coeff": 0.0,
    "evaluation_interval": 0,
    "evaluation_episodes": 8,
    "final_episodes": 8,
    "save_checkpoints": False,
    "progress": False,
}


ALGORITHMS = {"LLMPPO": {}, "LLMREINFORCE": {}, "GRPO": {"group_size": 4}}
"""The algorithms of reinforcement learning, with a KL and ratios, and what they need."""
EVERY_ALGORITHM = ALGORITHMS | {"SFT": {"demonstrations": "guess_by_half_the_hints"}}


class ModelStub:
    """Keys only: what a loss needs of its networks to be made."""

    actor = TensorDictModule(lambda x: (x, x), in_keys=["tokens"], out_keys=["log_prob", "entropy"])
    critic = TensorDictModule(lambda x: (x, x), in_keys=["tokens"], out_keys=["state_value", "bootstrap_value"])
    joint = None


def small_config(tmp_path, algo="LLMREINFORCE", **settings) -> RunSettings:
    return RunSettings.from_values(
        **SMALL | {"algo": algo, "output_dir": tmp_path / "run"} | EVERY_ALGORITHM[algo] | settings
    )


def one_batch(run):
    """The rows of one batch, where the run computes."""
    next(iter(run.trainer.collector))
    rows = run.trainer.replay_buffer[:].contiguous().to(run.trainer.accelerator.device)
    run.trainer.replay_buffer.empty(empty_write_count=False)
    return rows


def weights(run) -> torch.Tensor:
    parameters = run.models.actor_parameters() + run.models.critic_parameters()
    return torch.cat([p.detach().flatten() for p in parameters])


def contents(path: Path) -> dict[str, bytes]:
    """The files below a folder, by their paths in it."""
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


class Won:
    """Over after a turn, and won by whoever speaks."""

    won = 1.0

    def reset(self, seed=None):
        self.seed = seed
        return "Speak.", {}

    def step(self, action):
        return "Over.", self.won, True, False, {}


class TwoTurns(Won):
    """Over after two turns, which pay nothing."""

    won = 0.0

    def reset(self, seed=None):
        self.turn = 0
        return super().reset(seed)

    def step(self, action):
        self.turn += 1
        return "Go on.", 0.0, self.turn == 2, False, {}


def prepared(trainer):
    """A scored and credited batch."""
    next(iter(trainer.collector))
    rows = trainer.replay_buffer[:].contiguous().to(trainer.accelerator.device)
    trainer.scorer.score(rows)
    trainer.loss.value_estimator(rows)
    return rows
