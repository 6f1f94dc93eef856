"""Settings that a resumed run names in ``accept_changes`` apply from there on; none of them is a
dead end."""

import pytest
from instances import usual
from safetensors.torch import load_file
from small_runs import TwoTurns, Won, small_config

from torchrl_llm import keys
from torchrl_llm.runs import ConfigError, build_run

SAVED = {"save_checkpoints": True, "checkpoint_interval": 1, "lora_r": 2}
TREES = {"baseline": "leave_one_out", "scale": "none"}


class Scored(TwoTurns):
    """Two turns, each paid by the length of its response."""

    def step(self, action):
        return super().step(action)[0], float(len(action)), self.turn == 2, False, {"success": len(action) > 3}


class Other(Scored):
    pass


class Batches(list):
    """The rows that a run's iterations collected."""

    def of(self, run):
        iterate = run.trainer.iterate
        run.trainer.iterate = lambda rows: (self.append(rows), iterate(rows))[1]
        return run


def trained(folder, iterations, seen=None, *, env=Scored, algo="GRPO", **settings):
    run = build_run(small_config(folder, algo, max_iterations=iterations, **SAVED | settings), env=env)
    (Batches() if seen is None else seen).of(run).trainer.train()
    return run


def changed(*names):
    return {"resume": True, "accept_changes": ["max_iterations", *names]}


class TestTasks:
    """Groups, mixtures and trees decide which tasks come next: no task comes twice, and no id."""

    @pytest.mark.parametrize(
        ("before", "after"),
        usual(
            [
                ({"group_size": 4}, {"group_size": 8}),
                ({"group_size": 4}, {"group_size": 2}),
                ({"group_size": 4, **TREES}, {"group_size": 4, "tree_branches": 1, **TREES}),
                (
                    {"env": [Scored, Other], "env_weights": [1.0, 1.0]},
                    {"env": [Scored, Other], "env_weights": [1.0, 30.0]},
                ),
                ({"env": Scored}, {"env": [Scored, Other], "env_weights": [1.0, 30.0]}),
                (
                    {"env": [Scored, Other, Won], "adaptive_mixture": True},
                    {"env": [Other, Won], "adaptive_mixture": True},
                ),
            ]
        ),
        ids=["larger-groups", "smaller-groups", "trees", "weights", "an-environment-more", "another-mixture"],
    )
    def test_they_continue(self, tmp_path, before, after):
        seen = Batches()
        trained(tmp_path, 2, seen, **before)
        changes = [name for name in after if before.get(name) != after[name]]
        trained(tmp_path, 4, seen, **after, **changed(*changes))
        assert len(seen) == 4
        episodes, groups = ([set(rows[key].tolist()) for rows in seen] for key in (keys.EPISODE_ID, keys.GROUP_ID))
        assert sum(map(len, episodes)) == len(set.union(*episodes)) == 32
        assert sum(map(len, groups)) == len(set.union(*groups))
        size = after.get("group_size", 4)
        assert {int(count) for rows in seen[2:] for count in rows[keys.GROUP_ID].unique(return_counts=True)[1]} == {
            size
        }
        if "env_weights" in after:
            assert sum(int((rows[keys.ENV_ID] == 1).sum()) for rows in seen[2:]) >= 12

    @pytest.mark.extra
    def test_a_mixture_that_adapts_no_more_is_even_again(self, tmp_path):
        settings = {"env": [Scored, Other], "adaptive_mixture": True}
        run = trained(tmp_path, 1, **settings)
        assert run.trainer.collector.env.task_sampler.success is not None
        run = trained(tmp_path, 2, env=[Scored, Other], **changed("adaptive_mixture"))
        assert run.trainer.collector.env.task_sampler.success is None


@pytest.mark.extra
def test_another_collector_is_one_change(tmp_path):
    """Its own settings have their defaults, and those of the one before are gone with it."""
    before = {"tree_branches": 1, "group_size": 4, **TREES}
    trained(tmp_path, 1, **before)
    with pytest.raises(
        ConfigError, match=r"differ from those of .*: tree_branches was 1, is 0; collector was 'turn', is 'async'\. Use"
    ):
        trained(tmp_path, 2, **before | {"tree_branches": 0}, collector="async", **changed())
    run = trained(tmp_path, 2, **TREES, group_size=4, collector="async", **changed("collector", "tree_branches"))
    assert run.trainer.iteration == 2
    run = trained(tmp_path, 3, **TREES, group_size=4, **changed("collector"))
    assert run.trainer.iteration == 3


@pytest.mark.parametrize("lora_r", [2, 0])
@pytest.mark.extra
def test_a_reference_that_is_refreshed_no_more_stays_what_it_was(tmp_path, lora_r):
    settings = {"kl_coeff": 0.1, "lora_r": lora_r, "lr_actor": 1e-3}
    run = trained(tmp_path, 3, refresh_reference=2, **settings)
    file = "adapter_model.safetensors" if lora_r else "model.safetensors"
    before = load_file(run.checkpoints.latest() / "reference" / file)
    run = trained(tmp_path, 4, **settings, **changed("refresh_reference"))
    after = load_file(run.checkpoints.latest() / "reference" / file)
    assert after.keys() == before.keys()
    assert all(after[name].equal(value) for name, value in before.items())
    assert any(value.any() for name, value in after.items() if "lora_B" in name or not lora_r)
