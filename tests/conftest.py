"""Fixtures that several test modules share."""

from __future__ import annotations

import pytest

from torchrl_llm.testing.tokenizers import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level tokenizer with ChatML: one token a byte."""
    return byte_tokenizer()
