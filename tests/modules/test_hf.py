"""HFPolicy against ``model.generate``, teacher-forced forwards and exact probabilities, on random tiny models."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from tensordict import TensorDict
from tokenizers import Tokenizer, models
from torchrl.envs.utils import ExplorationType, set_exploration_type
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from torchrl_llm import keys
from torchrl_llm.modules.adapters import AdapterError, FusedLora
from torchrl_llm.modules.checks import UnsupportedModelError, VocabularyMismatchError
from torchrl_llm.modules.engine import ContextLengthError, NonFiniteLogitsError
from torchrl_llm.modules.hf import HFPolicy
from torchrl_llm.modules.sampling import SamplingConfig

V, END = 61, 1
TINY = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 0,
}


def make_tokenizer(size=V, end="1"):
    vocabulary = {str(i): i for i in range(size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="0")), eos_token=end
    )


def make_model(family="Qwen2", **fields):
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**(TINY | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=fields.get("attn_implementation", "sdpa"))
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.35)  # far from uniform, and every context token counts
            elif "bias" in name:
                parameter.data.normal_(0, 0.1)
    return model.eval()


def make_policy(model=None, *, adapter=None, seed=0, **sampling):
    sampling = {"max_output_tokens": 8, "stop_ids": ()} | sampling
    return HFPolicy(model or make_model(), make_tokenizer(), SamplingConfig(**sampling), adapter=adapter, seed=seed)


def random_rows(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, V, (n,), generator=generator).tolist() for n in lengths]


def batch_of(rows, *, turn=0, episodes=None):
    """A batch of prompts; an empty row is an idle slot."""
    lengths = torch.tensor([[len(row)] for row in rows])
    prompt = torch.full((len(rows), max(int(lengths.max()), 1)), 7)  # padding that looks like any other token
    for i, row in enumerate(rows):
        prompt[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return TensorDict(
        {
            keys.PROMPT: prompt,
            keys.PROMPT_LENGTH: lengths,
            keys.TURN: torch.full_like(lengths, turn),
            keys.EPISODE_ID: torch.tensor(episodes or list(range(len(rows)))).unsqueeze(-1),
        },
        batch_size=[len(rows)],
    )


def play(policy, rows, *, greedy=False, **options):
    """Responses as lists of ids, and their log-probs as tensors."""
    with set_exploration_type(ExplorationType.DETERMINISTIC if greedy else ExplorationType.RANDOM):
        out = policy(batch_of(rows, **options))
    mask = out[keys.RESPONSE_MASK]
    ids = [out[keys.RESPONSE][i][mask[i]].tolist() for i in range(len(rows))]
    return ids, [out[keys.RESPONSE_LOG_PROBS][i][mask[i]] for i in range(len(rows))]


def same(one, other):
    assert one[0] == other[0]
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


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


def teacher_forced(model, row, response):
    """``[A, V]`` logits before each token of the response, from one plain forward."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([row + response])).logits[0, len(row) - 1 : -1].float()


CONFIGS = {"Gemma3": "Gemma3TextConfig"}
FAMILIES = {
    "Qwen2": {},
    "Qwen2 sliding": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3": {"head_dim": 8},
    "Llama": {"attention_bias": True},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"sliding_window": 6, "head_dim": 8, "attn_implementation": "eager", "final_logit_softcapping": 5.0},
    "Gemma3": {"sliding_window": 6, "head_dim": 8, "num_hidden_layers": 3, "sliding_window_pattern": 3},
    "Phi3": {"sliding_window": 6},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "GPTNeoX": {"rotary_pct": 0.5},
    "Cohere": {"logit_scale": 0.5},
    "Granite": {"logits_scaling": 3.0},
    "Olmo2": {},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
    "SmolLM3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}


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


class TestStatelessness:
    """Nothing but weights, prompt and the noise key decides what is said."""

    rows = random_rows([11, 3, 1, 19, 7, 30])

    def test_neighbours_order_and_slot_do_not_matter(self):
        model = make_model()
        all_ids, all_log_probs = play(make_policy(model), self.rows)
        for chosen in ([5], [3, 0], [4, 5, 0, 1]):
            policy = make_policy(model)
            for _ in range(2):  # the second time from the cache
                found = play(policy, [self.rows[i] for i in chosen], episodes=chosen)
                same(found, ([all_ids[i] for i in chosen], [all_log_probs[i] for i in chosen]))

    def test_noise_depends_on_seed_episode_and_turn(self):
        model = make_model()
        rows = [self.rows[0]] * 3
        first = play(make_policy(model), rows)[0]
        assert first[0] != first[1] != first[2] != first[0]
        assert play(make_policy(model), rows, turn=1)[0] != first
        assert play(make_policy(model, seed=1), rows)[0] != first
        assert play(make_policy(model), rows, episodes=[1, 0, 2])[0] == [first[1], first[0], first[2]]

    def test_global_generators_are_neither_read_nor_moved(self):
        policy = make_policy()
        before = torch.get_rng_state()
        first = play(policy, self.rows)
        assert torch.equal(before, torch.get_rng_state())
        torch.rand(3)
        same(play(policy, self.rows), first)

    def test_turns_from_the_cache_equal_turns_computed_afresh(self):
        model = make_model()
        policy, rows = make_policy(model, stop_ids=(2, 3, 4, 5, 6, 7, 8)), list(self.rows)
        for turn in range(5):
            fresh = make_policy(model, stop_ids=(2, 3, 4, 5, 6, 7, 8))
            ids, log_probs = play(policy, rows, turn=turn)
            same((ids, log_probs), play(fresh, rows, turn=turn))
            feedback = random_rows([4, 2, 9, 1, 5, 40], seed=turn + 1)
            rows = [row + response + more for row, response, more in zip(rows, ids, feedback, strict=True)]
            rows[turn] = random_rows([6 + turn], seed=99 + turn)[0]  # a slot is refilled
            if turn == 2:
                rows = rows[::-1]  # every slot has a context that it never saw

    def test_slots_that_come_and_go(self):
        model = make_model()
        policy = make_policy(model)
        rows = random_rows([11, 3, 9, 19, 7, 5])
        for turn, idle in enumerate([(), (0, 3), (1,), (0, 1, 2, 4), (2, 5), ()]):
            now = [[] if i in idle else row for i, row in enumerate(rows)]
            ids, log_probs = play(policy, now, turn=turn)
            assert [len(response) for response in ids] == [0 if i in idle else 8 for i in range(6)]
            same((ids, log_probs), play(make_policy(model), now, turn=turn))
            rows = [row + response + [9] if response else row for row, response in zip(rows, ids, strict=True)]

    def test_more_slots_than_before(self):
        model = make_model()
        policy = make_policy(model)
        play(policy, self.rows[:2])
        same(play(policy, self.rows), play(make_policy(model), self.rows))

    def test_a_shorter_or_edited_prompt_is_not_answered_from_the_cache(self):
        model = make_model()
        policy = make_policy(model)
        row = self.rows[5]
        play(policy, [row])
        for changed in (row[:10], row[:-1], [*row[:4], 33, *row[5:]], [*row, 12]):
            same(play(policy, [changed]), play(make_policy(model), [changed]))

    def test_an_error_in_mid_turn_leaves_nothing_half_written(self):
        model = make_model()
        policy, row = make_policy(model), self.rows[5]
        ids, _ = play(policy, [row])
        calls = iter(range(100))

        def fail(*_):
            if next(calls) == 2:
                raise KeyboardInterrupt

        hook = model.model.norm.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            play(policy, [self.rows[3]])
        hook.remove()
        same(play(policy, [row + ids[0]]), play(make_policy(model), [row + ids[0]]))


class TestSharing:
    """Equal prompts and prefixes are computed once."""

    @pytest.fixture
    def counted(self):
        model = make_model()
        policy = make_policy(model, max_output_tokens=1)
        seen = []
        model.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        return model, policy, seen

    def test_members_of_a_group(self, counted):
        model, policy, seen = counted
        one, two = random_rows([40, 30])
        rows = [one, two, one, one, two]
        found = play(policy, rows)
        assert sum(seen) == 80  # two rows of 40
        same(found, play(make_policy(model, max_output_tokens=1), rows))

    def test_a_prefix_that_all_begin_with(self, counted):
        model, policy, seen = counted
        common, *tails = random_rows([100, 9, 8, 8])
        rows = [common + tail for tail in tails]
        found = play(policy, rows)
        assert sum(seen) == 100 + 3 * 9
        same(found, play(make_policy(model, max_output_tokens=1), rows))

    def test_a_prefix_that_another_slot_holds(self, counted):
        model, policy, seen = counted
        common, *tails = random_rows([100, 8, 8])
        play(policy, [common + tails[0], [5]])
        seen.clear()
        rows = [common + tails[0], common + tails[1]]
        found = play(policy, rows)
        assert sum(seen) == 2 * 8
        same(found, play(make_policy(model, max_output_tokens=1), rows))

    def test_a_slot_lends_no_more_than_it_has_computed(self):
        model = make_model()
        policy, row = make_policy(model), random_rows([40])[0]
        ids, _ = play(policy, [row, [5]])
        rows = [[], row + ids[0] + [8, 9]]  # the last token of a response was never fed to the model
        same(play(policy, rows, turn=1), play(make_policy(model), rows, turn=1))

    def test_only_new_tokens_are_computed_and_long_prompts_apart_from_short_ones(self, counted):
        _, policy, seen = counted
        rows = random_rows([60, 50, 40])
        ids, _ = play(policy, rows)
        assert seen.pop() == 3 * 60
        rows = [rows[0] + ids[0] + [4, 5], rows[1] + ids[1] + [6], random_rows([70], seed=5)[0]]
        play(policy, rows, turn=1)
        assert sorted(seen) == [2 * 3, 70]

    def test_long_reads_are_split(self, counted, monkeypatch):
        model, policy, seen = counted
        monkeypatch.setattr("torchrl_llm.modules.hf._cached_model._MAX_TOKENS", 32)
        rows = random_rows([50, 20, 7, 9, 31])
        same(play(policy, rows), play(make_policy(model, max_output_tokens=1), rows))
        assert max(seen) <= 32


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


class TestWeights:
    rows = random_rows([11, 3, 40])

    @pytest.mark.parametrize("how", ["weights_changed", "in place", "one element", "data", "fused", "load", "swap"])
    def test_new_weights_drop_the_cache(self, how):
        model, other = make_model(), make_model()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.1).add_(0.05)
        policy = make_policy(model)
        play(policy, self.rows)
        change_weights(model, other, how)
        if how == "weights_changed":
            policy.weights_changed()
            assert policy.policy_version == 1
            assert not policy._engine.cache._layers
        same(play(policy, self.rows), play(make_policy(copy.deepcopy(model)), self.rows))

    def test_unchanged_weights_keep_it(self):
        policy = make_policy()
        play(policy, self.rows)
        before = policy._engine.cache._layers[0][0]
        play(policy, self.rows)
        assert policy._engine.cache._layers[0][0] is before
        policy.close()
        assert not policy._engine.cache._layers

    def test_training_goes_on_after_generation(self):
        model = make_model(attention_dropout=0.5).train()
        model.model.layers[0].eval()
        modes = [module.training for module in model.modules()]
        policy = make_policy(model)
        one = play(policy, self.rows)
        assert [module.training for module in model.modules()] == modes
        same(play(make_policy(copy.deepcopy(model).eval()), self.rows), one)
        model(input_ids=torch.tensor([self.rows[0]]), labels=torch.tensor([self.rows[0]])).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_results_can_meet_autograd(self):
        out = make_policy()(batch_of(self.rows))
        weight = torch.ones(8, requires_grad=True)
        (out[keys.RESPONSE_LOG_PROBS] * weight).sum().backward()
        assert weight.grad is not None

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_a_copy_answers_alike_and_starts_with_an_empty_cache(self, copied):
        policy = make_policy()
        first = play(policy, self.rows)
        twin = copied(policy)
        assert not twin._engine.cache._layers
        with torch.no_grad():
            policy.model.lm_head.weight.zero_()
        same(play(twin, self.rows), first)

    def test_nan_weights_are_an_error_that_leaves_nothing_behind(self):
        model = make_model()
        policy = make_policy(model)
        first = play(policy, self.rows)
        saved = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.fill_(torch.nan)
        with pytest.raises(NonFiniteLogitsError, match="learning rate"):
            play(policy, self.rows)
        model.load_state_dict(saved)
        same(play(policy, self.rows), first)


def change_weights(model, other, how):
    if how == "load":
        model.load_state_dict(other.state_dict())
    elif how == "swap":
        model.load_state_dict(other.state_dict(), assign=True)
    elif how == "one element":
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight[0, 1] += 3
    elif how == "fused":
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW(model.parameters(), lr=0.05, fused=True).step()
    else:
        with torch.no_grad():
            for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
                (parameter if how == "in place" else parameter.data).copy_(new)


class TestAdapters:
    rows = random_rows([11, 3, 7])

    @pytest.fixture
    def model(self):
        model = get_peft_model(
            make_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"]), adapter_name="actor"
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.data.normal_(0, 0.5)
        return model

    def test_generates_with_the_adapter_asked_for(self, model):
        with_actor = play(make_policy(model, adapter="actor"), self.rows)
        without = play(make_policy(model), self.rows)
        same(without, play(make_policy(make_model()), self.rows))
        assert with_actor[0] != without[0]
        merged = copy.deepcopy(model).merge_and_unload()
        assert play(make_policy(merged), self.rows)[0] == with_actor[0]

    def test_a_step_of_the_adapter_drops_the_cache(self, model):
        policy = make_policy(model, adapter="actor")
        play(policy, self.rows)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.neg_()
        same(play(policy, self.rows), play(make_policy(copy.deepcopy(model), adapter="actor"), self.rows))

    @pytest.mark.parametrize(
        ("fields", "fused"),
        [
            ({}, True),
            ({"use_rslora": True}, True),
            ({"layers_to_transform": [1]}, True),
            ({"use_dora": True}, False),
            ({"lora_bias": True}, False),
        ],
        ids=str,
    )
    def test_layers_are_fused_for_the_time_of_a_turn_and_compute_the_same(self, fields, fused):
        config = LoraConfig(r=4, lora_alpha=3, target_modules=["q_proj", "v_proj"], **fields)
        with torch.random.fork_rng():
            torch.manual_seed(0)  # of lora_A
            model = get_peft_model(make_model(), config, adapter_name="actor")
            model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        layers, flags = dict(model.named_modules()), {n: p.requires_grad for n, p in model.named_parameters()}
        seen = []
        attention = model.get_base_model().model.layers[1].self_attn
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(type(module.q_proj)), with_kwargs=True
        )
        ids, log_probs = play(make_policy(model, adapter="actor"), self.rows)
        assert set(seen[-8:]) == {
            torch.nn.Linear if fused else type(layers["base_model.model.model.layers.1.self_attn.q_proj"])
        }
        assert dict(model.named_modules()) == layers
        assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
        model.set_adapter("actor")
        for row, response, found in zip(self.rows, ids, log_probs, strict=True):
            expected = teacher_forced(model, row, response).log_softmax(-1)[range(8), response]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    def test_layers_come_back_after_an_error(self, model):
        layers = dict(model.named_modules())
        policy = make_policy(model, adapter="actor")
        hook = model.get_base_model().model.norm.register_forward_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            play(policy, self.rows)
        assert dict(model.named_modules()) == layers
        hook.remove()
        same(play(policy, self.rows), play(make_policy(model, adapter="actor"), self.rows))

    def test_half_precision_and_large_layers_are_not_fused(self, model):
        assert not FusedLora(model, adapter="actor", max_bytes=1)._places
        assert FusedLora(model, adapter="actor")._places
        assert not FusedLora(copy.deepcopy(model).bfloat16(), adapter="actor")._places

    def test_unknown_adapter(self, model):
        with pytest.raises(AdapterError, match="no adapter 'critic'"):
            make_policy(model, adapter="critic")

    def test_prompt_learning(self):
        model = get_peft_model(make_model(), PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2))
        with pytest.raises(UnsupportedModelError, match="prompt-learning"):
            make_policy(model)


def make_local(family, window, **fields):
    """A model whose configuration declares a window in a way of its own."""
    if family == "GPTNeo":
        layers = {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "attn_implementation": "eager",
        }
        return make_model("GPTNeo", window_size=window, **layers, **fields)
    return make_model("Moshi", sliding_window=window, ffn_dim=48, audio_vocab_size=9, num_codebooks=2, **fields)


def check_rows(model, policy, lengths):
    rows = random_rows(lengths)
    for row, response, found in zip(rows, *play(policy, rows), strict=True):
        expected = teacher_forced(model, row, response).log_softmax(-1)[range(8), response]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


class TestWindows:
    """Attention windows that the configuration names and the ready-made masks may get wrong."""

    def test_up_to_the_window_nothing_is_refused(self):
        model = make_local("GPTNeo", 32)
        check_rows(model, make_policy(model), [24, 3, 11])

    def test_beyond_it_a_model_that_applies_it_by_column_is_refused(self):
        policy = make_policy(make_local("GPTNeo", 32))
        for _ in range(2):  # the second time without another comparison
            with pytest.raises(ContextLengthError, match="window of 32 tokens of GPTNeoForCausalLM"):
                play(policy, random_rows([40, 3, 11]))
        play(policy, random_rows([24, 3, 11]))

    def test_a_window_that_the_models_own_forward_does_not_apply_is_given_up(self):
        model = make_local("Moshi", 32)
        check_rows(model, make_policy(model), [24, 3, 11])
        check_rows(model, make_policy(model), [60, 3, 40])

    @pytest.mark.parametrize("family", ["Mistral", "Gemma2", "Qwen2 sliding"])
    def test_a_window_that_is_applied_is_kept(self, family):
        model = make_model(family.split()[0], **(FAMILIES[family] | {"sliding_window": 32}))
        policy = make_policy(model)
        check_rows(model, policy, [24, 3, 11])
        check_rows(model, policy, [60, 3, 40])
        assert 32 in policy._engine._windows.values()

    def test_the_cache_is_computed_anew_after_the_comparison(self):
        model = make_model("Mistral", sliding_window=32)
        policy, rows = make_policy(model), random_rows([20, 3, 11])
        for turn in range(4):
            ids, log_probs = play(policy, rows, turn=turn)
            same((ids, log_probs), play(make_policy(model), rows, turn=turn))
            rows = [row + response for row, response in zip(rows, ids, strict=True)]


class TestRefusals:
    @pytest.mark.parametrize(
        ("family", "fields", "problem"),
        [
            ("Mamba", {"state_size": 4, "attn_implementation": "eager"}, "linear_attention"),
            (
                "Qwen3Next",
                {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2},
                "linear_attention",
            ),
            ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}, "conv"),
            ("Bloom", {"n_layer": 2, "n_head": 4, "attn_implementation": "eager"}, "position_ids"),
        ],
    )
    def test_families_without_keys_and_values_by_position(self, family, fields, problem):
        with pytest.raises(UnsupportedModelError, match=problem):
            make_policy(make_model(family, **fields))

    def test_a_model_whose_cached_forward_disagrees(self):
        model = make_model()
        original = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda x, position_ids: original(
            x, torch.arange(position_ids.shape[1]).expand_as(position_ids)
        )
        with pytest.raises(UnsupportedModelError, match="other logits"):
            make_policy(model)

    def test_attention_without_a_mask_argument(self):
        model = make_model()
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"):
            make_policy(model)

    def test_tokenizer_with_more_ids_than_the_model(self):
        with pytest.raises(VocabularyMismatchError, match="61"):
            HFPolicy(make_model(), make_tokenizer(size=V + 1))

    def test_a_context_longer_than_the_models_positions(self):
        with pytest.raises(ContextLengthError, match="256 positions"):
            play(make_policy(), random_rows([249]))
        play(make_policy(), random_rows([248]))

    def test_rope_that_depends_on_the_longest_row_counts_up_to_where_it_sets_in(self):
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
        model = make_model(rope_parameters=rope, max_position_embeddings=64)
        policy = make_policy(model)
        play(policy, random_rows([56]))
        assert not model.model.rotary_emb.inv_freq.is_inference()
        with pytest.raises(ContextLengthError, match="64 positions"):
            play(policy, random_rows([57]))

    def test_a_negative_seed(self):
        with pytest.raises(ValueError, match="seed"):
            make_policy(seed=-1)
