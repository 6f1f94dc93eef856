"""Which models, attention windows and lengths of contexts HFPolicy takes, and which it refuses."""

from __future__ import annotations

import pytest
import torch
from tf32 import TF32
from tiny_policies import FAMILIES, V, make_model, make_policy, make_tokenizer, play, random_rows, same, teacher_forced

from torchrl_llm.modules.checks import UnsupportedModelError, VocabularyMismatchError
from torchrl_llm.modules.engine import ContextLengthError
from torchrl_llm.modules.hf import HFPolicy, _cached_model
from torchrl_llm.modules.kernels import float32_products


def make_local(family, window, **fields):
    """A model whose configuration declares a window in a way of its own."""
    if family == "GPTNeo":
        layers = {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "attn_implementation": "eager",
        }
        return make_model("GPTNeo", window_size=window, **layers, **fields)
    return make_model("Moshi", sliding_window=window, ffn_dim=48, audio_vocab_size=9, num_codebooks=2, **fields)


def check_rows(model, policy, lengths):
    rows = random_rows(lengths)
    for row, response, found in zip(rows, *play(policy, rows), strict=True):
        expected = teacher_forced(model, row, response).log_softmax(-1)[range(8), response]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


class TestWindows:
    """Attention windows that the configuration names and the ready-made masks may get wrong."""

    def test_up_to_the_window_nothing_is_refused(self):
        model = make_local("GPTNeo", 32)
        check_rows(model, make_policy(model), [24, 3, 11])

    def test_beyond_it_a_model_that_applies_it_by_column_is_refused(self):
        policy = make_policy(make_local("GPTNeo", 32))
        for _ in range(2):  # the second time without another comparison
            with pytest.raises(ContextLengthError, match="window of 32 tokens of GPTNeoForCausalLM"):
                play(policy, random_rows([40, 3, 11]))
        play(policy, random_rows([24, 3, 11]))

    def test_a_window_that_the_models_own_forward_does_not_apply_is_given_up(self):
        model = make_local("Moshi", 32)
        check_rows(model, make_policy(model), [24, 3, 11])
        check_rows(model, make_policy(model), [60, 3, 40])

    @pytest.mark.parametrize("family", ["Mistral", "Gemma2", "Qwen2 sliding"])
    def test_a_window_that_is_applied_is_kept(self, family):
        model = make_model(family.split()[0], **(FAMILIES[family] | {"sliding_window": 32}))
        policy = make_policy(model)
        check_rows(model, policy, [24, 3, 11])
        check_rows(model, policy, [60, 3, 40])
        assert 32 in policy._engine._windows.values()

    def test_the_cache_is_computed_anew_after_the_comparison(self):
        model = make_model("Mistral", sliding_window=32)
        policy, rows = make_policy(model), random_rows([20, 3, 11])
        for turn in range(4):
            ids, log_probs = play(policy, rows, turn=turn)
            same((ids, log_probs), play(make_policy(model), rows, turn=turn))
            rows = [row + response for row, response in zip(rows, ids, strict=True)]


class TestBuckets:
    """Masks wider than the context, which are the default on a GPU."""

    @pytest.mark.parametrize(("family", "bucket"), [("Qwen2", 128), ("GPTNeo", 1)])
    def test_a_model_that_does_not_bear_the_default_does_without(self, family, bucket, monkeypatch):
        monkeypatch.setattr(_cached_model, "_BUCKET", {})
        model = make_local("GPTNeo", 32) if family == "GPTNeo" else make_model(family)
        policy = make_policy(model)
        assert policy._engine.bucket == bucket
        check_rows(model, policy, [24, 3, 11])

    def test_a_bucket_that_is_given_is_not_replaced(self):
        with pytest.raises(UnsupportedModelError, match="other logits"):
            make_policy(make_local("GPTNeo", 32), bucket=128)


class TestRefusals:
    @pytest.mark.parametrize(
        ("family", "fields", "problem"),
        [
            ("Mamba", {"state_size": 4, "attn_implementation": "eager"}, "linear_attention"),
            (
                "Qwen3Next",
                {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2},
                "linear_attention",
            ),
            ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}, "conv"),
            ("Bloom", {"n_layer": 2, "n_head": 4, "attn_implementation": "eager"}, "position_ids"),
        ],
    )
    def test_families_without_keys_and_values_by_position(self, family, fields, problem):
        with pytest.raises(UnsupportedModelError, match=problem):
            make_policy(make_model(family, **fields))

    def test_a_model_whose_cached_forward_disagrees(self):
        model = make_model()
        original = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda x, position_ids: original(
            x, torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
        )
        with pytest.raises(UnsupportedModelError, match="other logits"):
            make_policy(model)

    def test_attention_without_a_mask_argument(self):
        model = make_model()
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"):
            make_policy(model)

    def test_tokenizer_with_more_ids_than_the_model(self):
        with pytest.raises(VocabularyMismatchError, match="61"):
            HFPolicy(make_model(), make_tokenizer(size=V + 1))

    def test_a_context_longer_than_the_models_positions(self):
        with pytest.raises(ContextLengthError, match="256 positions"):
            play(make_policy(), random_rows([249]))
        play(make_policy(), random_rows([248]))

    def test_rope_that_depends_on_the_longest_row_counts_up_to_where_it_sets_in(self):
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
        model = make_model(rope_parameters=rope, max_position_embeddings=64)
        policy = make_policy(model)
        play(policy, random_rows([56]))
        assert not model.model.rotary_emb.inv_freq.is_inference()
        with pytest.raises(ContextLengthError, match="64 positions"):
            play(policy, random_rows([57]))

    def test_a_negative_seed(self):
        with pytest.raises(ValueError, match="seed"):
            make_policy(seed=-1)


class TestTF32:
    """Two computations of one thing differ a thousand times more with it than in float32."""

    @pytest.mark.parametrize("family", ["Qwen2", "Mistral"])
    def test_no_comparison_refuses_a_model_for_it(self, family):
        """Neither when a policy is made, nor when the first context is longer than a window."""
        wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
        model = make_model(family, **FAMILIES[family] | wide)
        for parameter in model.parameters():
            parameter.data.mul_(0.35)
        with TF32(), float32_products("high"):
            play(make_policy(model), random_rows([30, 3, 11]))
