"""The files that weights are handed to an engine in, and what is done before it wakes; no engine is
needed."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from torchrl_llm.modules import WeightSyncError
from torchrl_llm.modules.vllm import weights
from torchrl_llm.testing.pretended_gpu import pretended_gpu

ADAPTER = {"lora_A": torch.arange(6.0).view(2, 3), "lora_B": torch.ones(3, 2)}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Shared memory and the folder for temporary files, both empty."""
    shared, temporary = tmp_path / "shared", tmp_path / "temporary"
    shared.mkdir(), temporary.mkdir()
    monkeypatch.setattr(weights, "_SHARED_MEMORY", shared)
    monkeypatch.setattr(weights.tempfile, "tempdir", str(temporary))
    return shared, temporary


def limit(monkeypatch, free):
    """Folders with so many bytes free; others have what they have."""
    real = shutil.disk_usage
    of = lambda path: SimpleNamespace(free=free[path]) if path in free else real(path)  # noqa: E731
    monkeypatch.setattr(weights.shutil, "disk_usage", of)


def written(tensors=ADAPTER):
    with weights.shared_file(dict(tensors), "model.safetensors") as file:
        assert [each.name for each in file.parent.iterdir()] == ["model.safetensors"]
        found = load_file(file)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    return file.parent.parent


class TestSharedFile:
    def test_it_lies_in_shared_memory_and_is_removed(self, folders):
        assert written() == folders[0]
        assert not any(list(folder.iterdir()) for folder in folders)

    def test_without_room_there_it_lies_with_the_temporary_files(self, folders, monkeypatch):
        limit(monkeypatch, {folders[0]: 47})  # and the tensors have 48 bytes
        assert written() == folders[1]
        assert not any(list(folder.iterdir()) for folder in folders)

    def test_without_shared_memory_too(self, folders):
        folders[0].rmdir()
        assert written() == folders[1]

    def test_room_that_others_take_meanwhile(self, folders, monkeypatch):
        save = weights.save_file

        def taken(tensors, file):
            if file.is_relative_to(folders[0]):
                file.write_bytes(b"half")
                raise OSError(28, "No space left on device")
            save(tensors, file)

        monkeypatch.setattr(weights, "save_file", taken)
        assert written() == folders[1]
        assert not any(list(folder.iterdir()) for folder in folders)

    def test_no_room_anywhere_is_said_with_numbers(self, folders):
        larger = torch.empty(2**50, dtype=torch.uint8, device="meta")
        with pytest.raises(
            WeightSyncError, match=r"1,125,899,907 MB.*shared has [\d,]+ MB free.*temporary has.*--shm-size"
        ):
            written({"embed": larger})
        assert not any(list(folder.iterdir()) for folder in folders)


class Sleeper:
    """Stands for a vLLM engine that sleeps: notes what happens, and how often PyTorch has given
    memory back by then."""

    def __init__(self, gpu):
        self.gpu, self.events = gpu, []
        self.llm_engine = SimpleNamespace(set_weight_version=lambda _: None)

    def note(self, event):
        self.events.append((event, self.gpu.emptied))

    def sleep(self, level, mode):
        self.note("pause")

    def wake_up(self, tags):
        self.note(*tags)

    def reset_prefix_cache(self, **_):
        return True


@pytest.mark.host  # which pretends a GPU of its own
class TestWake:
    @pytest.fixture
    def llm(self):
        with pretended_gpu() as gpu:
            yield Sleeper(gpu)

    def test_pytorch_gives_back_what_it_keeps_before_an_engine_allocates(self, llm):
        with weights.paused(llm, 1, asleep=True):
            llm.note("load")
        assert llm.events == [("weights", 1), ("pause", 1), ("load", 1), ("kv_cache", 2), ("scheduling", 2)]

    def test_an_engine_that_does_not_sleep_costs_no_memory_of_the_trainer(self, llm):
        with weights.paused(llm, 1):
            llm.note("load")
        assert llm.events == [("pause", 0), ("load", 0), ("scheduling", 0)]
