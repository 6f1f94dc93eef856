"""``output_dir`` where links became folders, and where ``checkpoints`` is a link to another
place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from run_folders import checkpoint, config, forked, names, no_loggers
from small_runs import contents
from torchrl.checkpoint import CheckpointError

from torchrl_llm.runs import ConfigError, build_run, verify
from torchrl_llm.runs.run_folder import LOCK, MARK, RunFolder


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
        RunFolder(config(folder, overwrite=True)).open(None, no_loggers)
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
            run.open(checkpoint(copy, 3), no_loggers)
        assert contents(copy / "checkpoints" / "best") == {
            name.removeprefix("checkpoints/best/"): content for name, content in before.items() if "/best/" in name
        }
        shutil.rmtree(checkpoint(copy, 1))
        run.open(checkpoint(copy, 3), no_loggers)
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
            ConfigError, match=r"checkpoints links to .*, which is not a folder: make it, or remove the link"
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
        with pytest.raises(ConfigError, match=r"holds config\.yaml, checkpoints, metrics\.csv"):
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
        run.open(checkpoint(linked, 1), no_loggers)
        assert (self.saved(elsewhere), names(linked / "previous-1")) == ([1], [2, 3])
        assert (elsewhere / "last").resolve().name == "checkpoint-000000000001"
        for path in (linked / "previous-1" / "checkpoints").iterdir():
            verify(path)
        run.open(None, no_loggers)
        assert names(linked / "previous-2") == [1]
        assert self.others(elsewhere)

    @pytest.mark.parametrize("start", [None, 1])
    def test_put_back_when_the_loggers_fail(self, linked, elsewhere, start):
        before = contents(linked) | contents(elsewhere)
        with pytest.raises(ZeroDivisionError):
            RunFolder(config(linked, overwrite=start is None)).open(
                start and checkpoint(linked, start), lambda: [1 // 0]
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
            RunFolder(config(linked, overwrite=start is None)).open(start and checkpoint(linked, start), no_loggers)

        assert forked(begin) == (0 if start and moves == 2 else 9)
        if not (start and moves == 2):
            RunFolder(config(linked, resume=True)).check()
            assert contents(linked) | contents(elsewhere) == before | {LOCK: (linked / LOCK).read_bytes()}
            assert (elsewhere / "last").resolve().name == "checkpoint-000000000003"

    def test_nothing_is_deleted_through_a_link_that_is_not_the_runs(self, folder, finished, tmp_path):
        """Such as one that an earlier version moved, and that points to another run's checkpoints
        now."""
        run = RunFolder(config(folder, overwrite=True))
        run.open(None, no_loggers)
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
                RunFolder(config(folder)).open(None, lambda: [1 // 0])
        assert self.others(elsewhere)
        assert (folder / "checkpoints").is_symlink()
        assert not list(folder.glob("previous-*"))
