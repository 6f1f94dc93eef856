"""What a pretended GPU puts in the place of PyTorch's and of other packages' own: they see a GPU,
and nothing of it remains."""

import copy
import io
import pickle
import threading

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.checkpoint import DefaultDeviceType, checkpoint
from torch.utils.data import DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_llm.testing.pretended_gpu import DeviceError, pretended_gpu


@pytest.fixture
def gpu():
    with pretended_gpu() as gpu:
        yield gpu


class TestSurroundings:
    def test_what_pytorch_says(self):
        with pretended_gpu(memory=24 * 2**30) as gpu:
            assert torch.cuda.is_available()
            assert torch.cuda.get_device_capability() == (9, 0)
            assert torch.cuda.get_device_properties(0).total_memory == 24 * 2**30
            held = torch.ones(1000, device="cuda")
            assert torch.cuda.memory_allocated() == 4000
            assert torch.cuda.mem_get_info() == (24 * 2**30 - 4000, 24 * 2**30)
            held = held[:1].clone()
            assert torch.cuda.memory_allocated() == 4
            torch.cuda.empty_cache()
            assert gpu.emptied == 1
        assert not torch.cuda.is_available()
        assert held.device.type == "cpu"

    def test_streams_and_events_are_classes(self):
        """Annotations name them, such as the ones of ``transformers.generation``."""
        with pretended_gpu() as gpu:
            stream = torch.cuda.Stream(gpu.device)
            assert isinstance(stream, torch.cuda.Stream | None)
            torch.cuda.Event(enable_timing=True).record(stream)
            torch.cuda.current_stream().wait_stream(stream)

    def test_transformers_loads_there(self, tmp_path):
        config = Qwen2Config(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
        Qwen2ForCausalLM(config).save_pretrained(tmp_path)
        ids = torch.tensor([[1, 2, 3]])
        expected = Qwen2ForCausalLM.from_pretrained(tmp_path)(ids).logits
        with pretended_gpu() as gpu:
            model = Qwen2ForCausalLM.from_pretrained(tmp_path, device_map="cuda")
            assert {each.device for each in (*model.parameters(), *model.buffers())} == {gpu.device}
            found = model(ids.cuda()).logits.cpu()
        assert torch.equal(found, expected)

    def test_accelerate_chooses_the_gpu_and_forgets_it(self):
        before = Accelerator(cpu=True, mixed_precision="no")
        with pretended_gpu() as gpu:
            inside = Accelerator(mixed_precision="bf16")
            assert inside.device.type == "cuda"
            with inside.autocast():
                product = torch.ones(2, 2, device=gpu.device) @ torch.ones(2, 2, device=gpu.device)
            assert product.dtype == torch.bfloat16
        assert before.device.type == "cpu"
        assert Accelerator(cpu=True).mixed_precision == "no"

    def test_all_is_as_before_after_an_error(self):
        before = torch.Generator, torch.cuda.is_available
        with pytest.raises(DeviceError), pretended_gpu():
            torch.ones(2, device="cuda") + torch.ones(2)
        assert (torch.Generator, torch.cuda.is_available) == before
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert isinstance(torch.Generator(), torch.Generator)
        with pytest.raises((RuntimeError, AssertionError)):
            torch.ones(2, device="cuda")

    def test_values_and_draws_are_those_of_the_cpu(self):
        def compute(device):
            torch.manual_seed(0)
            layer = nn.Linear(4, 3, device=device)
            x = torch.rand(5, 4, device=device, generator=torch.Generator(device).manual_seed(1))
            optimizer = torch.optim.AdamW(layer.parameters())
            for _ in range(2):
                nn.functional.cross_entropy(layer(x), torch.arange(5, device=device) % 3).backward()
                nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
                optimizer.step()
            assert layer.weight.grad.norm() < 1.1e-3
            return layer.weight.cpu()

        with pretended_gpu():
            there = compute("cuda")
        torch.testing.assert_close(there, compute("cpu"), rtol=0, atol=0)

    def test_the_accelerator_of_pytorch_is_it(self, gpu):
        assert torch.accelerator.is_available()
        assert torch.ones(2, device=torch.accelerator.current_accelerator()).is_cuda
        assert torch.accelerator.device_count() == 1

    def test_a_loader_pins_its_batches(self, gpu):
        for batch in DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True):
            assert batch.is_pinned()
            assert batch.pin_memory() is batch
            assert batch.to("cuda", non_blocking=True).is_cuda
        assert not gpu.waits

    def test_what_a_checkpointed_forward_chooses_by_default_is_forgotten(self):
        """That of a forward without tensors among its arguments, which PyTorch keeps."""
        with pretended_gpu():
            checkpoint(torch.ones, 2, use_reentrant=False)
            assert DefaultDeviceType.get_device_type() == "cuda"
        checkpoint(torch.ones, 2, use_reentrant=False)
        assert DefaultDeviceType.get_device_type() == "cpu"

    def test_what_is_printed_names_the_device(self, gpu):
        assert repr(torch.ones(2, device="cuda")) == "tensor([1., 1.], device='cuda:0')"
        assert repr(torch.ones(2)) == "tensor([1., 1.])"


class TestFiles:
    """A file says where its tensors were, and they are put there again, or where ``map_location``
    says."""

    @pytest.mark.parametrize("where", [None, "cpu", "cuda"])
    def test_tensors_are_loaded_where_they_were_or_are_asked_for(self, gpu, where):
        file, x = io.BytesIO(), torch.arange(3.0, device="cuda")
        torch.save({"there": x, "view": x[1:], "here": torch.ones(2)}, file)
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert [each.device.type for each in loaded.values()] == ([where] * 3 if where else ["cuda", "cuda", "cpu"])
        assert loaded["view"].tolist() == [1, 2]

    def test_a_pickle_keeps_the_device(self, gpu):
        x = torch.ones(2, device="cuda")
        assert pickle.loads(pickle.dumps(x)).is_cuda
        assert copy.copy(x).is_cuda

    def test_a_file_of_the_gpu_is_refused_where_there_is_none(self):
        file = io.BytesIO()
        with pretended_gpu():
            torch.save(torch.ones(2, device="cuda"), file)
        file.seek(0)
        with pytest.raises(RuntimeError, match="map_location"):
            torch.load(file)


class TestLimits:
    """What the module's docstring says of them."""

    def test_compiled_functions_run_eagerly(self, gpu):
        layer = nn.Linear(2, 2, device="cuda")
        x = torch.ones(2, device="cuda")
        compiled = torch.compile(layer)
        launches = []
        for each in (layer, compiled):
            gpu.reset()
            each(x)
            launches.append(gpu.launches)
        assert launches[0] == launches[1] > 0
        with pytest.raises(DeviceError, match="mixes devices"):
            compiled(torch.ones(2))

    def test_another_thread_sees_no_gpu(self, gpu):
        x, results, errors = torch.ones(2, device="cuda"), [], []

        def work():
            results.append((x.device.type, x + 1))
            try:
                torch.ones(2, device="cuda")
            except NotImplementedError as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        ((where, result),) = results
        assert where == "cpu"
        assert errors
        with pytest.raises(DeviceError, match="mixes devices"):
            x + result

    def test_streams_and_events_measure_nothing(self, gpu):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        end.record()
        assert start.elapsed_time(end) == 0.0

    def test_autocast_of_the_cpu_does_nothing(self, gpu):
        with torch.autocast("cpu", torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32

    def test_a_graph_cannot_be_captured(self, gpu):
        with pytest.raises(RuntimeError, match="CUDAGraph"):
            torch.cuda.CUDAGraph()

    def test_draws_are_those_of_the_cpu(self, gpu):
        draws = [torch.manual_seed(0) and torch.rand(2, device=device).tolist() for device in ("cuda", "cpu")]
        assert draws[0] == draws[1]
