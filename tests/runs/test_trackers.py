"""One run in all loggers: the same names and values, and the text of episodes where it is asked
for."""

import json
import math
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from small_runs import small_config

from torchrl_llm.runs import build_run
from torchrl_llm.runs import trackers as loggers
from torchrl_llm.runs.episode_texts import COLUMNS, episode_texts, markdown, table_rows
from torchrl_llm.runs.recording import read_recording
from torchrl_llm.runs.table import FILE, read_metrics
from torchrl_llm.runs.trackers import make_loggers
from torchrl_llm.trainers import Callback
from torchrl_llm.utils.optional import MissingExtraError

MIXTURE = ["game:GuessTheNumber-v0-easy", "game:GuessTheNumber-v0-hard"]
ENDS = {"nan": math.nan, "inf": math.inf, "tiny": 1e-30, "third": 1 / 3}


class Odd(Callback):
    """Metrics of one's own, with values that formats differ in."""

    def on_batch(self, trainer, rows, metrics):
        metrics |= {f"my/{name}": value for name, value in ENDS.items()}


def in_table(run: Path) -> dict[tuple[str, int], float]:
    rows = read_metrics(run / FILE)
    return {(name, int(row["rollout/steps"])): value for row in rows for name, value in row.items()}


def in_tensorboard(run: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    names = events.Tags()["scalars"]
    return {(name, event.step): event.value for name in names for event in events.Scalars(name)}


def wandb_records(path: Path):
    """The records of a ``.wandb`` file: LevelDB's log format in blocks of 32 KiB, with a header of
    7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # a block's rest that has no room for a header
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def wandb_history(run: Path) -> list[dict]:
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    found = [record.history.item for record in wandb_records(path) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items} for items in found]


def in_wandb(run: Path) -> dict[tuple[str, int], float]:
    """Without the steps that TorchRL adds for each group of metrics, and what W&B counts itself."""
    rows = [row for row in wandb_history(run) if "rollout/steps" in row]
    own = {(name, int(row["rollout/steps"])): value for row in rows for name, value in row.items()}
    for row in rows:
        assert {value for name, value in row.items() if name.endswith("/step")} == {row["rollout/steps"]}
    return {key: value for key, value in own.items() if not key[0].startswith("_") and not key[0].endswith("/step")}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run of a mixture that evaluates in its second iteration."""
    trackers = {"tensorboard": True, "wandb": True, "log_episodes": 2, "record_interval": 2}
    small = {"max_iterations": 3, "evaluation_interval": 2, "batch_size": 16, "env_name": MIXTURE}
    config = small_config(tmp_path_factory.mktemp("trackers"), "LLMPPO", **small, **trackers)
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    wandb.teardown()  # which keeps the mode of a process's first run
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        made = build_run(config, callbacks=[Odd()])
        made.trainer.train()
        for target in made.trainer.loggers:
            target.shutdown()
        # waits for the process that writes the file: on a busy machine its last record may come
        # after finish()
        wandb.teardown()
    return config.output.output_dir


def same(first: dict, second: dict, *, single: bool = False) -> None:
    assert first.keys() == second.keys()
    for key, value in first.items():
        # TensorBoard's files keep float32.
        expected = float(np.float32(value)) if single else value
        assert second[key] == expected or (math.isnan(second[key]) and math.isnan(expected)), key


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_a_sentence(tmp_path, monkeypatch, tracker):
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(MissingExtraError, match=rf"{tracker}=true needs .*pip install 'torchrl-llm\[{tracker}\]'"):
        make_loggers(small_config(tmp_path, **{tracker: True}))


@pytest.mark.parametrize(("given", "seconds"), [(None, 300.0), ("77", 77.0)])
def test_wandb_waits_for_its_service_on_a_busy_machine_too(tmp_path, monkeypatch, given, seconds):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", given or "")
    if given is None:
        monkeypatch.delenv("WANDB__SERVICE_WAIT")
    read = wandb.Settings()
    get_logger = loggers.get_logger

    def started(kind, *args, **_):
        if kind == "wandb":
            read.update_from_env_vars(os.environ)
        return get_logger("csv", *args[:2])

    monkeypatch.setattr(loggers, "get_logger", started)
    make_loggers(small_config(tmp_path, wandb=True))
    assert read.x_service_wait == seconds


class TestMetrics:
    @pytest.mark.extra
    def test_the_table_has_what_the_files_have(self, run):
        table = in_table(run)
        names = {name for name, _ in table}
        assert {
            "evaluation/success",
            "rollout/success/game:GuessTheNumber-v0-hard",
            "my/nan",
            "critic/clip_fraction",
        } <= names
        assert len(names) > 40

    def test_tensorboard_has_the_same_in_float32(self, run):
        same(in_table(run), in_tensorboard(run), single=True)

    def test_weights_and_biases_has_the_same(self, run):
        same(in_table(run), in_wandb(run))


class TestEpisodes:
    """Two of each recording: of the first, the second and the last iteration."""

    @pytest.fixture
    def recordings(self, run):
        return [read_recording(path) for path in sorted(run.glob("rollouts/*.safetensors"))]

    def test_tensorboard_has_pages(self, run, recordings):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run / "tensorboard")).Reload().Tensors("episodes/training/text_summary")
        shown = [(event.step, event.tensor_proto.string_val[0].decode()) for event in events]
        assert shown == [(each.steps, markdown(each, episode_texts(each, 2))) for each in recordings]
        assert [text.count("\n## Episode") for _, text in shown] == [2, 2, 2]

    def test_weights_and_biases_has_tables(self, run, recordings):
        logged = [row for row in wandb_history(run) if "episodes/step" in row]
        (files,) = run.glob("wandb/offline-run-*/files")
        tables = [json.loads((files / row["episodes/training/path"]).read_text()) for row in logged]
        assert [row["episodes/step"] for row in logged] == [each.steps for each in recordings]
        assert [table["data"] for table in tables] == [table_rows(each, episode_texts(each, 2)) for each in recordings]
        assert {tuple(table["columns"]) for table in tables} == {COLUMNS}


def test_trackio_has_the_metrics_and_traces(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    small = {"max_iterations": 2, "evaluation_interval": 2, "record_interval": 1, "save_checkpoints": True}
    shown = {"trackio": True, "trackio_project": "mine", "log_episodes": 2}
    for more in ({}, {"max_iterations": 3, "resume": True, "accept_changes": ["max_iterations"]}):
        made = build_run(small_config(tmp_path, **small | shown | more))
        history = made.trainer.train()
        made.trainer.loggers[-1].shutdown()
    (name,) = SQLiteStorage.get_runs("mine")
    assert name.startswith("run-")
    rows = [row for row in SQLiteStorage.get_logs("mine", name) if "rollout/steps" in row]
    assert [{key: row[key] for key in row.keys() - {"timestamp", "step"}} for row in rows] == history
    traces = sorted(SQLiteStorage.get_traces("mine", name), key=lambda trace: (trace["step"], trace["index"]))
    recordings = [read_recording(path) for path in sorted((tmp_path / "run" / "rollouts").glob("*.safetensors"))]
    expected = [(each.steps, text) for each in recordings for text in episode_texts(each, 2)]
    assert len(expected) == len(traces) == 6
    for trace, (steps, text) in zip(traces, expected, strict=True):
        assert (trace["key"], trace["step"], trace["metadata"]["outcome"]) == ("episodes/training", steps, text.outcome)
        assert [(each["role"], each["content"]) for each in trace["messages"]] == [*text.messages]


def test_a_resumed_run_may_log_elsewhere(tmp_path):
    small = {"max_iterations": 1, "save_checkpoints": True}
    build_run(small_config(tmp_path, **small)).trainer.train()
    resumed = build_run(small_config(tmp_path, **small, tensorboard=True, resume=True))
    assert resumed.trainer.iteration == 1
    resumed.close()
