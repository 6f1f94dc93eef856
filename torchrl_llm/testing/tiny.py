"""The small model that the package ships: where it lies and how to load it.

A Qwen2 of about 0.14 M parameters that plays ``game:GuessTheNumber-v0-easy`` legally, reads its hints and wins less
than three games in four, so that reinforcement learning has something to teach on a CPU in minutes. What it is and
what was measured stands in ``tiny_guess/README.md``; how it is made, in :mod:`torchrl_llm.testing.make_tiny_guess`.
Nothing here needs a network.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM


def tiny_model_path() -> Path:
    """The directory of the shipped model, in the format of transformers.

    Returns:
        An absolute path that ``from_pretrained`` takes.

    Examples:
        >>> sorted(path.name for path in tiny_model_path().glob("*.safetensors"))
        ['model.safetensors']
    """
    return Path(__file__).resolve().parent / "tiny_guess"


def load_tiny_model() -> Qwen2ForCausalLM:
    """The shipped model, float32, in evaluation mode.

    Examples:
        >>> load_tiny_model().config.hidden_size
        64
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype="float32", local_files_only=True).eval()


def load_tiny_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the shipped model, with its ChatML template.

    Examples:
        >>> tokenizer = load_tiny_tokenizer()
        >>> [tokenizer.decode([i]) for i in tokenizer.encode("At turn 2, you guessed 10, which is outside")][:4]
        ['At turn ', '2', ', you guessed ', '10']
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_path(), local_files_only=True)
