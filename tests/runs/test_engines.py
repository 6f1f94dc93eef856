"""Where the engine of a run is, which share of a GPU it takes, and when it starts; vLLM is not
needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from small_runs import small_config
from test_sleep import Sleeper

from torchrl_llm.modules.vllm import settings as of_vllm
from torchrl_llm.modules.vllm import start
from torchrl_llm.runs import ConfigError, RunSettings, build, build_run, settled
from torchrl_llm.runs.identity import config_changes
from torchrl_llm.runs.memory import trainer_memory
from torchrl_llm.testing.pretended_gpu import pretended_gpu
from torchrl_llm.testing.tiny import load_tiny_model

ONE, TWO = SimpleNamespace(world_size=1), SimpleNamespace(world_size=2)


def config_of(**settings):
    return RunSettings.from_values(policy="vllm", **settings)


class TestShare:
    """Of the memory of a GPU, whose other user is the trainer."""

    @pytest.mark.parametrize(
        ("device", "settings", "expected"),
        [
            ("cuda:0", {}, 0.4),
            ("cuda", {"sleep_mode": True}, 0.4),
            ("cuda:0", {"gpu_memory_utilization": 0.7}, 0.7),
            (None, {"collector": "ray", "ray_worker_gpus": 1.0}, 0.9),
            (None, {"collector": "ray", "ray_worker_gpus": 2.0}, 0.9),
            (None, {"collector": "ray", "ray_worker_gpus": 0.25}, 0.225),  # four workers on a GPU
            (None, {"collector": "ray", "ray_worker_gpus": 0.25, "gpu_memory_utilization": 0.2}, 0.2),
        ],
    )
    def test_leaves_room_for_whoever_else_is_there(self, device, settings, expected):
        place = None if device is None else torch.device(device)
        config = config_of(**settings)
        assert config.engine.share(config, place) == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("settings", "trainers"), [({}, 0.6), ({"sleep_mode": True}, 1.0), ({"weight_sync": "nccl"}, 1.0)]
    )
    def test_the_trainer_counts_with_the_rest(self, monkeypatch, settings, trainers):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (900, 1000))
        _, total = trainer_memory(config_of(**settings), torch.device("cuda", 0))
        assert total == pytest.approx(1000 * trainers)

    @pytest.mark.parametrize(
        ("settings", "served"),
        [
            ({"dtype": "bfloat16"}, True),
            ({"dtype": "float32"}, False),
            ({"dtype": "float32", "engine_dtype": "bfloat16"}, True),
        ],
    )
    def test_adapters_are_served_on_a_gpu_in_half_precision(self, settings, served):
        """vLLM 0.32 fails an assertion in its kernels otherwise."""
        with pretended_gpu():
            config = config_of(lora_r=8, **settings)
            assert config.engine.serves_adapter(config) is served

    def test_more_than_is_free_is_refused_with_the_share_that_would_do(self, monkeypatch):
        free, emptied = {0: 70, 1: 35}, []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu] * 2**30, 80 * 2**30))
        start._check_memory([0], 0.8)
        with pytest.raises(
            ValueError, match=r"is 0\.5, 40\.0 of the 80\.0 GiB of GPU 1, of which 35\.0 .* at most 0\.41"
        ):
            start._check_memory([0, 1], 0.5)
        start._check_memory([0, 1], 0.41)
        assert emptied  # what PyTorch keeps counts as free


class TestGPUs:
    @pytest.mark.parametrize(
        ("device", "settings", "expected"),
        [
            ("cuda:0", {}, [0]),
            ("cuda:1", {}, [1]),
            ("cuda:7", {"engine_process": True}, [7]),
            ("cuda", {"tensor_parallel_size": 4}, [0, 1, 2, 3]),
            ("cuda", {"weight_sync": "nccl", "tensor_parallel_size": 2}, [1, 2]),
            ("cpu", {}, None),
            (None, {"collector": "ray"}, None),
        ],
    )
    def test_each_process_has_its_engine_on_its_own(self, device, settings, expected):
        place = None if device is None else torch.device(device)
        assert config_of(**settings).engine.gpus(place) == expected

    def test_the_engine_is_started_there_with_its_share(self, monkeypatch):
        given = []
        monkeypatch.setattr(of_vllm, "VLLMPolicy", lambda *_, **options: given.append(options))
        build.start_engine(config_of(model_path="tiny"), None, None, TWO, torch.device("cuda", 1))
        build.start_engine(config_of(model_path="tiny", weight_sync="nccl"), None, None, TWO, torch.device("cuda", 1))
        build.start_engine(config_of(model_path="tiny", weight_sync="ipc"), None, None, TWO, torch.device("cuda", 1))
        names = ("device_ids", "gpu_memory_utilization", "weight_transfer", "multiprocess")
        assert [[each[name] for name in names] for each in given] == [
            [[1], 0.4, None, False],
            [[3], 0.9, "nccl", True],  # after the trainers' GPUs
            [[1], 0.4, "ipc", True],
        ]

    def test_engines_of_several_processes_on_several_gpus_are_refused(self):
        with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2.*2 training processes.*expected 1"):
            build.start_engine(config_of(tensor_parallel_size=2), None, None, TWO, torch.device("cuda", 1))

    @pytest.mark.parametrize("settings", [{"policy": "hf"}, {"policy": "vllm", "collector": "ray"}])
    def test_nothing_starts_where_the_policy_is_elsewhere(self, settings):
        assert build.start_engine(RunSettings.from_values(**settings), None, None, ONE, torch.device("cpu")) is None


class TestSlots:
    """How many environments run side by side where no number is given."""

    @pytest.mark.parametrize(
        ("settings", "processes", "expected"),
        [
            ({"policy": "hf", "batch_size": 512}, 1, 16),
            ({"policy": "hf", "batch_size": 96, "group_size": 12, "algo": "GRPO"}, 1, 12),
            ({"batch_size": 64}, 1, 64),
            ({"batch_size": 1024}, 1, 256),
            ({"batch_size": 1024}, 8, 128),
            ({"batch_size": 1200, "group_size": 12, "algo": "GRPO"}, 1, 252),
            ({"batch_size": 128, "collector": "ray", "ray_workers": 4}, 2, 16),
            ({"batch_size": 16, "group_size": 16, "algo": "GRPO", "collector": "ray"}, 1, 16),
        ],
    )
    def test_an_engine_gets_as_many_as_there_are_episodes(self, settings, processes, expected):
        config = RunSettings.from_values(**{"policy": "vllm"} | settings)
        pair = SimpleNamespace(world_size=processes)
        assert settled.with_num_envs(config, None, pair).env.num_envs == expected
        assert config.slots == config.default_num_envs(1)

    def test_a_given_number_counts_and_a_resumed_run_keeps_its_own(self):
        given, accepted = config_of(num_envs=8), config_of(accept_changes=["num_envs"], resume=True)
        assert settled.with_num_envs(given, {"num_envs": 16}, ONE) is given
        assert settled.with_num_envs(config_of(), {"num_envs": 16}, ONE).env.num_envs == 16
        assert settled.with_num_envs(accepted, {"num_envs": 16}, ONE).env.num_envs == 32
        assert not config_changes({"num_envs": 16}, {"num_envs": config_of().env.num_envs})


def test_the_engine_starts_before_the_model_is_loaded_and_sleeps_meanwhile(tmp_path, monkeypatch):
    made, asleep, load = [], [], build.load_models

    def make(path, tokenizer, sampling, **options):
        made.append(Sleeper(load_tiny_model(), tokenizer, sampling))
        return made[-1]

    def loaded(*args, **options):
        asleep.append([engine.asleep for engine in made])
        return load(*args, **options)

    monkeypatch.setattr(of_vllm, "VLLMPolicy", make)
    monkeypatch.setattr(build, "load_models", loaded)
    run = build_run(small_config(tmp_path, policy="vllm", sleep_mode=True))
    run.close()
    assert asleep == [[True]]
    assert not made[0].asleep, "the first sync has woken it"
