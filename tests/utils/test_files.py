"""Text files have the old text or the new one, wherever a process ends."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_llm.runs.trackers import _drawn_id
from torchrl_llm.utils.files import write_bytes, write_text


@pytest.fixture
def crash(monkeypatch):
    """Writing ends after the file was opened."""

    def fail(descriptor):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        yield patch


def test_a_crash_leaves_the_old_text(tmp_path, crash):
    path = tmp_path / "config.yaml"
    path.write_text("old")
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.yaml"]


WRITER = """
import sys
from torchrl_llm.utils.files import write_bytes
letter = sys.argv[2].encode()
for _ in range(int(sys.argv[3])):
    write_bytes(sys.argv[1], letter * 300_000)
"""


def test_several_processes_write_the_same_file(tmp_path):
    """With one temporary name for all, one process renamed what another still wrote, and the other
    found its own gone."""
    path = tmp_path / "table"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, letter, "60"], stderr=subprocess.PIPE) for letter in "abc"]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            data = path.read_bytes()
            assert (len(data), len(set(data))) == (300_000, 1)
    assert [writer.communicate()[1] for writer in writers] == [b""] * 3
    assert os.listdir(tmp_path) == ["table"]


def test_what_a_killed_writer_left_is_deleted(tmp_path):
    path = tmp_path / "table"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), "a", "1000000"])
    while not list(tmp_path.glob(".table.*")):
        assert writer.poll() is None
    writer.send_signal(signal.SIGSTOP)  # a living writer keeps its file
    write_bytes(path, b"b")
    kept = list(tmp_path.glob(".table.*"))
    writer.kill()
    writer.wait()
    for left in [*kept, tmp_path / ".table.new"]:  # the last is of an earlier version
        left.touch()
        os.utime(left, (0, 0))
    write_bytes(path, b"c")
    assert [file.name for file in tmp_path.iterdir()] == ["table"]


def test_data_are_on_the_disk_before_their_name(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, Path.replace

    def noted(file):
        done.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "data")
        sync(file)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "replace", lambda path, target: done.append("name") or replace(path, target))
    write_text(tmp_path / "table", "new")
    assert done == ["data", "name", "folder"]


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
