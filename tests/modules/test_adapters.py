"""use_adapter, gradient checkpointing, load_actor_critic and its files, on random tiny Qwen2
models."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_llm.modules import load_actor_critic
from torchrl_llm.modules.adapters import AdapterError, adapter_layers, enable_gradient_checkpointing, use_adapter
from torchrl_llm.modules.lm import hidden_states, lm_logits
from torchrl_llm.testing.tiny import tiny_model_path


def tiny_qwen2(*, seed: int = 0, dtype: torch.dtype = torch.float64, **config) -> Qwen2ForCausalLM:
    fields = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**(fields | config))).to(dtype).eval()


def two_adapters() -> nn.Module:
    """A PeftModel with trainable adapters actor and critic that both differ from the base."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = get_peft_model(tiny_qwen2(), lora, adapter_name="actor")
        model.add_adapter("critic", lora)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def tokens(seed: int = 0, batch: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 48, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    return found


class TestUseAdapter:
    def test_same_outputs_as_peft_itself(self):
        model, ids = two_adapters(), tokens()
        outputs = {}
        for name in ("actor", "critic", None):
            with use_adapter(model, name):
                outputs[name] = model(input_ids=ids).logits
        for name in ("actor", "critic"):
            model.set_adapter(name)
            assert torch.equal(model(input_ids=ids).logits, outputs[name])
        with model.disable_adapter():
            assert torch.equal(model(input_ids=ids).logits, outputs[None])
        assert torch.equal(tiny_qwen2()(input_ids=ids).logits, outputs[None])
        assert not torch.allclose(outputs["actor"], outputs["critic"])

    def test_restores_and_never_touches_requires_grad(self):
        model, ids = two_adapters(), tokens()
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["actor"].weight.requires_grad_(False)
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
        before = model(input_ids=ids).logits
        with use_adapter(model, "critic"):
            with use_adapter(model, None):
                base = model(input_ids=ids).logits
                with use_adapter(model, "actor"):
                    assert torch.equal(model(input_ids=ids).logits, before)
                assert torch.equal(model(input_ids=ids).logits, base)
            assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
        with pytest.raises(RuntimeError, match="inside"), use_adapter(model, None):
            raise RuntimeError("inside")
        assert torch.equal(model(input_ids=ids).logits, before)
        assert {name: p.requires_grad for name, p in model.named_parameters()} == flags

    def test_a_flag_that_is_changed_inside_stays_changed(self):
        model = two_adapters()
        with use_adapter(model, "critic"):
            model.set_requires_grad("actor", False)
        flags = {name: p.requires_grad for name, p in model.named_parameters() if "lora_" in name}
        assert flags == {name: ".critic." in name for name in flags}

    def test_parameters_that_are_exchanged_inside_keep_their_flags(self):
        model = two_adapters()
        layers = [module for module in model.modules() if hasattr(module, "lora_A")]
        with use_adapter(model, "critic"):
            for layer in layers:
                layer.lora_A["critic"].weight = nn.Parameter(layer.lora_A["critic"].weight.detach().clone())
        assert all(p.requires_grad for name, p in model.named_parameters() if "lora_" in name)

    def test_one_graph_gives_both_adapters_their_own_gradient(self):
        model, ids = two_adapters(), tokens()

        def outputs(name):
            with use_adapter(model, name):
                return model(input_ids=ids).logits.square().mean()

        expected = {}
        for name in ("actor", "critic"):
            outputs(name).backward()
            expected[name] = gradients(model)
        (outputs("actor") + 4 * outputs("critic")).backward()
        combined = gradients(model)
        for parameter, grad in combined.items():
            # A power of two: the norms compute in float32, and any other factor would round
            # differently there.
            name, factor = ("actor", 1) if ".actor." in parameter else ("critic", 4)
            assert grad.abs().max() > 0
            torch.testing.assert_close(grad, factor * expected[name][parameter], rtol=1e-12, atol=1e-15)
            other = "critic" if name == "actor" else "actor"
            assert expected[other][parameter] is None

    def test_modules_to_save_follow_the_adapter(self):
        lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
        model = get_peft_model(tiny_qwen2(tie_word_embeddings=False), lora, adapter_name="actor")
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save["actor"].weight.mul_(2)
        ids = tokens()
        with use_adapter(model, None):
            base = lm_logits(model, hidden_states(model, ids))
        assert torch.equal(base, tiny_qwen2(tie_word_embeddings=False)(input_ids=ids).logits)
        with use_adapter(model, "actor"):
            assert not torch.allclose(lm_logits(model, hidden_states(model, ids)), base)

    def test_an_adapter_with_modules_of_its_own(self):
        # The other adapter has no copy of the head and no trained tokens: such modules refuse its
        # name.
        model = get_peft_model(
            tiny_qwen2(tie_word_embeddings=False),
            LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
            adapter_name="critic",
        )
        fields = {"modules_to_save": ["lm_head"], "trainable_token_indices": [3, 4]}
        model.add_adapter("actor", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False, **fields))
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save["actor"].weight.mul_(2)
            for name, parameter in model.named_parameters():
                if "trainable_tokens_delta" in name:
                    parameter.add_(1)
        model.set_requires_grad(["actor", "critic"], True)
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
        ids = tokens() % 6
        outputs = {}
        for name in ("critic", "actor", None, "critic", "actor", None):
            with use_adapter(model, name):
                logits = model(input_ids=ids).logits
            assert torch.equal(outputs.setdefault(name, logits), logits)
            assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
        assert torch.equal(outputs[None], tiny_qwen2(tie_word_embeddings=False)(input_ids=ids).logits)
        for name in ("actor", "critic"):
            model.set_adapter(name)
            assert torch.equal(model(input_ids=ids).logits, outputs[name])
        assert not torch.allclose(outputs["actor"], outputs["critic"])

    def test_a_setter_that_fails_leaves_everything_as_it_was(self, monkeypatch):
        model, ids = two_adapters(), tokens()
        before = model(input_ids=ids).logits
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
        last = model.base_model.model.model.layers[2].mlp.down_proj
        monkeypatch.setattr(last, "set_adapter", lambda names: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            use_adapter(model, "critic").__enter__()
        assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
        assert torch.equal(model(input_ids=ids).logits, before)

    def test_named_errors(self):
        with use_adapter(nn.Linear(2, 2), None):
            pass
        with pytest.raises(AdapterError, match="Linear has no LoRA adapters"), use_adapter(nn.Linear(2, 2), "actor"):
            pass
        model = two_adapters()
        with pytest.raises(AdapterError, match=r"no adapter 'policy'; it has \['actor', 'critic'\]"):
            use_adapter(model, "policy").__enter__()
        model.merge_adapter(["actor"])
        with pytest.raises(AdapterError, match=r"\['actor'\] is merged"):
            use_adapter(model, "critic").__enter__()


class TestGradientCheckpointing:
    def test_recomputes_under_the_adapter_of_the_forward(self):
        model, ids = two_adapters(), tokens()

        def gradient_of_a_combined_objective():
            total = 0.0
            for name, factor in (("actor", 1.0), ("critic", 3.0)):
                with use_adapter(model, name):
                    total = total + factor * model(input_ids=ids).logits.square().mean()
            with use_adapter(model, None):  # another adapter is active while backward runs
                total.backward()
            return gradients(model)

        expected = gradient_of_a_combined_objective()
        enable_gradient_checkpointing(model)
        model.train()
        calls = []
        layer = model.get_base_model().model.layers[0].self_attn
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
        actual = gradient_of_a_combined_objective()
        assert len(calls) == 4  # two forwards, two recomputations
        assert expected.keys() == actual.keys()
        for name, grad in expected.items():
            assert grad.abs().max() > 0
            torch.testing.assert_close(actual[name], grad, rtol=1e-12, atol=1e-15)


@pytest.mark.host  # compares the products of its autocast, and what they keep
def test_autocast_is_not_undone_by_casts_to_float32():
    """PEFT casts the inputs of adapters to float32, and autocast back: the same results, at a
    cost."""
    results, kept = [], []
    for cast in (True, False):
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        models = load_actor_critic(tiny_model_path(), lora=lora, dtype="bfloat16")
        for layer in adapter_layers(models.model):
            layer.cast_input_dtype_enabled = cast or layer.cast_input_dtype_enabled
        sizes: dict[int, torch.UntypedStorage] = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage()) and x,
            lambda x: x,
        )
        tokens = torch.arange(3, 67).view(1, -1)
        with torch.autocast("cpu", torch.bfloat16), use_adapter(models.model, "actor"), hooks:
            hidden = hidden_states(models.model, tokens)
        hidden.float().square().sum().backward()
        results.append([hidden.detach(), *(p.grad for p in models.actor_parameters())])
        kept.append(sum(storage.nbytes() for storage in sizes.values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kept[1] < kept[0]


def test_layers_that_merged_settings_add_do_not_cast_under_autocast_either(tmp_path):
    few, others = ({"lora": LoraConfig(r=2, target_modules=[name])} for name in ("q_proj", "v_proj"))
    load_actor_critic(tiny_model_path(), **few).save_pretrained(tmp_path)
    models = load_actor_critic(tiny_model_path(), **others)
    models.load_pretrained(tmp_path, merge_lora_configs=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert not any(bool(layer.cast_input_dtype_enabled) for layer in adapter_layers(models.model))
    assert all(bool(layer.cast_input_dtype_enabled) for layer in adapter_layers(models.model))
