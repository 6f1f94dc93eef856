"""Where parts run and how large: device, models of random weights, the game that they play, and
runs of it."""

import math
import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from tensordict import TensorDictBase
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedConfig, Qwen2Config

from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.testing.tokenizers import byte_tokenizer

TURNS = 3
STOP, MOST_STOPS = 32, 120
"""A token in ``STOP`` ends an answer: answers of random models are ragged then. Of the vocabulary
at most ``MOST_STOPS`` ids do, because vLLM knows no more than 128; they are likelier in exchange
(:func:`make_stops_likely`)."""


def qwen(hidden: int, width: int, layers: int, heads: int, kv_heads: int, **more: Any) -> partial[PreTrainedConfig]:
    """A shape of Qwen2.5."""
    return partial(
        Qwen2Config,
        **{"vocab_size": 151_936, "tie_word_embeddings": True} | more,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
    )


SHAPES: dict[str, partial[PreTrainedConfig]] = {
    "SmolLM2-135M": partial(
        LlamaConfig,
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8_192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": qwen(896, 4_864, 24, 14, 2),
    "Qwen2.5-1.5B": qwen(1_536, 8_960, 28, 12, 2),
    "Qwen2.5-7B": qwen(3_584, 18_944, 28, 28, 4, vocab_size=152_064, tie_word_embeddings=False),
    "Qwen2.5-32B": qwen(5_120, 27_648, 64, 40, 8, vocab_size=152_064, tie_word_embeddings=False),
}
SHALLOW = "SmolLM2-135M, 6 layers"
SHAPES[SHALLOW] = partial(SHAPES["SmolLM2-135M"], num_hidden_layers=6)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""In place of a shape's own with ``tiny``."""


class Scored:
    """A few turns in which every response has a reward, so that there is a gradient whatever is
    said.

    Args:
        prompt: characters of the first message, on average; each is a token. It depends on the seed
            alone: a group shares it.
        feedback: characters of later messages, on average. They depend on the response, so that
            members of a group part.
    """

    def __init__(self, prompt: int = 24, feedback: int = 8) -> None:
        self.prompt, self.feedback = prompt, feedback
        self.turn = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode with a text of the seed's own."""
        self.turn = 0
        return text_of(self.prompt, f"prompt {seed}"), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """A reward that depends on every character."""
        self.turn += 1
        return text_of(self.feedback, action), sum(map(ord, action)) % 7 / 7, self.turn == TURNS, False, {}


def text_of(length: int, seed: str) -> str:
    """Letters, 0.6 to 1.4 times ``length`` of them."""
    draw = random.Random(seed)
    return "".join(draw.choices("abcdefgh ", k=draw.randint(length * 6 // 10, length * 14 // 10)))


def stop_ids(vocabulary: int) -> list[int]:
    """The ids that end an answer; of a vocabulary that has many, the end token and no bytes."""
    ids = range(2, vocabulary, STOP)
    return [*ids] if len(ids) <= MOST_STOPS else [2, *range(300, 299 + MOST_STOPS)]


def make_stops_likely(model: torch.nn.Module) -> None:
    """Scale the rows of :func:`stop_ids` in the head of a new model, where they are too few, until
    a token in ``STOP`` is one of them: logits of new models are normal, by their initial range and
    width, so that a wider row is likelier."""
    config = model.config
    vocabulary, ids = config.vocab_size, stop_ids(config.vocab_size)
    spread = config.initializer_range * math.sqrt(config.hidden_size)
    missing = math.log(vocabulary / (STOP * len(ids)))
    if missing > 0.1:
        with torch.no_grad():
            model.get_output_embeddings().weight[ids] *= math.sqrt(spread**2 + 2 * missing) / spread


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and how large: the device, whether shapes are tiny, and a folder."""

    device: str
    tiny: bool
    folder: Path
    rows: dict[tuple[Any, ...], TensorDictBase] = field(default_factory=dict)
    """Rows that were collected, by model and shape: all settings of an update get the same."""

    @property
    def on_gpu(self) -> bool:
        """Whether it is a CUDA device."""
        return self.device != "cpu"

    def size(self, number: int) -> int:
        """A number of tokens or rows, or less of them with ``tiny``."""
        return max(8, number // 32 * 2) if self.tiny else number

    def wait(self) -> None:
        """Return once the device has done what it was given."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def model(self, name: str, dtype: torch.dtype = torch.float32) -> Path:
        """A folder with a random model of the shape and a byte tokenizer; made once."""
        path = self.folder / f"{name}-{dtype}"
        if not path.exists():
            tokenizer = byte_tokenizer()
            config = SHAPES[name](eos_token_id=2, pad_token_id=0, bos_token_id=None, **SMALL if self.tiny else {})
            # Billions of random numbers take a CPU minutes.
            with torch.random.fork_rng(devices=[0] if self.on_gpu else []), torch.device(self.device):
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            make_stops_likely(model)
            model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
        return path

    def config(self, name: str, *, model: str = "SmolLM2-135M", **settings: Any) -> RunSettings:
        """Settings of a run in ``folder / name``: two iterations of short conversations in float32,
        unless given."""
        defaults = {
            "algo": "LLMPPO", "dtype": "float32", "float32_matmul_precision": "highest", "lora_r": 8, "num_envs": 8,
            "batch_size": 16, "max_model_len": 512, "max_output_tokens": 12, "min_output_tokens": 12, "max_iterations": 2,
            "schedule": "constant", "lr_actor": 1e-4, "kl_coeff": 0.01, "evaluation_interval": 0,
            "save_checkpoints": False, "progress": False,
        }  # fmt: skip
        chosen: dict[str, Any] = defaults | settings
        path = self.model(model, torch.bfloat16 if chosen["dtype"] == "bfloat16" else torch.float32)
        return RunSettings.from_values(
            **chosen, model_path=str(path), device=self.device, output_dir=self.folder / name
        )

    def run(self, name: str, **settings: Any) -> Any:
        """A run; ``settings`` are of :meth:`config`, ``env`` or ``make_env``."""
        played = {key: settings.pop(key) for key in ("env", "make_env") if key in settings}
        chosen = self.config(name, **settings)
        # a process has one device and precision otherwise
        AcceleratorState._reset_state(reset_partial_state=True)
        return build_run(chosen, **played or {} if "env_name" in settings or played else {"env": Scored})


def groups(
    place: Place, model: str, *, prompt: int = 600, feedback: int = 40, rows: int = 64, answer: int = 64, least: int = 4
) -> dict[str, Any]:
    """Settings of a run of ``model``: groups of 8 over three turns with ragged answers.

    Args:
        prompt, feedback: tokens of the first message and of later ones, on average.
        rows: episodes of a batch, all side by side.
        answer, least: most and fewest tokens of an answer.
    """
    # Prompts are long with tiny models too: from short ones nothing is shared.
    feedback, rows = place.size(feedback), max(8, place.size(rows) // 8 * 8)
    answer = place.size(answer)
    # Chat markup takes up to 32 bytes for each message.
    length = prompt * 14 // 10 + TURNS * (answer + feedback * 14 // 10 + 64)
    vocabulary = (SMALL if place.tiny else SHAPES[model].keywords)["vocab_size"]
    return {
        "model": model,
        "algo": "GRPO",
        "group_size": 8,
        "num_envs": rows,
        "batch_size": rows,
        "max_model_len": length,
        "max_output_tokens": answer,
        "min_output_tokens": min(least, answer),
        "stop_ids": stop_ids(vocabulary),
        "env": partial(Scored, prompt, feedback),
    }
