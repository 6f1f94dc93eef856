"""``output_dir`` belongs to one process at a time, for as long as its run is open."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_folders import config, forked, names, no_loggers
from small_runs import contents
from waiting import LIMIT

from torchrl_llm.runs import ConfigError, build_run, folder_lock
from torchrl_llm.runs.folder_lock import LOCK, FolderLock
from torchrl_llm.runs.run_folder import RunFolder


@contextmanager
def running(settings, then: Callable[[], object] = lambda: None) -> Iterator[int]:
    """Another process whose run has begun and continues; it is killed at the end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            folder = RunFolder(settings)
            folder.open(None, no_loggers)
            then()
            os.write(writer, b"1")
            time.sleep(LIMIT)
        finally:
            os._exit(1)
    try:
        os.close(writer)
        assert os.read(reader, 1) == b"1"
        yield child
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class TestTwoProcesses:
    def test_the_second_is_refused_and_a_kill_leaves_no_lock(self, folder):
        waiting = build_run(config(folder, resume=True))
        with running(config(folder, resume=True)) as pid:
            before = contents(folder)
            said = rf"{folder} is in use by another run \(process {pid} on {socket.gethostname()}\): wait .* end it, or choose"
            for settings in ({}, {"resume": True}, {"overwrite": True}):
                with pytest.raises(ConfigError, match=said):
                    build_run(config(folder, **settings, model_path="none"))
            with pytest.raises(ConfigError, match=said):
                waiting.begin()
            assert contents(folder) == before
        build_run(config(folder, resume=True)).begin()

    def test_two_folders_whose_checkpoints_are_one(self, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        first, second = (tmp_path / name / "run" for name in ("first", "second"))
        for path in (first, second):
            path.mkdir(parents=True)
            (path / "checkpoints").symlink_to("../../elsewhere")
        settings, other, known = config(first), RunFolder(config(second)), RunFolder(config(second))
        with running(settings) as pid:
            for take in (other.check, lambda: known.open(None, no_loggers)):
                with pytest.raises(ConfigError, match=rf"elsewhere is in use by another run \(process {pid}"):
                    take()
            # Nothing of its own is left locked.
            assert forked(lambda: FolderLock(second).release()) == 0
        other.open(None, no_loggers)
        assert forked(RunFolder(settings).check) == 3
        other.close()
        assert forked(RunFolder(settings).check) == 0

    @pytest.mark.extra
    def test_checkpoints_in_the_folder_of_another_run(self, tmp_path):
        first, second = config(tmp_path / "first" / "run"), config(tmp_path / "second" / "run")
        RunFolder(first).open(None, no_loggers)
        for path in (first.output.output_dir / "checkpoints", second.output.output_dir):
            path.mkdir(parents=True)
        # an empty folder would be removed
        (first.output.output_dir / "checkpoints" / "notes.txt").write_text("mine")
        (second.output.output_dir / "checkpoints").symlink_to(first.output.output_dir / "checkpoints")
        for one, other in ((first, second), (second, first)):
            known = RunFolder(other)
            with running(one):
                assert forked(known.check) == 3
                assert forked(lambda known=known: known.open(None, no_loggers)) == 3
            assert forked(known.check) == 0

    def test_a_process_that_the_first_forked_does_not_keep_the_lock(self, tmp_path):
        settings, reader_writer = config(tmp_path / "run"), os.pipe()

        def fork() -> None:
            if os.fork() == 0:
                os.close(reader_writer[1])
                os.read(reader_writer[0], 1)  # until the test is over
                os._exit(0)

        with running(settings, fork):
            assert forked(RunFolder(settings).check) == 3
        assert forked(RunFolder(settings).check) == 0
        for end in reader_writer:
            os.close(end)

    @pytest.mark.extra
    def test_a_forked_process_ends_and_the_lock_stays(self, tmp_path):
        settings = config(tmp_path / "run")
        folder = RunFolder(settings)
        folder.open(None, no_loggers)
        assert forked(gc.collect) == 0
        assert forked(folder.close) == 0
        assert forked(RunFolder(settings).check) == 3

    @pytest.mark.parametrize("end", ["close", "delete", "fail"])
    def test_the_lock_ends_with_the_run(self, tmp_path, end):
        settings = config(tmp_path / "run")
        folder = RunFolder(settings)
        if end == "fail":
            with pytest.raises(ZeroDivisionError):
                folder.open(None, lambda: [1 // 0])
        else:
            folder.open(None, no_loggers)
            assert forked(RunFolder(settings).check) == 3
        if end == "close":
            folder.close()
            folder.close()
        elif end == "delete":
            del folder
            gc.collect()
        assert forked(RunFolder(settings).check) == 0
        assert forked(lambda: RunFolder(settings).open(None, no_loggers)) == 0

    def test_it_ends_with_training_or_with_a_run_that_began_before(self, folder):
        settings = config(folder, resume=True)
        run = build_run(settings)
        check = RunFolder(settings).check
        run.open_folder.on_start(run.trainer)
        assert forked(check) == 3
        run.trainer.train()
        assert forked(check) == 0
        with running(settings), pytest.raises(ConfigError, match="in use by another run"):
            run.trainer.train()  # again
        run.begin()
        run.trainer.train()
        assert forked(check) == 3
        run.close()
        assert forked(check) == 0

    def test_a_later_run_of_the_process_takes_it_over(self, folder):
        first, second = RunFolder(config(folder, resume=True)), RunFolder(config(folder, overwrite=True))
        first.open(None, no_loggers)
        second.check()
        second.open(None, no_loggers)
        with pytest.raises(ConfigError, match=r"in use by a later run of this process.*output_dir of its own"):
            first.settle()
        assert names(folder / "previous-1") == [1, 2, 3]
        first.close()
        del first
        gc.collect()
        assert forked(RunFolder(config(folder, resume=True)).check) == 3
        second.close()
        assert forked(RunFolder(config(folder, resume=True)).check) == 0

    def test_a_folder_that_was_deleted_and_made_again(self, tmp_path):
        settings = config(tmp_path / "run")
        first, second = RunFolder(settings), RunFolder(settings)
        first.open(None, no_loggers)
        shutil.rmtree(tmp_path / "run")
        second.open(None, no_loggers)
        assert forked(RunFolder(settings).check) == 3

    def test_a_short_look_of_another_process_is_waited_for(self, tmp_path, monkeypatch):
        # the other process may get no core for long
        monkeypatch.setattr(folder_lock, "_WAIT", 1_000.0)
        settings = config(tmp_path / "run")
        RunFolder(settings).open(None, no_loggers)
        code = f"import fcntl, time; fcntl.flock(f := open({str(tmp_path / 'run' / LOCK)!r}), fcntl.LOCK_EX)\n"
        code += "print(flush=True); time.sleep(0.2)"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            process.stdout.read(1)
            RunFolder(settings).open(None, no_loggers)

    def test_where_there_are_no_locks(self, folder, monkeypatch, caplog):
        """As on some network file systems."""

        def refuse(*_) -> None:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

        monkeypatch.setattr(fcntl, "flock", refuse)
        changed = {"max_iterations": 4, "accept_changes": ["max_iterations"]}
        build_run(config(folder, resume=True, **changed)).trainer.train()
        assert names(folder) == [2, 3, 4]
        (line,) = [record.message for record in caplog.records if "cannot be locked" in record.message]
        assert "Operation not supported" in line

    def test_a_lock_that_cannot_be_signed_is_a_lock(self, tmp_path, monkeypatch):
        """As where locks are mandatory, and a second handle may not write."""

        def refuse(*_, **__) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        lock = FolderLock(tmp_path)
        monkeypatch.setattr(Path, "write_text", refuse)
        lock.sign()
        assert forked(lambda: FolderLock(tmp_path)) == 3

    def test_the_lock_of_another_user_who_could_replace_it(self, folder, monkeypatch):
        """filelock refuses it in a folder like /tmp."""

        def refuse(*_, **__) -> None:
            raise PermissionError(errno.EACCES, "lock file owner is not trusted")

        monkeypatch.setattr(folder_lock.FileLock, "acquire", refuse)
        said = rf"{LOCK} belongs to user {os.getuid()}, .*not trusted.*: remove it if no run uses the folder"
        with pytest.raises(ConfigError, match=said):
            build_run(config(folder, resume=True, model_path="none"))

    def test_a_link_in_place_of_the_lock_is_not_followed(self, folder, tmp_path):
        mine = tmp_path / "mine"
        mine.write_text("mine")
        (folder / LOCK).unlink()
        (folder / LOCK).symlink_to(mine)
        with pytest.raises(ConfigError, match=rf"{LOCK} cannot be opened .*: remove it"):
            build_run(config(folder, resume=True, model_path="none"))
        assert mine.read_text() == "mine"

    def test_a_lock_is_nothing_to_keep_a_folder_for(self, folder):
        run = RunFolder(config(folder, overwrite=True))
        run.open(None, no_loggers)
        # of a run that was looked at there
        shutil.copy(folder / LOCK, folder / "previous-1" / LOCK)
        run.settle()
        assert not (folder / "previous-1").exists()

    def test_a_lock_alone_makes_no_run(self, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / LOCK).touch()
        RunFolder(config(tmp_path / "run")).check()
