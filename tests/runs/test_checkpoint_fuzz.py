"""Every file of one checkpoint is deleted, cut, flipped, replaced or joined by others: refused by
name, or without effect."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import tensordict
import torch
from small_runs import contents, small_config
from tensordict import NonTensorData, TensorDict
from test_checkpoint import RUN, digest
from torchrl.checkpoint import CheckpointError

from torchrl_llm.modules import load_actor_critic
from torchrl_llm.modules.weights import WeightsError
from torchrl_llm.runs import ConfigError, build_run, verify
from torchrl_llm.runs.checkpoint_files import write_sums
from torchrl_llm.testing.tiny import tiny_model_path

SETTINGS = RUN | {"max_iterations": 2, "lora_r": 2, "kl_coeff": 0.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two iterations that is over, and its two checkpoints."""
    run = build_run(small_config(tmp_path_factory.mktemp("fuzz"), "LLMPPO", **SETTINGS))
    run.trainer.train()
    return run


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """The last checkpoint, to be damaged."""
    return shutil.copytree(run.checkpoints.latest(), tmp_path / "copy")


def damages(content: bytes, other: bytes | None) -> dict[str, bytes | None]:
    """What may become of a file: its new content; ``None`` deletes it."""
    places = {0, len(content) // 3, len(content) // 2, max(0, len(content) - 1)}
    flips = {f"flip {at}": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in places if content}
    return {"delete": None, "empty": b"", "cut": content[:-1], "longer": content + b"\n", **flips, "replace": other}


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


class TestEveryFile:
    @pytest.mark.extra
    def test_damaged_it_is_refused_by_name(self, run, copy):
        first = run.checkpoints.checkpoints()[0]
        original = contents(copy)
        assert len(original) > 15
        for name, content in original.items():
            file, other = copy / name, first / name
            for damage, new in damages(content, other.read_bytes() if other.is_file() else None).items():
                file.unlink() if new is None else file.write_bytes(new)
                if new == content or (name == "sums.json" and damage == "longer"):
                    verify(copy)  # nothing is different
                else:
                    with pytest.raises(CheckpointError) as error:
                        verify(copy)
                    # A changed sum is found at the file that it is of, or as one that is missing.
                    assert name == "sums.json" or Path(name).name in str(error.value), (name, damage)
                file.write_bytes(content)
        verify(copy)

    @pytest.mark.parametrize(
        "name", ["other.pickle", "state.pt", "adapter_config.json", "model.safetensors", ".hidden"]
    )
    def test_another_file_is_refused_by_name(self, copy, name):
        folders = [copy, *(path for path in copy.rglob("*") if path.is_dir())]
        for folder in folders:
            if (folder / name).exists():
                continue
            (folder / name).write_bytes(b"1")
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                verify(copy)
            (folder / name).unlink()
        verify(copy)

    @pytest.mark.parametrize("name", ["manifest.json", "sums.json", "actor", "components"])
    def test_a_link_is_refused_by_name(self, copy, tmp_path, name):
        (copy / name).rename(tmp_path / name)
        (copy / name).symlink_to(tmp_path / name)
        with pytest.raises(CheckpointError, match=rf"{name} is a link"):
            verify(copy)

    def test_a_checkpoint_under_the_name_of_another_iteration(self, copy):
        renamed = copy.rename(copy.with_name("checkpoint-000000000009"))
        with pytest.raises(CheckpointError, match="saved at iteration 2"):
            verify(renamed)


class TestPickles:
    """Planted by one who can make sums: none is read, wherever it is."""

    def load(self, run, path: Path, mark: Path) -> None:
        write_sums(path)
        before = digest(run)
        with pytest.raises((CheckpointError, WeightsError)):
            run.checkpoints.resume(run.trainer, path)
        assert not mark.exists()
        assert digest(run) == before or run.checkpoints.resume(run.trainer, run.checkpoints.latest())

    @pytest.fixture
    def mark(self, tmp_path) -> Path:
        return tmp_path / "mark"

    @pytest.mark.parametrize("name", ["optimizer", "rng", "trainer", "collector"])
    def test_in_the_archive_of_a_component(self, run, copy, mark, name):
        (folder,) = (copy / "components").glob(f"*-{name}")
        state = tensordict.load(folder / "state.tdz", allow_pickle=False).to_dict()
        planted = TensorDict(state | {"more": NonTensorData(Payload(mark))})
        planted.save(folder / "new.tdz", archive=True)
        mark.rmdir()  # tensordict reads what it has written
        (folder / "new.tdz").replace(folder / "state.tdz")
        self.load(run, copy, mark)

    @pytest.mark.parametrize("renamed", ["other.pickle", "state.pt", "state.txt"])
    def test_beside_it(self, run, copy, mark, renamed):
        (folder,) = (copy / "components").glob("*-optimizer")
        if renamed == "state.pt":
            torch.save(Payload(mark), folder / renamed)
        else:
            (folder / renamed).write_bytes(pickle.dumps(Payload(mark)))
        self.load(run, copy, mark)

    def test_a_folder_of_tensors_instead_of_the_archive(self, run, copy, mark):
        (folder,) = (copy / "components").glob("*-optimizer")
        TensorDict({"more": NonTensorData(Payload(mark))}).save(folder / "state")
        assert list((folder / "state").rglob("*.pickle"))
        self.load(run, copy, mark)

    @pytest.mark.parametrize("kept", [False, True])
    def test_weights(self, run, copy, mark, kept):
        """Also where no sum is looked at: ``init_from`` takes any folder of weights."""
        for role in ("actor", "critic"):
            torch.save(Payload(mark), copy / role / "adapter_model.bin")
            if not kept:
                (copy / role / "adapter_model.safetensors").unlink()
        if kept:
            run.models.load_pretrained(copy)
        else:
            with pytest.raises(WeightsError, match="Pickles"):
                run.models.load_pretrained(copy)
        assert not mark.exists()
        with pytest.raises(CheckpointError, match=r"adapter_model\.bin is a pickle"):
            run.load_checkpoint(copy)
        self.load(run, copy, mark)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "shard.bin"])
    def test_weights_of_a_whole_model(self, tmp_path, mark, name):
        models = load_actor_critic(tiny_model_path())
        models.save_pretrained(tmp_path)
        (tmp_path / "actor" / "model.safetensors").unlink()
        torch.save(Payload(mark), tmp_path / "actor" / name)
        if name == "shard.bin":
            index = {"metadata": {}, "weight_map": dict.fromkeys(models.model.state_dict(), name)}
            (tmp_path / "actor" / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(WeightsError):
            models.load_pretrained(tmp_path)
        assert not mark.exists()

    def test_the_pickle_does_leave_a_mark(self, mark):
        pickle.loads(pickle.dumps(Payload(mark)))
        assert mark.exists()


class TestResumed:
    """A sample of them through ``build_run``: nothing of the run has changed by then."""

    @pytest.mark.parametrize("damage", ["steps", "iteration", "config", "planted", "manifest"])
    def test_refused_before_anything_is_changed(self, run, tmp_path, damage):
        folder = shutil.copytree(run.config.output.output_dir, tmp_path / "run", symlinks=True)
        last = folder / "checkpoints" / "checkpoint-000000000002"
        manifest = json.loads((last / "manifest.json").read_text())
        if damage in ("steps", "iteration"):
            manifest["metadata"][damage] = 0
        elif damage == "config":
            del manifest["metadata"]["config"]
        (last / "manifest.json").write_text(json.dumps(manifest) if damage != "manifest" else "{}")
        if damage == "planted":
            (next((last / "components").glob("*-optimizer")) / "more.pickle").write_bytes(b"")
        write_sums(last)
        before = contents(folder)
        with pytest.raises(CheckpointError, match="pickle" if damage == "planted" else "manifest|iteration 0"):
            build_run(small_config(tmp_path, "LLMPPO", **SETTINGS, resume=True))
        assert contents(folder) == before

    def test_a_run_of_0_1_0_is_refused(self, run, tmp_path):
        """Its settings had other names, and ``accept_changes`` of these would lead to a state that
        nothing reads."""
        folder = shutil.copytree(run.config.output.output_dir, tmp_path / "run", symlinks=True)
        last = folder / "checkpoints" / "checkpoint-000000000002"
        manifest = json.loads((last / "manifest.json").read_text())
        for name in ("env_from_python", "python_parts"):
            del manifest["metadata"][name]
        (last / "manifest.json").write_text(json.dumps(manifest))
        write_sums(last)
        with pytest.raises(
            ConfigError, match=r"saved by version 0\.1\.0 .* start a run from its weights, with init_from: .*02 "
        ):
            build_run(small_config(tmp_path, "LLMPPO", **SETTINGS, resume=True))
