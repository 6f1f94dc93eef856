"""Several processes, without the processes: errors of the first one, and what is refused."""

import pickle

import pytest
from small_runs import small_config

from torchrl_llm.runs import ConfigError, build_run
from torchrl_llm.trainers.distributed import Several


class Piped(Several):
    """The first of several ranks; what it broadcasts is pickled."""

    def __init__(self):
        self.is_main, self.world_size = True, 2
        self.sent = []

    def broadcast(self, value):
        self.sent.append(pickle.dumps(value))
        return pickle.loads(self.sent[-1])


class TestErrorsOfTheFirstRank:
    """They are raised on all ranks, which wait for them in a broadcast."""

    class Locked(Exception):
        def __init__(self, code, why):
            super().__init__(f"{code}: {why}")
            self.close = lambda: None

    def test_one_that_cannot_be_pickled_is_sent_as_text(self):
        def fail():
            raise self.Locked(7, "in use")

        rank = Piped()
        with pytest.raises(self.Locked, match="7: in use"):
            rank.on_main(fail)
        _, heard = pickle.loads(rank.sent[0])
        assert (type(heard), str(heard)) == (RuntimeError, "Locked: 7: in use")

    def test_others_are_sent_as_they_are(self):
        def fail():
            raise ConfigError("no room")

        rank = Piped()
        with pytest.raises(ConfigError, match="no room"):
            rank.on_main(fail)
        assert type(pickle.loads(rank.sent[0])[1]) is ConfigError
        assert rank.on_main(lambda: 3) == 3


def test_new_parameters_are_refused(tmp_path):
    """The gradients of the old ones are averaged."""
    run = build_run(small_config(tmp_path, lora_r=4))
    saved = run.save_checkpoint(tmp_path / "saved")
    vars(run.trainer)["_distributed"] = Piped()
    with pytest.raises(ConfigError, match=r"New parameters .* with 2 processes"):
        run.load_checkpoint(saved, merge_lora_configs=True)
    with pytest.raises(ConfigError, match=r"New parameters .* with 2 processes"):
        run.trainer.replace_optimizer(run.trainer.optimizer)
    run.close()
