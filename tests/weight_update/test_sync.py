"""Weight sync into a real engine: every method brings the trained log-probs, and no failure is
played on. Needs vLLM."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.trainers import UpdateWeights
from trained import LORA, gap, make_models, play, scores, train

from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import AdapterError, EngineError, SamplingConfig, TurnRequest
from torchrl_llm.modules.merging import why_not_servable
from torchrl_llm.modules.weights import adapter_of
from torchrl_llm.testing.tiny import tiny_model_path
from torchrl_llm.weight_update import EngineWeightSync, WeightSyncError

pytest.importorskip("vllm", reason="needs vLLM: run make test-vllm")
from torchrl_llm.modules.vllm import VLLMPolicy, weights

pytestmark = pytest.mark.vllm

WHOLE = {"lora": None}
SETUPS = {
    "lora merged": ({}, "reload"),
    "lora served": ({}, "adapter"),
    "lora merged, by the way for other processes": ({}, "shared_memory"),
    "whole model": (WHOLE, "reload"),
    "whole model, by the way for other processes": (WHOLE, "shared_memory"),
}
TIED = pytest.mark.parametrize("path", ["tied"], indirect=True)


def shared_files() -> list[Path]:
    return list(Path("/dev/shm").glob("torchrl_llm-*"))


class TestSync:
    @pytest.mark.parametrize(("options", "method"), SETUPS.values(), ids=SETUPS)
    def test_brings_the_trained_log_probs(self, path, make_policy, options, method):
        policy, models = make_policy(), make_models(path, **options)
        sync = EngineWeightSync(models.model, models.adapter, policy=policy, method=method)
        for seed in range(3):
            train(models, seed)
            assert gap(policy, models) > 1e-3
            sync()
            assert gap(policy, models) <= 1e-5
        assert policy.policy_version == 3
        assert sync.parity_gap <= 1e-5
        assert not shared_files()

    @pytest.mark.parametrize("fields", [{"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"q_proj": 2}}])
    @TIED
    def test_brings_other_kinds_of_lora(self, path, make_policy, fields):
        policy, models = make_policy(), make_models(path, lora=LORA | fields)
        train(models)
        EngineWeightSync(models.model, models.adapter, policy=policy)()
        assert gap(policy, models) <= 1e-5

    @pytest.mark.parametrize("fields", [{"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}])
    @TIED
    def test_serves_other_kinds_of_lora(self, path, make_policy, fields):
        policy, models = make_policy(), make_models(path, lora=LORA | fields)
        train(models)
        EngineWeightSync(models.model, models.adapter, policy=policy, method="adapter")()
        assert gap(policy, models) <= 1e-5

    @pytest.mark.parametrize("method", ["reload", "adapter"])
    @TIED
    def test_leaves_the_trained_model_as_it_is(self, path, make_policy, method):
        policy, models = make_policy(), make_models(path)
        train(models)
        before = {name: value.clone() for name, value in models.model.state_dict().items()}
        sync = EngineWeightSync(models.model, models.adapter, policy=policy, method=method)
        sync(), sync()
        after = models.model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())

    @TIED
    def test_leaves_the_global_generators_as_they_are(self, path, make_policy):
        policy, models = make_policy(), make_models(path)
        sync = EngineWeightSync(models.model, models.adapter, policy=policy)
        before, numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
        sync()
        assert torch.equal(torch.get_rng_state(), before)
        assert (np.random.get_state()[1] == numpy).all()

    @TIED
    def test_one_adapter_is_left_whatever_the_number_of_syncs(self, path, make_policy, llm):
        policy, models = make_policy(), make_models(path)
        sync = EngineWeightSync(models.model, models.adapter, policy=policy, method="adapter")
        names = set()
        for _ in range(3):
            sync()
            names.add(policy.lora_request.lora_name)
        assert len(names) == 3
        assert len(llm.llm_engine.list_loras()) == 1


class TestInFlight:
    @pytest.mark.parametrize("method", ["reload", "adapter", "shared_memory"])
    @TIED
    def test_each_token_has_the_weights_that_it_is_stamped_with(self, path, make_policy, method):
        policy = make_policy(max_output_tokens=16)
        old, new = make_models(path), make_models(path)
        train(new, 1)
        EngineWeightSync(old.model, old.adapter, policy=policy, method=method)()
        sync = EngineWeightSync(new.model, new.adapter, policy=policy, method=method)
        prompts = torch.randint(5, 100, (3, 70), generator=torch.Generator().manual_seed(1))
        for slot, prompt in enumerate(prompts.numpy()):
            policy.submit(TurnRequest(slot, prompt, slot, 0))
        for _ in range(6):
            assert not policy.poll()
        sync()
        answers = []
        while policy.pending:
            answers += policy.poll()
        answers.sort(key=lambda answer: answer.slot)
        stacked = SimpleNamespace(
            tokens=torch.tensor(np.stack([a.tokens for a in answers])), lengths=torch.full((3,), 16)
        )
        versions = torch.tensor(np.stack([a.versions for a in answers]))
        log_probs = torch.tensor(np.stack([a.log_probs for a in answers]))
        assert versions.unique().tolist() == [1, 2]
        assert (versions.diff() >= 0).all()
        assert ((versions == 1).sum(1) >= 5).all()
        before, after = scores(old, prompts, stacked), scores(new, prompts, stacked)
        assert ((log_probs - torch.where(versions == 1, before, after)).abs() <= 1e-5).all()
        assert (before - after).abs().max() > 1e-2

    @TIED
    def test_turns_go_on_after_a_sync_that_failed_and_one_that_did_not(self, path, make_policy):
        policy, models = make_policy(max_output_tokens=16), make_models(path)
        sync = EngineWeightSync(models.model, models.adapter, policy=policy)
        sync()
        policy.submit(TurnRequest(0, np.arange(5, 75), 0, 0))
        policy.poll(), policy.poll()
        with broken(models), pytest.raises(WeightSyncError):
            sync()
        sync()
        answers = []
        while policy.pending:
            answers += policy.poll()
        assert set(answers[0].versions.tolist()) == {1, 2}
        prompt = torch.arange(5, 75)[None]
        answer = SimpleNamespace(tokens=torch.tensor(answers[0].tokens)[None], lengths=torch.tensor([16]))
        assert (scores(models, prompt, answer) - torch.tensor(answers[0].log_probs)).abs().max() <= 1e-5


class broken:
    """Inside, the last layer of the model cannot be merged, so a sync fails half way."""

    def __init__(self, models) -> None:
        layers = models.model.get_base_model().model.layers
        self.weight = layers[-1].mlp.down_proj.lora_A["actor"].weight

    def __enter__(self) -> None:
        self.whole = self.weight.data
        self.weight.data = torch.zeros(4, 7)

    def __exit__(self, *_) -> None:
        self.weight.data = self.whole


class TestFailure:
    @pytest.mark.parametrize("method", ["reload", "shared_memory"])
    @TIED
    def test_half_way_stops_the_policy_until_a_sync_succeeds(self, path, make_policy, method):
        policy, models = make_policy(), make_models(path)
        sync = EngineWeightSync(models.model, models.adapter, policy=policy, method=method)
        train(models)
        with broken(models), pytest.raises(WeightSyncError, match=r"merging '.*down_proj'"):
            sync()
        assert not shared_files()
        assert policy.policy_version == 0
        with pytest.raises(EngineError, match="weight sync"):
            play(policy)
        sync()
        assert gap(policy, models) <= 1e-5

    @TIED
    def test_in_the_engine_names_the_tensor(self, path, make_policy, llm):
        models = make_models(path, **WHOLE)
        tensors = dict(models.model.state_dict())
        tensors["model.norm.weight"] = torch.zeros(3)
        with pytest.raises(WeightSyncError, match=r"'model\.norm\.weight'"):
            weights.reload(llm, tensors.items())
        EngineWeightSync(models.model, policy=make_policy())()  # mends the engine

    @TIED
    def test_in_the_middle_of_a_layer_leaves_nothing_behind(self, path, make_policy, llm):
        policy, models = make_policy(), make_models(path, **WHOLE)
        old = {name: value.clone() for name, value in models.model.state_dict().items()}

        def half():
            yield from ((name, old[name]) for name in old if "q_proj" in name or "gate_proj" in name)
            raise OSError("gone")

        with pytest.raises(WeightSyncError, match="OSError: gone"):
            weights.reload(llm, half())
        train(models)
        EngineWeightSync(models.model, policy=policy)()
        assert gap(policy, models) <= 1e-5

    @TIED
    def test_stale_prefixes_are_found_by_the_parity_check(self, path, make_policy, monkeypatch):
        policy, models = make_policy(), make_models(path)
        sync = EngineWeightSync(models.model, models.adapter, policy=policy)
        sync()
        train(models)
        policy.submit(TurnRequest(0, np.arange(5, 75), 0, 0))
        with monkeypatch.context() as patch:
            patch.setattr(weights, "reset_prefix_cache", lambda llm: None)
            with pytest.raises(WeightSyncError, match="parity check"):
                sync()
        assert policy.pending == 0
        with pytest.raises(EngineError, match="parity check"):
            play(policy)
        sync()
        assert gap(policy, models) <= 1e-5

    @TIED
    def test_a_head_that_was_not_sent_is_found_by_the_parity_check(self, path, make_policy, monkeypatch):
        policy, models = make_policy(), make_models(path, **WHOLE)
        sync = EngineWeightSync(models.model, policy=policy)
        sync()
        train(models)
        send, headless = weights.reload, lambda tensors: (x for x in tensors if x[0] != "lm_head.weight")
        with monkeypatch.context() as patch:
            patch.setattr(weights, "reload", lambda llm, tensors: send(llm, headless(tensors)))
            with pytest.raises(WeightSyncError, match="parity check"):
                sync()
        sync()

    @TIED
    def test_without_a_parity_check_there_is_no_check(self, path, make_policy):
        policy, models = make_policy(), make_models(path)
        sync = EngineWeightSync(models.model, models.adapter, policy=policy, parity_check=0)
        sync()
        assert math.isnan(sync.parity_gap)
        assert gap(policy, models) <= 1e-5

    def test_of_the_prefix_cache_is_an_error(self):
        refusing = SimpleNamespace(reset_prefix_cache=lambda **_: False)
        with pytest.raises(WeightSyncError, match="did not empty its prefix cache"):
            weights.reset_prefix_cache(refusing)

    @TIED
    def test_of_an_adapter_that_the_engine_cannot_serve_is_named(self, path, make_policy):
        policy, models = make_policy(), make_models(path, lora=LORA | {"r": 64})
        sync = EngineWeightSync(models.model, models.adapter, policy=policy, method="adapter")
        with pytest.raises(WeightSyncError, match=r"loading the adapter.*rank"):
            sync()
        EngineWeightSync(models.model, models.adapter, policy=policy, method="reload")()
        assert gap(policy, models) <= 1e-5


class TestChoice:
    def stand_in(self, *, in_process=True, device="cuda", lora=True, backend=None):
        config = SimpleNamespace(
            device_config=SimpleNamespace(device_type=device),
            lora_config=object() if lora else None,
            weight_transfer_config=None if backend is None else SimpleNamespace(backend=backend),
        )
        return config, in_process

    @pytest.mark.parametrize(
        ("setup", "fields", "expected"),
        [
            ({}, {}, "adapter"),
            ({"in_process": False}, {}, "adapter"),
            ({"lora": False}, {}, "reload"),
            ({"lora": False, "in_process": False}, {}, "shared_memory"),
            ({}, {"use_dora": True}, "reload"),
            ({"device": "cpu"}, {}, "reload"),
            ({"device": "cpu", "in_process": False}, {}, "shared_memory"),
            ({"backend": "nccl"}, {}, "nccl"),
            ({"backend": "ipc"}, {}, "ipc"),
            ({"backend": "sharded_rdt"}, {}, "adapter"),
        ],
    )
    def test_is_the_fastest_correct_one(self, setup, fields, expected):
        models = make_models(tiny_model_path(), lora=LORA | fields)
        config, in_process = self.stand_in(**setup)
        unserved = why_not_servable(models.model, models.adapter)
        method, reason = weights.choose_method(config, in_process=in_process, adapter=True, unserved=unserved)
        assert method == expected
        assert reason

    @TIED
    def test_is_logged_with_its_reason(self, path, make_policy, caplog):
        models = make_models(path)
        with caplog.at_level(logging.INFO, "torchrl_llm"):
            sync = EngineWeightSync(models.model, models.adapter, policy=make_policy())
        assert sync.method == "reload"
        assert "'reload': on CPUs merged weights" in caplog.text

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"method": "magic"}, "expected 'auto' or one of"),
            ({"method": "adapter", "adapter": None}, "no adapter"),
            ({"method": "adapter", "sleep_level": 2}, "sleep_level=1"),
        ],
    )
    @TIED
    def test_that_cannot_work_is_refused(self, path, make_policy, options, match):
        models = make_models(path)
        with pytest.raises(ValueError, match=match):
            EngineWeightSync(models.model, **({"adapter": models.adapter, "policy": make_policy()} | options))

    @TIED
    def test_of_an_adapter_that_is_not_there_is_refused(self, path, make_policy):
        with pytest.raises(AdapterError, match="no adapter 'critic'"):
            EngineWeightSync(make_models(path).model, "critic", policy=make_policy())


class TestTorchRL:
    @TIED
    def test_collector(self, path, make_policy, words):
        policy, models = make_policy(max_output_tokens=4), make_models(path)
        train(models)
        env = GEMEnv("game:GuessTheNumber-v0-easy", tokenizer=words, num_envs=2, max_model_len=250, max_output_tokens=4)
        sync = EngineWeightSync(models.model, models.adapter, policy=policy)
        collector = Collector(
            env, policy, frames_per_batch=4, total_frames=8, trust_policy=True, weight_sync_schemes={"policy": sync}
        )
        assert gap(policy, models) <= 1e-5
        versions = []
        for batch in collector:
            train(models, 1)
            collector.update_policy_weights_()
            versions.append(batch["policy_version"].max().item())
            assert gap(policy, models) <= 1e-5
        collector.shutdown()
        assert versions == [1, 2]
        with pytest.raises(ValueError, match="without arguments"):
            collector.update_policy_weights_(TensorDict())

    @TIED
    def test_trainer_hook(self, path, make_policy):
        policy, models = make_policy(), make_models(path)
        hook = UpdateWeights(
            update_weights_interval=2, sender=EngineWeightSync(models.model, models.adapter, policy=policy)
        )
        train(models)
        hook()
        assert policy.policy_version == 0
        hook()
        assert policy.policy_version == 1
        assert gap(policy, models) <= 1e-5


class TestSleep:
    @TIED
    def test_is_refused_unless_asked_for(self, path, make_policy):
        models = make_models(path)
        with pytest.raises(ValueError, match="sleep_level"):
            EngineWeightSync(models.model, models.adapter, policy=make_policy()).sleep()

    @pytest.mark.parametrize("level", [1, 2])
    @TIED
    def test_ends_with_the_next_sync(self, path, make_policy, level):
        policy, models = make_policy(), make_models(path)
        sync = EngineWeightSync(models.model, models.adapter, policy=policy, sleep_level=level, method="reload")
        sync.sleep()
        train(models)
        sync()
        assert gap(policy, models) <= 1e-5
        assert adapter_of(models.model, "actor").tensors


@pytest.mark.slow
class TestEngineInAProcessOfItsOwn:
    def test_gets_the_trained_log_probs_by_either_method(self, words):
        engine_args = {"dtype": "float32", "max_model_len": 256, "max_lora_rank": 8, "multiprocess": True}
        sampling = SamplingConfig(max_output_tokens=12, temperature=0.7, stop_ids=())
        policy, models = VLLMPolicy(tiny_model_path(), words, sampling, **engine_args), make_models(tiny_model_path())
        try:
            for seed, method in enumerate(["auto", "adapter", "shared_memory"]):
                sync = EngineWeightSync(models.model, models.adapter, policy=policy, method=method)
                assert sync.method == ("adapter" if method == "adapter" else "shared_memory")
                train(models, seed)
                sync()
                assert gap(policy, models) <= 1e-5
            with pytest.raises(ValueError, match="shared_memory"):
                EngineWeightSync(models.model, models.adapter, policy=policy, method="reload")
        finally:
            policy.close()
        assert not shared_files()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGPUs:
    @pytest.mark.parametrize("method", ["reload", "adapter"])
    def test_colocated_sleep_and_sync(self, words, method):
        sampling = SamplingConfig(max_output_tokens=12, temperature=0.7, stop_ids=())
        options = {"gpu_memory_utilization": 0.3, "sleep_mode": True, "max_model_len": 256, "max_lora_rank": 8}
        policy = VLLMPolicy(tiny_model_path(), words, sampling, dtype="bfloat16", **options)
        models = make_models(tiny_model_path())
        models.model.to("cuda")
        sync = EngineWeightSync(models.model, models.adapter, policy=policy, method=method, sleep_level=1)
        try:
            for seed in range(2):
                before = torch.cuda.mem_get_info()[0]
                sync.sleep()
                assert torch.cuda.mem_get_info()[0] > before
                train(models, seed)
                sync()
                assert sync.parity_gap <= 0.1
        finally:
            policy.close()

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL knows a GPU once")
    def test_nccl(self, words):
        sampling = SamplingConfig(max_output_tokens=12, temperature=0.7, stop_ids=())
        config = {"multiprocess": True, "weight_transfer": "nccl", "device_ids": [1]}
        policy = VLLMPolicy(tiny_model_path(), words, sampling, dtype="bfloat16", max_model_len=256, **config)
        models = make_models(tiny_model_path())
        models.model.to("cuda")
        sync = EngineWeightSync(models.model, models.adapter, policy=policy)
        try:
            assert sync.method == "nccl"
            for seed in range(2):
                train(models, seed)
                sync()
                assert sync.parity_gap <= 0.1
        finally:
            sync.close()
            policy.close()
