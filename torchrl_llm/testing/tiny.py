"""The small model that the package ships: where it lies and how to load it.

A Qwen2 of about 0.14 M parameters that acts legally in ``game:GuessTheNumber-v0-easy``, reads its
hints and wins less than three episodes in four, so that reinforcement learning has something to
teach on a CPU in minutes. What it is and what was measured stands in ``tiny_guess/README.md``; it
is made by ``benchmarks/small_models/make_tiny_guess.py`` of the repository. Nothing here needs a
network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_llm.runs.tiny import tiny_model_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

__all__ = ["load_tiny_model", "load_tiny_tokenizer", "random_model", "tiny_model_path"]


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


def random_model(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 2,
    max_length: int = 256,
    seed: int = 0,
) -> Qwen2ForCausalLM:
    """A small Qwen2 that has learned nothing: float32, embeddings apart from the head, in
    evaluation mode.

    The global generators are left as they were.

    Args:
        tokenizer: gives the size of the vocabulary and the ids of padding and EOS.
        hidden: width; the layers in between are three times as wide. A multiple of ``heads``.
        layers: number of layers.
        heads: number of attention heads.
        max_length: longest context in tokens.
        seed: of the weights, which are normal with deviation ``1 / (2 sqrt(inputs))``; norms are 1
            and biases 0.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import word_tokenizer
        >>> model = random_model(word_tokenizer(["left", "right"]))
        >>> model.config.vocab_size, model.config.hidden_size
        (7, 32)
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5 / 2, generator=generator)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0
    )
    return model.eval()
