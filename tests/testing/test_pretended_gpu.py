"""The pretended GPU: what a CUDA device refuses is refused, what makes the host wait is counted,
and values are the CPU's."""

import copy
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import one_hot, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from torchrl_llm.functional import turn_sum
from torchrl_llm.testing.pretended_gpu import DeviceError, pretended_gpu


@pytest.fixture
def gpu():
    with pretended_gpu() as gpu:
        yield gpu


HERE = torch.tensor([0, 2])
"""Ids of the host."""


def line_of(text: str) -> str:
    """Where this file has ``text``: as a place names it."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


class TestPlaces:
    """Where tensors are: what is computed of a GPU's tensors is there, and what is made is where it
    was asked for."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda x: torch.zeros(2, device="cuda"),
            lambda x: torch.tensor([1, 2], device="cuda"),
            lambda x: torch.as_tensor(np.ones(2), device="cuda:0"),
            lambda x: torch.full_like(torch.ones(2), 3.0, device="cuda"),
            lambda x: torch.ones(2).to("cuda"),
            lambda x: torch.as_tensor(x),
            lambda x: torch.as_tensor(torch.ones(2), dtype=torch.float64, device=x.device),
            lambda x: torch.ones(2).to(0, torch.float64),
            lambda x: torch.ones(2).to(x),
            lambda x: torch.ones(2).cuda(),
            lambda x: x + 1,
            lambda x: x * torch.tensor(2.0),
            lambda x: x[1:],
            lambda x: x.to(torch.bfloat16),
            lambda x: x.new_zeros(3),
            lambda x: x.new_tensor([1.0]),
            lambda x: torch.empty_like(x),
            lambda x: one_hot(x.long(), 3),
            lambda x: pad_sequence([x, x[:1]]),
            lambda x: copy.deepcopy(x),
            lambda x: copy.deepcopy(nn.Parameter(x)),
            lambda x: nn.Linear(2, 2, device="cuda").weight,
            lambda x: nn.Linear(2, 2).to("cuda").bias,
            lambda x: nn.Linear(2, 2).cuda()(x.expand(3, 2)),
            lambda x: torch.rand(2, generator=torch.Generator("cuda"), device="cuda"),
            lambda x: torch.where(x > 0, x, 0.0),
            lambda x: torch.histc(x.int(), bins=2, min=0, max=1),
            lambda x: x.data,
            lambda x: x.to_sparse(),
            lambda x: torch.sparse_coo_tensor(HERE[None], torch.ones(2), (3,), device="cuda"),
            lambda x: torch.eye(2).to_sparse().to("cuda") @ torch.eye(2, device="cuda"),
            lambda x: torch.eye(2).to_sparse_csr().cuda(),
        ],
    )
    def test_on_the_gpu(self, gpu, make):
        made = make(torch.ones(2, device="cuda"))
        assert made.device == torch.device("cuda", 0)
        assert made.is_cuda
        assert not made.is_cpu
        assert made.get_device() == 0

    @pytest.mark.parametrize(
        "make",
        [
            lambda x: torch.zeros(2),
            lambda x: x.cpu(),
            lambda x: x.to("cpu"),
            lambda x: torch.empty_like(x, device="cpu"),
            lambda x: x.new_zeros(2, device="cpu"),
            lambda x: torch.tensor(x.tolist()),
            lambda x: torch.eye(2).to_sparse(),
            lambda x: x.to_sparse().cpu(),
        ],
    )
    def test_on_the_host(self, gpu, make):
        made = make(torch.ones(2, device="cuda"))
        assert made.device == torch.device("cpu")
        assert made.get_device() == -1

    def test_a_context_of_the_device(self, gpu):
        with torch.device("cuda"):
            assert torch.arange(3).is_cuda

    def test_the_meta_device_is_as_it_was(self, gpu):
        x = torch.ones(2, device="cuda")
        with torch.device("meta"):
            assert torch.tensor([]).device == torch.zeros(2).device == torch.device("meta")
        assert x.to("meta").device == torch.empty_like(x, device="meta").device == torch.device("meta")
        assert torch.empty_like(torch.empty(2, device="meta"), device="cuda").is_cuda

    def test_gradients_and_the_state_of_an_optimizer(self, gpu):
        layer = nn.Linear(3, 1, device="cuda")
        optimizer = torch.optim.AdamW(layer.parameters())
        first = layer(torch.ones(2, 3, device="cuda")).sum()
        first.backward()
        optimizer.step()
        assert layer.weight.grad.is_cuda
        assert optimizer.state[layer.weight]["exp_avg"].is_cuda
        assert layer(torch.ones(2, 3, device="cuda")).sum() < first

    def test_a_checkpointed_forward_is_computed_again_there(self, gpu):
        seen, x = [], torch.ones(2, device="cuda", requires_grad=True)

        def forward(x):
            places = torch.arange(2, device=x.device)
            seen.append((x.device.type, places.device.type))
            return (x * places) ** 2

        checkpoint(forward, x, use_reentrant=False).sum().backward()
        assert seen == [("cuda", "cuda")] * 2
        assert x.grad.tolist() == [0, 2]

    def test_a_function_with_a_backward_of_its_own(self, gpu):
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return 2 * x

            @staticmethod
            def backward(ctx, gradient):
                return gradient * torch.full((2,), 2.0, device=gradient.device)

        x = torch.ones(2, device="cuda", requires_grad=True)
        Double.apply(x).sum().backward()
        assert x.grad.tolist() == [2, 2]

    def test_several_devices(self):
        with pretended_gpu(count=2) as gpu:
            assert torch.cuda.device_count() == 2
            with torch.cuda.device(1):
                one = torch.ones(2, device="cuda")
            assert one.device == torch.device("cuda", 1)
            assert gpu.device == torch.device("cuda", 0)
            assert one.to("cuda").device == gpu.device
            with pytest.raises(DeviceError, match=r"add\(cuda:1 \[2\], cuda:0 \[2\]\) mixes devices"):
                one + torch.ones(2, device="cuda")


class TestErrors:
    @pytest.mark.parametrize(
        "mix",
        [
            lambda x: x + torch.ones(4),
            lambda x: torch.cat([x, torch.ones(4)]),
            lambda x: torch.cat([x[:0], torch.ones(0)]),
            lambda x: x.index_add(0, HERE, torch.ones(2, device="cuda")),
            lambda x: torch.ones(4)[HERE.cuda()],
            lambda x: torch.ones(4, 4) @ x,
            lambda x: nn.Linear(4, 1)(x),
            lambda x: x.masked_fill_(torch.ones(4, dtype=torch.bool), 0.0),
            lambda x: torch.where(torch.ones(4, dtype=torch.bool), x, 0.0),
            lambda x: x.__setitem__(HERE.cuda(), torch.ones(2)),
            lambda x: x.clone().requires_grad_().sum().backward(torch.ones(())) or x.mul_(torch.ones(4)),
            lambda x: torch.rand(4, device="cuda", generator=torch.Generator()),
            lambda x: torch.randperm(4, generator=torch.Generator("cuda")),
            lambda x: x.normal_(generator=torch.Generator()),
            lambda x: x.numpy(),
            lambda x: np.asarray(x),
            lambda x: torch.eye(4).to_sparse() @ x[:, None],
            lambda x: x.pin_memory(),
            lambda x: torch.ones(2, device="cuda", pin_memory=True),
            lambda x: torch.ones(2, device="cuda:1"),
            lambda x: x.to("cuda:1"),
            lambda x: x.cuda(1),
            lambda x: torch.cuda.set_device(1),
            lambda x: torch.cuda.get_device_properties(1),
        ],
    )
    def test_are_raised_and_noted(self, gpu, mix):
        with pytest.raises(DeviceError, match=r"test_pretended_gpu\.py:\d+"):
            mix(torch.ones(4, device="cuda"))
        assert gpu.errors.total() == 1

    def test_name_the_line_of_the_code_that_was_called(self, gpu):
        rows, weight = torch.ones(2, 4, device="cuda"), torch.ones(4)
        with pytest.raises(DeviceError) as raised:
            nn.functional.layer_norm(rows, (4,), weight)  # the line of the layer
        assert str(raised.value) == (
            f"native_layer_norm(cuda:0 [2, 4], cpu [4]) mixes devices at {line_of('# the line of the layer')}"
        )

    def test_of_the_package_name_its_file(self, gpu):
        with pytest.raises(DeviceError, match=r" at torchrl_llm/functional/\w+\.py:\d+$"):
            turn_sum(torch.ones(1, 3, device="cuda"), torch.zeros(1, 3, dtype=torch.int64), 1)

    def test_can_be_collected(self):
        with pretended_gpu(raise_errors=False) as gpu:
            x = torch.ones(4, device="cuda")
            for _ in range(3):
                x = x + torch.ones(4)  # the line of the sum
            x.numpy()
        assert [*gpu.errors.values()] == [3, 1]
        assert line_of("# the line of the sum") in gpu.report()

    def test_autocast_of_the_cpu_around_a_product_of_the_gpu(self, gpu):
        layer = nn.Linear(4, 1, device="cuda")
        x = torch.ones(4, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with torch.autocast("cuda"):
            assert layer(x).dtype == torch.float16
        with torch.autocast("cpu"), pytest.raises(DeviceError, match=r'autocast\("cpu"\) changes nothing'):
            layer(x)
        with torch.autocast("cpu", enabled=False):
            assert layer(x).dtype == torch.float32

    def test_no_second_pretended_gpu(self, gpu):
        with pytest.raises(RuntimeError, match="inside itself"), pretended_gpu():
            pass


class TestWaits:
    @pytest.mark.parametrize(
        ("what", "does"),
        [
            ("item", lambda x: x.sum().item()),
            ("item", lambda x: bool(x.any())),
            ("item", lambda x: range(x.long()[0])),
            ("tolist", lambda x: x.tolist()),
            ("nonzero", lambda x: x.nonzero()),
            ("nonzero", lambda x: torch.where(x > 0)),
            ("unique", lambda x: x.unique()),
            ("equal", lambda x: x.equal(x)),
            ("masked_select", lambda x: x.masked_select(x > 0)),
            ("bincount", lambda x: x.long().bincount()),
            ("repeat_interleave without output_size", lambda x: x.repeat_interleave(x.long())),
            ("index by a mask", lambda x: x[x > 0]),
            ("index by a mask", lambda x: x.__setitem__(x > 0, torch.ones(4, device="cuda"))),
            ("index by ids of the host", lambda x: x[HERE]),
            ("index by ids of the host", lambda x: x[[0, 1]]),
            ("index by ids of the host", lambda x: x.__setitem__(HERE, torch.ones(2, device="cuda"))),
            ("copy to the host", lambda x: x.cpu()),
            ("copy to the device", lambda x: HERE.to("cuda")),
            ("copy to the device", lambda x: HERE.to("cuda", non_blocking=True)),  # pageable memory
            ("copy to the device", lambda x: torch.tensor([1], device="cuda")),
            ("copy_ between host and device", lambda x: x.copy_(torch.ones(4))),
            ("copy_ between host and device", lambda x: torch.ones(4).copy_(x)),
            ("synchronize", lambda x: torch.cuda.synchronize()),
            ("synchronize", lambda x: torch.accelerator.synchronize()),
            ("synchronize", lambda x: torch.cuda.Event().synchronize()),
            ("print", repr),
            ("copy to the host", lambda x: torch.save(x, io.BytesIO())),
        ],
    )
    def test_are_counted_by_place(self, gpu, what, does):
        x = torch.ones(4, device="cuda")
        gpu.reset()
        does(x)
        ((wait, number),) = gpu.waits.items()
        assert (wait.what, number) == (what, 1)
        assert wait.place.startswith(f"{__file__}:")
        assert gpu.waits_in(__file__) == 1
        assert gpu.waits_in("torchrl_llm/") == 0

    @pytest.mark.parametrize(
        "does",
        [
            lambda x: x.to("cpu", non_blocking=True),
            lambda x: torch.ones(4, pin_memory=True).to("cuda", non_blocking=True),
            lambda x: x.copy_(torch.ones(4).pin_memory(), non_blocking=True),
            lambda x: x.__setitem__(x > 0, 0.0),
            lambda x: x.repeat_interleave(x.long(), output_size=4),
            lambda x: x[x.long() * 0],
            lambda x: torch.full((), 3.0, device="cuda"),
            lambda x: torch.ones(4).sum().item(),
            lambda x: repr(torch.ones(4)),
            lambda x: (x @ x).exp().clamp(max=2.0),
        ],
    )
    def test_nothing_else_is(self, gpu, does):
        x = torch.ones(4, device="cuda")
        gpu.reset()
        does(x)
        assert not gpu.waits

    def test_the_optimizer_and_clipping_wait_for_nothing(self, gpu):
        layer = nn.Linear(3, 1, device="cuda")
        optimizer = torch.optim.AdamW(layer.parameters())
        x = torch.ones(2, 3, device="cuda")
        gpu.reset()
        for _ in range(2):
            layer(x).sum().backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert not gpu.waits
        assert gpu.launches > 20
        assert gpu.products[torch.float32] >= 4


def tensors(dtype=torch.bfloat16, heads=2, keys=8, queries=8, width=16):
    """Queries, keys and values."""
    shapes = [(1, heads, queries, width), (1, 2, keys, width), (1, 2, keys, width)]
    return [torch.ones(shape, dtype=dtype, device="cuda") for shape in shapes]


class TestAttention:
    @pytest.mark.parametrize(
        ("kernel", "given", "options"),
        [
            ("cudnn", {}, {"is_causal": True}),
            ("cudnn", {}, {"mask": (8, 8)}),
            ("flash", {"width": 136}, {}),
            ("efficient", {"width": 136}, {"mask": (8, 8)}),
            ("flash", {"keys": 1}, {}),
            ("efficient", {"dtype": torch.float32}, {"mask": (1, 1, 8, 8)}),
            ("math", {"dtype": torch.float32, "width": 6}, {}),
            ("math", {"dtype": torch.float64}, {}),
            ("math", {"dtype": torch.float32, "heads": 4}, {"enable_gqa": True}),
            ("cudnn", {"heads": 4}, {"enable_gqa": True}),
        ],
    )
    def test_the_kernel_is_that_of_an_h100(self, gpu, kernel, given, options):
        if (shape := options.pop("mask", None)) is not None:
            options["attn_mask"] = torch.zeros(shape, dtype=given.get("dtype", torch.bfloat16), device="cuda")
        query, key, value = tensors(**given)
        scaled_dot_product_attention(query, key, value, **options)
        ((call, number),) = gpu.attention.items()
        assert (call.kernel, number) == (kernel, 1)
        assert (call.mask, call.gradient) == ("attn_mask" in options, False)
        assert (call.query, call.key) == (query.shape, key.shape)
        assert call.place.startswith(__file__)

    @pytest.mark.parametrize(
        ("allowed", "kernel"),
        [
            ([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], "efficient"),
            ([SDPBackend.EFFICIENT_ATTENTION], "efficient"),
            ([SDPBackend.MATH], "math"),
            ([SDPBackend.CUDNN_ATTENTION], "cudnn"),
        ],
    )
    def test_kernels_can_be_chosen(self, gpu, allowed, kernel):
        mask = torch.zeros(8, 8, dtype=torch.bfloat16, device="cuda")
        with sdpa_kernel(allowed):
            scaled_dot_product_attention(*tensors(), attn_mask=mask)
        assert [call.kernel for call in gpu.attention] == [kernel]

    def test_their_order_too(self, gpu):
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=True):
            scaled_dot_product_attention(*tensors())
        assert [call.kernel for call in gpu.attention] == ["efficient"]

    def test_none_that_can_is_an_error(self, gpu):
        mask = torch.zeros(8, 8, dtype=torch.bfloat16, device="cuda")
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), pytest.raises(RuntimeError, match="No available kernel"):
            scaled_dot_product_attention(*tensors(), attn_mask=mask)

    def test_autocast_decides_too(self, gpu):
        with torch.autocast("cuda", torch.bfloat16):
            scaled_dot_product_attention(*tensors(dtype=torch.float32))
        assert [call.kernel for call in gpu.attention] == ["cudnn"]

    def test_that_of_the_host_is_not_noted(self, gpu):
        scaled_dot_product_attention(*(each.cpu() for each in tensors()))
        assert not gpu.attention
