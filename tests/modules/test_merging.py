"""What is sent: merged weights against PEFT's own merge, and adapters. Needs no engine."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM

from torchrl_llm.modules import AdapterError, WeightsError
from torchrl_llm.modules.weights import adapter_of
from torchrl_llm.testing.tiny import load_tiny_model, random_model
from torchrl_llm.weight_update import adapter_tensors, merged_tensors

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
VARIANTS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    "modules_to_save": {"modules_to_save": ["lm_head", "norm"]},
}


def wrap(base, **fields):
    """Two adapters on ``base``, each of which does something of its own."""
    config = LoraConfig(**(LORA | fields))
    model = get_peft_model(base, config, adapter_name="actor")
    model.add_adapter("reference", copy.deepcopy(config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if {"actor", "reference"} & set(name.split(".")):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def difference(ours, theirs) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


class TestMergedTensors:
    @pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
    def test_equal_what_peft_merges(self, tokenizer, fields):
        model = wrap(random_model(tokenizer), **fields)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        merged = {name: value.clone() for name, value in merged_tensors(model, "actor")}
        assert difference(dict(model.state_dict()), before) == 0
        theirs = copy.deepcopy(model)
        theirs.set_adapter("actor")
        assert difference(merged, theirs.merge_and_unload(adapter_names=["actor"]).state_dict()) <= 1e-6
        assert difference(merged, random_model(tokenizer).state_dict()) > 1e-2

    def test_equal_what_peft_merges_into_stacked_experts(self):
        config = MixtralConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=3,
        )  # fmt: skip
        model = wrap(MixtralForCausalLM(config), target_modules="all-linear")
        merged = {name: value.clone() for name, value in merged_tensors(model, "actor")}
        base = dict(merged_tensors(model))
        theirs = copy.deepcopy(model)
        theirs.set_adapter("actor")
        assert difference(merged, theirs.merge_and_unload(adapter_names=["actor"]).state_dict()) <= 1e-6
        for name in ("gate_up_proj", "down_proj"):
            name = f"model.layers.0.mlp.experts.{name}"
            assert float((merged[name] - base[name]).abs().max()) > 1e-3

    def test_without_an_adapter_are_the_base(self, tokenizer):
        model = wrap(random_model(tokenizer), **VARIANTS["modules_to_save"])
        assert difference(dict(merged_tensors(model)), random_model(tokenizer).state_dict()) == 0

    def test_of_a_plain_model_are_its_own_and_not_copies(self, tokenizer):
        model = random_model(tokenizer)
        own = model.state_dict()
        assert all(value.data_ptr() == own[name].data_ptr() for name, value in merged_tensors(model))

    def test_have_the_head_also_where_it_is_tied(self):
        model = wrap(load_tiny_model())
        tensors = dict(merged_tensors(model, "actor"))
        assert model.get_base_model().config.tie_word_embeddings
        assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
        assert tensors.keys() == load_tiny_model().state_dict().keys()

    def test_keep_the_dtype_of_the_base(self, tokenizer):
        model = wrap(random_model(tokenizer).bfloat16())
        assert {value.dtype for _, value in merged_tensors(model, "actor")} == {torch.bfloat16}

    @pytest.mark.parametrize("fields", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}])
    def test_one_of_two_tied_matrices_is_refused(self, fields):
        with pytest.raises(WeightsError, match="tied"):
            list(merged_tensors(wrap(load_tiny_model(), **fields), "actor"))

    def test_an_unknown_wrapper_is_named(self, tokenizer):
        model = wrap(random_model(tokenizer), trainable_token_indices=[1, 2])
        with pytest.raises(WeightsError, match=r"model.embed_tokens.*TrainableTokensWrapper"):
            list(merged_tensors(model, "actor"))

    def test_a_layer_that_cannot_be_merged_is_named(self, tokenizer):
        model = wrap(random_model(tokenizer))
        layer = model.get_base_model().model.layers[1].mlp.down_proj
        layer.lora_A["actor"].weight.data = torch.zeros(4, 7)
        with pytest.raises(WeightsError, match=r"merging 'model\.layers\.1\.mlp\.down_proj'"):
            list(merged_tensors(model, "actor"))

    def test_an_adapter_that_is_not_there_is_refused(self, tokenizer):
        with pytest.raises(AdapterError, match="no adapter 'critic'"):
            list(merged_tensors(wrap(random_model(tokenizer)), "critic"))
        with pytest.raises(AdapterError, match="no LoRA"):
            list(merged_tensors(random_model(tokenizer), "actor"))

    def test_an_adapter_merged_already_is_not_merged_twice(self, tokenizer):
        model = wrap(random_model(tokenizer))
        before = {name: value.clone() for name, value in merged_tensors(model, "actor")}
        model.merge_adapter(["actor"])
        assert difference(dict(merged_tensors(model, "actor")), before) == 0

    def test_another_adapter_merged_already_is_refused(self, tokenizer):
        model = wrap(random_model(tokenizer))
        model.merge_adapter(["reference"])
        with pytest.raises(AdapterError, match="merged"):
            list(merged_tensors(model, "actor"))


class TestAdapterTensors:
    def test_are_those_of_one_adapter_under_file_names(self, tokenizer):
        model = wrap(random_model(tokenizer))
        own, copies = adapter_of(model, "actor").tensors, adapter_tensors(model, "actor")
        assert difference(copies, own) == 0
        assert not any(value.requires_grad for value in copies.values())
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in copies

    @pytest.mark.parametrize("variant", ["dora", "lora_bias", "modules_to_save"])
    def test_what_vllm_cannot_serve_is_refused(self, tokenizer, variant):
        with pytest.raises(AdapterError, match="vLLM cannot serve"):
            adapter_tensors(wrap(random_model(tokenizer), **VARIANTS[variant]), "actor")
