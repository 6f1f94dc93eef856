"""What a loss and its estimator keep from one iteration to the next belongs to a checkpoint, and
continues with the run."""

from collections import deque
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from small_runs import small_config, weights
from torchrl.checkpoint import CheckpointError

from torchrl_llm.objectives import LLMPPOLoss, LLMReinforceLoss, ReBN
from torchrl_llm.runs import build_run
from torchrl_llm.runs.loss_state import own_state


@dataclass(kw_only=True, eq=False, repr=False)
class LearnedBaseline(ReBN):
    """Returns less a moving average of the returns of earlier batches, and how many batches there
    were."""

    def __post_init__(self, value_network):
        super().__post_init__(value_network)
        self.register_buffer("baseline", torch.zeros(()))
        self.batches = 0

    def get_extra_state(self):
        return {"batches": self.batches}

    def set_extra_state(self, state):
        self.batches = state["batches"]

    def compare(self, tensordict, score, penalty, acted):
        before = self.baseline.clone()
        self.baseline.lerp_(score[acted].mean(), 0.5)
        self.batches += 1
        return torch.where(acted, score - before, 0.0)


@dataclass(kw_only=True, eq=False, repr=False)
class Adaptive(LLMReinforceLoss):
    """Its objective is scaled by a number that grows with each optimizer batch; a table is shared
    with the actor."""

    def __post_init__(self, *args):
        super().__post_init__(*args)
        self.register_buffer("scale", torch.ones(2))
        self.table = next(iter(self.actor_network.parameters()))
        self.make_value_estimator(LearnedBaseline, gamma=0.9)

    def objective(self, log_ratio, advantage):
        if self.training:
            self.scale += 0.1
        return super().objective(log_ratio, advantage) * self.scale[0]


class Other(Adaptive):
    """Another shape, and no baseline."""

    def __post_init__(self, *args):
        super().__post_init__(*args)
        self.scale = torch.ones(3)
        self.make_value_estimator(ReBN)


@dataclass(kw_only=True, eq=False, repr=False)
class Returns(ReBN):
    """Keeps all returns that it has seen, in a tensor that grows."""

    def __post_init__(self, value_network):
        super().__post_init__(value_network)
        self.seen = torch.zeros(0)

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state

    def compare(self, tensordict, score, penalty, acted):
        self.seen = torch.cat([self.seen.to(score.device), score[acted]])
        return super().compare(tensordict, score, penalty, acted)


class Unset(Returns):
    """It forgot to take what it gave."""

    def get_extra_state(self):
        return {"count": len(self.seen)}

    set_extra_state = torch.nn.Module.set_extra_state


class Queue(Returns):
    """Its state is none that a checkpoint can hold."""

    def get_extra_state(self):
        return deque(self.seen.tolist())


KEPT = ["_value_estimator._extra_state", "_value_estimator.baseline", "scale"]
SAVED = {"save_checkpoints": True, "checkpoint_interval": 1, "lr_actor": 1e-3}
RESUMED = {"resume": True, "accept_changes": ["max_iterations"]}


def make(config, models):
    return Adaptive(models.actor, **config.loss_options(Adaptive))


def make_other(config, models):
    return Other(models.actor, **config.loss_options(Other))


def built(folder, iterations, *, make_loss=make, **settings):
    return build_run(small_config(folder, max_iterations=iterations, **SAVED | settings), make_loss=make_loss)


def kept(run):
    return own_state(run.trainer.loss)


def trained(run):
    run.trainer.train()
    return run


class TestState:
    def test_a_resumed_run_has_it(self, tmp_path, caplog):
        whole = trained(built(tmp_path / "whole", 3, lora_r=4))
        trained(built(tmp_path / "parts", 2, lora_r=4))
        resumed = built(tmp_path / "parts", 3, lora_r=4, **RESUMED)
        assert sorted(kept(resumed)) == KEPT
        assert kept(resumed)["_value_estimator.baseline"] > 0.1
        assert kept(resumed)["_value_estimator._extra_state"] == {"batches": 2}
        trained(resumed)
        assert weights(resumed).equal(weights(whole))
        assert kept(resumed)["scale"].tolist() == kept(whole)["scale"].tolist() != [1.0, 1.0]
        assert "begin as new" not in caplog.text

    @pytest.mark.extra
    def test_so_has_an_estimator_that_is_made_after_the_run_was_built(self, tmp_path):
        def later(config, models):
            return LLMReinforceLoss(models.actor, **config.loss_options(LLMReinforceLoss))

        def run(folder, iterations, **settings):
            made = built(folder, iterations, make_loss=later, **settings)
            made.trainer.loss.make_value_estimator(LearnedBaseline)
            return trained(made)

        whole = run(tmp_path / "whole", 3)
        run(tmp_path / "parts", 2)
        resumed = run(tmp_path / "parts", 3, **RESUMED)
        assert weights(resumed).equal(weights(whole))
        assert resumed.trainer.loss.value_estimator.batches == 3

    def test_what_is_set_after_a_resume_stays(self, tmp_path):
        trained(built(tmp_path, 1))
        resumed = built(tmp_path, 2, **RESUMED)
        resumed.trainer.loss.scale.fill_(7.0)
        trained(resumed)
        assert kept(resumed)["scale"].min() > 7

    def test_it_is_loaded_by_hand_too(self, tmp_path):
        saved = trained(built(tmp_path / "one", 2)).save_checkpoint(tmp_path / "saved")
        other = built(tmp_path / "two", 2)
        other.load_checkpoint(saved)
        assert kept(other)["_value_estimator._extra_state"] == {"batches": 2}
        bare = trained(built(tmp_path / "three", 1)).save_checkpoint(tmp_path / "bare", save_optimizer=False)
        other.load_checkpoint(bare, load_optimizer=False)
        assert kept(other)["_value_estimator._extra_state"] == {"batches": 2}

    def test_what_has_no_place_is_named(self, tmp_path, caplog):
        """In a run that continues with another loss; and with this one, from a checkpoint of a loss
        without a state."""
        trained(built(tmp_path, 1))
        change = RESUMED | {"accept_changes": ["max_iterations", "make_loss"]}
        trained(built(tmp_path, 2, make_loss=make_other, **change))
        assert f"{', '.join(KEPT)} begin as new" in caplog.text
        caplog.clear()
        trained(built(tmp_path, 3, make_loss=None, **change))
        assert "is not that of the one here: scale begin as new" in caplog.text
        caplog.clear()
        trained(built(tmp_path, 4, **change))
        assert f"{', '.join(KEPT)} begin as new" in caplog.text


class TestExtraState:
    """What ``get_extra_state`` returns may be a tensor of any shape, and whatever else a checkpoint
    can hold."""

    @staticmethod
    def run(folder, iterations, kind, **settings):
        def make_loss(config, models):
            loss = LLMReinforceLoss(models.actor, **config.loss_options(LLMReinforceLoss))
            return loss.make_value_estimator(kind)

        return built(folder, iterations, make_loss=make_loss, **settings)

    def test_a_tensor_that_grows_continues(self, tmp_path, caplog):
        before = trained(self.run(tmp_path, 1, Returns)).trainer.loss.value_estimator.seen
        resumed = self.run(tmp_path, 2, Returns, **RESUMED)
        assert resumed.trainer.loss.value_estimator.seen.equal(before)
        assert len(before) > 0
        trained(resumed)
        assert "begin as new" not in caplog.text

    def test_one_that_is_not_set_is_named(self, tmp_path, caplog):
        trained(self.run(tmp_path, 1, Unset))
        trained(self.run(tmp_path, 2, Unset, **RESUMED))
        assert "_value_estimator._extra_state begin as new" in caplog.text

    def test_one_that_cannot_be_saved_is_refused_before_training(self, tmp_path):
        run = self.run(tmp_path, 1, Queue)
        with pytest.raises(CheckpointError, match=r"get_extra_state of Queue returns deque\(\[\]\).*lists, tuples and"):
            run.trainer.train()
        assert run.trainer.iteration == 0
        with pytest.raises(CheckpointError, match="get_extra_state of Queue"):
            run.save_checkpoint(tmp_path / "saved")
        run = self.run(tmp_path / "unsaved", 1, Queue, save_checkpoints=False, checkpoint_interval=10)
        assert len(trained(run).trainer.history) == 1


@pytest.mark.parametrize(
    "buffer", [torch.eye(3).to_sparse(), torch.ones(3).to(torch.float8_e4m3fn)], ids=["sparse", "float8"]
)
def test_a_buffer_that_cannot_be_saved_is_refused_before_training(tmp_path, buffer):
    def make_loss(config, models, persistent=True):
        loss = make(config, models)
        loss.register_buffer("counts", buffer, persistent=persistent)
        return loss

    run = built(tmp_path / "run", 1, make_loss=make_loss)
    with pytest.raises(CheckpointError, match=r"'counts' of Adaptive is a tensor of .*persistent=False"):
        run.trainer.train()
    assert run.trainer.iteration == 0
    trained(built(tmp_path / "other", 1, make_loss=partial(make_loss, persistent=False)))


@pytest.mark.parametrize("settings", [{}, {"lora_r": 4}, {"critic_trunk": "shared"}])
def test_the_networks_are_no_part_of_it(tmp_path, settings):
    run = build_run(small_config(tmp_path, "LLMPPO", **settings))
    assert isinstance(run.trainer.loss, LLMPPOLoss)
    assert own_state(run.trainer.loss) == {}
    path = run.save_checkpoint(tmp_path / "saved")
    assert not [file for file in path.rglob("*") if "loss_state" in file.name]
