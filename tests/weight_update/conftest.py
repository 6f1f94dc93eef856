"""Engines for the tests of weight updates."""

from __future__ import annotations

import pytest

from torchrl_llm.modules import SamplingConfig
from torchrl_llm.testing.tiny import load_tiny_tokenizer, random_model, tiny_model_path

CONTEXT = 256


@pytest.fixture(scope="session")
def words():
    return load_tiny_tokenizer()


@pytest.fixture(scope="module", params=["tied", "untied"])
def path(request, tmp_path_factory, words):
    """A model's directory; its embeddings and its head are one matrix or two."""
    if request.param == "tied":
        return tiny_model_path()
    path = tmp_path_factory.mktemp("untied")
    random_model(words, hidden=64).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(path):
    from torchrl_llm.modules.vllm import load_engine

    engine = load_engine(path, dtype="float32", max_model_len=CONTEXT, max_num_seqs=16, max_lora_rank=8)
    yield engine
    engine.llm_engine.engine_core.shutdown()


@pytest.fixture
def make_policy(llm, words):
    from torchrl_llm.modules.vllm import VLLMPolicy

    def make(**sampling):
        options = {"max_output_tokens": 12, "temperature": 0.7, "stop_ids": ()}
        return VLLMPolicy(llm, words, SamplingConfig(**(options | sampling)))

    return make
