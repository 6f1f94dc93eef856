"""The head while sampling: packed where it is large and plain, and the same function of its inputs
either way."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_policies import FAMILIES, make_model, make_policy, play, random_rows, same, teacher_forced
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_llm.modules.hf._head import sampling_head
from torchrl_llm.modules.lm import logits_function

LARGE = {"vocab_size": 2**15}  # times 32: as many weights as are packed


class Operations(TorchDispatchMode):
    """The names of the operations that were called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def is_packed(model):
    with torch.no_grad(), Operations() as called:
        sampling_head(model)(torch.ones(1, 32, dtype=model.dtype))
    return "mkldnn._linear_pointwise.default" in called.names


@pytest.mark.host  # where heads are packed
class TestHead:
    @pytest.mark.parametrize(
        ("family", "fields"),
        [("Qwen2", {}), ("Granite", FAMILIES["Granite"]), ("Phi", {}), ("Gemma2", FAMILIES["Gemma2"])],
    )
    def test_computes_what_the_model_does(self, family, fields):
        model, hidden = (
            make_model(family, **LARGE, **fields),
            torch.randn(9, 32, generator=torch.Generator().manual_seed(0)),
        )
        assert is_packed(model) is (family != "Gemma2")  # which does more to its logits
        with torch.no_grad():
            torch.testing.assert_close(sampling_head(model)(hidden), logits_function(model)(hidden), rtol=0, atol=1e-5)

    def test_a_row_does_not_depend_on_the_others(self):
        logits_of = sampling_head(make_model(**LARGE))
        hidden = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            whole = logits_of(hidden)
            for rows in (1, 2, 7, 32):
                assert torch.equal(logits_of(hidden[:rows]), whole[:rows])

    def test_small_narrow_and_adapted_ones_stay(self):
        assert not is_packed(make_model())
        assert not is_packed(make_model(**LARGE).bfloat16())
        lora = LoraConfig(r=2, target_modules=["lm_head"])
        assert not is_packed(get_peft_model(make_model(**LARGE), lora))


class TestPolicy:
    def test_samples_from_the_models_distribution(self):
        model, rows = make_model(**LARGE), random_rows([5, 9, 7])
        ids, log_probs = play(make_policy(model), rows)
        for row, response, found in zip(rows, ids, log_probs, strict=True):
            expected = teacher_forced(model, row, response).log_softmax(-1)[range(len(response)), response]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    def test_new_weights_of_the_head_are_seen(self):
        model, rows = make_model(**LARGE), random_rows([5, 9, 7])
        policy = make_policy(model)
        before = play(policy, rows)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        after = play(policy, rows)
        assert after[0] != before[0]
        same(after, play(make_policy(copy.deepcopy(model)), rows))
