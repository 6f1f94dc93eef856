"""Checkpoints: whole or not at all, read back exactly, refused when damaged or of other
settings."""

from __future__ import annotations

import csv
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import Script
from safetensors.torch import load_file
from small_runs import small_config
from torchrl.checkpoint import Checkpoint, CheckpointError
from waiting import LIMIT, wait_until

from torchrl_llm.envs import EnvSpec, GEMEnv, TaskSampler
from torchrl_llm.runs import CheckpointStore, ConfigError, build_run, checkpoint_files, identity, make_objective, verify
from torchrl_llm.runs.identity import config_changes, git_revision
from torchrl_llm.runs.table import read_metrics
from torchrl_llm.testing.environments import Faulty, StopOrGo
from torchrl_llm.trainers import Callback

RUN = {
    "epochs": 2,
    "minibatch_size": 4,
    "kl_coeff": 0.01,
    "evaluation_interval": 2,
    "checkpoint_interval": 1,
    "save_checkpoints": True,
    "lr_actor": 1e-3,
    "warmup_fraction": 0.1,
    "max_steps": 700,
}
CASES = [
    (
        "LLMPPO",
        {"entropy_coeff": 0.1, "entropy_target": 0.2, "target_kl": 0.01, "kl_coeff": 0.1, "kl_decay_fraction": 0.8},
    ),
    ("GRPO", {"lora_r": 4, "refresh_reference": 2}),
    ("LLMPPO", {"lora_r": 4}),
    ("LLMREINFORCE", {"top_p": 0.9}),
    ("GRPO", {"dynamic_sampling": 2, "kl_in": "reward"}),
    ("GRPO", {"env_name": [f"game:GuessTheNumber-v0-{level}" for level in ("easy", "hard")], "adaptive_mixture": True}),
    ("SFT", {"demonstrations": "guess_by_half_the_hints", "imitate": "success", "kl_coeff": 0.0}),
    ("LLMREINFORCE", {"estimator": "TurnVine", "branches": 2, "branch_share": 0.5}),
    ("GRPO", {"tree_branches": 1, "tree_depth": 2, "baseline": "leave_one_out", "scale": "none", "credit": "state"}),
]


class PowerCut(BaseException):
    """Nothing is saved for it, as for an error it would be."""


class Stop(Callback):
    """Fails at an iteration, as a machine does."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_iteration(self, trainer, metrics):
        if trainer.iteration == self.iteration:
            raise PowerCut


class Draw(Callback):
    """Seeds the global generators in the first iteration, and draws from them in each, as code of
    users does."""

    def __init__(self) -> None:
        self.drawn: dict[int, tuple[float, ...]] = {}

    def on_iteration(self, trainer, metrics):
        if trainer.iteration == 1:
            seed_all(0)
        self.drawn[trainer.iteration] = (torch.rand(()).item(), random.random(), np.random.random())


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def digest(run) -> str:
    """Of weights and optimizer state."""
    sums = hashlib.sha256()
    for parameter in run.models.actor_parameters() + run.models.critic_parameters():
        sums.update(parameter.detach().cpu().numpy().tobytes())
    for state in run.trainer.optimizer.state_dict()["state"].values():
        for _, value in sorted(state.items()):
            sums.update(value.cpu().numpy().tobytes())
    return sums.hexdigest()


def scalars(folder: Path) -> dict[str, str]:
    """The columns of the table of metrics, but for times."""
    columns = zip(*csv.reader((folder / "metrics.csv").open()), strict=True)
    return {name: str(cells) for name, *cells in columns if not name.startswith("time/")}


def interrupted(config, iteration: int) -> None:
    with pytest.raises(PowerCut):
        build_run(config, callbacks=[Stop(iteration)]).trainer.train()


class TestResume:
    @pytest.mark.parametrize(
        ("algo", "settings"),
        [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.extra) for case in CASES[2:])],
        ids=str,
    )
    def test_in_the_same_bytes(self, tmp_path, algo, settings):
        def config(name, **more):
            return small_config(tmp_path / name, algo, **RUN | settings | {"max_iterations": 5} | more)

        whole = build_run(config("whole"))
        whole.trainer.train()
        interrupted(config("cut"), 3)
        run = build_run(config("cut", resume=True))
        assert run.trainer.iteration == 2
        run.trainer.train()
        assert digest(run) == digest(whole)
        assert scalars(tmp_path / "cut" / "run") == scalars(tmp_path / "whole" / "run")
        timeless = [{k: v for k, v in m.items() if not k.startswith("time/")} for m in run.trainer.history]
        assert str(timeless) == str(
            [{k: v for k, v in m.items() if not k.startswith("time/")} for m in whole.trainer.history]
        )

    def test_the_global_generators_go_on_where_they_were(self, tmp_path):
        settings = {"lora_r": 4, "max_iterations": 3, "checkpoint_interval": 1, "save_checkpoints": True}
        whole, resumed = Draw(), Draw()
        build_run(small_config(tmp_path / "whole", **settings), callbacks=[whole]).trainer.train()
        with pytest.raises(PowerCut):
            build_run(small_config(tmp_path / "cut", **settings), callbacks=[Draw(), Stop(2)]).trainer.train()
        seed_all(1)
        build_run(small_config(tmp_path / "cut", **settings, resume=True), callbacks=[resumed]).trainer.train()
        assert resumed.drawn == {iteration: whole.drawn[iteration] for iteration in (2, 3)}

    def test_a_checkpoint_is_checked_once(self, tmp_path, monkeypatch):
        """Its sums take a pass over all files."""
        settings = RUN | {"max_iterations": 1}
        build_run(small_config(tmp_path, **settings)).trainer.train()
        checked, sha256 = [], checkpoint_files.sha256
        monkeypatch.setattr(checkpoint_files, "sha256", lambda path: (checked.append(path), sha256(path))[1])
        run = build_run(small_config(tmp_path, **settings, resume=True))
        assert run.trainer.iteration == 1
        assert len(checked) == len({*checked}) > 5

    def test_the_git_revision_is_that_of_the_start(self, tmp_path, monkeypatch):
        def moved_on(*_, **__):
            raise AssertionError("git was asked while the run went on")

        run = build_run(small_config(tmp_path, **RUN | {"max_iterations": 1}))
        monkeypatch.setattr(identity.subprocess, "run", moved_on)
        run.trainer.train()
        saved = verify(run.checkpoints.latest())["metadata"]["environment"]
        assert saved["git_revision"] == git_revision()

    def test_what_failed_and_was_dropped_is_counted_on(self, tmp_path):
        class Sometimes(Faulty):
            def reset(self, seed=None):
                self.at = 0 if seed in bad else 99
                return super().reset(seed)

        bad = {TaskSampler()[i].seed for i in (1, 9)}
        settings = RUN | {"max_turns": 2, "evaluation_interval": 0, "max_iterations": 1}
        build_run(small_config(tmp_path, **settings), env=partial(Sometimes, "raise")).trainer.train()
        longer = settings | {"max_iterations": 2, "resume": True, "accept_changes": ["max_iterations"]}
        history = build_run(small_config(tmp_path, **longer), env=partial(Sometimes, "raise")).trainer.train()
        assert [(row["data/faults"], row["data/dropped"]) for row in history] == [(1, 1), (2, 2)]

    def test_a_finished_run_is_finished(self, tmp_path):
        settings = RUN | {"max_iterations": 2}
        build_run(small_config(tmp_path, **settings)).trainer.train()
        again = build_run(small_config(tmp_path, **settings, resume=True))
        before = digest(again)
        again.trainer.train()
        assert digest(again) == before
        assert again.trainer.stop_reason == "max_iterations=2"

    def test_a_longer_run_is_a_change_that_can_be_accepted(self, tmp_path):
        build_run(small_config(tmp_path, **RUN, max_iterations=1)).trainer.train()
        longer = RUN | {"max_iterations": 3, "resume": True}
        with pytest.raises(ConfigError, match=r"max_iterations was 1, is 3.*accept_changes"):
            build_run(small_config(tmp_path, **longer))
        run = build_run(small_config(tmp_path, **longer, accept_changes=["max_iterations"]))
        run.trainer.train()
        assert run.trainer.iteration == 3

    def test_from_the_start_where_there_is_nothing(self, tmp_path):
        run = build_run(small_config(tmp_path, **RUN, max_iterations=1, resume=True))
        run.trainer.train()
        assert run.trainer.iteration == 1

    def test_another_run_in_the_same_place_is_an_error(self, tmp_path):
        build_run(small_config(tmp_path, **RUN, max_iterations=2)).trainer.train()
        with pytest.raises(ConfigError, match=r"holds a run already.*overwrite=true"):
            build_run(small_config(tmp_path, **RUN))
        run = build_run(small_config(tmp_path, **RUN, max_iterations=1, overwrite=True))
        run.trainer.train()
        (row,) = read_metrics(tmp_path / "run" / "metrics.csv")
        assert row["rollout/steps"] == run.trainer.steps

    def test_another_environment_or_loss_of_python_is_a_change(self, tmp_path):
        config = partial(small_config, tmp_path, "GRPO", max_iterations=1, save_checkpoints=True)
        build_run(config(), env=StopOrGo, make_loss=make_objective).trainer.train()
        first = {"env": StopOrGo, "make_loss": make_objective}
        for given, said in (
            ({}, "env was '.*:StopOrGo', is None; make_loss was 'torchrl_llm.runs.build:make_objective', is None"),
            ({**first, "env": partial(Faulty, 0)}, "env was '.*:StopOrGo', is '.*:Faulty'"),
            ({**first, "env": EnvSpec("mine", StopOrGo)}, r"is 'mine \(.*:StopOrGo\)'"),
            ({"make_env": GEMEnv, "make_loss": make_objective}, "make_env was None, is '.*:GEMEnv'"),
        ):
            with pytest.raises(ConfigError, match=rf"{said}.* accept_changes: \["):
                build_run(config(resume=True), **given)
        accepted = config(resume=True, accept_changes=["make_loss", "max_iterations"], max_iterations=2)
        for run in (build_run(config(resume=True), **first), build_run(accepted, env=StopOrGo)):
            assert run.trainer.iteration == 1
            run.close()

    def test_another_environment_is_said(self, tmp_path, caplog, monkeypatch):
        build_run(small_config(tmp_path, **RUN, max_iterations=1)).trainer.train()
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        build_run(small_config(tmp_path, **RUN, max_iterations=1, resume=True))
        assert "another threads" in caplog.text


class TestDamage:
    @pytest.fixture
    def store(self, tmp_path):
        run = build_run(small_config(tmp_path, "LLMPPO", **RUN, max_iterations=3))
        run.trainer.train()
        return run.trainer.checkpoints

    @pytest.mark.parametrize("name", ["actor/model.safetensors", "critic/value_head.safetensors", "components"])
    @pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
    def test_the_bad_file_is_named_and_the_one_before_is_offered(self, store, tmp_path, name, damage):
        last = store.latest()
        file = (
            next(p for p in sorted((last / name).rglob("*")) if p.is_file() and p.stat().st_size)
            if name == "components"
            else last / name
        )
        content = file.read_bytes()
        if damage == "remove":
            file.unlink()
        else:
            file.write_bytes(content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="damaged") as error:
            build_run(small_config(tmp_path, "LLMPPO", **RUN, max_iterations=3, resume=True))
        assert str(file) in str(error.value)
        offered = store.rotation.checkpoints()[-2]
        assert f"{offered} is whole" in str(error.value)
        run = build_run(small_config(tmp_path, "LLMPPO", **RUN, max_iterations=3, resume_from=offered))
        assert run.trainer.iteration == 2

    def test_a_broken_manifest(self, store):
        last = store.latest()
        (last / "manifest.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"manifest\.json is not what was saved"):
            verify(last)
        # a resume refuses it, and does not go back further than anyone said
        assert store.latest() == last

    def test_nothing_is_a_pickle(self, store):
        for path in store.latest().rglob("*"):
            assert path.suffix not in (".pt", ".pkl", ".bin", ".pth"), path


class TestStore:
    def test_one_of_weights_needs_what_the_loss_keeps(self, tmp_path):
        """It failed at the first save."""
        run = build_run(small_config(tmp_path))
        with pytest.raises(ConfigError, match="give it loss_state=LossState"):
            CheckpointStore(tmp_path / "checkpoints", models=run.models)

    def test_the_newest_and_the_best_are_kept(self, tmp_path):
        run = build_run(
            small_config(tmp_path, **RUN | {"evaluation_interval": 1}, max_iterations=6, keep_checkpoints=2)
        )
        scores = iter([0.1, 0.9, 0.3, 0.2, 0.1, 0.0])
        run.trainer.evaluator = lambda: {"evaluation/success": next(scores)}
        run.trainer.train()
        store = run.trainer.checkpoints
        assert [int(path.name[-3:]) for path in store.rotation.checkpoints()] == [2, 5, 6]
        assert store.best().name.endswith("002")
        assert (store.directory / "best").resolve() == store.best()
        assert (store.directory / "last").resolve() == store.latest()
        manifest = verify(store.best())["metadata"]
        assert (manifest["iteration"], manifest["evaluation_success"]) == (2, 0.9)
        assert manifest["config"]["algo"] == "LLMREINFORCE"
        assert "torch" in manifest["environment"]["versions"]

    def test_folders_in_place_of_the_links_are_replaced_by_links(self, tmp_path):
        """Of a run that was copied without links, or whose links somebody replaced while it ran."""
        run = build_run(small_config(tmp_path, **RUN, max_iterations=2))
        run.trainer.train()
        store = run.trainer.checkpoints
        for name in ("last", "best"):
            (store.directory / name).unlink(missing_ok=True)
            shutil.copytree(store.latest(), store.directory / name)
        run.trainer.iteration = 3
        store.save(run.trainer, {"evaluation/success": 1.0})
        assert [path.name[-3:] for path in store.checkpoints()] == ["002", "003"]
        for name in ("last", "best"):
            assert (store.directory / name).is_symlink()
            assert verify(store.directory / name)["metadata"]["iteration"] == 3
        assert len(list(store.directory.iterdir())) == 4

    def test_a_checkpoint_is_taken_when_it_is_time(self, tmp_path):
        settings = RUN | {"evaluation_interval": 0, "checkpoint_interval": 3}
        run = build_run(small_config(tmp_path, **settings, max_iterations=7, keep_checkpoints=9))
        run.trainer.train()
        assert [int(path.name[-3:]) for path in run.trainer.checkpoints.rotation.checkpoints()] == [3, 6, 7]

    def test_what_a_crash_left_is_cleaned_and_the_rest_is_whole(self, tmp_path, monkeypatch):
        run = build_run(small_config(tmp_path, **RUN, max_iterations=2))
        run.trainer.train()
        store = run.trainer.checkpoints
        whole = store.latest()
        # Dies before the new one takes its place.
        monkeypatch.setattr(Checkpoint, "_publish_path", staticmethod(lambda *_: os._exit(1)))
        child = os.fork()
        if child == 0:
            run.trainer.iteration = 3
            store.save(run.trainer, {})
        assert os.waitpid(child, 0)[1] != 0
        assert list(store.directory.glob(".*.stage-*"))
        assert store.latest() == whole
        verify(whole)
        store.clean()
        assert not list(store.directory.glob(".*"))
        assert store.latest() == whole

    @pytest.mark.extra
    def test_weights_are_loaded_by_peft_and_transformers_alone(self, tmp_path):
        run = build_run(small_config(tmp_path, "LLMPPO", **RUN, lora_r=4, max_iterations=1))
        run.trainer.train()
        code = (
            "import sys, torch; from peft import PeftModel; from transformers import AutoModelForCausalLM\n"
            "base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='float32')\n"
            "model = PeftModel.from_pretrained(base, sys.argv[2] + '/actor').eval()\n"
            "assert 'torchrl_llm' not in sys.modules\n"
            "print(model(input_ids=torch.arange(9)[None]).logits.double().sum().item())"
        )
        from torchrl_llm.modules import use_adapter
        from torchrl_llm.testing.tiny import tiny_model_path

        last = str(run.trainer.checkpoints.latest())
        out = subprocess.run([sys.executable, "-c", code, str(tiny_model_path()), last], capture_output=True, text=True)
        with torch.no_grad(), use_adapter(run.models.model, "actor"):
            ids = torch.arange(9, device=run.models.model.device)
            expected = run.models.model(input_ids=ids[None]).logits.double().sum().item()
        assert float(out.stdout) == pytest.approx(expected, rel=1e-6), out.stderr


class TestSaveAndLoad:
    """``Run.save_checkpoint`` and ``Run.load_checkpoint``: weights for other runs, and the start of
    one from another."""

    def trained(self, tmp_path, **settings):
        run = build_run(small_config(tmp_path / "one", "LLMPPO", **RUN | {"max_iterations": 1, "lora_r": 4} | settings))
        run.trainer.train()
        return run

    def test_weights_and_optimizer_but_not_the_counters(self, tmp_path):
        run = self.trained(tmp_path)
        path = run.save_checkpoint(tmp_path / "saved")
        other = build_run(small_config(tmp_path / "two", "LLMPPO", **RUN, lora_r=4, seed=5))
        assert digest(other) != digest(run)
        other.load_checkpoint(path)
        assert digest(other) == digest(run)
        assert (other.trainer.iteration, other.trainer.steps) == (0, 0)
        assert not (path / "merged").exists()

    def test_without_the_optimizer(self, tmp_path):
        run = self.trained(tmp_path)
        path = run.save_checkpoint(tmp_path / "saved", save_optimizer=False)
        assert not list((path / "components").glob("*optimizer"))
        other = build_run(small_config(tmp_path / "two", "LLMPPO", **RUN, lora_r=4, seed=5))
        with pytest.raises(CheckpointError, match="load_optimizer=False"):
            other.load_checkpoint(path)
        other.load_checkpoint(path, load_optimizer=False)
        assert other.trainer.optimizer.state_dict()["state"] == {}
        pairs = zip(other.models.actor_parameters(), run.models.actor_parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)

    def test_the_optimizers_settings_stay_those_of_the_run(self, tmp_path):
        path = self.trained(tmp_path, weight_decay=0.0, adam_beta2=0.999).save_checkpoint(tmp_path / "saved")
        settings = {"lora_r": 4, "weight_decay": 0.1, "adam_beta2": 0.9, "lr_actor": 1e-4, "schedule": "constant"} | {
            "warmup_fraction": 0.0
        }
        other = build_run(small_config(tmp_path / "two", "LLMPPO", **RUN | settings | {"max_iterations": 1}))
        other.load_checkpoint(path)
        other.trainer.train()
        for group in other.trainer.optimizer.param_groups:
            assert (group["weight_decay"], group["betas"], group["lr"]) == (0.1, (0.9, 0.9), 1e-4)
        assert min(state["step"] for state in other.trainer.optimizer.state.values()) > 4, (
            "one iteration has four steps"
        )

    def test_an_optimizer_of_other_parameters_changes_nothing(self, tmp_path):
        settings = RUN | {"lora_r": 4, "max_iterations": 1}
        one = build_run(small_config(tmp_path / "one", **settings))
        one.trainer.train()
        other = build_run(small_config(tmp_path / "two", "LLMPPO", **settings))
        before = digest(other)
        with pytest.raises(
            CheckpointError, match=r"groups of \[28\] tensors; expected \[28, 30\].*load_optimizer=False"
        ):
            other.load_checkpoint(one.save_checkpoint(tmp_path / "saved"))
        assert digest(other) == before

    def test_lora_only_or_with_the_merged_model(self, tmp_path):
        run = self.trained(tmp_path)
        path = run.save_checkpoint(tmp_path / "saved", lora_only=False)
        assert (path / "merged" / "model.safetensors").exists()
        assert (path / "merged" / "tokenizer.json").exists()
        verify(path)

    def test_merged_settings_get_a_fresh_optimizer(self, tmp_path):
        path = self.trained(tmp_path).save_checkpoint(tmp_path / "saved")
        other = build_run(small_config(tmp_path / "two", "LLMPPO", **RUN, lora_r=8, max_iterations=1))
        other.load_checkpoint(path, merge_lora_configs=True)
        before = digest(other)
        other.trainer.train()
        assert digest(other) != before
        mine = {id(p) for p in other.models.actor_parameters() + other.models.critic_parameters()}
        assert {id(p) for group in other.trainer.optimizer.param_groups for p in group["params"]} == mine

    def test_a_damaged_one_is_refused(self, tmp_path):
        path = self.trained(tmp_path).save_checkpoint(tmp_path / "saved")
        (path / "actor" / "adapter_model.safetensors").write_bytes(b"")
        other = build_run(small_config(tmp_path / "two", "LLMPPO", **RUN, lora_r=4))
        with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is not what was saved"):
            other.load_checkpoint(path)

    def test_the_reference_is_refreshed(self, tmp_path):
        settings = {"lora_r": 4, "refresh_reference": 2, "max_iterations": 3, "keep_checkpoints": 9}
        run = build_run(small_config(tmp_path, "GRPO", **RUN | settings))
        run.trainer.train()
        second, third = (
            [load_file(path / role / "adapter_model.safetensors") for role in ("actor", "reference")]
            for path in run.trainer.checkpoints.rotation.checkpoints()[1:]
        )
        assert all(torch.equal(second[0][name], second[1][name]) for name in second[0])
        assert all(torch.equal(second[1][name], third[1][name]) for name in third[1])
        assert not all(torch.equal(third[0][name], third[1][name]) for name in third[0])

    def test_a_shared_trunk_is_trained_by_both(self, tmp_path):
        run = build_run(small_config(tmp_path, "LLMPPO", **RUN | {"critic_trunk": "shared", "max_iterations": 2}))
        run.trainer.train()
        assert len(run.models.critic_parameters()) == 2
        again = build_run(
            small_config(tmp_path, "LLMPPO", **RUN | {"critic_trunk": "shared", "max_iterations": 2}, resume=True)
        )
        assert digest(again) == digest(run)


class TestConfigChanges:
    def test_new_and_old_names_count(self):
        assert config_changes({"a": 1, "b": 2}, {"b": 2, "c": [3]}) == {"a": (1, None), "c": (None, [3])}


PHASES = {
    "rollout": ("torchrl_llm.modules.hf", "HFPolicy", "generate", 8),
    "update": ("torchrl_llm.trainers.update", "Update", "step", 6),
    "evaluation": ("torchrl_llm.envs.env", "GEMEnv", "_step", 12),
    "logging": ("torchrl_llm.trainers.trainer", "LLMTrainer", "save_if_due", 2),
    "saving": ("torchrl_llm.runs.states", "State", "save", 8),
    "publishing": ("torchrl.checkpoint", "CheckpointRotation", "prune", 2),
}
"""Where a run is killed: module, class and method that is called then, and before how many of its
calls, about two iterations' worth."""

SCRIPT = Path(__file__).with_name("killed_script.py")


def play(folder: Path, case: int, iterations: int, *kill: str, rows: int | None = None) -> str | None:
    """One process of the run: killed in a phase, or in mid-run, or left to end. Its digest, if it
    ended.

    Args:
        kill: the phase.
        rows: of the table of metrics; it is killed a moment after they have been written.
    """
    folder.mkdir(exist_ok=True)
    table, done = folder / "run" / "metrics.csv", None
    script = Script([SCRIPT, folder, case, iterations, *kill], folder / "process")
    try:
        if rows is None:
            done = script.wait(LIMIT)
            assert done is not None, (folder / "process.err").read_text()
        else:
            wait_until(lambda: script.wait(0.0) or (table.exists() and table.read_text().count("\n") > rows))
            time.sleep(random.uniform(0.0, 0.2))
    finally:
        script.kill()
    if done is None and (done := script.wait(LIMIT)).returncode == -signal.SIGKILL:
        return None
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.stdout.split()[1] if "digest" in done.stdout else None


@pytest.mark.slow
class TestKilled:
    """SIGKILL in every phase and at random moments; the run continues each time, and ends as the
    one that was left alone.

    ``KILLS`` is how often each case is killed; ``make test-resume`` kills 21 times in all.
    """

    @pytest.mark.parametrize("case", [0, *(pytest.param(case, marks=pytest.mark.extra) for case in (3, 4))])
    def test_the_same_bytes(self, tmp_path, case):
        kills = int(os.environ.get("KILLS", "1"))
        iterations = 3 + 2 * kills
        generator = torch.Generator().manual_seed(17 * case + kills)
        expected = play(tmp_path / "whole", case, iterations)
        phases = [*PHASES, None]
        deaths = 0
        for kill in range(kills):
            chance = float(torch.rand((), generator=generator))
            phase = phases[(kill + case) % len(phases)]
            if phase is None:
                ended = play(tmp_path / "killed", case, iterations, rows=int(iterations * (1 + chance) / 3))
            else:
                module, owner, name, most = PHASES[phase]
                ended = play(tmp_path / "killed", case, iterations, f"{module}:{owner}:{name}:{int(chance * most)}")
            deaths += ended is None
        assert deaths == kills
        assert play(tmp_path / "killed", case, iterations) == expected
        assert scalars(tmp_path / "killed" / "run") == scalars(tmp_path / "whole" / "run")
