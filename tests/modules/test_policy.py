"""SamplingConfig and TurnPolicy: what every engine has in common."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_llm import keys
from torchrl_llm.modules.policy import Generation, SamplingConfig, TurnPolicy, TurnRequest


class Counter(TurnPolicy):
    """Answers with 1 + slot, as often as the prompt is long (at most 4 times), and remembers how it
    was asked."""

    def __init__(self, **options):
        super().__init__(SamplingConfig(max_output_tokens=4), **options)
        self.calls = []

    def generate(self, prompt, lengths, turn, episode_id, *, slots, greedy):
        self.calls.append((prompt, lengths, turn, episode_id, greedy))
        shape = (len(slots), 4)
        tokens = (1 + slots).unsqueeze(-1).expand(shape)
        return Generation(tokens, lengths.clamp(max=4), torch.full(shape, -0.5))


def make_batch(lengths, *, shape=None):
    lengths = torch.tensor(lengths)
    n = len(lengths)
    batch = TensorDict(
        {
            keys.PROMPT: torch.arange(n * 6).reshape(n, 6),
            keys.PROMPT_LENGTH: lengths.unsqueeze(-1),
            keys.TURN: torch.arange(n).unsqueeze(-1),
            keys.EPISODE_ID: 10 + torch.arange(n).unsqueeze(-1),
        },
        batch_size=[n],
    )
    return batch if shape is None else batch.reshape(shape)


class TestSamplingConfig:
    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            ("temperature", 0.0),
            ("temperature", -1.0),
            ("top_k", -1),
            ("top_p", 0.0),
            ("top_p", 1.1),
            ("min_p", 1.0),
            ("min_p", -0.1),
            ("repetition_penalty", 0.0),
            ("max_output_tokens", 0),
            ("min_output_tokens", 65),
            ("min_output_tokens", -1),
        ],
    )
    def test_a_wrong_value_is_named(self, name, wrong):
        with pytest.raises(ValueError, match=rf"{name} is {wrong}; expected "):
            SamplingConfig(**{name: wrong})

    def test_the_default_is_the_models_own_distribution(self):
        assert not SamplingConfig().truncates
        assert not SamplingConfig(temperature=0.3, min_output_tokens=2).truncates

    @pytest.mark.parametrize("options", [{"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}])
    def test_truncates(self, options):
        assert SamplingConfig(**options).truncates


class TestTurnPolicy:
    def test_writes_the_response_keys(self):
        policy = Counter()
        out = policy(make_batch([2, 0, 6]))
        assert out[keys.RESPONSE].tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [3, 3, 3, 3]]
        assert out[keys.RESPONSE_MASK].sum(-1).tolist() == [2, 0, 4]
        assert out[keys.RESPONSE_LOG_PROBS].tolist() == [[-0.5, -0.5, 0, 0], [0, 0, 0, 0], [-0.5] * 4]
        assert out[keys.TURN_IDS].tolist() == [[0, 0, -1, -1], [-1] * 4, [2] * 4]
        assert out[keys.POLICY_VERSION].tolist() == [[0, 0, -1, -1], [-1] * 4, [0] * 4]
        dtypes = {keys.RESPONSE: torch.int64, keys.RESPONSE_MASK: torch.bool, keys.RESPONSE_LOG_PROBS: torch.float32}
        assert all(out[key].dtype == dtype for key, dtype in dtypes.items())
        assert all(key in out.keys(True) for key in policy.out_keys)

    def test_the_engine_sees_live_slots_only(self):
        policy = Counter()
        policy(make_batch([2, 0, 3]))
        prompt, lengths, turn, episode_id, _ = policy.calls[0]
        assert prompt.tolist() == [[0, 1, 2], [12, 13, 14]]
        assert (lengths.tolist(), turn.tolist(), episode_id.tolist()) == ([2, 3], [0, 2], [10, 12])

    def test_no_live_slot_no_call(self):
        policy = Counter()
        out = policy(make_batch([0, 0]))
        assert not policy.calls
        assert out[keys.TURN_IDS].eq(-1).all()

    @pytest.mark.parametrize("shape", [(2, 3), (6, 1), (1, 2, 3)])
    def test_any_batch_shape(self, shape):
        lengths = [2, 0, 3, 1, 0, 5]
        flat, shaped = Counter()(make_batch(lengths)), Counter()(make_batch(lengths, shape=shape))
        for key in Counter.out_keys:
            assert torch.equal(shaped[key], flat[key].reshape(*shape, 4))

    def test_no_batch_dimension(self):
        out = Counter()(make_batch([3])[0])
        assert out[keys.RESPONSE].tolist() == [1, 1, 1, 0]

    @pytest.mark.parametrize(
        ("kind", "greedy"),
        [(ExplorationType.RANDOM, False), (ExplorationType.DETERMINISTIC, True), (ExplorationType.MODE, True)],
    )
    def test_exploration_type(self, kind, greedy):
        policy = Counter()
        with set_exploration_type(kind):
            policy(make_batch([1]))
        assert policy.calls[0][-1] is greedy

    def test_versions_count_weight_changes(self):
        policy = Counter()
        policy.weights_changed()
        policy.weights_changed()
        assert policy(make_batch([1]))[keys.POLICY_VERSION].tolist() == [[2, -1, -1, -1]]

    def test_base_promises_no_exactness(self):
        assert Counter().logprobs_match_trainer is False

    def test_a_length_beyond_the_prompt_is_an_error(self):
        with pytest.raises(ValueError, match=r"says 7 tokens, but .* has only 6 columns"):
            Counter()(make_batch([7]))

    def test_a_negative_seed_is_an_error(self):
        with pytest.raises(ValueError, match="seed is -1"):
            Counter(seed=-1)


class TestSingleTurns:
    """``submit`` and ``poll`` answer what a call with a TensorDict answers."""

    @staticmethod
    def requests(batch):
        lengths = batch[keys.PROMPT_LENGTH].flatten().tolist()
        return [
            TurnRequest(i, batch[keys.PROMPT][i, :length].numpy(), 10 + i, i, greedy=i == 1)
            for i, length in enumerate(lengths)
        ]

    def test_the_answers_are_those_of_a_batch(self):
        policy, batch = Counter(), make_batch([2, 6, 3])
        policy.policy_version = 5
        for request in self.requests(batch):
            policy.submit(request)
        assert policy.pending == 3
        answers = {answer.slot: answer for answer in policy.poll()}
        assert policy.pending == 0
        assert not policy.poll()
        policy(batch)
        for slot, answer in answers.items():
            mask = batch[keys.RESPONSE_MASK][slot]
            assert answer.tokens.tolist() == batch[keys.RESPONSE][slot][mask].tolist()
            assert answer.log_probs.tolist() == batch[keys.RESPONSE_LOG_PROBS][slot][mask].tolist()
            assert answer.versions.tolist() == [5] * int(mask.sum())
        assert [call[4] for call in policy.calls] == [False, True, False]
        assert policy.calls[0][0].tolist() == [[0, 1, 0], [12, 13, 14]]

    def test_cancelled_requests_are_not_answered(self):
        policy, batch = Counter(), make_batch([2, 6, 3])
        for request in self.requests(batch):
            policy.submit(request)
        policy.cancel([0, 2])
        assert [answer.slot for answer in policy.poll()] == [1]
        policy.submit(self.requests(batch)[0])
        policy.cancel()
        assert not policy.pending
