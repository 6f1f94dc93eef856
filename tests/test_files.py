"""Text files have the old text or the new one, wherever a process ends."""

from pathlib import Path

import pytest

from torchrl_llm.files import write_text
from torchrl_llm.trainers.loggers import _drawn_id


@pytest.fixture
def crash(monkeypatch):
    """Writing ends after the file was opened."""

    def write(path, data):
        path.touch()
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write)
        yield patch


def test_a_crash_leaves_the_old_text(tmp_path, crash):
    path = tmp_path / "config.yaml"
    path.write_text("old")
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"


def test_text_is_utf_8(tmp_path):
    write_text(tmp_path / "names", "Émile\n")
    assert (tmp_path / "names").read_bytes() == "Émile\n".encode()


def test_a_run_at_weights_and_biases_has_an_id_after_a_crash_too(tmp_path, crash):
    with pytest.raises(OSError, match="No space"):
        _drawn_id(tmp_path / "wandb_id")
    crash.undo()
    drawn = _drawn_id(tmp_path / "wandb_id")
    assert len(drawn) == 8
    assert _drawn_id(tmp_path / "wandb_id") == drawn
