"""AsyncTurnCollector and TurnCollector over a real vLLM engine. Needs vLLM."""

from __future__ import annotations

import pytest
import torch

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.envs import GEMEnv
from torchrl_llm.functional import turn_last
from torchrl_llm.keys import StopReason
from torchrl_llm.modules import SamplingConfig, TokenScorer, VLLMPolicy, load_actor_critic, load_engine
from torchrl_llm.modules.engine import EngineError
from torchrl_llm.testing.environments import Slow
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer, tiny_model_path
from torchrl_llm.weight_update import EngineWeightSync, WeightSyncError

pytest.importorskip("vllm", reason="needs vLLM: run make test-vllm")
pytestmark = pytest.mark.vllm

GAME = "game:GuessTheNumber-v0-easy"
SIZE = {"max_model_len": 256, "max_output_tokens": 16}


@pytest.fixture(scope="module")
def llm():
    engine = load_engine(tiny_model_path(), dtype="float32", max_model_len=256, max_num_seqs=16)
    yield engine
    engine.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def words():
    return load_tiny_tokenizer()


@pytest.fixture
def policy(llm, words):
    return VLLMPolicy(llm, words, SamplingConfig(max_output_tokens=16))


def make_env(words, game=GAME, **options):
    return GEMEnv(game, tokenizer=words, num_envs=8, **SIZE | options)


def slow_game(seed):
    return lambda: Slow(GAME, mean=0.01, sigma=1.0, seed=seed)


class TestBatches:
    @pytest.mark.parametrize("game", [GAME, slow_game(0), slow_game(1)], ids=["instant", "slow", "slow otherwise"])
    def test_they_are_those_of_a_barrier_whatever_the_latencies(self, policy, words, game):
        barrier = TurnCollector(make_env(words), policy, batch_size=24)
        collector = AsyncTurnCollector(make_env(words, game), policy, batch_size=24)
        try:
            expected, found = barrier.rollout(), collector.rollout()
        finally:
            collector.shutdown()
        assert found.shape == expected.shape
        for key in expected.keys(include_nested=True, leaves_only=True):
            if key == keys.SAMPLE_LOG_PROB:
                torch.testing.assert_close(found[key], expected[key], rtol=0, atol=1e-5)
            else:
                assert torch.equal(found[key], expected[key]), key

    def test_turns_join_those_that_are_half_sampled(self, policy, words, monkeypatch):
        joined = []
        submit = VLLMPolicy.submit

        def watched(self, request):
            states = self.llm.llm_engine.output_processor.request_states.values()
            joined.append(any(state.detokenizer.num_output_tokens() > 0 for state in states))
            submit(self, request)

        monkeypatch.setattr(VLLMPolicy, "submit", watched)
        collector = AsyncTurnCollector(make_env(words, slow_game(0)), policy, batch_size=24)
        collector.rollout()
        collector.shutdown()
        assert sum(joined) > len(joined) / 4


@pytest.mark.parametrize("kind", [TurnCollector, AsyncTurnCollector])
class TestFaults:
    """Whatever ends a response or an episode, what is trained on is what was sampled."""

    def play(self, kind, llm, words, *, tokens=16, context=256):
        policy = VLLMPolicy(llm, words, SamplingConfig(max_output_tokens=tokens))
        env = GEMEnv(GAME, tokenizer=words, num_envs=8, max_model_len=context, max_output_tokens=tokens)
        collector = kind(env, policy, batch_size=16)
        rows = collector.rollout()
        collector.shutdown()
        assert gaps(load_tiny_model(), policy, rows).max() <= 1e-5
        return rows

    def test_a_response_without_its_stop_token(self, kind, llm, words):
        rows = self.play(kind, llm, words, tokens=3)
        turns = rows[keys.TURN_MASK]
        last = turn_last(rows[keys.TOKENS].double(), rows[keys.TURN_IDS], turns.shape[1])[turns]
        assert (last != words.eos_token_id).double().mean() > 0.5
        assert (rows[keys.TURN_IDS] >= 0).sum() <= 3 * turns.sum()

    def test_a_full_context(self, kind, llm, words):
        rows = self.play(kind, llm, words, context=80)
        cut = rows[keys.TURN_STOP_REASON] == StopReason.CONTEXT
        assert cut.any()
        assert rows[keys.TURN_TRUNCATED][cut].all()
        assert rows[keys.TOKENS].shape[1] <= 80


class TestWeights:
    def test_a_collector_sends_them_by_its_scheme(self, policy, words):
        models = load_actor_critic(tiny_model_path(), dtype="float32")
        sync = EngineWeightSync(models.model, models.adapter, policy=policy)
        collector = TurnCollector(make_env(words), policy, batch_size=8, weight_sync_schemes={"policy": sync})
        version = policy.policy_version
        with torch.no_grad():
            models.model.lm_head.weight.mul_(0.5)
        collector.update_policy_weights_()
        assert policy.policy_version == version + 1
        assert gaps(models.model, policy, collector.rollout()).max() <= 1e-5

    def test_each_token_has_the_log_prob_of_the_weights_it_is_stamped_with(self, policy, words):
        # Collection continues in a thread while the weights change: tokens of both versions must be
        # found in their rows.
        models = load_actor_critic(tiny_model_path(), dtype="float32")
        sync = EngineWeightSync(models.model, models.adapter, policy=policy)
        sync()
        collector = AsyncTurnCollector(
            make_env(words, slow_game(0)), policy, batch_size=32, max_staleness=1, total_batches=4
        )
        scorers, mixed = {}, 0
        try:
            for rows in collector:
                scorers[policy.policy_version] = load_tiny_model()
                scorers[policy.policy_version].load_state_dict(models.model.state_dict())
                versions = rows[keys.POLICY_VERSION]
                assert versions[versions >= 0].min() >= policy.policy_version - 1
                mixed += sum(len(set(row.tolist()) - {-1}) > 1 for row in versions)
                for version in set(versions.unique().tolist()) - {-1}:
                    gap = gaps(scorers[version], policy, rows)
                    assert gap[versions[versions >= 0] == version].max() <= 1e-5
                with torch.no_grad():
                    models.model.lm_head.weight.mul_(0.9)
                sync()
        finally:
            collector.shutdown()
        assert mixed

    def test_a_sync_that_fails_in_flight_ends_the_collection(self, policy, words):
        models = load_actor_critic(tiny_model_path(), dtype="float32")
        sync = EngineWeightSync(models.model, models.adapter, policy=policy)
        sync()
        collector = AsyncTurnCollector(make_env(words, slow_game(0)), policy, batch_size=16, max_staleness=1)
        norm = models.model.model.norm.weight
        whole = norm.data
        try:
            next(iter(collector))
            norm.data = whole[:3]
            with pytest.raises(WeightSyncError, match="reloading the weights"):
                sync()
            with pytest.raises(EngineError, match="did not end well"):
                collector.rollout()
        finally:
            collector.shutdown()
            norm.data = whole
        sync()
        rows = TurnCollector(make_env(words), policy, batch_size=8).rollout()
        assert gaps(models.model, policy, rows).max() <= 1e-5


def gaps(model, policy, rows):
    """Absolute differences of recorded and scored log-probs, one for each sampled token."""
    with torch.no_grad():
        scored = TokenScorer(model, policy.sampling)(rows.clone())[keys.LOG_PROB]
    return (scored - rows[keys.SAMPLE_LOG_PROB])[rows[keys.TURN_IDS] >= 0].abs()
