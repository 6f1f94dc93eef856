"""docs/thinking_models.md, with the templates that packages ship in place of the hub's: its blocks
run, assert and print what they show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sources import real_tokenizers, templates, tokenizer_for
from test_docs import unasserted
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
TEMPLATES = {
    "Qwen/Qwen3.5-0.8B": "qwen3_5_think",
    "zai-org/GLM-4.5-Air": "glm4moe",
    "openai/gpt-oss-20b": "gptoss",
    "google/gemma-4-E2B-it": "gemma4_v5",
}
pytestmark = [
    pytest.mark.templates,
    pytest.mark.skipif(
        "REAL_TEMPLATES" not in os.environ, reason="needs packages with chat templates: make test-templates"
    ),
]


def test_its_blocks_run_and_print_what_they_show(monkeypatch):
    found = {each.name: each for each in templates() if each.package == "trl" and not each.kwargs}
    loaded = []

    def load(name):
        template = found[TEMPLATES[name]]
        loaded.append(name)
        real = [*real_tokenizers(template)]
        assert bool(real) == name.startswith("Qwen")  # a real vocabulary, where a package has it
        return real[0] if real else tokenizer_for(template)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    assert unasserted("thinking_models.md", (ROOT / "docs" / "thinking_models.md").read_text()) == []
    assert loaded == [*TEMPLATES]
