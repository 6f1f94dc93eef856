"""The transfer between GPUs, on CPUs: vLLM's own factory, trainer and worker, with a queue where NCCL would broadcast."""

from __future__ import annotations

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
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import nccl_engine

from torchrl_llm.modules.vllm import NCCLTransfer, VLLMPolicy

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
    with make_policy(words, weight_transfer_config=WeightTransferConfig(backend="nccl")) as policy:
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


def test_an_engine_that_was_not_made_for_it_is_refused():
    config = SimpleNamespace(weight_transfer_config=None)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    with pytest.raises(WeightSyncError, match=r"backend is None; expected 'nccl'.*weight_transfer_config="):
        NCCLTransfer(llm, "127.0.0.1")
