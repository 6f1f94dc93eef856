"""Small tokenizers for tests and examples, made in milliseconds without any download."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchrl_llm.envs.chat import CHATML
from torchrl_llm.envs.response import THINKING

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

THINKING_CHATML = (
    CHATML.replace("message['content']", "message['content'].split('</think>')[-1].lstrip('\\n')")
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
"""ChatML that shows thinking as Qwen3's template does: that of earlier answers is dropped, and with
``enable_thinking=False`` the prompt has an empty thought."""


def byte_tokenizer(
    *, chat_template: str | None = CHATML, corpus: Iterable[str] = (), vocab_size: int = 512, phrases: bool = False
) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer that can encode any text.

    Ids 0, 1, 2 are ``<|endoftext|>`` (padding), ``<|im_start|>`` and ``<|im_end|>`` (EOS); then
    come the 256 bytes, then merges learned from ``corpus``.

    Args:
        chat_template: Jinja template; default ChatML. ``None`` leaves the tokenizer without one.
        corpus: texts to learn merges from; default none, that is one token a byte.
        vocab_size: most tokens in all, with merges.
        phrases: whether merges may join words, so that fixed wording between two digits becomes one
            token, and each digit is a token. Default ``False``: no token has more than one word.

    Examples:
        >>> tokenizer = byte_tokenizer()
        >>> len(tokenizer), tokenizer.eos_token
        (259, '<|im_end|>')
        >>> tokenizer.encode("hi<|im_end|>")
        [74, 75, 2]
        >>> tokenizer = byte_tokenizer(corpus=["pile 0: 3"], phrases=True)
        >>> [tokenizer.decode([token]) for token in tokenizer.encode("pile 0: 3 ")]
        ['pile ', '0', ': ', '3', ' ']
    """
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not phrases)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), split]) if phrases else split
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(list(corpus), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def word_tokenizer(words: Sequence[str], *, thinks: bool = False) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are whole words, for models of a tiny vocabulary.

    Ids 0, 1, 2 are ``<|endoftext|>`` (padding), ``<|im_start|>`` and ``<|im_end|>`` (EOS), 3 and 4
    the roles ``user`` and ``assistant`` of the ChatML template; then come the words. White space
    separates words and is not kept.

    Save it in a directory of its own (``RunSettings.from_values(tokenizer_path=...)``): next to the
    files of a Qwen2, ``AutoTokenizer`` would read it as Qwen2's byte-level BPE.

    Args:
        words: all other words that occur in messages and responses; distinct, without white space.
        thinks: whether it is a tokenizer of a model that thinks. Then ``<think>``, ``</think>`` and
            ``<unk>``, for any other word, follow the words, and the template is
            :data:`THINKING_CHATML`. Default ``False``.

    Returns:
        A tokenizer with ``5 + len(words)`` tokens, and three more if it ``thinks``; if not, it
        raises (a bare ``Exception``, from the tokenizers library) on a text with any other word.
        Nor can it spell the control tokens as text: an environment that repeats what was written,
        as many games do, needs :func:`byte_tokenizer`.

    Raises:
        ValueError: ``words`` holds a word twice, one of the five tokens above, or something that is
            not one word.

    Examples:
        >>> tokenizer = word_tokenizer(["left", "right"])
        >>> tokenizer.convert_ids_to_tokens(tokenizer.encode("<|im_start|>user\\nleft right<|im_end|>"))
        ['<|im_start|>', 'user', 'left', 'right', '<|im_end|>']
        >>> tokenizer.decode([6, 5])
        'right left'
        >>> word_tokenizer(["4"], thinks=True).decode([6, 5, 7, 5])
        '<think> 4 </think> 4'
    """
    # Formatters try a template that drops thinking with texts of their own, so any word is encoded.
    own = [*THINKING, "<unk>"] if thinks else []
    tokens = [*SPECIAL_TOKENS, "user", "assistant", *words, *own]
    wrong = [word for word in words if word.split() != [word] or tokens.count(word) > 1]
    if wrong:
        raise ValueError(f"words holds {wrong}; expected distinct words without white space that are not {tokens[:5]}.")
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # not special, as in Qwen3: they are a part of answers
    backend.add_tokens([AddedToken(token, normalized=False) for token in own[:2]])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=THINKING_CHATML if thinks else CHATML,
    )
