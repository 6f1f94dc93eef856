"""Chat templates and vocabularies that Python packages ship, with tokenizers for them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from torchrl_llm.rendering import ChatTemplateError, Message, Renderer
from torchrl_llm.testing.tokenizers import byte_tokenizer

CONTROL = re.compile(
    r"<[|｜][^|｜<>\n{}'\" ]{1,40}[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_\w+>|<end_of_utterance>|<(?:bos|eos|pad|unk|sep)>"
    r"|\[/?(?:[A-Z]{2,}_)*[A-Z]{2,}\]|</?s>|<SPECIAL_\d+>|<(?:seed|mm):(?:bos|eos)>|\]~b\]|\]~!b\[|\[e~\[|\[gMASK\]|<sop>"
)
MARKUP = re.compile(
    r"</?(?:\w+:)?(?:think|tool_calls?|tool_response|arg_key|arg_value|answer|TOOLCALL|user|assistant|system|sp)>"
)
ENDS_OF_TEXT = (
    "<|im_end|>", "<|eot_id|>", "<end_of_utterance>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|end_of_text|>", "<|return|>",
    "<seed:eos>", "[e~[", "<SPECIAL_12>", "[EOS]",
)  # fmt: skip
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_WORDS = QWEN_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")


@dataclass(frozen=True)
class Template:
    """A chat template of a package.

    Attributes:
        package: where it is from.
        name: the file's name, without its suffix.
        text: the template.
        kwargs: what the template is given.
    """

    package: str
    name: str
    text: str = field(repr=False)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" if name != "tools" else "tools" for name, value in self.kwargs.items())
        return f"{self.name} ({given})" if given else self.name


def templates() -> list[Template]:
    """All that are installed, each also with the switches of thinking that it reads."""
    return [
        variant for found in (_trl, _mistral, _llama_cpp) for template in found() for variant in _variants(template)
    ]


TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
SWITCHES = {"enable_thinking": False, "preserve_thinking": True, "thinking": True, "keep_all_reasoning": True}


def _variants(template: Template) -> Iterator[Template]:
    yield template
    for name, value in SWITCHES.items():
        # A variable, not the field of a message.
        if re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", template.text):
            yield Template(template.package, template.name, template.text, {name: value})
    if re.search(r"for \w+ in tools", template.text) and not re.search(r"if .*\btools\b", template.text):
        yield Template(template.package, template.name, template.text, {"tools": [TOOL]})


def _trl() -> Iterator[Template]:
    if spec := find_spec("trl"):  # without importing it: its own dependencies are not installed
        for path in sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja")):
            yield Template("trl", path.stem, path.read_text())


def _mistral() -> Iterator[Template]:
    if find_spec("mistral_common"):
        from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
        from mistral_common.tokens.tokenizers.base import TokenizerVersion

        names = ("spm", "thinking_support", "plain_thinking_support")
        for version, *chosen in product(TokenizerVersion, *[(False, True)] * len(names)):
            switches = dict(zip(names, chosen, strict=True))
            try:
                text = build_chat_template(TemplateConfig(version=version, **switches))
            except ValueError:  # a combination that no model has
                continue
            yield Template("mistral-common", "_".join([version.value, *(n for n in names if switches[n])]), text)


def _llama_cpp() -> Iterator[Template]:
    """The templates of llama.cpp's own tests, which the source distribution of llama-cpp-python
    has."""
    for path in sorted(Path(os.environ.get("LLAMA_CPP_TEMPLATES", "nowhere")).rglob("*.jinja")):
        yield Template("llama.cpp", path.stem, path.read_text())


def tokenizer_for(template: Template, backend: Tokenizer | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer that has the control tokens which a template spells: byte-level, unless another
    is given."""
    backend = (
        backend or byte_tokenizer(corpus=["user\n\nassistant\n\n  the number is higher lower\n"] * 3).backend_tokenizer
    )
    spelled = template.text + _rendered(template)  # some put their tokens together
    ends = [token for token in ENDS_OF_TEXT if token in spelled]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=ends[0] if ends else "<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=template.text,
    )
    special = dict.fromkeys([*CONTROL.findall(spelled), "<s>", tokenizer.eos_token, "<|endoftext|>"])
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    markup = [
        token for token in dict.fromkeys([*MARKUP.findall(spelled), "<think>", "</think>"]) if token not in special
    ]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in markup])
    return tokenizer


def _rendered(template: Template) -> str:
    """A conversation, if the template renders one."""
    try:
        render = Renderer(byte_tokenizer(chat_template=template.text), chat_template_kwargs=template.kwargs)
        return render([Message("user", "q"), Message("assistant", "a"), Message("user", "q")])
    except ChatTemplateError:
        return ""


@cache
def vocabulary(name: str) -> bytes | None:
    """A real vocabulary as the bytes of a ``Tokenizer``; ``None``: its package is not installed."""
    package, file, words = {
        "qwen": ("dashscope", "resources/qwen.tiktoken", QWEN_WORDS),
        "llama3": ("llama_models", "llama3/tokenizer.model", LLAMA_WORDS),
        "mistral": ("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3", ""),
    }[name]
    spec = find_spec(package)
    if spec is None:
        return None
    path = str(Path(spec.origin).parent / file)
    backend = _sentencepiece(path) if name == "mistral" else TikTokenConverter(path, words).converted()
    return backend.to_str().encode()


def _sentencepiece(path: str) -> Tokenizer:
    """A SentencePiece model as transformers converts the models of Llama 2 and Mistral 7B."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import decoders, models, pre_tokenizers

    model = SentencePieceProcessor(model_file=path)
    pieces = {model.id_to_piece(i): i for i in range(model.vocab_size())}
    merges = []
    for piece, i in pieces.items():
        pairs = [
            (piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in pieces and piece[at:] in pieces
        ]
        merges += [(-model.get_score(i), i, pair) for pair in pairs]
    ordered = [pair for _, _, pair in sorted(merges, key=lambda merge: merge[:2])]
    backend = Tokenizer(models.BPE(pieces, ordered, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


VOCABULARIES = {"qwen": r"^qwen|^Qwen", "llama3": r"^llama3|^meta-llama", "mistral": r"spm|^v[123]$"}


def real_tokenizers(template: Template) -> Iterator[PreTrainedTokenizerFast]:
    """Tokenizers with the real vocabulary of the template's family, where a package has it."""
    for name, family in VOCABULARIES.items():
        if re.search(family, template.name) and (found := vocabulary(name)):
            yield tokenizer_for(template, Tokenizer.from_str(found.decode()))
