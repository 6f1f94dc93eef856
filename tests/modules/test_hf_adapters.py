"""HFPolicy over models with adapters."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from places import device
from tiny_policies import make_model, make_policy, play, random_rows, same, teacher_forced

from torchrl_llm.modules.adapters import AdapterError, FusedLora
from torchrl_llm.modules.checks import UnsupportedModelError


class TestAdapters:
    rows = random_rows([11, 3, 7])

    @pytest.fixture
    def model(self):
        model = get_peft_model(
            make_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"]), adapter_name="actor"
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.data.normal_(0, 0.5)
        return model

    def test_generates_with_the_adapter_asked_for(self, model):
        with_actor = play(make_policy(model, adapter="actor"), self.rows)
        without = play(make_policy(model), self.rows)
        same(without, play(make_policy(make_model()), self.rows))
        assert with_actor[0] != without[0]
        merged = copy.deepcopy(model).merge_and_unload()
        assert play(make_policy(merged), self.rows)[0] == with_actor[0]

    def test_its_fingerprint_is_that_of_the_weights_it_samples_with(self, model):
        """As an opponent, the start of a run stays who it is while another adapter on its model
        learns."""
        base, actor = make_policy(model), make_policy(model, adapter="actor")
        before = base.fingerprint(), actor.fingerprint()
        assert before[0] == make_policy(make_model()).fingerprint() != before[1]
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.neg_()
        assert base.fingerprint() == before[0]
        assert actor.fingerprint() != before[1]
        next(iter(model.parameters())).data.neg_()
        assert base.fingerprint() != before[0]

    def test_a_step_of_the_adapter_drops_the_cache(self, model):
        policy = make_policy(model, adapter="actor")
        play(policy, self.rows)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.neg_()
        same(play(policy, self.rows), play(make_policy(copy.deepcopy(model), adapter="actor"), self.rows))

    @pytest.mark.parametrize(
        ("fields", "fused"),
        [
            ({}, True),
            ({"use_rslora": True}, True),
            ({"layers_to_transform": [1]}, True),
            ({"use_dora": True}, False),
            ({"lora_bias": True}, False),
        ],
        ids=str,
    )
    def test_layers_are_fused_for_the_time_of_a_turn_and_compute_the_same(self, fields, fused):
        config = LoraConfig(r=4, lora_alpha=3, target_modules=["q_proj", "v_proj"], **fields)
        with torch.random.fork_rng():
            torch.manual_seed(0)  # of lora_A
            model = get_peft_model(make_model(), config, adapter_name="actor")
            model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        layers, flags = dict(model.named_modules()), {n: p.requires_grad for n, p in model.named_parameters()}
        seen = []
        attention = model.get_base_model().model.layers[1].self_attn
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(type(module.q_proj)), with_kwargs=True
        )
        ids, log_probs = play(make_policy(model, adapter="actor"), self.rows)
        assert set(seen[-8:]) == {
            torch.nn.Linear if fused else type(layers["base_model.model.model.layers.1.self_attn.q_proj"])
        }
        assert dict(model.named_modules()) == layers
        assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
        model.set_adapter("actor")
        for row, response, found in zip(self.rows, ids, log_probs, strict=True):
            expected = teacher_forced(model, row, response).log_softmax(-1)[range(8), response]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    def test_layers_come_back_after_an_error(self, model):
        layers = dict(model.named_modules())
        policy = make_policy(model, adapter="actor")
        hook = model.get_base_model().model.norm.register_forward_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            play(policy, self.rows)
        assert dict(model.named_modules()) == layers
        hook.remove()
        same(play(policy, self.rows), play(make_policy(model, adapter="actor"), self.rows))

    def test_large_layers_keep_their_factors_apart(self, model):
        kinds = lambda **options: {type(place[-1]) for place in FusedLora(model, adapter="actor", **options)._places}  # noqa: E731
        assert kinds() == {torch.nn.Linear}
        assert torch.nn.Linear not in kinds(max_bytes=1)
        hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).to(device())
        with torch.no_grad():
            for _, _, layer, plain in FusedLora(model, adapter="actor", max_bytes=1)._places:
                torch.testing.assert_close(plain(hidden), layer(hidden), rtol=0, atol=1e-5)
                torch.testing.assert_close(plain(hidden[0]), layer(hidden[0]), rtol=0, atol=1e-5)

    def test_half_precision_rounds_no_change_away(self):
        # A change of 2**-13 in weights of 1 is a thirty-second of what bfloat16 can add to them.
        lora = LoraConfig(r=1, lora_alpha=1, target_modules=["0"])
        model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False)), lora, adapter_name="actor")
        layer = model.base_model.model[0]
        layer.base_layer.weight.data.fill_(1.0)
        layer.base_layer.to(torch.bfloat16)
        layer.lora_A["actor"].weight.data.fill_(1.0)[:, ::2] = -1.0
        layer.lora_B["actor"].weight.data.fill_(2.0**-13)
        with torch.no_grad():
            ((_, _, _, plain),) = FusedLora(model, adapter="actor")._places
            # which the weights alone sum up to 0
            x = torch.tensor([[-1.0, 1.0] * 4], dtype=torch.bfloat16)
            assert plain(x).tolist() == layer(x).tolist() == [[2.0**-10] * 4]

    def test_half_precision_samples_with_the_adapter_within_the_parity_bound(self, model):
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if "lora" in name else torch.bfloat16)
        policy = make_policy(model, adapter="actor")
        assert not policy.logprobs_match_trainer
        ids, log_probs = play(policy, self.rows)
        model.set_adapter("actor")
        for row, response, found in zip(self.rows, ids, log_probs, strict=True):
            expected = teacher_forced(model, row, response).log_softmax(-1)[range(8), response]
            assert (found - expected).abs().mean() < 0.1

    def test_unknown_adapter(self, model):
        with pytest.raises(AdapterError, match="no adapter 'critic'"):
            make_policy(model, adapter="critic")

    def test_prompt_learning(self):
        model = get_peft_model(make_model(), PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2))
        with pytest.raises(UnsupportedModelError, match="prompt-learning"):
            make_policy(model)
