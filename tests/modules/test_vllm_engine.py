"""VLLMPolicy with engines of its own: other dtypes and processes, deaths, what a start leaves
behind. Needs vLLM."""

from __future__ import annotations

import random

import numpy as np
import psutil
import pytest
import torch
from one_turn import CONTEXT, PROMPTS, batch_of, finish, gaps_of, request_of

from torchrl_llm import keys
from torchrl_llm.modules import EngineError, SamplingConfig
from torchrl_llm.modules.vllm import VLLMPolicy
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer, tiny_model_path

pytest.importorskip("vllm", reason="needs vLLM: run make test-vllm")
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def words():
    return load_tiny_tokenizer()


class TestBfloat16:
    @pytest.mark.slow
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_in_bfloat16_they_are_the_scorers_to_two_hundredths(self, words, temperature):
        sampling = SamplingConfig(max_output_tokens=12, temperature=temperature)
        policy = VLLMPolicy(tiny_model_path(), words, sampling, dtype="bfloat16", max_model_len=CONTEXT)
        try:
            model = load_tiny_model().to(torch.bfloat16)
            assert not policy.logprobs_match_trainer
            gaps = gaps_of(policy, model, batch_of(words, PROMPTS * 32))
            assert gaps.mean() <= 2e-2
            assert gaps.max() <= 0.5  # a rare token's: the logits themselves are rounded to 1/16
        finally:
            policy.close()


class TestDeath:
    def test_logits_that_are_not_finite_are_refused(self, words):
        with pytest.raises(FloatingPointError, match="learning rate"):
            _with_own_engine(words, lambda policy, model: model.lm_head.weight.fill_(float("nan")))

    def test_an_engine_that_dies_in_a_rollout_is_named_and_stays_dead(self, words):
        def kill(policy, model):
            def die(*_):
                raise RuntimeError("the GPU fell off the bus")

            policy.submit(request_of(words))
            policy.poll()
            model.register_forward_pre_hook(die)

        with pytest.raises(EngineError, match=r"died in a step.*fell off the bus"):
            _with_own_engine(words, kill, then=lambda policy: finish(policy))


def _with_own_engine(words, spoil, then=None):
    policy = VLLMPolicy(
        tiny_model_path(), words, SamplingConfig(max_output_tokens=4), dtype="float32", max_model_len=64
    )
    try:
        with torch.no_grad():
            policy.llm.apply_model(lambda model: spoil(policy, model))
        try:
            (then or (lambda policy: policy(batch_of(words))))(policy)
        except EngineError:
            with pytest.raises(EngineError, match="fell off the bus"):
                policy.submit(request_of(words))
            raise
    finally:
        policy.close()
        policy.close()


class TestStart:
    def test_nothing_global_is_disturbed(self, words):
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.set_num_threads
        policy = VLLMPolicy(tiny_model_path(), words, SamplingConfig(max_output_tokens=4), max_model_len=64)
        try:
            policy(batch_of(words, PROMPTS[:2]))
        finally:
            policy.close()
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()
        assert before[2] == np.random.get_state()[1].tolist()
        assert torch.set_num_threads is before[3]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="an engine on a GPU can sleep")
    def test_one_that_cannot_sleep_is_refused_before(self, words):
        with pytest.raises(
            ValueError, match=r"sleep_mode is true.*'cpu'.*expected vLLM for GPUs\. Leave sleep_mode out"
        ):
            VLLMPolicy("no/such/model", words, sleep_mode=True)

    def test_adapters_in_float32_on_a_gpu_are_refused(self, words, monkeypatch):
        """vLLM 0.32 fails an assertion without a word in its kernels."""
        from vllm.platforms import current_platform

        monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
        with pytest.raises(ValueError, match=r"max_lora_rank is 8 and dtype is float32.*expected dtype 'bfloat16'"):
            VLLMPolicy("no/such/model", words, dtype="float32", max_lora_rank=8)


class TestOtherProcess:
    @pytest.mark.slow
    def test_it_answers_and_its_death_is_named(self, words):
        children = set(psutil.Process().children(recursive=True))
        policy = VLLMPolicy(
            tiny_model_path(), words, SamplingConfig(max_output_tokens=12), dtype="float32", max_model_len=CONTEXT,
            multiprocess=True,
        )  # fmt: skip
        try:
            assert not policy.in_process
            assert gaps_of(policy, load_tiny_model(), batch_of(words)).max() <= 1e-5
            policy.submit(request_of(words))
            for child in set(psutil.Process().children(recursive=True)) - children:
                child.kill()
            with pytest.raises(EngineError, match="died"):
                finish(policy)
        finally:
            policy.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGPU:
    @pytest.fixture(scope="class")
    def gpu(self, words):
        policy = VLLMPolicy(
            tiny_model_path(), words, SamplingConfig(max_output_tokens=12), dtype="bfloat16", max_model_len=CONTEXT,
            gpu_memory_utilization=0.3, sleep_mode=True,
        )  # fmt: skip
        yield policy
        policy.close()

    def test_bfloat16_agrees_with_the_scorer(self, gpu, words):
        model = load_tiny_model().to(torch.bfloat16)
        assert gaps_of(gpu, model, batch_of(words, PROMPTS * 32)).mean() <= 2e-2

    def test_sleep_gives_memory_back_and_waking_up_restores_the_weights(self, gpu, words):
        before = gpu(batch_of(words))[keys.RESPONSE]
        used = torch.cuda.mem_get_info()[0]
        gpu.sleep()
        assert torch.cuda.mem_get_info()[0] - used > 2**30
        gpu.wake_up()
        assert torch.equal(gpu(batch_of(words))[keys.RESPONSE], before)
