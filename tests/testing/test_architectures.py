"""The sweep over model types: a sample of them, and faults that it must find. ``make test-models``
tries them all."""

from __future__ import annotations

import re
from contextlib import contextmanager

import architectures
import pytest
import transformers
from architectures import PARTS, Finding, check, model_types, sweep, table
from packaging.version import Version
from peft.tuners.tuners_utils import BaseTunerLayer

from torchrl_llm.modules import adapters, lm, prefix_attention
from torchrl_llm.modules.hf import _cached_model

MIXTURES = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe")
REFUSED = {
    # masks of its own, by column
    "gpt_neo": ("sampler", "ContextLengthError: .* window of 16 tokens"),
    "bert": ("scorer", "UnsupportedHeadError"),
    "xlm": ("scorer", "not causal"),
    "phimoe": ("LoRA", "LoraTargetError: .* PhimoeForCausalLM"),
    "mamba": ("sampler", "linear_attention"),
}


def statuses(name: str) -> dict[str, str]:
    return {part: finding.status for part, finding in check(name).items()}


class TestSample:
    @pytest.mark.parametrize("name", [*MIXTURES, "gemma3_text", "moshi", "opt"])
    def test_agrees(self, name):
        found, expected = check(name), dict.fromkeys(PARTS, Finding("agrees"))
        if name == "moshi" and Version(transformers.__version__) < Version("5.21"):
            # Its backbone passes nothing on to its layers there, so that no attention hears of
            # prefixes.
            assert "its states would differ" in found.pop("shared").note
            expected.pop("shared")
        assert found == expected

    @pytest.mark.parametrize("name", ["llama, dynamic RoPE", "phi3, longrope"])
    def test_agrees_and_shares_nothing(self, name):
        found = check(name)
        assert found.pop("shared") == Finding("rows", "the frequencies of its positions depend on a row's length.")
        assert set(found.values()) == {Finding("agrees")}

    @pytest.mark.parametrize("name", REFUSED)
    def test_is_refused_by_name(self, name):
        part, message = REFUSED[name]
        finding = check(name)[part]
        assert finding.status == "refused"

        assert re.search(message, finding.note)


class TestFaults:
    """Put a fault back, and the sweep finds it."""

    def test_nested_layers_that_are_not_switched(self, monkeypatch):
        def outermost(model):
            found, stack = [], [model]
            while stack:
                module = stack.pop()
                if isinstance(module, BaseTunerLayer):
                    found.append(module)
                else:
                    stack.extend(module.children())
            return found

        monkeypatch.setattr(adapters, "adapter_layers", outermost)
        assert statuses("mixtral") == dict.fromkeys(PARTS, "agrees") | {"LoRA": "wrong"}

    @pytest.mark.parametrize("name", ["gpt_neo", "moshi"])
    def test_windows_that_are_not_tried(self, monkeypatch, name):
        monkeypatch.setattr(_cached_model, "declared_windows", lambda config: [])
        assert statuses(name)["sampler"] == "wrong"

    @pytest.mark.parametrize("name", ["llama, dynamic RoPE", "phi3, longrope"])
    def test_rotary_frequencies_of_the_longest_row(self, monkeypatch, name):
        @contextmanager
        def of_the_batch(model, lengths):
            yield

        monkeypatch.setattr(lm, "rope_by_row", of_the_batch)
        assert statuses(name)["scorer"] == "wrong"

    def test_stages_without_windows(self, monkeypatch):
        """The library's own comparison, which would refuse such a model, is switched off."""
        mask = prefix_attention.PrefixTree.mask
        monkeypatch.setattr(
            prefix_attention.PrefixTree,
            "mask",
            lambda self, stage, groups, window, dtype: mask(self, stage, groups, None, dtype),
        )
        assert statuses("gemma3_text")["shared"] == "rows"
        monkeypatch.setattr(prefix_attention, "_gap", lambda *_: 0.0)
        assert statuses("gemma3_text")["shared"] == "wrong"


class TestSweep:
    def test_a_type_that_crashes_or_hangs_ends_nothing(self, monkeypatch):
        def broken(name):
            while name == "hangs":
                pass
            if name == "crashes":
                raise SystemExit(3)
            return dict.fromkeys(PARTS, Finding("agrees"))

        monkeypatch.setattr(architectures, "check", broken)
        found = dict(sweep(["crashes", "hangs", "works"], limit=1.0))
        assert [found[name]["LoRA"].status for name in ("crashes", "hangs", "works")] == ["error", "error", "agrees"]

    def test_the_table_names_every_type_and_the_reason(self):
        found = {
            "one": dict.fromkeys(PARTS, Finding("agrees")),
            "two": dict.fromkeys(PARTS, Finding("refused", "A|B: no")),
        }
        text = table(found)
        assert "| one | agrees | agrees | agrees | agrees |  |" in text
        assert "| two | refused | refused | refused | refused | A\\|B: no |" in text

    def test_all_types_of_transformers_are_there(self):
        assert {"qwen2", "llama", "gpt2", *MIXTURES} <= set(model_types())
