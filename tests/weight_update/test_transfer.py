"""The transfer from GPU to GPU, on CPUs: vLLM's own factory, trainer and worker, with a queue where
NCCL would broadcast, and tensors where CUDA IPC would pass the handles of a buffer."""

from __future__ import annotations

import os
import queue
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from trained import gap, make_models, train
from waiting import LIMIT

from torchrl_llm.modules import SamplingConfig
from torchrl_llm.testing.tiny import tiny_model_path
from torchrl_llm.weight_update import EngineWeightSync, WeightSyncError

pytest.importorskip("vllm", reason="needs vLLM: run make test-vllm")
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine
from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk

from torchrl_llm.modules.vllm import IPCTransfer, NCCLTransfer, VLLMPolicy, weights

pytestmark = pytest.mark.vllm


class Group:
    """Stands for a communicator of NCCL: what is broadcast waits here until it is received."""

    def __init__(self):
        self.tensors, self.open = queue.Queue(), True

    def destroy(self):
        self.open = False


@pytest.fixture
def group(monkeypatch):
    found, infos = Group(), []

    def produce(iterator, group, **_):
        for pair in iterator:
            group.tensors.put(pair[1].clone())

    def consume(iterator, group, post_unpack_func, **_):
        for name, (shape, dtype) in iterator:
            tensor = group.tensors.get(timeout=LIMIT)
            assert (tuple(tensor.shape), tensor.dtype) == (tuple(shape), dtype), name
            post_unpack_func([(name, tensor)])

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: infos.append(info) or found)
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", lambda info, parallel: infos.append(info) or found)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", produce)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_consumer", consume)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    found.infos = infos
    return found


@contextmanager
def make_policy(words, **engine_args):
    sampling = SamplingConfig(max_output_tokens=12, temperature=0.7, stop_ids=())
    policy = VLLMPolicy(tiny_model_path(), words, sampling, dtype="float32", max_model_len=256, **engine_args)
    try:
        yield policy
    finally:
        policy.close()


def test_all_weights_arrive_and_the_group_is_left(group, words):
    models = make_models(tiny_model_path())
    with make_policy(words, weight_transfer="nccl") as policy:
        sync = EngineWeightSync(models.model, models.adapter, policy=policy)
        assert sync.method == "nccl"
        for seed in range(2):
            train(models, seed)
            assert gap(policy, models) > 1e-3
            sync()
            assert gap(policy, models) <= 1e-5
            assert group.tensors.empty()
        places = {(info.master_address, info.master_port, info.world_size) for info in group.infos}
        assert len(group.infos) == 2, "the ranks met once"
        assert len(places) == 1
        assert {(address, ranks) for address, _, ranks in places} == {("127.0.0.1", 2)}
    assert not group.open


@pytest.fixture
def chunks(monkeypatch):
    """The sizes of the buffer, and what passed through it."""
    found = []

    def produce(iterator, gpu_uuid, post_iter_func, buffer_size_bytes):
        for name, tensor in iterator:
            assert tensor.nbytes <= buffer_size_bytes, "vLLM refuses it"
            found.append((name, buffer_size_bytes, os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION")))
            kind, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            yield PackedIpcChunk([name], [shape], [kind], [tensor.nbytes], {gpu_uuid: (tensor.clone(),)})

    def consume(ipc_handle, names, shapes, dtype_names, **_):
        (tensor,) = ipc_handle["GPU-1"]
        assert [[*tensor.shape], str(tensor.dtype).removeprefix("torch.")] == [shapes[0], dtype_names[0]]
        return [(names[0], tensor)]

    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", produce)
    monkeypatch.setattr(ipc_engine, "packed_ipc_consumer", consume)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    return found


def test_all_weights_pass_through_a_buffer_that_holds_the_largest(chunks, words, monkeypatch):
    models = make_models(tiny_model_path())
    with make_policy(words, weight_transfer="ipc") as policy:
        sync = EngineWeightSync(models.model, models.adapter, policy=policy)
        assert sync.method == "ipc"
        with pytest.raises(WeightSyncError, match=r"in this process.*'reload'"):
            IPCTransfer(policy.llm)
        monkeypatch.setattr(weights, "is_in_process", lambda _: False)
        for seed in range(2):
            train(models, seed)
            assert gap(policy, models) > 1e-3
            sync()
            assert gap(policy, models) <= 1e-5
        largest = models.model.get_input_embeddings().weight.nbytes
        assert {(size, allowed) for _, size, allowed in chunks} == {(largest, "1")}
        assert "lm_head.weight" in {name for name, *_ in chunks}
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ


@pytest.mark.parametrize(("kind", "name"), [(NCCLTransfer, "nccl"), (IPCTransfer, "ipc")])
def test_an_engine_that_was_not_made_for_it_is_refused(kind, name):
    config = SimpleNamespace(weight_transfer_config=None)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    with pytest.raises(WeightSyncError, match=rf"backend is 'none'; expected '{name}'.*weight_transfer='{name}'"):
        kind(llm, *["127.0.0.1"] * (name == "nccl"))
