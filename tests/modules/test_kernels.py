"""Which attention kernels PyTorch may choose from in an update and while sampling: never
cuDNN's."""

from __future__ import annotations

import threading

import pytest
import tiny_policies
import torch
import torch.nn.functional as F
from places import device
from test_prefix_attention import make_rows, shared
from tiny_models import make_model
from torch.backends.cuda import cudnn_sdp_enabled
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import MistralConfig, MistralForCausalLM
from waiting import LIMIT

from torchrl_llm.modules import TokenScorer, load_actor_critic
from torchrl_llm.modules.kernels import attention_kernels
from torchrl_llm.testing.pretended_gpu import pretended_gpu


@pytest.fixture
def calls(monkeypatch) -> list[tuple[bool, bool]]:
    """Of each attention call, whether it had a mask, and whether cuDNN's kernel was among those
    that PyTorch chooses from."""
    found = []
    attention = F.scaled_dot_product_attention

    def record(query, key, value, attn_mask=None, **options):
        found.append((attn_mask is not None, cudnn_sdp_enabled()))
        return attention(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    return found


class TestCalls:
    """cuDNN's masked backward may give NaN, and it plans each new shape for 23 to 37 ms."""

    @pytest.mark.parametrize("prefixes", [True, False])
    def test_of_an_update_with_recomputation(self, calls, prefixes):
        window = {
            "cls": MistralForCausalLM,
            "config": MistralConfig,
            "sliding_window": 6,
        }  # whose plain rows have masks too
        models = load_actor_critic(make_model(torch.float32, **window), gradient_checkpointing=True)
        scorer = TokenScorer(models.model, prefixes=shared(models.model) if prefixes else None)
        calls.clear()
        out = scorer(make_rows().to(device()))["log_prob"].sum()
        forward = len(calls)
        out.backward()
        assert len(calls) > forward
        assert {masked for masked, _ in calls} >= {True}
        assert not any(enabled for _, enabled in calls)
        assert cudnn_sdp_enabled()

    def test_of_sampling(self, calls):
        policy = tiny_policies.make_policy()
        calls.clear()
        tiny_policies.play(policy, tiny_policies.random_rows([5, 3]))
        assert set(calls) == {(True, False)}
        assert cudnn_sdp_enabled()


@pytest.mark.host  # which pretends a GPU of its own
class TestOnGPUs:
    """cuDNN's kernel would be taken without :func:`attention_kernels`; grouped heads in float32
    would be left to "math"."""

    @pytest.mark.parametrize(
        ("dtype", "autocast", "kernels"),
        [
            (torch.bfloat16, False, {("flash", False), ("efficient", True)}),
            (torch.float32, True, {("flash", False), ("efficient", True)}),
            (torch.float32, False, {("efficient", True)}),
        ],
    )
    def test_of_an_update(self, dtype, autocast, kernels):
        with pretended_gpu() as gpu:
            models = load_actor_critic(make_model(dtype).to("cuda"), gradient_checkpointing=True, master_weights=False)
            scorer = TokenScorer(models.model, prefixes=shared(models.model))
            gpu.reset()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                out = scorer(make_rows().to("cuda"))["log_prob"].sum()
            out.backward()
        assert {(call.kernel, call.mask) for call in gpu.attention} == kernels

    def test_of_sampling(self):
        with pretended_gpu() as gpu:
            policy = tiny_policies.make_policy(tiny_policies.make_model().to("cuda", torch.bfloat16))
            tiny_policies.play(policy, tiny_policies.random_rows([5, 3]))
        assert {call.kernel for call in gpu.attention if call.mask} == {"efficient"}


class TestSwitch:
    def test_what_is_off_outside_stays_off(self):
        with sdpa_kernel(SDPBackend.MATH):
            with attention_kernels():
                assert not torch.backends.cuda.flash_sdp_enabled()
            assert not cudnn_sdp_enabled()
        assert cudnn_sdp_enabled()

    def test_a_thread_that_leaves_first_puts_nothing_back_for_the_other(self):
        inside, leave = threading.Event(), threading.Event()

        def other():
            with attention_kernels():
                inside.set()
                leave.wait(LIMIT)

        with attention_kernels():
            thread = threading.Thread(target=other)
            thread.start()
            assert inside.wait(LIMIT)
        assert not cudnn_sdp_enabled()
        leave.set()
        thread.join()
        assert cudnn_sdp_enabled()
