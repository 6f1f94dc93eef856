"""A curriculum that a callback sets: a resumed run samples the tasks of one that never stopped."""

from __future__ import annotations

import pytest
from instances import usual
from small_runs import small_config
from torchrl.record import CSVLogger

from torchrl_llm import keys
from torchrl_llm.runs import build_run
from torchrl_llm.trainers import Callback

STAGES = {1: {"weights": (0, 1)}, 3: {"weights": (3, 1), "options": [{"moves": 2}, {}]}}
"""After an iteration, what changes."""


class Curriculum(Callback):
    """Sets the stages, and notes episode, environment and number of turns of what is learned
    from."""

    def __init__(self):
        self.seen = {}

    def on_batch(self, trainer, rows, metrics):
        columns = rows[keys.EPISODE_ID], rows[keys.ENV_ID], rows[keys.TASK_ID], rows[keys.TURN_MASK].sum(-1)
        self.seen[trainer.iteration] = [column.tolist() for column in columns]

    def on_iteration(self, trainer, metrics):
        if trainer.iteration in STAGES:
            trainer.collector.set_curriculum(**STAGES[trainer.iteration])


@pytest.mark.parametrize("options", usual([{"collector": "turn"}, {"collector": "async", "max_staleness": 1}]))
def test_tasks_after_a_resume(tmp_path, options):
    settings = {
        "env_name": ["world:coins", "world:key-and-door"],
        "save_checkpoints": True,
        "checkpoint_interval": 1,
        "max_model_len": 512,
        **options,
    }

    def seen(name, iterations, **more):
        curriculum = Curriculum()
        config = small_config(tmp_path / name, "GRPO", **settings, max_iterations=iterations, **more)
        build_run(config, callbacks=[curriculum]).trainer.train()
        return curriculum.seen

    whole = seen("whole", 5)
    assert set(whole[0][1]) == {0, 1}
    if options["collector"] == "turn":  # nothing was in flight
        assert set(whole[1][1]) == set(whole[2][1]) == {1}
        coins = [length for env_id, length in zip(whole[3][1], whole[3][3], strict=True) if env_id == 0]
        assert set(coins) == {2}
    for stop in (2, 4):
        first = seen(f"stopped-{stop}", stop)
        resumed = seen(f"stopped-{stop}", 5, resume=True, accept_changes=["max_iterations"])
        parts = {iteration: episodes[:3] for iteration, episodes in (first | resumed).items()}
        assert parts == {iteration: episodes[:3] for iteration, episodes in whole.items()}


class FailingLogger(CSVLogger):
    def log_metrics(self, *args, **kwargs):
        raise ConnectionError("the tracker is away")


class FailingCallback(Callback):
    def on_iteration(self, trainer, metrics):
        raise ConnectionError("the pager is away")


@pytest.mark.parametrize("failing", ["logger", "callback"])
def test_a_stage_is_saved_though_another_fails_before(tmp_path, failing):
    config = small_config(tmp_path, "GRPO", env_name=["world:coins", "world:key-and-door"], save_checkpoints=True)
    by_callback = failing == "callback"
    run = build_run(config, callbacks=[*([FailingCallback()] if by_callback else []), Curriculum()])
    if not by_callback:
        run.trainer.loggers = [FailingLogger("failing", tmp_path)]
    with pytest.raises(ConnectionError, match="is away"):
        run.trainer.train()
    config.output.resume = True
    resumed = build_run(config)
    assert resumed.trainer.iteration == 1
    assert [stage.weights for stage in resumed.trainer.collector.env.task_sampler.stages] == [STAGES[1]["weights"]]
    resumed.close()
