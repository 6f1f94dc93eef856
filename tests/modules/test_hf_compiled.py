"""HFPolicy with ``compile_decode``: the compiled forward of a sampled token computes what the one
without the compiler does.

Most tests trace the forward as PyTorch's compiler does and run the trace as it is, without
generating code: that takes seconds a graph, and finds what tracing gets wrong (constants, shapes,
writes to the cache). One generates code.
"""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from instances import usual
from peft import LoraConfig, get_peft_model
from tiny_policies import FAMILIES, make_model, make_policy, play, random_rows
from torch._dynamo.testing import CompileCounterWithBackend

from torchrl_llm.modules import load_actor_critic
from torchrl_llm.modules.base_products import narrow_base_products
from torchrl_llm.modules.checks import UnsupportedModelError
from torchrl_llm.modules.engine import NonFiniteLogitsError, TurnRequest
from torchrl_llm.modules.hf import DecodeCompilationError, _step

pytestmark = pytest.mark.host  # a pretended GPU has no compiler

SHORT = {"stop_ids": tuple(range(2, 8)), "max_output_tokens": 24}


@pytest.fixture
def graphs(monkeypatch):
    """Counts graphs, and runs them as they were traced."""
    return count_graphs(monkeypatch, "eager")


def count_graphs(monkeypatch, backend):
    # pytest would format and keep what the compiler traces for tools: half of the time.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(_step._step, fullgraph=True, backend=counter)
    monkeypatch.setattr(_step, "_compiled", lambda: compiled)
    return counter


def same(one, other, atol=1e-4):
    assert one[0] == other[0]
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def same_until_an_id_differs(one, other):
    """For models in bfloat16: a last bit that a processor rounds otherwise may move an id, and what
    follows that id is another text. A log-prob is off by a few of these bits (0.02 seen)."""
    compared = 0
    for a, b, of_a, of_b in zip(one[0], other[0], one[1], other[1], strict=True):
        common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        torch.testing.assert_close(of_a[:common], of_b[:common], rtol=0, atol=5e-2)
        compared += common
    assert compared >= sum(map(len, one[0])) / 4


def with_adapter(model, rank=4):
    model = get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "down_proj"]), adapter_name="actor")
    return perturbed(model)


def perturbed(model, seed=0):
    """The model itself, its adapter another one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def compiled_layers():
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    return perturbed(load_actor_critic(make_model(num_hidden_layers=1), lora=lora, compile=True).model)


def narrow():
    model = with_adapter(make_model(num_hidden_layers=1))
    narrow_base_products(model)
    return model


def sliding(family):
    return lambda: make_model(family.split()[0], **FAMILIES[family])


MODELS = {
    "fused adapters": lambda: with_adapter(make_model(num_hidden_layers=1)),
    "factors in bfloat16": lambda: with_adapter(make_model(num_hidden_layers=1).to(torch.bfloat16)),
    "adapters of PEFT": lambda: get_peft_model(
        make_model(num_hidden_layers=1), LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True), "actor"
    ),
    "compiled layers": compiled_layers,
    "products in bfloat16": narrow,
    "windows": sliding("Mistral"),
    "windows of some layers": sliding("Qwen2 sliding"),
    "learned positions": sliding("GPT2"),
    "experts": sliding("Mixtral"),
}


class TestEquality:
    @pytest.mark.parametrize("name", usual(MODELS, ["fused adapters"]))
    def test_ids_and_log_probs_are_those_without_it(self, name, graphs):
        model = MODELS[name]()
        equal = same_until_an_id_differs if "bfloat16" in name else same
        adapter = "actor" if hasattr(model, "peft_config") else None
        plain, compiled = (make_policy(model, adapter=adapter, compile_decode=each, **SHORT) for each in (False, True))
        rows = random_rows([5, 9, 2, 14] * 2)
        for turn in range(2):
            found = play(compiled, rows, turn=turn)
            equal(found, play(plain, rows, turn=turn))
            rows = [row + response for row, response in zip(rows, found[0], strict=True)]
        # One for batches, one for a batch that has shrunk to a row.
        play(compiled, rows[:1], turn=1)
        assert graphs.frame_count == 2
        # New weights are not a new graph, and no graph holds old ones.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.1)
        new = play(compiled, rows, turn=1)
        equal(new, play(plain, rows, turn=1))
        assert new[0] != found[0]
        assert graphs.frame_count == 2

    @pytest.mark.slow
    @pytest.mark.extra
    def test_generated_code_writes_to_the_cache_in_place(self, monkeypatch):
        graphs = count_graphs(monkeypatch, "inductor")
        model = with_adapter(make_model(num_hidden_layers=1))
        # Of one length: a batch that shrinks to a row would be another graph.
        options = {"adapter": "actor", "max_output_tokens": 12}
        policy, rows = make_policy(model, compile_decode=True, **options), random_rows([5, 9, 200])
        same(play(policy, rows), play(make_policy(model, **options), rows))
        keys = policy._engine.cache._layers[0][0]
        with torch.profiler.profile(profile_memory=True) as profile:
            play(policy, random_rows([5, 9, 2]), turn=1)
        assert graphs.frame_count == 1
        largest = max(abs(event.cpu_memory_usage) for event in profile.events())
        assert 0 < largest < keys.nbytes


class TestGraphs:
    @pytest.mark.extra
    def test_there_are_two_whatever_the_rows_the_widths_and_the_cache(self, graphs):
        model = make_model()
        policy, rows = make_policy(model, compile_decode=True, **SHORT), random_rows([5, 9, 2, 14] * 3)
        assert graphs.frame_count == 0  # the first turn compiles
        for turn in range(3):  # rows end, contexts and the cache grow
            found = play(policy, rows, turn=turn)
            same(found, play(make_policy(model, **SHORT), rows, turn=turn))
            rows = [row + response for row, response in zip(rows, found[0], strict=True)]
        play(policy, random_rows([3] * 30))
        play(policy, rows[:1], turn=7)
        assert graphs.frame_count == 2
        # Another model of the same shapes has the same graphs, and its own weights.
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.model.layers[1].mlp.down_proj.weight.neg_()
        same(play(make_policy(other, compile_decode=True, **SHORT), rows), play(make_policy(other, **SHORT), rows))
        assert graphs.frame_count == 2

    @pytest.mark.extra
    def test_buckets_and_looks_as_on_a_gpu(self, graphs):
        model, options = make_model(num_hidden_layers=1), {"bucket": 16, "check_every": 8, **SHORT}
        policy, rows = make_policy(model, compile_decode=True, **options), random_rows([5, 9, 2, 14] * 5)
        same(play(policy, rows), play(make_policy(model, **SHORT), rows))
        assert graphs.frame_count == 1

    def test_a_stream_is_of_one_row(self, graphs):
        model = make_model(num_hidden_layers=1)
        request = TurnRequest(prompt=torch.tensor([3, 4, 5]).numpy(), episode_id=0, turn=0, slot=0, greedy=False)
        plain, compiled = (make_policy(model, compile_decode=each) for each in (False, True))
        assert list(compiled.stream(request)) == list(plain.stream(request))
        assert graphs.frame_count == 1


class TestPolicy:
    @pytest.mark.parametrize(
        "copied",
        [pytest.param(copy.deepcopy, marks=pytest.mark.extra), lambda x: pickle.loads(pickle.dumps(x))],
        ids=["deepcopy", "pickle"],
    )
    def test_a_copy_samples_the_same_and_compares_again(self, copied, graphs, monkeypatch):
        model, rows = make_model(num_hidden_layers=1), random_rows([5, 9, 2])
        policy = make_policy(model, compile_decode=True)
        expected = play(policy, rows)
        twin = copied(policy)
        same(play(twin, rows), expected)
        assert twin.compile_decode
        assert graphs.frame_count == 1
        # In another process a copy has another compiler.
        monkeypatch.setattr(_step, "_compiled", lambda: lambda *args: _step._step(*args) + 1.0)
        with pytest.raises(UnsupportedModelError, match="other logits with the compiled forward"):
            play(copied(policy), rows)

    def test_its_fingerprint_is_that_without_it(self):
        model = make_model(num_hidden_layers=1)
        assert make_policy(model, compile_decode=True).fingerprint() == make_policy(model).fingerprint()

    def test_a_forward_that_cannot_be_compiled(self, graphs):
        """Dynamic RoPE reads the longest position on the host."""
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
        model = with_adapter(make_model(rope_parameters=rope, max_position_embeddings=64, num_hidden_layers=1))
        modules = dict(model.named_modules())
        policy = make_policy(model, adapter="actor", compile_decode=True)
        with pytest.raises(DecodeCompilationError, match=r"Set compile_decode to false.*Unsupported"):
            play(policy, random_rows([5, 9]))
        assert dict(model.named_modules()) == modules  # the modules of a turn are put back
        assert not policy._engine.cache.tokens.size

    def test_a_compiler_that_is_not_there(self, monkeypatch):
        def backend(graph, inputs):
            raise RuntimeError("No C++ compiler.")

        count_graphs(monkeypatch, backend)
        with pytest.raises(DecodeCompilationError, match=r"(?s)environment variable CXX.*No C\+\+ compiler"):
            play(make_policy(make_model(num_hidden_layers=1), compile_decode=True), random_rows([5, 9]))

    @pytest.mark.parametrize("wrong", [lambda hidden: hidden + 1.0, lambda hidden: hidden * torch.nan])
    def test_a_compiler_that_computes_something_else(self, wrong, monkeypatch):
        monkeypatch.setattr(_step, "_compiled", lambda: lambda *args: wrong(_step._step(*args)))
        with pytest.raises(UnsupportedModelError, match="other logits with the compiled forward"):
            play(make_policy(make_model(num_hidden_layers=1), compile_decode=True), random_rows([5, 9]))

    def test_weights_that_have_diverged_are_no_fault_of_the_compiler(self, monkeypatch):
        monkeypatch.setattr(_step, "_compiled", lambda: _step._step)
        model = make_model(num_hidden_layers=1)
        policy = make_policy(model, compile_decode=True)
        model.model.norm.weight.data.fill_(torch.nan)
        with pytest.raises(NonFiniteLogitsError, match="diverged"):
            play(policy, random_rows([5, 9]))
