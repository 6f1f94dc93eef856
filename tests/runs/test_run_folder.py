"""``output_dir``: nothing is lost that was not replaced by something whole, and nothing foreign is
ever touched."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import SETTINGS, checkpoint, config, names, no_loggers
from small_runs import contents, small_config
from torchrl.checkpoint import CheckpointError

from torchrl_llm.runs import ConfigError, Interrupted, build_run, verify
from torchrl_llm.runs.run_folder import LOCK, MARK, RunFolder
from torchrl_llm.runs.table import FILE as METRICS
from torchrl_llm.runs.table import read_metrics


@pytest.fixture
def without_checkpoints(folder) -> Path:
    shutil.rmtree(folder / "checkpoints")
    return folder


def rewards(folder: Path) -> list[tuple[float, float]]:
    return [(row["rollout/steps"], row["rollout/reward"]) for row in read_metrics(folder / METRICS)]


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
        assert len(read_metrics(folder / "previous-1" / METRICS)) == 3
        (line,) = [record.message for record in caplog.records if "previous-1" in record.message]
        assert "checkpoint-000000000003" in line
        for path in (folder / "previous-1" / "checkpoints").iterdir():
            verify(path)
        # Killed before it saves, or after: the branch continues, under its own settings.
        again = build_run(config(folder, resume=True, **branch | changes))
        assert again.trainer.iteration == 1
        again.trainer.config.max_iterations = 2
        again.trainer.train()
        assert rewards(folder)[:1] == rewards(folder / "previous-1")[:1]
        assert (len(rewards(folder)), len(rewards(folder / "previous-1"))) == (2, 3)
        assert (folder / "checkpoints" / "last").resolve() == checkpoint(folder, 2)
        assert build_run(config(folder, resume=True, **branch)).trainer.iteration == 2

    def test_no_link_dangles(self, folder):
        best = folder / "checkpoints" / "best"
        best.symlink_to(checkpoint(folder, 3).name)
        RunFolder(config(folder, resume=True)).open(checkpoint(folder, 1), no_loggers)
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
        (folder / "rollouts" / "notes.txt").write_text("mine")
        (folder / "thesis.tex").write_text("mine")
        run = build_run(config(folder, overwrite=True, max_iterations=1))
        run.begin()
        old = folder / "previous-1"
        assert before.items() - contents(old).items() == {(name, before[name]) for name in (MARK, LOCK)}
        assert not any((folder / name).exists() for name in ("wandb_id", "evaluation_before.json", "checkpoints"))
        run.trainer.train()
        assert names(folder) == [1]
        assert contents(old) == {"rollouts/notes.txt": b"mine", MARK: (old / MARK).read_bytes()}
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
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
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
            RunFolder(settings).open(None, lambda: [(tmp_path / "run" / "csv" / "texts").mkdir(parents=True)])
        assert not list(settings.output.output_dir.glob("previous-*"))

    def test_what_overwrite_left_is_not_deleted_by_a_run_without(self, folder):
        RunFolder(config(folder, overwrite=True)).open(None, no_loggers)
        later = RunFolder(config(folder, resume=True))
        later.check()
        later.open(None, no_loggers)
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
            RunFolder(config(folder, overwrite=start is None)).open(start and checkpoint(folder, start), fail)
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
            RunFolder(config(folder, overwrite=start is None)).open(start and checkpoint(folder, start), no_loggers)
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
        with pytest.raises(ConfigError, match="taken is not a folder: choose another output_dir"):
            build_run(
                small_config(tmp_path, **SETTINGS | {"output_dir": tmp_path / "taken" / below, "model_path": "none"})
            )

    def test_not_writable(self):
        with pytest.raises(ConfigError, match=r"nothing can be written to /proc .*: choose another output_dir"):
            build_run(small_config(Path("/proc/nowhere"), **SETTINGS, model_path="none"))

    def test_a_full_disk(self, tmp_path):
        """A file system of its own, where the kernel lets one be made."""
        code = (
            "import sys; from pathlib import Path; from torchrl_llm.runs import RunSettings, build_run\n"
            "where = Path(sys.argv[1]); (where / 'filler').write_bytes(bytes(1 << 15))\n"
            "build_run(RunSettings.from_values(model_path='none', output_dir=where / 'run'))"
        )
        mount = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -c "$3" "$1"'
        command = ["unshare", "-rm", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, code]
        if subprocess.run([*command[:4], 'mount -t tmpfs tmpfs "$1"', "sh", str(tmp_path)], check=False).returncode:
            pytest.skip("no file system can be mounted here")
        error = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        assert "nothing can be written to" in error
        assert "No space left on device" in error
