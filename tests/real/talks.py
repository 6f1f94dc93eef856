"""What the tests of real models share: a conversation of several turns, and the settings of a short
run."""

from pathlib import Path

from torchrl_llm.runs import RunSettings

TURNS = 3
QUESTIONS = (
    "Name three colors of the rainbow.",
    "What is 7 times 8? Explain your answer in one sentence.",
    "Write a short poem about a river, the sea and the rain.",
)


class Talk:
    """A few questions after one that depends on the seed; pays by the length of the answers, which
    few share."""

    def reset(self, seed=None):
        self.turn, self.length = 0, 0
        return f"You are in room {seed % 1000}. {QUESTIONS[seed % 3]}", {}

    def step(self, action):
        self.turn, self.length = self.turn + 1, self.length + len(action)
        over = self.turn == TURNS
        return f"Thank you. {QUESTIONS[self.turn % 3]}", over * (self.length % 17) / 16, over, False, {}


class LongTalk(Talk):
    """The first message has about 240 tokens."""

    def reset(self, seed=None):
        message, info = super().reset(seed)
        return " ".join(f"There is a door number {seed % 89 + place} here." for place in range(22)) + message, info


def config(folder: Path, **settings) -> RunSettings:
    """GRPO with LoRA on four conversations an iteration."""
    return RunSettings.from_values(
        **{
            "algo": "GRPO",
            "model_path": "smollm2",
            "device": "cpu",
            "lora_r": 8,
            "lr_actor": 1e-3,
            "kl_coeff": 0.0,
            "num_envs": 4,
            "batch_size": 4,
            "group_size": 2,
            "max_model_len": 512,
            "max_output_tokens": 12,
            "evaluation_interval": 0,
            "progress": False,
            "output_dir": folder,
        }
        | settings
    )
