"""Where models and rows of a trainer are: on the accelerator's device."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from small_runs import one_batch, small_config

from torchrl_llm.runs import ConfigError, build_run, device
from torchrl_llm.testing.pretended_gpu import pretended_gpu
from torchrl_llm.testing.probes import ALGORITHMS, ConstantAnswer, solve
from torchrl_llm.trainers.distributed import FSDP2, Distributed


class Elsewhere(Accelerator):
    """Its device is one that every machine has, and that no model is on."""

    device = torch.device("meta")


@pytest.mark.host  # whose accelerator is on another device
class TestPrepare:
    @staticmethod
    def prepare(accelerator, loss, reference):
        optimizer = torch.optim.AdamW(loss.parameters())
        return Distributed.of(accelerator).prepare(loss, optimizer, reference)

    def test_all_models_are_moved_where_the_rows_go(self):
        loss, reference = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2).requires_grad_(False)
        self.prepare(Elsewhere(cpu=True), loss, reference)
        tensors = (*loss.parameters(), *reference.parameters(), *reference.buffers())
        assert {each.device.type for each in tensors} == {"meta"}

    def test_parameters_stay_the_optimizers(self):
        loss = torch.nn.Linear(2, 2)
        before = list(loss.parameters())
        _, optimizer = self.prepare(Accelerator(cpu=True), loss, torch.nn.Linear(2, 2))
        stepped = optimizer.param_groups[0]["params"]
        assert all(a is b is c for a, b, c in zip(before, loss.parameters(), stepped, strict=True))

    def test_what_cannot_be_moved_is_refused(self):
        loss, spread = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        with pytest.raises(ConfigError, match=r"Weights are on cpu, but the trainer's rows are on meta.*Accelerator"):
            self.prepare(Elsewhere(cpu=True, device_placement=False), loss, torch.nn.Linear(2, 2))
        spread.hf_device_map = {"weight": 0, "bias": "cpu"}
        with pytest.raises(ConfigError, match=r"Weights are on cpu, .* no device_map"):
            self.prepare(Elsewhere(cpu=True), loss, spread)
        with pytest.raises(ConfigError, match=r"Weights are on meta, but the trainer's rows are on cpu"):
            self.prepare(Accelerator(cpu=True), loss, torch.nn.Linear(2, 2, device="meta"))


class TestOnAMac:
    """Whose GPU has no float64: PyTorch's error about that names no setting."""

    @pytest.mark.parametrize(("given", "chosen"), [(None, "mps"), ("mps", "cpu")])
    def test_a_run_says_that_its_gpu_is_not_supported(self, tmp_path, monkeypatch, given, chosen):
        monkeypatch.setattr(device, "PartialState", lambda cpu: SimpleNamespace(device=torch.device(chosen)))
        with pytest.raises(ConfigError, match=r"'mps', Apple's GPU, which is not supported.*--device cpu"):
            build_run(small_config(tmp_path, device=given))


def test_a_process_has_one_device(tmp_path, monkeypatch):
    """On an H100 a run on the CPU after one on the GPU was told to leave its device out."""
    monkeypatch.setattr(device, "PartialState", lambda cpu: SimpleNamespace(device=torch.device("cuda")))
    with pytest.raises(ConfigError, match=r"device is 'cpu', .*'cuda', now or for an earlier run of this process"):
        build_run(small_config(tmp_path, device="cpu"))


@pytest.mark.host  # which pretends a GPU of its own
class TestOnAGPU:
    """Pretended: an operation that mixes devices raises."""

    def test_a_trainer_made_by_hand_of_models_of_the_host(self):
        class Short(ConstantAnswer):
            iterations = 1

        with pretended_gpu():
            solve(Short, ALGORITHMS["LLMPPO"])

    def test_rows_of_the_host_are_learned_from(self, tmp_path):
        with pretended_gpu():
            run = build_run(small_config(tmp_path, "LLMPPO", device=None))
            rows = one_batch(run).cpu()
            run.trainer.learn(rows)
            assert all(parameter.is_cuda for parameter in run.models.actor_parameters())
            assert "advantage" not in rows
            run.close()

    def test_weights_that_will_be_sharded_are_loaded_on_the_host(self, tmp_path, monkeypatch):
        """Whole float32 models were on every GPU before they were sharded."""
        places = {}

        class Sharding(Distributed):
            """As FSDP2 of one process, but for the sharding."""

            def prepare(self, loss, optimizer, *others):
                modules = (loss, *others)
                places["before"] = {parameter.device.type for each in modules for parameter in each.parameters()}
                return super().prepare(loss, optimizer, *others)

        with pretended_gpu():
            sharded = FSDP2(Accelerator(), FullyShardedDataParallelPlugin(fsdp_version=2))
            assert (sharded.device.type, sharded.load_device.type) == ("cuda", "cpu")
            distributed = Sharding(sharded.accelerator)
            distributed.load_device = sharded.load_device
            monkeypatch.setattr(Distributed, "of", staticmethod(lambda accelerator: distributed))
            build_run(small_config(tmp_path, "LLMPPO", device=None, kl_coeff=0.1)).close()
        assert places["before"] == {"cpu"}
