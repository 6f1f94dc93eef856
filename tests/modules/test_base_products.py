"""LoRA whose products with the frozen weights are in bfloat16: what it computes, how far it is off,
and where it is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from peft import LoraConfig
from places import device
from tiny_actor_critic import make_rows

from torchrl_llm import keys
from torchrl_llm.modules import AdapterError, HFPolicy, SamplingConfig, load_actor_critic, use_adapter
from torchrl_llm.modules.adapters import adapter_layers
from torchrl_llm.modules.base_products import narrow_base_products
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def load(base_products, **options):
    torch.manual_seed(0)
    return load_actor_critic(load_tiny_model(), lora=LORA, base_products=base_products, **options)


def gradient(models, rows):
    models.actor(rows.clone())[keys.LOG_PROB].square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in models.actor_parameters()])


class TestValues:
    def test_of_a_layer_are_lora_on_a_rounded_weight(self):
        """But for the rounding of inputs and products to 8 bits, with and without adapter, forward
        and backward."""
        layer, plain = (adapter_layers(load(products).model)[0] for products in ("bfloat16", None))
        for adapters in (True, False):
            results = []
            for each in (layer, plain):
                each.enable_adapters(adapters)
                x = torch.randn(3, 5, each.in_features, generator=torch.Generator().manual_seed(1))
                x = x.to(device()).requires_grad_()
                y = each(x)
                y.sin().sum().backward()
                factors = (each.lora_A["actor"].weight, each.lora_B["actor"].weight) if adapters else ()
                results.append([y.detach(), x.grad, *(factor.grad for factor in factors)])
            for narrow, wide in zip(*results, strict=True):
                assert narrow.dtype == torch.float32
                error = (narrow - wide).norm() / wide.norm()
                assert 0 < error < 0.02

    @pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
    def test_gradient_and_log_probs_are_near_those_of_float32(self, options):
        """The bound that the documentation gives."""
        found = [load(products, **options) for products in ("bfloat16", None)]
        rows = make_rows()
        log_probs = [models.actor(rows.clone())[keys.LOG_PROB].detach() for models in found]
        assert 0 < (log_probs[0] - log_probs[1]).abs().max() < 0.1
        narrow, wide = (gradient(models, rows) for models in found)
        assert 0 < (narrow - wide).norm() / wide.norm() < 0.05

    def test_the_reference_is_computed_alike(self):
        """Else the KL to it would hold the rounding."""
        lora = LoraConfig(r=4, target_modules="all-linear")  # which begins as the base
        models = load_actor_critic(load_tiny_model(), lora=lora, base_products="bfloat16", reference=True)
        actor, reference = (part(make_rows())[keys.LOG_PROB] for part in (models.actor, models.reference))
        assert torch.equal(actor.detach(), reference)

    @pytest.mark.parametrize("assign", [False, True])
    def test_other_base_weights_are_multiplied_by(self, assign):
        """The copies in bfloat16 were made of the weights before."""
        models, other = load("bfloat16"), load("bfloat16")
        with torch.no_grad():
            for parameter in other.base_parameters():
                parameter.mul_(1.5)
        rows = make_rows()
        expected = load("bfloat16")
        expected.model.load_state_dict(other.model.state_dict())
        narrow_base_products(expected.model)
        models.actor(rows.clone())
        models.model.load_state_dict(other.model.state_dict(), assign=assign)
        for each in (models, other):
            assert torch.equal(*(part.actor(rows.clone())[keys.LOG_PROB] for part in (each, expected)))

    def test_the_sampler_computes_alike(self):
        """It fuses adapters of small models into their weights otherwise, which would be another
        computation."""
        models = load("bfloat16")
        tokenizer, sampling = load_tiny_tokenizer(), SamplingConfig(max_output_tokens=4, stop_ids=())
        policy = HFPolicy(models.model, tokenizer, sampling, adapter=models.adapter)
        seen = []
        layer = adapter_layers(models.model)[0]
        layer.register_forward_pre_hook(lambda *_: seen.append(1))
        prompt = torch.arange(3, 13).view(1, -1)
        one = torch.ones(1, dtype=torch.int64)
        policy.generate(prompt, 10 * one, 0 * one, 0 * one, slots=0 * one, greedy=True)
        assert seen

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_copies_have_their_own_weights(self, copied):
        models = load("bfloat16")
        twin = copied(models.model).to(device())
        for parameter in twin.parameters():
            parameter.data.zero_()
        tokens = torch.arange(3, 9, device=device()).view(1, -1)
        for model, expected in ((models.model, False), (twin, True)):
            with use_adapter(model, "actor"), torch.no_grad():
                assert (model(tokens).logits == 0).all() == expected

    @pytest.mark.host  # whose autocast it is
    def test_autocast_computes_as_without_the_option(self):
        found = []
        for products in ("bfloat16", None):
            models = load(products)
            with torch.autocast("cpu", torch.bfloat16), use_adapter(models.model, "actor"):
                found.append(models.model(torch.arange(3, 9).view(1, -1)).logits)
        assert torch.equal(*found)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lora": None}, ValueError, "base_products is 'bfloat16'; expected 'bfloat16', with lora"),
        ({"compile": True}, ValueError, "without compile"),
        ({"base_products": "float16"}, ValueError, "base_products is 'float16'"),
        (
            {"dtype": "bfloat16"},
            AdapterError,
            r"float32 nn.Linear modules, and \d+ of them are not, such as one on torch.bfloat16",
        ),
    ],
)
def test_refused(options, error, message):
    with pytest.raises(error, match=message):
        load_actor_critic(load_tiny_model(), **{"lora": LORA, "base_products": "bfloat16"} | options)
