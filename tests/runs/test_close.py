"""What a run opens is closed: when it ends, when a part fails to close, and when it cannot be
built."""

import threading
from types import SimpleNamespace

import pytest
from small_runs import small_config

from torchrl_llm.modules import HFPolicy
from torchrl_llm.runs import build_run
from torchrl_llm.trainers import Callback


def run_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("torchrl_llm")}


@pytest.fixture
def closed(monkeypatch):
    """The policies that were closed."""
    found, close = [], HFPolicy.close
    monkeypatch.setattr(HFPolicy, "close", lambda policy: (found.append(policy), close(policy))[1])
    return found


@pytest.mark.parametrize("collector", ["turn", "async"])
def test_a_run_that_cannot_be_built_leaves_nothing_open(tmp_path, closed, collector):
    before = run_threads()
    config = small_config(tmp_path, collector=collector, env_threads=2)
    with pytest.raises(ValueError, match="A component is called 'rng'"):
        build_run(config, components={"rng": object()})
    assert len(closed) == 1
    assert run_threads() == before


def test_a_loss_that_cannot_be_made_fails_before_an_engine_is_started(tmp_path, closed):
    def make_loss(config, models):
        raise ValueError("no loss")

    before = run_threads()
    with pytest.raises(ValueError, match="no loss"):
        build_run(small_config(tmp_path, env_threads=2), make_loss=make_loss)
    assert closed == []
    assert run_threads() == before


def test_all_is_closed_if_the_collector_does_not_stop(tmp_path, closed):
    run = build_run(small_config(tmp_path, env_threads=2))
    run.begin()

    def shutdown():
        raise RuntimeError("still running")

    run.trainer.collector.shutdown = shutdown
    flushed = []
    run.trainer.loggers = [SimpleNamespace(flush=lambda: flushed.append(True))]
    with pytest.raises(RuntimeError, match="still running"):
        run.close()
    assert closed == [run.policy]
    assert flushed == [True]
    assert run.evaluation_env.is_closed
    assert run.trainer.collector.env.is_closed
    again = build_run(small_config(tmp_path))
    again.begin()  # the folder is free
    again.close()
    run.close()


def test_a_closed_run_is_closed(tmp_path, closed):
    before = run_threads()
    run = build_run(small_config(tmp_path, env_threads=2, max_iterations=1))
    run.trainer.train()
    assert run_threads() == before, "a collector that is shut down has closed its environment"
    for _ in range(2):
        run.close()
    assert closed == [run.policy]
    assert run_threads() == before


def test_callbacks_end_though_another_fails_to(tmp_path):
    ended = []

    class Ends(Callback):
        def __init__(self, name):
            self.name = name

        def on_end(self, trainer):
            ended.append(self.name)
            if self.name == "second":
                raise RuntimeError("cannot end")

    callbacks = [Ends("first"), Ends("second"), Ends("third")]
    run = build_run(small_config(tmp_path, max_iterations=1), callbacks=callbacks)
    with pytest.raises(RuntimeError, match="cannot end"):
        run.trainer.train()
    # The first of a run holds the folder that the others write to.
    assert ended == ["third", "second", "first"]
    run.close()
