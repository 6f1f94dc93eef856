"""VLLMPolicy over a real engine, against the scorer, HFPolicy and exact probabilities. Needs
vLLM."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from one_turn import CONTEXT, PROMPTS, batch_of, finish, gaps_of, request_of
from torchrl.envs.utils import ExplorationType, set_exploration_type
from waiting import LIMIT

from torchrl_llm import keys
from torchrl_llm.modules import HFPolicy, SamplingConfig, TurnRequest
from torchrl_llm.modules.checks import VocabularyMismatchError
from torchrl_llm.modules.engine import RETRIES, ContextLengthError, EngineError, NonFiniteLogitsError
from torchrl_llm.modules.vllm import VLLMPolicy, load_engine
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer, tiny_model_path
from torchrl_llm.testing.tokenizers import byte_tokenizer

pytest.importorskip("vllm", reason="needs vLLM: run make test-vllm")
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def llm():
    engine = load_engine(tiny_model_path(), dtype="float32", max_model_len=CONTEXT, max_num_seqs=64)
    yield engine
    engine.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def model():
    return load_tiny_model()


@pytest.fixture(scope="module")
def words():
    return load_tiny_tokenizer()


@pytest.fixture
def make(llm, words):
    def make_policy(seed=0, **sampling):
        return VLLMPolicy(llm, words, SamplingConfig(**({"max_output_tokens": 12} | sampling)), seed=seed)

    return make_policy


class TestLogProbs:
    @pytest.mark.parametrize(
        "sampling",
        [
            {},
            {"temperature": 0.7},
            {"temperature": 1.5, "min_output_tokens": 6},
            {"top_p": 0.9},
            {"top_p": 0.6, "temperature": 1.4},
            {"top_k": 3},
            {"min_p": 0.1},
        ],
        ids=str,
    )
    def test_they_are_the_scorers(self, make, model, words, sampling):
        policy = make(**sampling)
        assert gaps_of(policy, model, batch_of(words, PROMPTS * 8)).max() <= 1e-5

    def test_what_is_sampled_has_the_models_distribution(self, make, model, words):
        # One prompt, 2000 episodes: noise of different episodes must be independent.
        policy = make(max_output_tokens=1, temperature=1.3)
        batch = policy(batch_of(words, PROMPTS[:1] * 2000))
        with torch.no_grad():
            logits = model(torch.tensor([words.encode(PROMPTS[0])])).logits[0, -1] / 1.3
        p = logits.softmax(-1)
        counts = batch[keys.RESPONSE].flatten().bincount(minlength=len(p)).float()
        common = p * 2000 >= 5
        chi2 = ((counts - 2000 * p) ** 2 / (2000 * p))[common].sum()
        degrees = int(common.sum())
        assert degrees >= 3
        assert abs(chi2 - degrees) < 5 * (2 * degrees) ** 0.5

    def test_exact_says_whether_a_scorer_computes_the_same(self, make):
        assert make().logprobs_match_trainer
        assert make(temperature=0.5).logprobs_match_trainer
        assert not make(top_p=0.9).logprobs_match_trainer


class TestResponses:
    def test_the_keys_are_those_of_hf_policy(self, make, model, words):
        texts = [PROMPTS[0], "", PROMPTS[2]]
        ours, theirs = batch_of(words, texts), batch_of(words, texts)
        make()(ours)
        HFPolicy(model, words, SamplingConfig(max_output_tokens=12))(theirs)
        for key in make().out_keys:
            assert ours[key].shape == theirs[key].shape, key
            assert ours[key].dtype == theirs[key].dtype, key
        assert not ours[keys.RESPONSE_MASK][1].any()
        assert (ours[keys.TURN_IDS][1] == -1).all()
        assert (ours[keys.POLICY_VERSION][1] == -1).all()

    def test_greedy_responses_are_those_of_hf_policy(self, make, model, words):
        ours, theirs = batch_of(words), batch_of(words)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            make()(ours)
            HFPolicy(model, words, SamplingConfig(max_output_tokens=12))(theirs)
        assert torch.equal(ours[keys.RESPONSE], theirs[keys.RESPONSE])
        torch.testing.assert_close(ours[keys.RESPONSE_LOG_PROBS], theirs[keys.RESPONSE_LOG_PROBS], rtol=0, atol=1e-5)

    def test_a_response_does_not_depend_on_its_neighbours_or_its_slot(self, make, words):
        batch = make()(batch_of(words, PROMPTS, turn=2, episodes=[7, 8, 9]))
        for i, text in reversed(list(enumerate(PROMPTS))):
            policy = make()
            policy.submit(request_of(words, text, slot=40 + i, episode=7 + i, turn=2))
            answer = finish(policy)[40 + i]
            assert answer.tokens.tolist() == batch[keys.RESPONSE][i][batch[keys.RESPONSE_MASK][i]].tolist()

    def test_a_dropped_cache_changes_no_response(self, make, words):
        policy, long = make(), [PROMPTS[2] * 4] * 3
        first, again = policy(batch_of(words, long)), policy(batch_of(words, long))
        policy.drop_cache()
        anew = policy(batch_of(words, long))
        for other in (again, anew):
            assert torch.equal(first[keys.RESPONSE], other[keys.RESPONSE])
            torch.testing.assert_close(
                first[keys.RESPONSE_LOG_PROBS], other[keys.RESPONSE_LOG_PROBS], rtol=0, atol=1e-5
            )

    def test_seed_episode_and_turn_are_the_key_of_the_noise(self, make, words):
        same = make(temperature=1.5)(batch_of(words, PROMPTS[:1] * 2, episodes=[5, 5]))[keys.RESPONSE]
        assert torch.equal(same[0], same[1])
        hot = {"temperature": 2.0, "stop_ids": ()}
        others = [
            make(**hot)(batch_of(words, PROMPTS[:1] * 8, episodes=range(8)))[keys.RESPONSE],
            make(**hot)(batch_of(words, PROMPTS[:1] * 8, turn=1))[keys.RESPONSE],
            make(seed=1, **hot)(batch_of(words, PROMPTS[:1] * 8))[keys.RESPONSE],
        ]
        assert len({tuple(row.tolist()) for each in others for row in each}) == 24

    def test_a_response_ends_with_its_stop_id_or_at_the_limit(self, make, words):
        stop = words.eos_token_id
        batch = make(max_output_tokens=40)(batch_of(words, PROMPTS * 4))
        for tokens, mask in zip(batch[keys.RESPONSE], batch[keys.RESPONSE_MASK], strict=True):
            said = tokens[mask].tolist()
            assert stop not in said[:-1]
            assert said[-1] == stop or len(said) == 40
        never = make(max_output_tokens=40, stop_ids=())(batch_of(words))
        assert never[keys.RESPONSE_MASK].all()

    def test_stop_ids_of_the_callers_choice_are_kept_in_the_response(self, make, words):
        first = make(stop_ids=())(batch_of(words))[keys.RESPONSE]
        stop = int(first[0, 3])
        batch = make(stop_ids=(stop,))(batch_of(words))
        said = batch[keys.RESPONSE][0][batch[keys.RESPONSE_MASK][0]].tolist()
        assert said == first[0, : first[0].tolist().index(stop) + 1].tolist()

    def test_stop_ids_are_held_back_at_first(self, make, words):
        batch = make(min_output_tokens=9, max_output_tokens=9)(batch_of(words, PROMPTS * 4))
        assert batch[keys.RESPONSE_MASK].all()
        assert not (batch[keys.RESPONSE][:, :-1] == words.eos_token_id).any()


class TestSingleTurns:
    def test_turns_are_answered_as_they_finish(self, make, words):
        policy = make(max_output_tokens=30, stop_ids=())
        short = VLLMPolicy(policy.llm, words, SamplingConfig(max_output_tokens=2, stop_ids=()))
        policy.submit(request_of(words, slot=3))
        policy.poll()
        assert policy.pending == 1
        policy.submit(request_of(words, slot=4, episode=1))
        answers = finish(policy)
        assert {slot: len(answer.tokens) for slot, answer in answers.items()} == {3: 30, 4: 30}
        assert short(batch_of(words))[keys.RESPONSE_MASK].all()

    def test_a_batch_in_between_disturbs_no_turn_in_flight(self, make, words):
        policy = make(max_output_tokens=20, stop_ids=())
        policy.submit(request_of(words, slot=0, episode=5))
        alone = finish(policy)[0]
        policy.submit(request_of(words, slot=0, episode=5))
        policy.poll()
        batch = policy(batch_of(words, PROMPTS))
        assert batch[keys.RESPONSE_MASK].all()
        assert policy.pending == 1
        together = finish(policy)[0]
        assert together.tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(together.log_probs, alone.log_probs, rtol=0, atol=1e-5)

    def test_each_token_carries_the_version_it_was_sampled_with(self, make, words):
        policy = make(max_output_tokens=10, stop_ids=())
        policy.policy_version = 7
        policy.submit(request_of(words))
        for _ in range(4):
            policy.poll()
        policy.policy_version = 9
        versions = finish(policy)[0].versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {7, 9}
        assert 3 <= versions.count(7) <= 4
        assert set(make()(batch_of(words))[keys.POLICY_VERSION].flatten().tolist()) <= {0, -1}

    def test_cancelled_turns_leave_the_engine(self, make, words):
        policy = make(max_output_tokens=60, stop_ids=())
        for slot in range(3):
            policy.submit(request_of(words, slot=slot, episode=slot))
        policy.poll()
        policy.cancel([0, 2])
        assert list(finish(policy)) == [1]
        policy.submit(request_of(words))
        policy.cancel()
        assert policy.pending == 0
        assert not policy.llm.llm_engine.has_unfinished_requests()

    @pytest.mark.parametrize("failure", [ContextLengthError, KeyboardInterrupt])
    def test_a_batch_that_fails_leaves_no_turn_behind(self, make, words, monkeypatch, failure):
        policy = make(max_output_tokens=20, stop_ids=())
        expected = policy(batch_of(words, PROMPTS[:1]))[keys.RESPONSE]
        policy.submit(request_of(words, slot=0, episode=5))
        steps = iter([policy.step])

        def step_once():
            for step in steps:
                return step()
            raise KeyboardInterrupt

        too_long = failure is ContextLengthError
        monkeypatch.setattr(policy, "step", policy.step if too_long else step_once)
        with pytest.raises(failure):
            policy(batch_of(words, [PROMPTS[2], PROMPTS[1] * (CONTEXT if too_long else 1)]))
        monkeypatch.undo()
        assert policy.pending == 1
        assert torch.equal(policy(batch_of(words, PROMPTS[:1]))[keys.RESPONSE], expected)
        assert list(finish(policy)) == [0]
        assert not policy.llm.llm_engine.has_unfinished_requests()

    @staticmethod
    def spoil(monkeypatch, policy, slot, times, value):
        """The engine gives the last token of a slot's first ``times`` responses a log-prob that is
        not finite."""
        engine, left = policy.llm.llm_engine, [times]
        step = engine.step

        def spoiled():
            outputs = step()
            for output in outputs:
                request = policy._running.get(output.request_id)
                if output.finished and request is not None and request.slot == slot and left[0]:
                    output.outputs[0].logprobs.logprobs[-1] = value
                    left[0] -= 1
            return outputs

        monkeypatch.setattr(engine, "step", spoiled)

    @pytest.mark.parametrize("value", [-np.inf, np.nan])
    def test_a_token_without_a_finite_log_prob_is_sampled_again(self, make, model, words, monkeypatch, value, caplog):
        found = []
        for times in (0, 1, 1, RETRIES):
            policy = make(max_output_tokens=8, stop_ids=())
            for slot in range(3):
                policy.submit(request_of(words, slot=slot, episode=slot))
            self.spoil(monkeypatch, policy, 1, times, value)
            found.append(finish(policy))
            monkeypatch.undo()
        once, again, more = ([answers[slot].tokens.tolist() for slot in range(3)] for answers in found[1:])
        plain = [found[0][slot].tokens.tolist() for slot in range(3)]
        # Only that turn is another one, and the same in every repetition.
        assert once == again
        assert [a == b for a, b in zip(plain, once, strict=True)] == [True, False, True]
        assert once[1] != more[1] != plain[1]
        assert all(np.isfinite(answer.log_probs).all() for answers in found for answer in answers.values())
        assert (
            "episode 1, turn 0 has a token whose log-prob is NaN or infinite: the turn is sampled again" in caplog.text
        )
        policy = make(max_output_tokens=8)
        self.spoil(monkeypatch, policy, -2, 1, value)
        assert gaps_of(policy, model, batch_of(words, PROMPTS)).max() <= 1e-5

    def test_a_turn_that_fails_costs_no_other_its_answer(self, make, words, monkeypatch):
        policy = make(max_output_tokens=4, stop_ids=())
        for slot in range(3):
            policy.submit(request_of(words, slot=slot, episode=slot))
        self.spoil(monkeypatch, policy, 0, RETRIES + 1, np.nan)
        answered = []

        def until_it_fails():
            while policy.pending:
                answered.extend(answer.slot for answer in policy.poll())

        with pytest.raises(NonFiniteLogitsError, match="episode 0, turn 0"):
            until_it_fails()
        monkeypatch.undo()
        assert sorted([*answered, *finish(policy)]) == [1, 2]

    def test_policies_that_share_an_engine_name_their_turns_apart(self, make, words):
        first, second, other = make(), make(seed=1), make(seed=1)
        other.submit(request_of(words))
        alone = finish(other)[0]
        first.submit(request_of(words, PROMPTS[1]))
        second.submit(request_of(words))
        assert finish(second)[0].tokens.tolist() == alone.tokens.tolist()
        with second.exclusive():
            while second.llm.llm_engine.has_unfinished_requests():
                second.step()
        # One at a time is meant to have turns in it: what the second took is lost to the first, and
        # waited for by nobody.
        with pytest.raises(EngineError, match="another policy or caller has taken its steps"):
            finish(first)
        first.cancel()


class TestErrors:
    def test_a_full_context_is_refused_before_anything_is_sampled(self, make, words):
        policy = make(max_output_tokens=64)
        with pytest.raises(ContextLengthError, match=r"max_output_tokens=64 .* max_model_len=256"):
            policy.submit(TurnRequest(0, np.full(CONTEXT - 63, 9), 0, 0))
        policy.submit(TurnRequest(0, np.full(CONTEXT - 64, 9), 0, 0))
        assert len(finish(policy)[0].tokens) >= 1

    def test_settings_without_an_equivalent_are_refused(self, make):
        for temperature in (0.005, 2.5):
            with pytest.raises(ValueError, match=r"vLLM samples at 0\.01 to 2\.0"):
                make(temperature=temperature)

    def test_end_tokens_are_stop_ids_where_answers_have_a_least_length(self, make, words):
        """vLLM keeps them from being sampled too, and the scorer does not."""
        other = (words.eos_token_id + 1,)
        with pytest.raises(ValueError, match=f"stop_ids has no {words.eos_token_id}, an end token of the model"):
            make(stop_ids=other, min_output_tokens=4)
        make(stop_ids=other)
        make(stop_ids=(words.eos_token_id, *other), min_output_tokens=4)

    def test_a_foreign_tokenizer_is_refused(self, llm):
        class Larger:
            @staticmethod
            def get_vocab():
                return {"a": 10**6}

        with pytest.raises(VocabularyMismatchError, match="1000000"):
            VLLMPolicy(llm, Larger())

    def test_an_engine_with_other_log_probs_is_refused(self, llm, words, monkeypatch):
        monkeypatch.setattr(llm.llm_engine.vllm_config.model_config, "logprobs_mode", "raw_logprobs")
        with pytest.raises(ValueError, match="not the one sampled from"):
            VLLMPolicy(llm, words)

    def test_an_engine_that_reads_prompts_in_parts_is_refused_on_cpus(self, llm, words, monkeypatch):
        monkeypatch.setattr(llm.llm_engine.vllm_config.scheduler_config, "enable_chunked_prefill", True)
        with pytest.raises(ValueError, match="enable_chunked_prefill=False"):
            VLLMPolicy(llm, words)

    def test_settings_for_a_live_engine_are_refused(self, llm, words):
        with pytest.raises(ValueError, match=r"\['dtype'\]"):
            VLLMPolicy(llm, words, dtype="float32")

    def test_unknown_weights_are_not_sampled_from(self, make, words):
        policy = make()
        policy.invalidate("the sync failed at layer 3.")
        for use in (lambda: policy.submit(request_of(words)), lambda: policy(batch_of(words))):
            with pytest.raises(EngineError, match="layer 3"):
                use()
        policy.validate()
        assert policy(batch_of(words))[keys.RESPONSE_MASK].any()


class TestThreads:
    def test_a_loop_of_polls_lets_others_in(self, make, words):
        policy = make(max_output_tokens=100, stop_ids=())
        for slot in range(8):
            policy.submit(request_of(words, slot=slot, episode=slot))
        player = threading.Thread(target=finish, args=(policy,), daemon=True)
        player.start()
        waits = 0
        while player.is_alive() and waits < 10:
            with policy.exclusive(), policy.exclusive():
                waits += 1
        player.join(LIMIT)
        assert not player.is_alive()
        assert waits == 10


def test_a_byte_tokenizer_fits_the_tiny_model(llm):
    # Fewer tokens than the model embeds: common, and accepted.
    assert VLLMPolicy(llm, byte_tokenizer(), SamplingConfig(stop_ids=())).stop_ids == ()
