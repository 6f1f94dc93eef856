"""Snapshots of trained weights, and policies of other processes that take them in."""

from __future__ import annotations

import pickle
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tf32 import TF32
from trained import LORA, gap, make_models, play, train

from torchrl_llm.modules import HFPolicy, SamplingConfig
from torchrl_llm.modules.kernels import float32_products
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import load_tiny_model, random_model, tiny_model_path
from torchrl_llm.weight_update import ParityCheck, Snapshot, WeightSyncError, install

TEMPERATURE = 0.7
KINDS = {
    "lora": {},
    "lora merged": {},
    "rank-stabilised lora": {"lora": LORA | {"use_rslora": True}},
    "dora merged": {"lora": LORA | {"use_dora": True}},
    "whole model": {"lora": None},
}


def snapshot(models, *, version=1, merged=False, parity_check=2):
    seen = ParityCheck.of(models.model, models.adapter, temperature=TEMPERATURE, prompts=parity_check)
    return Snapshot.of(models.model, models.adapter, version=version, parity_check=seen, merged=merged)


def carried(sent):
    """What arrives in another process: read-only memory, as in Ray's object store."""
    buffers = []
    data = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    assert buffers, "nothing is out of band"
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


@pytest.fixture
def make_policy(words):
    """Policies with a model of their own, a worker's."""

    def make(lora=None, model=None, **sampling):
        model, adapter = load_tiny_model() if model is None else model, None
        if lora is not None:
            model, adapter = get_peft_model(model, LoraConfig(**lora)), "default"
        options = {"max_output_tokens": 12, "temperature": TEMPERATURE, "stop_ids": ()}
        return HFPolicy(model, words, SamplingConfig(**options | sampling), adapter=adapter)

    return make


class TestHFPolicy:
    def test_merged_weights_are_what_the_trained_model_computes_with_tf32_too(self, make_policy, words):
        """Whose rounding differs where an adapter is merged."""
        models = make_models(random_model(words, hidden=256, layers=6))
        policy = make_policy(model=random_model(words, hidden=256, layers=6))
        train(models, scale=0.02)
        with TF32(), float32_products("high"):
            assert install(policy, snapshot(models, merged=True)) <= 1e-4

    @pytest.mark.parametrize("kind", KINDS)
    def test_it_computes_what_the_trained_model_does(self, make_policy, kind):
        models, merged = make_models(tiny_model_path(), **KINDS[kind]), "merged" in kind
        lora = None if merged or kind == "whole model" else KINDS[kind].get("lora", LORA)
        policy = make_policy(lora)
        for version in (1, 2, 7):
            train(models, version)
            assert gap(policy, models) > 1e-3
            sent = carried(snapshot(models, version=version, merged=merged))
            assert install(policy, sent) <= 1e-4
            assert policy.policy_version == version
            assert gap(policy, models) <= 1e-5

    def test_what_a_snapshot_of_an_adapter_holds(self):
        models = make_models(tiny_model_path())
        held = snapshot(models)
        assert held.lora.r == LORA["r"]
        assert all("lora_" in name for name in held.tensors)
        assert sum(tensor.numel() for tensor in held.tensors.values()) == sum(
            parameter.numel() for parameter in models.actor_parameters()
        )

    @pytest.mark.parametrize("merged", [False, True])
    def test_a_snapshot_is_a_copy(self, make_policy, merged):
        models, policy = make_models(tiny_model_path()), make_policy(None if merged else LORA)
        train(models)
        held = snapshot(models, merged=merged)
        tensors = {name: tensor.clone() for name, tensor in held.tensors.items()}
        train(models, 1)
        install(policy, held)
        train(models, 2)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(2)
        assert all(torch.equal(held.tensors[name], tensor) for name, tensor in tensors.items())

    def test_a_snapshot_arrives_as_it_was(self):
        models = make_models(tiny_model_path(), lora=None)
        models.model.bfloat16()
        held = snapshot(models)
        arrived = carried(held)
        assert arrived.tensors.keys() == held.tensors.keys()
        for name, tensor in held.tensors.items():
            assert tensor.dtype == arrived.tensors[name].dtype == torch.bfloat16
            assert torch.equal(tensor, arrived.tensors[name])

    def test_the_trained_model_stays_as_it_is(self, make_policy):
        models = make_models(tiny_model_path())
        train(models)
        before = {name: value.clone() for name, value in models.model.state_dict().items()}
        plain, adapted = make_policy(), make_policy(LORA)
        state = torch.get_rng_state()
        install(plain, snapshot(models, merged=True))
        install(adapted, snapshot(models))
        after = models.model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert torch.equal(torch.get_rng_state(), state)

    def test_contexts_computed_before_are_forgotten(self, make_policy):
        models, policy = make_models(tiny_model_path()), make_policy(LORA)
        before = play(policy)[1]
        train(models)
        install(policy, snapshot(models, version=5))
        fresh = make_policy(LORA)
        install(fresh, snapshot(models, version=5))
        again, expected = play(policy)[1], play(fresh)[1]
        assert torch.equal(again.tokens, expected.tokens)
        torch.testing.assert_close(again.log_probs, expected.log_probs, rtol=0, atol=1e-6)
        assert not torch.equal(before.log_probs, again.log_probs)

    def test_weights_in_half_precision(self, make_policy):
        models, policy = make_models(tiny_model_path()), make_policy(model=load_tiny_model().bfloat16())
        train(models)
        assert install(policy, snapshot(models, merged=True)) < 0.1
        assert policy.model.dtype == torch.bfloat16


class TestErrors:
    def test_an_adapter_for_a_plain_model(self, make_policy):
        with pytest.raises(WeightSyncError, match="the policy's model has none"):
            install(make_policy(), snapshot(make_models(tiny_model_path())))

    def test_a_whole_model_for_one_with_an_adapter(self, make_policy):
        with pytest.raises(WeightSyncError, match="make it with a model without LoRA"):
            install(make_policy(LORA), snapshot(make_models(tiny_model_path(), lora=None)))

    def test_an_adapter_of_another_rank(self, make_policy):
        with pytest.raises(WeightSyncError, match=r"AdapterError.*do not fit"):
            install(make_policy(LORA | {"r": 2}), snapshot(make_models(tiny_model_path())))

    def test_a_model_of_another_size(self, make_policy, words):
        other = make_policy(model=random_model(words, hidden=32))
        with pytest.raises(WeightSyncError, match=r"(?s)loading the weights.*size mismatch"):
            install(other, snapshot(make_models(tiny_model_path(), lora=None)))

    def test_an_adapter_on_another_base(self, make_policy):
        other = load_tiny_model()
        with torch.no_grad():
            other.model.norm.weight.mul_(1.5)
        with pytest.raises(WeightSyncError, match="parity check found"):
            install(make_policy(LORA, other), snapshot(make_models(tiny_model_path())))

    def test_an_adapter_of_another_scaling(self, make_policy):
        models = make_models(tiny_model_path())
        train(models)
        with pytest.raises(WeightSyncError, match="parity check found"):
            install(make_policy(LORA | {"lora_alpha": 2}), snapshot(models))

    def test_a_temperature_that_is_not_that_of_the_policy_is_no_concern_of_the_parity_check(self, make_policy):
        assert install(make_policy(LORA, temperature=1.0), snapshot(make_models(tiny_model_path()))) <= 1e-4

    def test_without_a_parity_check_nothing_is_compared(self, make_policy):
        other = load_tiny_model()
        with torch.no_grad():
            other.model.norm.weight.mul_(1.5)
        difference = install(make_policy(LORA, other), snapshot(make_models(tiny_model_path()), parity_check=0))
        assert difference != difference

    def test_a_tolerance_of_zero_is_not_the_default(self, make_policy):
        """The log-probs differ by one step of float32, which the default tolerates."""
        policy, models = make_policy(), load_tiny_model()
        seen = ParityCheck.of(models, None, temperature=TEMPERATURE)
        seen = replace(seen, log_probs=seen.log_probs.nextafter(torch.tensor(0.0)))
        assert 0 < seen.check(policy) < 1e-3
        with pytest.raises(WeightSyncError, match="where 0 is the most"):
            seen.check(policy, tolerance=0.0)

    def test_policies_of_other_kinds(self, words):
        policy = ScriptedPolicy(lambda *_: "hi", tokenizer=words)
        with pytest.raises(TypeError, match=r"ScriptedPolicy takes no trained weights.*InferenceEngine"):
            install(policy, snapshot(make_models(tiny_model_path())))


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: run make test-vllm")
class TestVLLMPolicy:
    @pytest.fixture(scope="class")
    def engine(self):
        from torchrl_llm.modules.vllm import load_engine

        engine = load_engine(tiny_model_path(), dtype="float32", max_model_len=256, max_num_seqs=16, max_lora_rank=8)
        yield engine
        engine.llm_engine.engine_core.shutdown()

    @pytest.fixture
    def policy(self, engine, words):
        from torchrl_llm.modules.vllm import VLLMPolicy

        return VLLMPolicy(engine, words, SamplingConfig(max_output_tokens=12, temperature=TEMPERATURE, stop_ids=()))

    @pytest.mark.parametrize("merged", [False, True])
    def test_it_computes_what_the_trained_model_does(self, policy, merged):
        models = make_models(tiny_model_path())
        for version in (1, 2, 7):
            train(models, version)
            sent = carried(snapshot(models, version=version, merged=merged))
            tensors = {name: tensor.clone() for name, tensor in sent.tensors.items()}
            assert install(policy, sent) <= 1e-4
            assert policy.policy_version == version
            assert gap(policy, models) <= 1e-5
            assert all(torch.equal(sent.tensors[name], tensor) for name, tensor in tensors.items())
        install(
            policy, snapshot(make_models(tiny_model_path(), lora=None), version=8)
        )  # the engine's own weights again

    def test_an_adapter_on_another_base_and_the_next_that_fits(self, policy):
        models, other = make_models(tiny_model_path()), make_models(tiny_model_path())
        with torch.no_grad():
            other.model.get_base_model().model.norm.weight.mul_(1.5)
        with pytest.raises(WeightSyncError, match="parity check found"):
            install(policy, snapshot(other))
        with pytest.raises(Exception, match="Sync again"):
            play(policy)
        assert install(policy, snapshot(models, version=2)) <= 1e-4
        assert gap(policy, models) <= 1e-5
