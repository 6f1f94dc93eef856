"""load_actor_critic with less memory: half precision over master weights, a quantized base, a base
that is offloaded."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from peft import LoraConfig
from tiny_actor_critic import LORA, make_model, make_rows, outputs, perturb
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_llm.modules import WeightsError, load_actor_critic
from torchrl_llm.modules._base import load_base
from torchrl_llm.testing.pretended_gpu import pretended_gpu


@pytest.fixture(params=["lora", "full"])
def lora(request) -> LoraConfig | None:
    return LoraConfig(**LORA) if request.param == "lora" else None


class TestMasterWeights:
    @pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float16])
    def test_what_trains_is_float32(self, dtype, caplog):
        values = make_model().bfloat16().state_dict()
        models = load_actor_critic(make_model().bfloat16(), critic=True, reference=True, dtype=dtype)
        everything = [*models.actor_parameters(), *models.critic_parameters(), *models.base_parameters()]
        assert {p.dtype for p in everything} == {torch.float32}
        assert all(values[name].equal(x.to(torch.bfloat16)) for name, x in models.model.state_dict().items())
        assert caplog.text.count("kept in float32") == 1

    def test_a_checkpoint_is_not_rounded_on_the_way(self, tmp_path):
        make_model().save_pretrained(tmp_path)
        models = load_actor_critic(tmp_path, dtype="bfloat16")
        assert all(x.equal(models.model.state_dict()[name]) for name, x in make_model().state_dict().items())

    def test_they_are_widened_on_their_device(self, tmp_path):
        """Each process of a machine would hold a float32 copy on the host; until then they share
        the mapped file."""
        make_model().bfloat16().save_pretrained(tmp_path)

        class Casts(TorchDispatchMode):
            found: ClassVar[set[str]] = set()

            def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
                kwargs = kwargs or {}
                widens = kwargs.get("dtype") is torch.float32 and getattr(args[0], "dtype", None) is torch.bfloat16
                if widens:
                    self.found.add(args[0].device.type)
                return operation(*args, **kwargs)

        with Casts():
            base = load_base(tmp_path, device="meta", master_weights=True)
        assert {parameter.dtype for parameter in base.parameters()} == {torch.float32}
        assert Casts.found == {"meta"}

    def test_not_where_nothing_or_only_adapters_train(self, caplog):
        models = load_actor_critic(make_model(), dtype="bfloat16", master_weights=False)
        assert models.model.dtype == torch.bfloat16
        models = load_actor_critic(make_model(), dtype="bfloat16", lora=LoraConfig(**LORA))
        assert {p.dtype for p in models.base_parameters()} == {torch.bfloat16}
        assert load_actor_critic(make_model().double()).model.dtype == torch.float64
        assert not caplog.text


class TestQuantization:
    def test_what_is_refused(self, tmp_path, monkeypatch):
        make_model().save_pretrained(tmp_path)
        lora = LoraConfig(**LORA)
        with pytest.raises(ValueError, match="full fine-tuning"):
            load_actor_critic(tmp_path, quantization="nf4")
        with pytest.raises(ValueError, match="Pass its directory"):
            load_actor_critic(make_model(), lora=lora, quantization="nf4")
        with pytest.raises(ValueError, match="quantization is 'int3'; expected 'nf4' or None"):
            load_actor_critic(tmp_path, lora=lora, quantization="int3")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ImportError, match="pip install bitsandbytes"):
            load_actor_critic(tmp_path, lora=lora, quantization="nf4")

    def test_a_4_bit_base(self, tmp_path):
        bitsandbytes = pytest.importorskip("bitsandbytes")
        make_model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
        options = {"lora": LoraConfig(**LORA), "critic": True, "dtype": "bfloat16"}
        models = load_actor_critic(tmp_path / "base", quantization="nf4", **options)
        layer = models.model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
        assert isinstance(layer, bitsandbytes.nn.Linear4bit)
        assert layer.weight.quant_type == "nf4"
        perturb(models)
        assert {x.dtype for x in outputs(models)} == {torch.float32}
        models.actor(make_rows())["log_prob"].sum().backward()
        assert all(p.grad.abs().max() > 0 for p in models.actor_parameters())
        models.save_pretrained(tmp_path / "trained")
        exact = load_actor_critic(tmp_path / "base", **options)
        exact.load_pretrained(tmp_path / "trained")
        torch.testing.assert_close(outputs(models)[0], outputs(exact)[0], rtol=0, atol=0.2)
        with pytest.raises(WeightsError, match="quantized"):
            models.export_merged(tmp_path / "merged")


class TestOffload:
    def test_base_parameters_are_neither_adapters_nor_heads(self):
        models = load_actor_critic(make_model(), lora=LoraConfig(**LORA), critic=True, reference="adapter")
        plain = {tuple(p.shape) for p in make_model().parameters()}
        base = models.base_parameters()
        assert len(base) == len(list(make_model().parameters()))
        assert {tuple(p.shape) for p in base} == plain
        adapters = [p for name, p in models.model.named_parameters() if "lora_" in name]
        assert not {id(p) for p in base} & {id(p) for p in [*adapters, *models.critic_parameters()]}

    def test_full_fine_tuning_has_no_frozen_base_but_the_reference(self):
        assert load_actor_critic(make_model(), critic=True).base_parameters() == []
        models = load_actor_critic(make_model(), critic=True, reference=True)
        expected = {id(p) for p in models.reference.model.parameters()}
        assert {id(p) for p in models.base_parameters()} == expected

    @pytest.mark.host  # where there is nowhere to move to
    def test_on_the_cpu_nothing_moves(self, lora):
        models = load_actor_critic(make_model(), lora=lora, critic=True, reference=True)
        expected = outputs(models)
        places = [p.data_ptr() for p in models.base_parameters()]
        with models.offload_base():
            assert [p.data_ptr() for p in models.base_parameters()] == places
            assert all(map(torch.equal, outputs(models), expected))
        with pytest.raises(RuntimeError, match="inside"), models.offload_base():
            raise RuntimeError("inside")
        assert all(map(torch.equal, outputs(models), expected))

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_on_cuda_the_base_leaves_and_comes_back(self):
        self.base_leaves_and_comes_back()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_on_a_pretended_gpu_too(self):
        with pretended_gpu():
            self.base_leaves_and_comes_back()

    @torch.no_grad()  # a graph would keep views of the base
    def base_leaves_and_comes_back(self):
        lora = LoraConfig(**LORA)
        models = load_actor_critic(make_model(), lora=lora, critic=True, reference="adapter", device="cuda")
        rows = make_rows().to("cuda")
        expected, values = models.actor(rows.clone())["log_prob"], models.critic(rows.clone())["state_value"]
        trained, before = models.actor_parameters() + models.critic_parameters(), torch.cuda.memory_allocated()
        size = sum(p.nbytes for p in models.base_parameters())
        with models.offload_base():
            assert all(p.device.type == "cpu" and p.is_pinned() for p in models.base_parameters())
            assert all(p.device.type == "cuda" for p in trained)
            assert torch.cuda.memory_allocated() <= before - size
        assert all(p.device.type == "cuda" for p in models.base_parameters())
        assert torch.equal(models.actor(rows.clone())["log_prob"], expected)
        assert torch.equal(models.critic(rows)["state_value"], values)
