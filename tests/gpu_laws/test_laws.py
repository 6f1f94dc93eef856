"""Laws of training on a GPU, on a pretended one: an instance of each. The rest of the instances are
in ``test_gpu_runs.py``.

That PyTorch gives its memory back before an engine wakes is in ``modules/test_vllm_weights.py``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pretended_runs import Rated, iterate, model_of, run_of
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from torchrl_llm.modules import HFPolicy, SamplingConfig, prefix_attention
from torchrl_llm.testing.pretended_gpu import pretended_gpu
from torchrl_llm.testing.tokenizers import byte_tokenizer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


class Long(Rated):
    """Prompts that a group computes once."""

    def reset(self, seed=None):
        text, info = super().reset(seed)
        return text + " And say it slowly, in a clear voice." * 4, info


@pytest.fixture
def shared(monkeypatch):
    """Prefixes of tiny models are shared, too, which a GPU computes faster alone."""
    monkeypatch.setitem(prefix_attention._STAGE_FLOPS, "cuda", prefix_attention._STAGE_FLOPS["cpu"])


def test_an_iteration_mixes_no_devices(tmp_path, shared):
    """Actor, critic and reference, two optimizer steps on shuffled rows of the host, in mixed
    precision."""
    with pretended_gpu() as gpu:
        run = run_of(tmp_path, dtype="float32", mixed_precision="bf16", group_size=4, minibatch_size=2, env=Long)
        before = [parameter.clone() for parameter in run.models.actor_parameters()]
        run.trainer.learn(run.trainer.collect(iter(run.trainer.collector)).cpu())
        after = run.models.actor_parameters()
        run.close()
    assert not gpu.errors
    assert gpu.launches > 1000
    assert gpu.products[torch.bfloat16] > 100
    assert all((old != new).any() for old, new in zip(before, after, strict=True))


def turn_of(rows: int) -> TensorDict:
    """A turn of ``rows`` prompts of different lengths."""
    lengths = 30 + np.arange(rows) % 3
    prompts = torch.from_numpy(np.random.default_rng(0).integers(3, 250, (rows, 32)))
    numbers = torch.arange(rows).view(rows, 1)
    tokens = {"prompt": prompts, "prompt_length": torch.from_numpy(lengths).view(rows, 1)}
    return TensorDict(tokens=tokens, turn=torch.zeros_like(numbers), episode_id=numbers, batch_size=[rows])


def waits_of_a_turn(gpu, path: str, *, rows: int = 4, tokens: int) -> int:
    """How often the host waits while ``rows`` responses of ``tokens`` tokens are sampled from a new
    context."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to("cuda")
    policy = HFPolicy(model, byte_tokenizer(), SamplingConfig(max_output_tokens=tokens, min_output_tokens=tokens))
    policy(turn_of(rows))  # what is checked once
    policy.drop_cache()
    gpu.reset()
    policy(turn_of(rows))
    return gpu.waits.total()


def test_a_token_waits_at_most_once_in_eight(tmp_path):
    """Not to copy anything, and neither for each layer nor for each row; a turn has its own few
    waits."""
    with pretended_gpu() as gpu:
        short, long = (waits_of_a_turn(gpu, model_of(tmp_path), tokens=tokens) for tokens in (8, 40))
        deep = waits_of_a_turn(gpu, model_of(tmp_path, layers=4), tokens=8)
        many = waits_of_a_turn(gpu, model_of(tmp_path), rows=12, tokens=8)
    assert long - short <= (40 - 8) / 8
    assert short <= 20
    assert deep == many == short


def waits_of_an_update(gpu, folder, **settings) -> int:
    """How often the host waits while one optimizer step is made on groups of four."""
    run = run_of(folder, algo="GRPO", group_size=4, max_tokens=10**6, env=Long, **settings)
    rows = run.trainer.collect(iter(run.trainer.collector))
    gpu.reset()
    run.trainer.learn(rows)
    run.close()
    return gpu.waits.total()


def test_the_waits_of_an_update_grow_neither_with_layers_nor_with_rows(tmp_path, shared):
    with pretended_gpu() as gpu:
        waits = waits_of_an_update(gpu, tmp_path)
        masked = [call for call in gpu.attention if call.mask and call.gradient]
        deep = waits_of_an_update(gpu, tmp_path, layers=4)
        many = waits_of_an_update(gpu, tmp_path, num_envs=8, batch_size=8)
    assert masked, "no prefix was shared"
    assert waits <= 100
    assert max(deep, many) <= waits


def test_no_attention_is_left_to_cudnn(tmp_path, shared):
    """Where it has a mask, its gradient can be NaN; and it plans each new shape. Recomputed
    forwards are not an exception."""
    with pretended_gpu() as gpu:
        run = run_of(tmp_path, group_size=4, gradient_checkpointing=True, env=Long)
        iterate(run)
        run.close()
    kernels = {(call.kernel, call.mask, call.gradient) for call in gpu.attention}
    assert {("efficient", True, True), ("flash", False, True), ("efficient", True, False)} <= kernels
    assert not [call for call in gpu.attention if call.kernel in ("cudnn", "math")]
