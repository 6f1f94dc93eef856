"""``output_dir``: nothing is lost that was not replaced by something whole, and nothing foreign is ever touched."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from small_runs import small_config
from test_checkpoint import RUN
from test_checkpoint_fuzz import contents
from torchrl.checkpoint import CheckpointError

from torchrl_llm.trainers import ConfigError, Interrupted, build_run, verify
from torchrl_llm.trainers.run_folder import LOCK, MARK, RunFolder

SETTINGS = RUN | {"max_iterations": 3, "keep_checkpoints": 3, "evaluation_interval": 0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run of three iterations that is over, with a report."""
    run = build_run(small_config(tmp_path_factory.mktemp("finished"), **SETTINGS))
    run.begin()
    for name in ("evaluation_before.json", "conversations_before.md", "result.json", "wandb_id"):
        (run.config.output_dir / name).write_text("{}")
    run.trainer.train()
    return run.config.output_dir


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


@pytest.fixture
def without_checkpoints(folder) -> Path:
    shutil.rmtree(folder / "checkpoints")
    return folder


def config(folder: Path, **settings):
    return small_config(folder.parent, **SETTINGS | settings)


def checkpoint(folder: Path, iteration: int) -> Path:
    return folder / "checkpoints" / f"checkpoint-{iteration:012d}"


def names(folder: Path) -> list[int]:
    return sorted(int(path.name[-3:]) for path in (folder / "checkpoints").glob("checkpoint-*"))


def no_loggers() -> list:
    return []


def forked(do: Callable[[], object]) -> int:
    """The exit code of another process that does ``do``: 3 if it is refused because the folder is in use."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            do()
            code = 0
        except ConfigError as error:
            code = 3 if "in use by another run" in str(error) else 4
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def running(settings, then: Callable[[], object] = lambda: None) -> Iterator[int]:
    """Another process whose run has begun and goes on; it is killed at the end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            folder = RunFolder(settings)
            folder.open(None, 0, no_loggers)
            then()
            os.write(writer, b"1")
            time.sleep(600)
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


def rewards(folder: Path) -> list[str]:
    return (folder / "csv" / "scalars" / "rollout" / "reward.csv").read_text().splitlines()


class TestBranch:
    def test_what_is_newer_is_moved_aside_and_a_resume_continues_the_branch(self, folder, caplog):
        before = contents(folder)
        branch = {"lr_actor": 2e-3, "max_iterations": 4, "checkpoint_interval": 1}
        changes = {"accept_changes": ["lr_actor", "max_iterations"]}
        run = build_run(
            config(
                folder,
                resume_from=folder / "checkpoints" / "last" / ".." / checkpoint(folder, 1).name,
                **branch | changes,
            )
        )
        assert contents(folder) == before  # until it trains
        run.begin()
        assert (names(folder), names(folder / "previous-1")) == ([1], [2, 3])
        assert (folder / "checkpoints" / "last").resolve() == checkpoint(folder, 1)
        assert rewards(folder) == rewards(folder / "previous-1")[:1]
        assert len(rewards(folder / "previous-1")) == 3
        (line,) = [record.message for record in caplog.records if "previous-1" in record.message]
        assert "checkpoint-000000000003" in line
        for path in (folder / "previous-1" / "checkpoints").iterdir():
            verify(path)
        # Killed before it saves, or after: the branch goes on, under its own settings.
        again = build_run(config(folder, resume=True, **branch | changes))
        assert again.trainer.iteration == 1
        again.trainer.config.max_iterations = 2
        again.trainer.train()
        assert (folder / "checkpoints" / "last").resolve() == checkpoint(folder, 2)
        assert build_run(config(folder, resume=True, **branch)).trainer.iteration == 2

    def test_no_link_dangles(self, folder):
        best = folder / "checkpoints" / "best"
        best.symlink_to(checkpoint(folder, 3).name)
        RunFolder(config(folder, resume=True)).open(checkpoint(folder, 1), 0, no_loggers)
        links = [path for path in (folder / "checkpoints").iterdir() if path.is_symlink()]
        assert [link.name for link in links] == ["last"]
        assert links[0].exists()

    def test_the_newest_is_no_branch(self, folder):
        before = contents(folder)
        run = build_run(config(folder, resume_from=folder / "checkpoints" / "last"))
        run.begin()
        assert contents(folder / "checkpoints") == {
            k[12:]: v for k, v in before.items() if k.startswith("checkpoints/")
        }
        assert not list(folder.glob("previous-*"))

    def test_of_another_run(self, folder, tmp_path):
        elsewhere = checkpoint(folder, 2).rename(tmp_path / "mine")
        with pytest.raises(ConfigError, match="holds another run"):
            build_run(config(folder, resume_from=elsewhere))
        other = tmp_path / "other" / "run"
        run = build_run(config(other, resume_from=elsewhere))
        run.begin()
        assert run.trainer.iteration == 2
        assert build_run(config(other, resume=True)).trainer.iteration == 2  # its own by now


class TestNothingIsLost:
    @pytest.mark.parametrize(
        "settings",
        [
            {"overwrite": True},
            {"resume": True},
            {"save_checkpoints": False, "checkpoint_interval": 10, "keep_checkpoints": 2},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("checkpoints", [True, False])
    def test_to_build_a_run_changes_nothing(self, folder, settings, checkpoints):
        if not checkpoints:
            shutil.rmtree(folder / "checkpoints")
        before = contents(folder)
        for _ in range(2):
            if checkpoints and "save_checkpoints" in settings:
                with pytest.raises(ConfigError, match=r"holds a run already.*overwrite=true"):
                    build_run(config(folder, **settings))
            else:
                build_run(config(folder, **settings))
        assert contents(folder) == before

    def test_the_old_run_is_whole_until_the_new_one_is(self, folder):
        before = contents(folder)
        (folder / "csv" / "notes.txt").write_text("mine")
        (folder / "thesis.tex").write_text("mine")
        run = build_run(config(folder, overwrite=True, max_iterations=1))
        run.begin()
        old = folder / "previous-1"
        assert before.items() - contents(old).items() == {(name, before[name]) for name in (MARK, LOCK)}
        assert not any((folder / name).exists() for name in ("wandb_id", "evaluation_before.json", "checkpoints"))
        run.trainer.train()
        assert names(folder) == [1]
        assert contents(old) == {"csv/notes.txt": b"mine", MARK: (old / MARK).read_bytes()}
        assert (folder / "thesis.tex").read_text() == "mine"

    def test_a_run_that_is_stopped_early_deletes_nothing(self, folder):
        """A signal after a mistaken overwrite, say."""
        before = contents(folder / "checkpoints")
        run = build_run(config(folder, overwrite=True))
        generate = run.policy.generate

        def stopped(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGTERM)
            return generate(*args, **kwargs)

        run.policy.generate = stopped
        with pytest.raises(Interrupted):
            run.trainer.train()
        assert names(folder) == [0]
        assert contents(folder / "previous-1" / "checkpoints") == before

    def test_files_of_others_in_its_folders_stay(self, folder):
        others = ("merged/my_notes.txt", "conversations_by_hand.md", "csv/scalars/mine.csv", "csv/texts/diary.txt")
        for name in others:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("mine")
        run = build_run(config(folder, overwrite=True, max_iterations=1))
        run.trainer.train()
        for name in others:
            assert "mine" in [
                (place / name).read_text() for place in (folder, folder / "previous-1") if (place / name).exists()
            ]

    def test_metrics_of_a_run_without_checkpoints_are_kept(self, without_checkpoints):
        folder = without_checkpoints
        rows = rewards(folder)
        build_run(config(folder, max_iterations=1)).trainer.train()
        assert rewards(folder / "previous-1") == rows
        assert (len(rewards(folder)), names(folder)) == (1, [1])

    def test_a_run_that_failed_at_once_leaves_nothing_to_move(self, tmp_path):
        settings = config(tmp_path / "run")
        for _ in range(2):
            RunFolder(settings).open(None, 0, lambda: [(tmp_path / "run" / "csv" / "texts").mkdir(parents=True)])
        assert not list(settings.output_dir.glob("previous-*"))

    def test_what_overwrite_left_is_not_deleted_by_a_run_without(self, folder):
        RunFolder(config(folder, overwrite=True)).open(None, 0, no_loggers)
        later = RunFolder(config(folder, resume=True))
        later.check()
        later.open(None, 0, no_loggers)
        later.settle()
        assert names(folder / "previous-1") == [1, 2, 3]

    @pytest.mark.parametrize("start", [None, 1])
    def test_put_back_when_the_loggers_fail(self, folder, start):
        """Such as Weights & Biases without a key."""

        def fail() -> list:
            (folder / "csv" / "texts").mkdir(parents=True, exist_ok=True)
            raise RuntimeError("no key")

        before = contents(folder)
        with pytest.raises(RuntimeError, match="no key"):
            RunFolder(config(folder, overwrite=start is None)).open(start and checkpoint(folder, start), 0, fail)
        assert contents(folder) == before
        assert (folder / "checkpoints" / "last").resolve() == checkpoint(folder, 3)

    @pytest.mark.parametrize("start", [None, 1])
    @pytest.mark.parametrize("moves", range(4))
    def test_put_back_after_a_crash_between_two_moves(self, folder, start, moves, monkeypatch):
        before = contents(folder)
        left, rename = [moves], Path.rename

        def killed(self, target):
            left[0] -= 1
            return os._exit(9) if left[0] < 0 else rename(self, target)

        child = os.fork()
        if child == 0:
            monkeypatch.setattr(Path, "rename", killed)
            RunFolder(config(folder, overwrite=start is None)).open(start and checkpoint(folder, start), 0, no_loggers)
            os._exit(0)
        killed_by = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if killed_by:
            RunFolder(config(folder, resume=True)).check()
            assert contents(folder) == before | {LOCK: (folder / LOCK).read_bytes()}
            assert (folder / "checkpoints" / "last").resolve() == checkpoint(folder, 3)
        else:
            assert (start, moves) in ((1, 2), (1, 3))
        assert killed_by or names(folder / "previous-1") == [2, 3]

    @pytest.mark.parametrize("settings", [{}, {"overwrite": True}, {"resume": True}], ids=str)
    @pytest.mark.parametrize("name", ["checkpoints/mine.txt", "csv/mine.txt", "result.json", "tensorboard/events"])
    def test_a_folder_that_is_not_marked_is_refused(self, tmp_path, name, settings):
        file = tmp_path / "run" / name
        file.parent.mkdir(parents=True)
        file.write_text("mine")
        with pytest.raises(ConfigError, match=rf"holds {name.partition('/')[0]}, which this library did not write"):
            build_run(config(tmp_path / "run", **settings))
        assert contents(tmp_path) == {f"run/{name}": b"mine"}

    def test_a_rotated_checkpoint_with_a_foreign_file_is_kept(self, folder, caplog):
        (checkpoint(folder, 1) / "notes.txt").write_text("mine")
        changed = {"max_iterations": 4, "accept_changes": ["max_iterations"], "keep_checkpoints": 1}
        build_run(config(folder, resume=True, **changed)).trainer.train()
        assert names(folder) == [1, 4]
        assert "notes.txt" in caplog.text


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

    def test_a_forked_process_ends_and_the_lock_stays(self, tmp_path):
        settings = config(tmp_path / "run")
        folder = RunFolder(settings)
        folder.open(None, 0, no_loggers)
        assert forked(gc.collect) == 0
        assert forked(folder.close) == 0
        assert forked(RunFolder(settings).check) == 3

    @pytest.mark.parametrize("end", ["close", "delete", "fail"])
    def test_the_lock_ends_with_the_run(self, tmp_path, end):
        settings = config(tmp_path / "run")
        folder = RunFolder(settings)
        if end == "fail":
            with pytest.raises(ZeroDivisionError):
                folder.open(None, 0, lambda: [1 // 0])
        else:
            folder.open(None, 0, no_loggers)
            assert forked(RunFolder(settings).check) == 3
        if end == "close":
            folder.close()
            folder.close()
        elif end == "delete":
            del folder
            gc.collect()
        assert forked(RunFolder(settings).check) == 0
        assert forked(lambda: RunFolder(settings).open(None, 0, no_loggers)) == 0

    def test_it_ends_with_training_or_with_a_run_that_began_before(self, folder):
        settings = config(folder, resume=True)
        run = build_run(settings)
        check = RunFolder(settings).check
        run.trainer.callbacks[0].on_start(run.trainer)
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
        first.open(None, 0, no_loggers)
        second.check()
        second.open(None, 0, no_loggers)
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
        first.open(None, 0, no_loggers)
        shutil.rmtree(tmp_path / "run")
        second.open(None, 0, no_loggers)
        assert forked(RunFolder(settings).check) == 3

    def test_a_short_look_of_another_process_is_waited_for(self, tmp_path):
        settings = config(tmp_path / "run")
        RunFolder(settings).open(None, 0, no_loggers)
        code = f"import fcntl, time; fcntl.flock(f := open({str(tmp_path / 'run' / LOCK)!r}), fcntl.LOCK_EX)\n"
        code += "print(flush=True); time.sleep(0.2)"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            process.stdout.read(1)
            RunFolder(settings).open(None, 0, no_loggers)

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
        run.open(None, 0, no_loggers)
        shutil.copy(folder / LOCK, folder / "previous-1" / LOCK)  # of a run that was looked at there
        run.settle()
        assert not (folder / "previous-1").exists()

    def test_a_lock_alone_makes_no_run(self, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / LOCK).touch()
        RunFolder(config(tmp_path / "run")).check()


class TestCopyWithoutLinks:
    """By ``cp -rL``, ``shutil.copytree`` or an object store: ``last`` and ``best`` are folders."""

    @pytest.fixture
    def copy(self, finished, tmp_path) -> Path:
        shutil.copytree(finished, tmp_path / "run", symlinks=False)
        shutil.copytree(checkpoint(tmp_path / "run", 1), tmp_path / "run" / "checkpoints" / "best")
        return tmp_path / "run"

    def longer(self, folder: Path, **settings):
        return config(folder, max_iterations=4, accept_changes=["max_iterations"], keep_checkpoints=2, **settings)

    @pytest.mark.parametrize("only", ["checkpoint-* last best", "last best", "last"])
    def test_it_is_resumed(self, copy, only):
        for path in (copy / "checkpoints").iterdir():
            if not any(path.match(pattern) for pattern in only.split()):
                shutil.rmtree(path)
        before = contents(copy)
        run = build_run(self.longer(copy, resume=True))
        assert run.trainer.iteration == 3
        assert contents(copy) == before
        run.begin()
        assert names(copy)[-1] == 3
        assert (copy / "checkpoints" / "last").is_symlink()
        run.trainer.train()
        assert names(copy) == [3, 4]
        (link,) = [
            path
            for path in (copy / "checkpoints").iterdir()
            if path.name not in ("checkpoint-000000000003", "checkpoint-000000000004")
        ]
        assert link.is_symlink()
        assert link.resolve() == checkpoint(copy, 4)
        verify(link)

    @pytest.mark.parametrize(("name", "iteration"), [("last", 3), ("best", 1)])
    @pytest.mark.parametrize("twin", [True, False])
    def test_it_is_resumed_from_the_copy(self, copy, name, iteration, twin):
        if not twin:
            shutil.rmtree(checkpoint(copy, iteration))
        run = build_run(self.longer(copy, resume=True, resume_from=copy / "checkpoints" / name))
        run.begin()
        assert run.trainer.iteration == iteration
        assert names(copy)[-1] == iteration
        assert (copy / "checkpoints" / "last").resolve() == checkpoint(copy, iteration)
        assert (copy / "previous-1").exists() == (name == "best")
        verify(checkpoint(copy, iteration))

    def test_it_is_replaced(self, copy):
        build_run(config(copy, overwrite=True, max_iterations=1)).trainer.train()
        assert names(copy) == [1]
        assert not (copy / "previous-1").exists()

    def test_what_was_replaced_is_deleted_in_a_copy_too(self, folder, tmp_path):
        (folder / "checkpoints" / "best").symlink_to(checkpoint(folder, 1).name)
        RunFolder(config(folder, overwrite=True)).open(None, 0, no_loggers)
        copy = shutil.copytree(folder, tmp_path / "copy" / "run", symlinks=False)
        RunFolder(config(copy, overwrite=True)).settle()
        assert not (copy / "previous-1").exists()

    @pytest.mark.parametrize("damage", ["foreign", "manifest", "another", "not one"])
    def test_what_is_no_copy_is_refused_by_name(self, copy, damage):
        last = copy / "checkpoints" / "last"
        if damage == "foreign":
            (last / "notes.txt").write_text("mine")
        elif damage == "manifest":
            (last / "manifest.json").write_text("{}")
        elif damage == "another":
            (checkpoint(copy, 3) / "sums.json").write_text("{}")
        else:
            shutil.rmtree(last)
            last.mkdir()
            (last / "notes.txt").write_text("mine")
        before = contents(copy)
        with pytest.raises(CheckpointError, match=rf"{last} is a folder in place of a link.*: move it elsewhere"):
            build_run(self.longer(copy, resume=True, model_path="none"))
        assert contents(copy) == before

    def test_the_whole_one_of_two_is_kept(self, copy):
        damaged = checkpoint(copy, 1) / "manifest.json"
        damaged.write_text("{")
        before = contents(copy)
        run = RunFolder(config(copy, resume=True))
        run.check()
        with pytest.raises(
            CheckpointError, match=rf"{damaged} is not what was saved.*best is a copy of it.*move .* elsewhere"
        ):
            run.open(checkpoint(copy, 3), 0, no_loggers)
        assert contents(copy / "checkpoints" / "best") == {
            name.removeprefix("checkpoints/best/"): content for name, content in before.items() if "/best/" in name
        }
        shutil.rmtree(checkpoint(copy, 1))
        run.open(checkpoint(copy, 3), 0, no_loggers)
        verify(checkpoint(copy, 1))


class TestCheckpointsElsewhere:
    """``checkpoints`` is a relative link, to another file system where there is one."""

    @pytest.fixture
    def elsewhere(self, tmp_path) -> Iterator[Path]:
        shared = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as place:
            (Path(place) / "ckpt" / "empty").mkdir(parents=True)
            (Path(place) / "ckpt" / "checkpoint-notes.txt").write_text("mine")
            (Path(place) / "ckpt" / "checkpoint-000000000001.txt").write_text("mine")
            (Path(place) / "ckpt" / "thesis").mkdir()
            (Path(place) / "ckpt" / "thesis" / "a.tex").write_text("mine")
            yield Path(place) / "ckpt"

    def link(self, folder: Path, elsewhere: Path) -> None:
        target = Path(os.path.relpath(elsewhere, folder.resolve()))
        assert not target.is_absolute()
        (folder / "checkpoints").symlink_to(target)

    @pytest.fixture
    def linked(self, folder, elsewhere) -> Path:
        for path in (folder / "checkpoints").iterdir():
            shutil.move(path, elsewhere / path.name)
        (folder / "checkpoints").rmdir()
        self.link(folder, elsewhere)
        return folder

    def others(self, elsewhere: Path) -> bool:
        mine = ("checkpoint-notes.txt", "checkpoint-000000000001.txt", "thesis/a.tex")
        return (elsewhere / "empty").is_dir() and all((elsewhere / name).read_text() == "mine" for name in mine)

    def saved(self, elsewhere: Path) -> list[int]:
        return sorted(int(path.name[-3:]) for path in elsewhere.glob("checkpoint-*") if path.is_dir())

    def test_a_run_begins_and_is_resumed(self, tmp_path, elsewhere):
        folder = tmp_path / "run"
        folder.mkdir()
        shutil.rmtree(elsewhere)
        self.link(folder, elsewhere)
        with pytest.raises(
            ConfigError, match=r"checkpoints links to .*, which is no folder: make it, or remove the link"
        ):
            build_run(config(folder, model_path="none"))
        elsewhere.mkdir()
        build_run(config(folder, max_iterations=1)).trainer.train()
        more = {"resume": True, "accept_changes": ["max_iterations"]}
        run = build_run(config(folder, max_iterations=2, **more))
        assert run.trainer.iteration == 1
        run.trainer.train()
        run = build_run(
            config(
                folder, max_iterations=2, resume=True, resume_from=elsewhere / "last", accept_changes=["max_iterations"]
            )
        )
        assert run.trainer.iteration == 2
        assert self.saved(elsewhere) == [1, 2]
        assert (elsewhere / "last").resolve() == checkpoint(
            elsewhere.parent, 2
        ).parent.parent / "ckpt" / "checkpoint-000000000002"
        assert (folder / "checkpoints").is_symlink()
        assert not list(folder.glob("previous-*"))

    def test_checkpoints_of_an_unmarked_folder_are_refused(self, linked):
        (linked / MARK).unlink()
        with pytest.raises(ConfigError, match=r"holds config\.yaml, checkpoints, csv"):
            build_run(config(linked, overwrite=True, model_path="none"))

    def test_a_run_is_replaced(self, linked, elsewhere):
        target, before = os.readlink(linked / "checkpoints"), contents(linked / "checkpoints")
        run = build_run(config(linked, overwrite=True, max_iterations=1))
        run.begin()
        old = linked / "previous-1"
        assert names(old) == [1, 2, 3]
        assert not Path(os.readlink(old / "checkpoints")).is_absolute()
        assert (old / "checkpoints").resolve() == (elsewhere / "previous-1").resolve()
        assert (old / "checkpoints" / "last").resolve().name == "checkpoint-000000000003"
        for name, content in before.items():
            if name.startswith("checkpoint-0") and "/" in name:
                assert (old / "checkpoints" / name).read_bytes() == content
        assert self.saved(elsewhere) == []
        run.trainer.train()
        assert os.readlink(linked / "checkpoints") == target
        assert self.saved(elsewhere) == [1]
        assert (elsewhere / "last").resolve().name == "checkpoint-000000000001"
        assert not os.path.lexists(old)
        assert not (elsewhere / "previous-1").exists()
        assert self.others(elsewhere)

    def test_of_what_was_replaced_foreign_files_are_kept(self, linked, elsewhere):
        (checkpoint(linked, 2) / "notes.txt").write_text("mine")
        build_run(config(linked, overwrite=True, max_iterations=1)).trainer.train()
        assert names(linked / "previous-1") == [2]
        assert (elsewhere / "previous-1" / "checkpoint-000000000002" / "notes.txt").read_text() == "mine"

    def test_a_branch(self, linked, elsewhere):
        run = RunFolder(config(linked, resume=True))
        run.open(checkpoint(linked, 1), 0, no_loggers)
        assert (self.saved(elsewhere), names(linked / "previous-1")) == ([1], [2, 3])
        assert (elsewhere / "last").resolve().name == "checkpoint-000000000001"
        for path in (linked / "previous-1" / "checkpoints").iterdir():
            verify(path)
        run.open(None, 0, no_loggers)
        assert names(linked / "previous-2") == [1]
        assert self.others(elsewhere)

    @pytest.mark.parametrize("start", [None, 1])
    def test_put_back_when_the_loggers_fail(self, linked, elsewhere, start):
        before = contents(linked) | contents(elsewhere)
        with pytest.raises(ZeroDivisionError):
            RunFolder(config(linked, overwrite=start is None)).open(
                start and checkpoint(linked, start), 0, lambda: [1 // 0]
            )
        assert contents(linked) | contents(elsewhere) == before
        assert not (elsewhere / "previous-1").exists()
        assert (elsewhere / "last").resolve().name == "checkpoint-000000000003"

    @pytest.mark.parametrize("start", [None, 1])
    @pytest.mark.parametrize("moves", range(3))
    def test_put_back_after_a_crash_between_two_moves(self, linked, elsewhere, start, moves, monkeypatch):
        before = contents(linked) | contents(elsewhere)
        left, rename = [moves], Path.rename

        def killed(self, target):
            left[0] -= 1
            return os._exit(9) if left[0] < 0 else rename(self, target)

        def begin() -> None:
            monkeypatch.setattr(Path, "rename", killed)
            RunFolder(config(linked, overwrite=start is None)).open(start and checkpoint(linked, start), 0, no_loggers)

        assert forked(begin) == (0 if start and moves == 2 else 9)
        if not (start and moves == 2):
            RunFolder(config(linked, resume=True)).check()
            assert contents(linked) | contents(elsewhere) == before | {LOCK: (linked / LOCK).read_bytes()}
            assert (elsewhere / "last").resolve().name == "checkpoint-000000000003"

    def test_nothing_is_deleted_through_a_link_that_is_not_the_runs(self, folder, finished, tmp_path):
        """Such as one that an earlier version moved, and that points to another run's checkpoints now."""
        run = RunFolder(config(folder, overwrite=True))
        run.open(None, 0, no_loggers)
        other = shutil.copytree(finished / "checkpoints", tmp_path / "other", symlinks=True)
        before = contents(other)
        shutil.rmtree(folder / "previous-1" / "checkpoints")
        (folder / "previous-1" / "checkpoints").symlink_to(other)
        run.settle()
        assert contents(other) == before
        assert (other / "last").is_symlink()

    def test_nothing_behind_it_is_deleted_when_a_run_comes_to_nothing(self, tmp_path, elsewhere):
        folder = tmp_path / "run"
        folder.mkdir()
        self.link(folder, elsewhere)
        for _ in range(2):
            with suppress(ZeroDivisionError):
                RunFolder(config(folder)).open(None, 0, lambda: [1 // 0])
        assert self.others(elsewhere)
        assert (folder / "checkpoints").is_symlink()
        assert not list(folder.glob("previous-*"))


class TestSaveCheckpoint:
    def test_only_a_checkpoint_is_replaced(self, folder, tmp_path):
        run = build_run(config(folder, resume=True))
        place = tmp_path / "saved"
        for _ in range(2):
            run.save_checkpoint(place, save_optimizer=False)
            verify(place)
        before = contents(place)
        (place / "notes.txt").write_text("mine")
        with pytest.raises(CheckpointError, match=r"notes\.txt.*choose another folder"):
            run.save_checkpoint(place)
        assert contents(place) == before | {"notes.txt": b"mine"}
        for taken in (tmp_path, place / "notes.txt"):
            with pytest.raises(CheckpointError, match="choose another folder"):
                run.save_checkpoint(taken)

    @pytest.mark.parametrize("limit", [100, 3_000, 100_000, 1_000_000])
    def test_where_the_disk_is_full_the_last_one_is_whole(self, folder, limit):
        run = build_run(config(folder, resume=True))
        before = contents(folder)
        run.trainer.iteration = 4
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(
                CheckpointError, match=r"could not be saved.*checkpoint-000000000003 is whole: resume=true"
            ):
                run.checkpoints.save(run.trainer, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert contents(folder) == before


class TestOutputDir:
    @pytest.mark.parametrize("below", ["", "run"])
    def test_a_file(self, tmp_path, below):
        (tmp_path / "taken").write_text("mine")
        with pytest.raises(ConfigError, match="taken is no folder: choose another output_dir"):
            build_run(
                small_config(tmp_path, **SETTINGS | {"output_dir": tmp_path / "taken" / below, "model_path": "none"})
            )

    def test_not_writable(self):
        with pytest.raises(ConfigError, match=r"nothing can be written to /proc .*: choose another output_dir"):
            build_run(small_config(Path("/proc/nowhere"), **SETTINGS, model_path="none"))

    def test_a_full_disk(self, tmp_path):
        """A file system of its own, where the kernel lets one be made."""
        code = (
            "import sys; from pathlib import Path; from torchrl_llm.trainers import RunConfig, build_run\n"
            "where = Path(sys.argv[1]); (where / 'filler').write_bytes(bytes(1 << 15))\n"
            "build_run(RunConfig(model_path='none', output_dir=where / 'run'))"
        )
        mount = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -c "$3" "$1"'
        command = ["unshare", "-rm", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, code]
        if subprocess.run([*command[:4], 'mount -t tmpfs tmpfs "$1"', "sh", str(tmp_path)], check=False).returncode:
            pytest.skip("no file system can be mounted here")
        error = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        assert "nothing can be written to" in error
        assert "No space left on device" in error
