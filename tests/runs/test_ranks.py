"""Training on several processes is the training of one: real processes, gloo, DDP and FSDP2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from socket import socket
from types import SimpleNamespace
from typing import ClassVar

import pytest
import ranks_run
import torch
from accelerate.commands import launch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from processes import Script
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from waiting import LIMIT, wait_until

from torchrl_llm import keys
from torchrl_llm.runs import ConfigError, RunSettings
from torchrl_llm.runs.build import check_sharding
from torchrl_llm.runs.checkpoint_files import verify
from torchrl_llm.runs.states import sampled_further
from torchrl_llm.utils.accelerated import check_plugin

SCRIPT = Path(__file__).with_name("ranks_run.py")
CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
BOTH = pytest.mark.parametrize("how", ["ddp", pytest.param("fsdp2", marks=pytest.mark.extra)])


def start(out, what, *names, how="ddp", device="cpu"):
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(CONFIGS / f"accelerate_{how}.yaml"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RANKS_RUN_DEVICE": device}
    command += [str(SCRIPT), str(out), what, *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)


def forked(out, what, *names, how):
    """The ranks without their launcher; once more if another process took their port before they
    did."""
    try:
        _forked(out, what, *names, how=how)
    except AssertionError as error:
        if "EADDRINUSE" not in str(error):
            raise
        _forked(out, what, *names, how=how)


def _forked(out, what, *names, how):
    """The ranks, with the variables that their launcher would set; whoever fails first ends
    both."""
    arguments = ["--config_file", str(CONFIGS / f"accelerate_{how}.yaml"), str(SCRIPT)]
    given, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(arguments))
    common = prepare_multi_gpu_env(given) | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    own = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    scripts = [Script([SCRIPT, out, what, *names], f"{out}-{what}.{rank}", each) for rank, each in enumerate(own)]
    try:

        def ended():
            done = [script.wait(0.1) for script in scripts]  # and again, however long it takes
            failed = [each.stderr for each in done if each is not None and each.returncode]
            assert not failed, failed[0][-5000:]
            return None not in done

        wait_until(ended, f"the end of {what}")
    finally:
        for script in scripts:
            script.kill()


def results(out, what, *names, how="ddp", device="cpu"):
    if device == "cpu":
        out.parent.mkdir(exist_ok=True)
        forked(out, what, *names, how=how)
    else:
        done = start(out, what, *names, how=how, device=device)
        assert done.returncode == 0, done.stderr[-5000:]
    return [torch.load(f"{out}-{what}.{rank}.pt", weights_only=False) for rank in range(2)]


# transformers' RMSNorm computes in float32, of float64 models too, and ranks share other prefixes
# than one process.
ROUNDING = 1e-8


def difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).detach().abs().max()) for name in a)


def same_figures(mine, theirs):
    # What a collector counts is of its own process.
    names = {name for name in mine if not name.startswith(("time/", "data/padding", "policy/ESS"))}
    for name in names - {"critic/explained_variance", "critic/update_explained_variance"}:
        assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6, nan_ok=True), name


def collector_state(worker, num_workers, num_sampled, *, group_size=4, **rest):
    task_sampler = {"worker": worker, "num_workers": num_workers, "group_size": group_size, "success": None}
    task_sampler["stages"] = []
    return {
        "env_state_dict": {"task_sampler": task_sampler, "num_sampled": num_sampled},
        "iter": -1,
        "frames": 0,
    } | rest


class TestRedealt:
    @pytest.mark.parametrize(
        ("dealt", "workers", "first"),
        [
            ([16, 16], 1, 8),
            ([32], 2, 8),
            ([16, 20], 1, 10),
            ([20, 16], 1, 9),
            ([20, 16], 4, 12),
            ([18, 16], 1, 9),
            ([0, 0], 3, 0),
        ],
    )
    def test_no_group_is_dealt_twice(self, dealt, workers, first):
        old = [collector_state(worker, len(dealt), count, iter=3) for worker, count in enumerate(dealt)]
        played = {w + r * len(dealt) for w, count in enumerate(dealt) for r in range(-(-count // 4))}
        new = [sampled_further(old, collector_state(worker, workers, 0)) for worker in range(workers)]
        begins = [s["env_state_dict"]["num_sampled"] // 4 * workers + w for w, s in enumerate(new)]
        assert begins == list(range(first, first + workers))
        assert not [group for group in played if group >= first]
        assert all(state["iter"] == 3 for state in new)

    def test_what_was_learned_goes_on(self):
        old = collector_state(0, 1, 8)
        old["env_state_dict"]["task_sampler"]["success"] = (0.25, 0.5)
        assert sampled_further([old], collector_state(1, 2, 0))["env_state_dict"]["task_sampler"]["success"] == (
            0.25,
            0.5,
        )

    def test_a_transformed_environment(self):
        old, new = collector_state(0, 1, 8), collector_state(1, 2, 0)
        for state in (old, new):
            state["env_state_dict"] = {"base": state["env_state_dict"], "transform": {}}
        assert sampled_further([old], new)["env_state_dict"]["base"]["num_sampled"] == 4


class TestSettings:
    """What accelerate was told has to be what is done."""

    @pytest.fixture(autouse=True)
    def plugin(self, monkeypatch):
        for name, value in {
            "VERSION": 2,
            "RESHARD_AFTER_FORWARD": "true",
            "CPU_RAM_EFFICIENT_LOADING": "false",
        }.items():
            monkeypatch.setenv(f"FSDP_{name}", str(value))

    def test_the_shipped_ones_are_accepted(self):
        check_plugin(FullyShardedDataParallelPlugin())

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("version", 1),
            ("offload_params", "true"),
            ("cpu_ram_efficient_loading", "true"),
            ("activation_checkpointing", "true"),
        ],
    )
    def test_others_are_refused(self, monkeypatch, name, value):
        monkeypatch.setenv(f"FSDP_{name.upper()}", str(value))
        if name == "version":
            monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "FULL_SHARD")
        with pytest.raises(ConfigError, match=f"fsdp_{name} is not supported"):
            check_plugin(FullyShardedDataParallelPlugin())

    @pytest.mark.parametrize(
        "given",
        [
            {"compile": True},
            {"compile_decode": True},
            {"export_merged": True},
            {"quantization": "nf4"},
            {"offload_base": True, "policy": "vllm"},
        ],
        ids=lambda given: next(iter(given)),
    )
    def test_settings_that_sharded_weights_do_not_go_with(self, tmp_path, given):
        config = RunSettings.from_values(
            algo="LLMPPO", model_path="tiny", max_model_len=256, output_dir=tmp_path, **given
        )
        check_sharding(config, SimpleNamespace(sharded=False, world_size=2))
        with pytest.raises(ConfigError, match=f"{next(iter(given))} is .* over 2 processes"):
            check_sharding(config, SimpleNamespace(sharded=True, world_size=2))


@pytest.mark.slow
class TestReplayed:
    """The same rows, learned from by one process and by two."""

    RUNS: ClassVar = {
        "ddp": ["LLMPPO-LoRA", "LLMREINFORCE", "GRPO", "own-parameters"],
        "fsdp2": [name for name in ranks_run.REPLAYED if name != "own-parameters"],
    }

    @pytest.fixture(scope="class")
    def where(self, tmp_path_factory):
        where = tmp_path_factory.mktemp("replayed")
        torch.save(ranks_run.play(where / "played"), where / "rows.pt")
        return where

    @pytest.fixture(scope="class")
    def one(self, where):
        rows = torch.load(where / "rows.pt", weights_only=False)
        return {name: ranks_run.replay(where / name, rows, **given) for name, given in ranks_run.REPLAYED.items()}

    @pytest.fixture(scope="class")
    def two(self, where):
        @cache
        def replayed(how):
            (where / how).mkdir()
            shutil.copy(where / "rows.pt", where / how)
            return results(where / how, "replay", *self.RUNS[how], how=how)

        return replayed

    @pytest.mark.parametrize(("how", "name"), [(how, name) for how, names in RUNS.items() for name in names])
    def test_gradient_and_weights_are_those_of_one_process(self, one, two, how, name):
        alone, (first, second) = one[name], [result[name] for result in two(how)]
        assert [each["sharded"] for each in (alone, first, second)] == [False] + 2 * [how == "fsdp2"]
        assert max(float(gradient.abs().max()) for gradient in alone["gradient"].values()) > 1e-4
        for what in ("gradient", "weights"):
            assert difference(first[what], second[what]) == 0
            assert difference(alone[what], first[what]) < 1e-9
        same_figures(alone["metrics"], first["metrics"])

    def test_parameters_of_a_loss_are_trained(self, one):
        assert abs(one["own-parameters"]["gradient"]["bias"]) > 1e-4
        assert one["own-parameters"]["metrics"]["optim/grad_norm_loss"] > 0

    def test_a_step_was_shortened(self, one):
        assert one["LLMREINFORCE"]["metrics"]["optim/step_share"] < 1

    def test_weights_moved(self, one):
        for name in ("LLMREINFORCE", "GRPO-LoRA"):
            moved = [value for key, value in one[name]["weights"].items() if "lora_B" in key]
            assert max(float(value.detach().abs().max()) for value in moved) > 1e-3


@pytest.mark.extra
class TestLaws:
    """Whole runs, in which every process plays its own conversations."""

    RUNS: ClassVar = {
        "ddp": ["LLMPPO", "LLMREINFORCE", "GRPO", "thinking", "trees", "vine", "target_kl", "SFT", "float32", "uneven"],
        "fsdp2": ["LLMPPO", "LoRA", "thinking", "uneven", "bfloat16"],
    }

    @pytest.fixture(scope="class")
    def one(self, tmp_path_factory):
        where = tmp_path_factory.mktemp("one")
        given = ranks_run.LAWS | {"uneven": ranks_run.UNEVEN}
        return {name: ranks_run.train(where / name, **settings) for name, settings in given.items()}

    @pytest.fixture(scope="class")
    def two(self, tmp_path_factory):
        where = tmp_path_factory.mktemp("two")
        return cache(lambda how: results(where / how, "laws", *self.RUNS[how], how=how))

    @pytest.mark.parametrize(
        ("how", "name"),
        [
            ("ddp", "LLMPPO"),
            ("ddp", "LLMREINFORCE"),
            ("ddp", "GRPO"),
            ("ddp", "thinking"),
            ("ddp", "trees"),
            ("ddp", "vine"),
            ("ddp", "target_kl"),
            ("ddp", "uneven"),
            ("ddp", "SFT"),
            ("fsdp2", "LLMPPO"),
            ("fsdp2", "LoRA"),
            ("fsdp2", "thinking"),
        ],
    )
    def test_weights_after_three_iterations(self, one, two, how, name):
        alone, (first, second) = one[name], [result[name] for result in two(how)]
        assert [each["ranks"] for each in (alone, first, second)] == [1, 2, 2]
        assert difference(first["weights"], second["weights"]) == 0
        assert difference(alone["weights"], first["weights"]) < 1e-9
        for mine, theirs in zip(alone["history"], second["history"], strict=True):
            same_figures(mine, theirs)

    def test_weights_moved(self, one):
        assert difference(one["LLMREINFORCE"]["weights"], one["GRPO"]["weights"]) > 1e-3

    def test_turns_that_think_are_segments(self, one):
        mask = one["thinking"]["batches"][keys.ATTENTION_MASK].int()
        assert ((mask.diff(dim=-1) > 0).sum(-1) == 2).all()  # two gaps: three segments

    def test_steps_were_shortened(self, one):
        assert all(metrics["optim/step_share"] < 1 for metrics in one["target_kl"]["history"])

    @pytest.mark.parametrize(
        ("how", "name"),
        [("ddp", "GRPO"), ("ddp", "float32"), ("ddp", "LLMREINFORCE"), ("ddp", "SFT"), ("fsdp2", "LoRA")],
    )
    def test_the_ranks_play_the_tasks_of_one_process(self, one, two, how, name):
        alone, ranks = one[name]["batches"], [result[name]["batches"] for result in two(how)]
        if name == "GRPO":
            assert all((rows[keys.GROUP_ID].unique(return_counts=True)[1] % 4 == 0).all() for rows in ranks)
        assert not set(ranks[0][keys.GROUP_ID].tolist()) & set(ranks[1][keys.GROUP_ID].tolist())
        said = [
            {
                int(row[keys.EPISODE_ID]): row[keys.TOKENS][row[keys.ATTENTION_MASK]].tolist()
                for rows in batches
                for row in rows
            }
            for batches in ([alone], ranks)
        ]
        assert said[0] == said[1]

    def test_a_gradient_in_float32(self, one, two):
        alone, first = one["float32"], two("ddp")[0]["float32"]
        assert alone["history"][0]["optim/grad_norm_actor"] == pytest.approx(
            first["history"][0]["optim/grad_norm_actor"], rel=1e-5
        )

    @pytest.mark.parametrize(("how", "name"), [("ddp", "GRPO"), ("fsdp2", "LLMPPO"), ("fsdp2", "LoRA")])
    def test_the_first_rank_writes_the_files_of_one_process(self, one, two, how, name):
        def files(result):
            return [file for file in result["files"] if "/components/collector/" not in file]

        assert files(two(how)[0][name]) == files(one[name])

    @BOTH
    def test_ranks_with_less_or_nothing_to_learn_from_stay_in_step(self, two, how):
        first, second = (result["uneven"] for result in two(how))
        assert difference(first["weights"], second["weights"]) == 0
        assert 0 in first["spoken"] + second["spoken"]
        assert any(a != b and a and b for a, b in zip(first["parts"], second["parts"], strict=True))

    def test_what_trains_is_float32_on_a_base_in_bfloat16(self, two):
        first, second = (result["bfloat16"] for result in two("fsdp2"))
        assert difference(first["weights"], second["weights"]) == 0
        dtypes = {name: value.dtype for name, value in first["weights"].items()}
        assert dtypes["critic_network.value_head.weight"] == torch.float32
        assert set(dtypes.values()) <= {torch.float32, torch.bfloat16}
        assert {dtype for name, dtype in dtypes.items() if "lora_" in name} == {torch.float32}


@pytest.mark.extra
class TestParts:
    """What may be chosen (a loss, an estimator, groups to learn from) is the same for two processes
    as for one."""

    @pytest.fixture(scope="class")
    def one(self, tmp_path_factory):
        where = tmp_path_factory.mktemp("alone")
        return {name: ranks_run.run_parts(where, name) for name in ranks_run.PARTS}

    @pytest.fixture(scope="class")
    def two(self, tmp_path_factory):
        where = tmp_path_factory.mktemp("parts")
        return cache(lambda how: results(where / how, "parts", how=how))

    @BOTH
    def test_groups_are_chosen_over_all_ranks(self, one, two, how):
        alone, (first, second) = one["dynamic"], [result["dynamic"] for result in two(how)]
        assert alone["history"][0]["data/frac_nonzero_variance"] < 1, "some groups are left out"
        for mine, theirs in zip(alone["history"], first["history"], strict=True):
            assert mine["data/frac_nonzero_variance"] == theirs["data/frac_nonzero_variance"]
        learned = [
            set(batches[keys.EPISODE_ID].tolist())
            for batches in (result["batches"] for result in (alone, first, second))
        ]
        assert learned[0] == learned[1] | learned[2]
        assert difference(first["weights"], second["weights"]) == 0
        assert difference(alone["weights"], first["weights"]) < 1e-9

    def test_one_rank_may_have_all_that_teaches(self, one, two):
        """The other is lent a whole group, without weight."""
        group_size = ranks_run.COMMON["group_size"]
        assert [each["dynamic"]["chosen"] for each in (one, *two("ddp"))] == [(16, 16), (16, 16), (0, group_size)]

    @BOTH
    def test_all_episodes_may_be_left_out(self, one, two, how):
        """Though a rank that had no group to learn from was lent rows, which are not overlong."""
        assert [each["overlong"] for each in (one, *two(how))] == 3 * [{"metrics": {}, "moved": 0.0}]

    @BOTH
    def test_a_loss_and_an_estimator_of_ones_own(self, one, two, how):
        alone, (first, second) = one["later"], [result["later"] for result in two(how)]
        assert min(each["calls"] for each in (alone, first, second)) >= 4
        assert difference(first["weights"], second["weights"]) == 0
        assert difference(alone["weights"], first["weights"]) < ROUNDING
        same_figures(alone["metrics"], first["metrics"])

    @BOTH
    def test_all_skip_a_step_whose_gradient_is_not_finite_on_one(self, one, two, how):
        alone, (first, second) = one["broken"], [result["broken"] for result in two(how)]
        assert [each["metrics"]["optim/skipped_steps"] for each in (alone, first, second)] == [1.0] * 3
        assert difference(first["weights"], second["weights"]) == 0
        assert difference(alone["weights"], first["weights"]) < ROUNDING
        assert difference(one["later"]["weights"], alone["weights"]) > 1e-6

    def test_counts_are_added_up_and_other_metrics_of_a_collector_are_means(self, one, two):
        expected = {"data/faults": 4.0, "data/own_mean": 4.5, "own/mean": 0.5}
        assert [each["later"]["counted"] for each in two("ddp")] == [expected, expected]
        assert one["later"]["counted"] == {"data/faults": 2.0, "data/own_mean": 5.0, "own/mean": 0.5}

    def test_metrics_read_the_same_keys(self, one, two):
        assert [each["later"]["seen"] for each in (one, *two("ddp"))] == 3 * [{keys.EPISODE_ID, keys.ATTENTION_MASK}]


@pytest.mark.extra
class TestHalfPrecision:
    def test_sharded_weights_and_gradients_stay_in_float32(self, tmp_path):
        first, second = (result["mixed"] for result in results(tmp_path / "run", "half", "mixed", how="fsdp2"))
        assert difference(first["weights"], second["weights"]) == 0
        assert {value.dtype for value in first["weights"].values()} == {torch.float32}
        assert all(metrics["policy/log_prob_gap"] < 0.01 for metrics in first["history"])


@pytest.mark.slow
class TestResume:
    @pytest.fixture(scope="class")
    def where(self, tmp_path_factory):
        return tmp_path_factory.mktemp("resume")

    @pytest.fixture(scope="class")
    def ddp(self, where):
        ranks_run.train(where / "ddp" / "others", max_iterations=1, **ranks_run.RESUMED)
        return results(where / "ddp", "resume")

    @pytest.fixture(scope="class")
    def fsdp2(self, where, ddp):
        # What DDP began: the first of its two checkpoints.
        shutil.copytree(where / "ddp" / "parts", where / "fsdp2" / "others", symlinks=True)
        latest = max((where / "fsdp2" / "others" / "checkpoints").glob("checkpoint-*"))
        shutil.rmtree(latest)
        return results(where / "fsdp2", "resume", how="fsdp2")

    @BOTH
    def test_as_many_ranks_go_on_in_the_same_bytes(self, how, request):
        first = request.getfixturevalue(how)[0]
        assert first["parts"]["history"][0]["rollout/episodes"] == 16
        assert difference(first["whole"]["weights"], first["parts"]["weights"]) == 0

    @pytest.mark.extra
    def test_sharded_ranks_go_on_with_what_others_began(self, ddp, fsdp2):
        assert fsdp2[0]["others"]["sharded"]
        assert len(fsdp2[0]["others"]["history"]) == 2
        assert difference(ddp[0]["whole"]["weights"], ddp[0]["others"]["weights"]) > 0
        assert difference(ddp[0]["whole"]["weights"], fsdp2[0]["others"]["weights"]) < 1e-4

    def test_two_ranks_go_on_with_what_one_began(self, ddp):
        history = ddp[0]["others"]["history"]
        assert [metrics["rollout/episodes"] for metrics in history] == [16, 32]
        played = [set(result["others"]["batches"][keys.EPISODE_ID].tolist()) for result in ddp]
        assert played[0] | played[1] == set(range(16, 32))
        assert not played[0] & played[1]

    @BOTH
    def test_one_process_goes_on_with_what_two_began(self, where, how, request, caplog):
        first = request.getfixturevalue(how)[0]["parts"]
        resumed = ranks_run.RESUMED | {"max_iterations": 3, "accept_changes": ["max_iterations"]}
        run = ranks_run.build(where / how / "parts", **resumed)
        assert "tasks continue from group 8, for other processes" in caplog.text
        assert difference(ranks_run.whole_weights(run.trainer), first["weights"]) == 0
        mine, theirs = run.trainer.optimizer.state_dict(), first["optimizer"]
        assert mine["param_groups"] == theirs["param_groups"]
        for index, state in theirs["state"].items():
            assert all(torch.equal(mine["state"][index][name], value) for name, value in state.items())
        run.trainer.policy.drop_cache()
        rows = run.trainer.collect(iter(run.trainer.collector))
        assert sorted(rows[keys.EPISODE_ID].tolist()) == list(range(32, 48))
        run.close()

    @pytest.mark.extra
    @BOTH
    def test_thinking_goes_on_with_another_number_of_ranks(self, where, how):
        """What one process began, two go on with, and what two began, one; the same number in the
        same bytes."""
        out, given = where / f"thinking-{how}", ranks_run.RESUMED | ranks_run.THINKING
        ranks_run.train(out / "others", max_iterations=1, **given)
        two = results(out, "thinking", how=how)
        assert difference(two[0]["whole"]["weights"], two[0]["parts"]["weights"]) == 0
        assert [each["rollout/episodes"] for each in two[0]["others"]["history"]] == [16, 32]
        resumed = given | {"max_iterations": 3, "accept_changes": ["max_iterations"]}
        run = ranks_run.build(out / "parts", **resumed)
        assert difference(ranks_run.whole_weights(run.trainer), two[0]["parts"]["weights"]) == 0
        *_, metrics = run.trainer.train()
        assert metrics["rollout/turns"] == 3

    @pytest.mark.extra
    def test_transformers_loads_what_sharded_ranks_saved(self, where, fsdp2):
        path = max((where / "fsdp2" / "whole" / "checkpoints").glob("checkpoint-*"))
        verify(path)
        weights = fsdp2[0]["whole"]["weights"]
        model = AutoModelForCausalLM.from_pretrained(path / "actor")
        for name, value in model.named_parameters():
            assert torch.equal(value, weights[f"actor_network.model.{name}"]), name
        head = load_file(path / "critic" / "value_head.safetensors")
        assert torch.equal(head["weight"], weights["critic_network.value_head.weight"])

    @pytest.mark.extra
    @BOTH
    def test_a_rank_that_dies_ends_the_run_with_an_error(self, tmp_path, how):
        done = start(tmp_path / "run", "dies", how=how)
        assert done.returncode != 0
        assert "SIGKILL" in done.stderr or "exitcode: -9" in done.stderr or "Signal 9" in done.stderr
        assert list((tmp_path / "run" / "checkpoints").glob("checkpoint-*"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 CUDA devices; {torch.cuda.device_count()} found")
class TestGPUs:
    """The same over NCCL."""

    @pytest.fixture(scope="class")
    def where(self, tmp_path_factory):
        where = tmp_path_factory.mktemp("gpus")
        torch.save(ranks_run.play(where / "played"), where / "rows.pt")
        return where

    @BOTH
    def test_gradient_and_weights_are_those_of_one_process_on_the_cpu(self, where, how):
        rows = torch.load(where / "rows.pt", weights_only=False)
        (where / how).mkdir()
        shutil.copy(where / "rows.pt", where / how)
        ranks = results(where / how, "replay", *ranks_run.REPLAYED, how=how, device="cuda")
        for name, given in ranks_run.REPLAYED.items():
            alone = ranks_run.replay(where / how / "one" / name, rows, **given)
            for what in ("gradient", "weights"):
                assert difference(ranks[0][name][what], ranks[1][name][what]) == 0
                assert difference(alone[what], ranks[0][name][what]) < 1e-6

    @BOTH
    @pytest.mark.parametrize("name", ["bfloat16", "mixed", "LoRA-bfloat16"])
    def test_half_precision(self, tmp_path, how, name):
        first, second = (result[name] for result in results(tmp_path / "run", "half", name, how=how, device="cuda"))
        assert difference(first["weights"], second["weights"]) == 0
        assert len(first["history"]) == 2
        for metrics in first["history"]:
            assert 0 < metrics["optim/grad_norm_actor"] < 1e3
            assert metrics["policy/log_prob_gap"] < 0.1
