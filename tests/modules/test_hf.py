"""HFPolicy against ``model.generate``, teacher-forced forwards and exact probabilities, on random
tiny models."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_policies import (
    END,
    FAMILIES,
    V,
    batch_of,
    make_model,
    make_policy,
    make_tokenizer,
    play,
    random_rows,
    same,
    teacher_forced,
)
from transformers import AutoModelForCausalLM

from torchrl_llm import keys
from torchrl_llm.modules.hf import HFPolicy
from torchrl_llm.modules.hf._cached_model import CachedModel
from torchrl_llm.modules.hf.policy import _Responses
from torchrl_llm.modules.sampling import SamplingConfig


def generated(model, rows, width):
    """What ``model.generate`` says, greedily, on left-padded prompts."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    model.generation_config.eos_token_id = None
    out = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=width, min_new_tokens=width, pad_token_id=0
    )
    return out[:, longest:].tolist()


def by_hand(logits, context, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0):
    """Log-probs ``[V]`` of one token, written out."""
    seen = torch.tensor(sorted(set(context)))
    logits = logits.double().clone()
    picked = logits[seen]
    logits[seen] = torch.where(picked > 0, picked / repetition_penalty, picked * repetition_penalty)
    logits = logits / temperature
    order = logits.argsort(descending=True)
    keep = torch.ones(V, dtype=torch.bool)
    if top_k:
        keep[order[top_k:]] = False
    probs = logits.masked_fill(~keep, -torch.inf).softmax(-1)
    keep[order[1:][probs[order].cumsum(-1)[:-1] >= top_p]] = False
    probs = logits.masked_fill(~keep, -torch.inf).softmax(-1)
    keep &= probs >= min_p * probs.max()
    return logits.masked_fill(~keep, -torch.inf).log_softmax(-1)


class TestAgainstGenerate:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_greedy_over_two_turns(self, family):
        model = make_model(family.split()[0], **FAMILIES[family])
        policy = make_policy(model)
        rows = random_rows([11, 3, 1, 19, 7])
        for turn in range(2):
            ids, log_probs = play(policy, rows, greedy=True, turn=turn)
            assert ids == generated(model, rows, 8)
            for row, response, found in zip(rows, ids, log_probs, strict=True):
                logits = teacher_forced(model, row, response).log_softmax(-1)
                torch.testing.assert_close(found, logits.amax(-1), rtol=0, atol=1e-5)
            feedback = random_rows([4, 2, 9, 1, 5], seed=turn + 1)
            rows = [row + response + more for row, response, more in zip(rows, ids, feedback, strict=True)]

    def test_eager_attention_and_one_query_head_a_key_head(self):
        rows = random_rows([9, 2, 5])
        for fields in ({"attn_implementation": "eager"}, {"num_key_value_heads": 4}):
            model = make_model(**fields)
            assert play(make_policy(model), rows, greedy=True)[0] == generated(model, rows, 8)

    def test_bfloat16(self):
        model = make_model().bfloat16()
        rows = random_rows([9, 2, 5])
        ids, log_probs = play(make_policy(model), rows)
        for row, response, found in zip(rows, ids, log_probs, strict=True):
            assert found.dtype == torch.float32
            expected = teacher_forced(model, row, response).log_softmax(-1)[range(8), response]
            torch.testing.assert_close(found, expected, rtol=0, atol=0.25)


class TestLogProbs:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"temperature": 0.7},
            {"top_p": 0.9},
            {"top_k": 5},
            {"min_p": 0.05},
            {"repetition_penalty": 1.3},
            {"repetition_penalty": 1.2, "temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("greedy", [False, True])
    def test_are_those_of_the_distribution_sampled(self, options, greedy):
        model = make_model()
        rows = random_rows([11, 3, 1, 19])
        ids, log_probs = play(make_policy(model, **options), rows, greedy=greedy)
        for row, response, found in zip(rows, ids, log_probs, strict=True):
            for i, logits in enumerate(teacher_forced(model, row, response)):
                expected = by_hand(logits, row + response[:i], **options)
                assert float(found[i]) == pytest.approx(float(expected[response[i]]), abs=1e-5)
                assert not greedy or response[i] == int(expected.argmax())

    def test_exact_says_whether_a_scorer_can_repeat_them(self):
        assert make_policy(temperature=0.5).logprobs_match_trainer
        assert not make_policy(top_p=0.9).logprobs_match_trainer
        assert not make_policy(make_model().bfloat16()).logprobs_match_trainer

    def test_frequencies_are_the_probabilities(self):
        model = make_model()
        policy = make_policy(model, temperature=1.5, top_k=8, max_output_tokens=2)
        prompt, draws = random_rows([6])[0], 3000
        ids, _ = play(policy, [prompt] * draws, episodes=list(range(draws)))
        first = by_hand(teacher_forced(model, prompt, [0])[0], prompt, temperature=1.5, top_k=8).exp()
        expected = torch.zeros(V, V, dtype=torch.float64)
        for token in first.nonzero().flatten().tolist():
            logits = teacher_forced(model, prompt, [token, 0])[1]
            expected[token] = first[token] * by_hand(logits, prompt, temperature=1.5, top_k=8).exp()
        counts = torch.zeros(V, V, dtype=torch.float64)
        counts.index_put_(tuple(torch.tensor(ids).T), torch.ones(draws, dtype=torch.float64), accumulate=True)
        assert not counts[expected == 0].any()
        cells = expected > 5 / draws
        statistic = ((counts - expected * draws) ** 2 / (expected * draws))[cells].sum()
        assert torch.special.gammaincc(cells.sum() / 2, statistic.float() / 2) > 1e-3

    def test_a_hostile_generation_config_on_disk_has_no_effect(self, tmp_path):
        model, rows = make_model(), random_rows([9, 2, 5])
        model.save_pretrained(tmp_path)
        hostile = {
            "do_sample": True, "top_k": 2, "temperature": 0.01, "top_p": 0.1, "min_p": 0.9, "repetition_penalty": 9.0,
            "suppress_tokens": list(range(30)), "begin_suppress_tokens": [40], "bad_words_ids": [[41]], "typical_p": 0.1,
            "no_repeat_ngram_size": 1, "max_new_tokens": 1, "min_new_tokens": 3, "num_beams": 4,
            "eos_token_id": [END, 5],
        }  # fmt: skip
        (tmp_path / "generation_config.json").write_text(json.dumps(hostile))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
        assert loaded.generation_config.top_k == 2
        for greedy in (False, True):
            same(play(make_policy(loaded), rows, greedy=greedy), play(make_policy(model), rows, greedy=greedy))
        assert make_policy(loaded, stop_ids=None).stop_ids == (END, 5)

    def test_half_padded_vocabulary_keeps_the_models_distribution(self):
        model = make_model()
        policy = HFPolicy(model, make_tokenizer(size=40), SamplingConfig(max_output_tokens=30, stop_ids=()))
        ids, _ = play(policy, random_rows([5, 6, 7]))
        assert max(max(response) for response in ids) >= 40


class TestResponses:
    def test_stop_ids_end_a_response_and_belong_to_it(self):
        stops = tuple(range(2, 12))
        ids, _ = play(make_policy(stop_ids=stops, max_output_tokens=12), random_rows([5] * 16))
        free, _ = play(make_policy(max_output_tokens=12), random_rows([5] * 16))
        assert len({len(response) for response in ids}) > 3
        for response, unstopped in zip(ids, free, strict=True):
            end = next((i + 1 for i, token in enumerate(unstopped) if token in stops), 12)
            assert response == unstopped[:end]

    def test_rows_that_finish_early_disturb_nobody(self):
        model, rows = make_model(), random_rows([5, 9, 2, 14, 7, 3, 11, 6])
        options = {"stop_ids": tuple(range(2, 12)), "max_output_tokens": 20, "repetition_penalty": 1.3}
        together = play(make_policy(model, **options), rows)
        assert len(set(map(len, together[0]))) > 3
        for i, row in enumerate(rows):
            same(play(make_policy(model, **options), [row], episodes=[i]), ([together[0][i]], [together[1][i]]))

    @pytest.mark.parametrize("check_every", [3, 8, 50])
    def test_looking_less_often_for_the_end_changes_no_response(self, check_every, monkeypatch):
        model, rows, options = make_model(), random_rows([5, 9, 2, 14] * 2), {"stop_ids": tuple(range(2, 8))}
        expected = play(make_policy(model, max_output_tokens=24, check_every=1, **options), rows)
        longest = max(map(len, expected[0]))
        assert len({*map(len, expected[0])}) > 3
        policy, looks = make_policy(model, max_output_tokens=24, check_every=check_every, **options), []
        drop = _Responses._drop_finished
        monkeypatch.setattr(_Responses, "_drop_finished", lambda self: looks.append(self._index) or drop(self))
        same(play(policy, rows), expected)
        assert len(looks) == min(-(-longest // check_every), 23 // check_every)
        # The cache holds nothing that was sampled behind an end.
        longer = [row + response for row, response in zip(rows, expected[0], strict=True)]
        same(play(policy, longer, turn=1), play(make_policy(model, max_output_tokens=24, **options), longer, turn=1))

    @pytest.mark.host  # which looks at each token for responses that have ended
    @pytest.mark.parametrize("bucket", [16, 64])
    def test_shapes_that_repeat_change_no_response(self, bucket, monkeypatch):
        model, rows = make_model(), random_rows([5, 9, 2, 14] * 5)
        options = {"stop_ids": tuple(range(2, 8)), "max_output_tokens": 24}
        expected, shapes, step = play(make_policy(model, **options), rows), [], CachedModel._forward

        def forward(self, ids, positions, *, width, **rest):
            shapes.append((*ids.shape, width))
            return step(self, ids, positions, width=width, **rest)

        policy = make_policy(model, bucket=bucket, **options)
        monkeypatch.setattr(CachedModel, "_forward", forward)
        same(play(policy, rows), expected)
        # A step a token, of 20, 16 or 8 rows.
        steps = [shape for shape in shapes if shape[1] == 1]
        assert len(steps) == max(map(len, expected[0])) - 1 > 10
        assert {shape[0] for shape in steps} <= {20, 16, 8}
        assert len({*steps}) <= 4
        assert all(width % bucket == 0 for _, _, width in steps)
        longer = [row + response for row, response in zip(rows, expected[0], strict=True)]
        same(play(policy, longer, turn=1), play(make_policy(model, **options), longer, turn=1))

    def test_min_output_tokens(self):
        model, rows = make_model(), random_rows([5] * 8)
        stops = list(range(2, 40))
        ids, log_probs = play(make_policy(model, stop_ids=tuple(stops), min_output_tokens=3), rows)
        assert min(map(len, ids)) == 4  # three tokens, then the end
        for row, response, found in zip(rows, ids, log_probs, strict=True):
            assert not set(response[:3]) & set(stops)
            logits = teacher_forced(model, row, response)
            logits[:3, stops] = -torch.inf
            expected = logits.log_softmax(-1)[range(len(response)), response]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    def test_default_stop_ids_are_the_tokenizers_and_the_models(self):
        model = make_model()
        model.generation_config.eos_token_id = [9, 3]
        assert make_policy(model, stop_ids=None).stop_ids == (1, 3, 9)

    def test_no_stop_ids_anywhere_is_an_error(self):
        model = make_model(eos_token_id=None)
        tokenizer = make_tokenizer(end=None)
        with pytest.raises(ValueError, match="neither the tokenizer nor"):
            HFPolicy(model, tokenizer)
        assert HFPolicy(model, tokenizer, SamplingConfig(stop_ids=())).stop_ids == ()

    def test_a_stop_id_outside_of_the_vocabulary_is_an_error(self):
        with pytest.raises(ValueError, match=r"stop_ids \[61\]"):
            make_policy(stop_ids=(61,))

    def test_everything_idle(self):
        out = make_policy()(batch_of([[], []]))
        assert not out[keys.RESPONSE_MASK].any()
