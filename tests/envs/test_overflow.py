"""Sliding windows: when the context is full, the oldest turns leave it, and nothing is trained on
as it was not seen."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.data import HistoryRewrittenError, TurnsToSequence, TurnViewError, micro_batches, turns_to_rows
from torchrl_llm.envs import GEMEnv
from torchrl_llm.keys import StopReason
from torchrl_llm.modules import HFPolicy, SamplingConfig, TokenScorer, TurnCritic
from torchrl_llm.objectives import TurnGAE
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.runs.outputs import episodes_text
from torchrl_llm.testing.environments import Echo
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer
from torchrl_llm.testing.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()


class Chatter:
    """Answers with some words of its own choice; reward 1 for the last turn."""

    def __init__(self, turns=8, longest=40):
        self.turns, self.longest = turns, longest

    def reset(self, seed=None):
        self.draw, self.turn = random.Random(seed), 0
        return "Speak.", {}

    def step(self, action):
        self.turn += 1
        last = self.turn == self.turns
        return "x" * self.draw.randint(0, self.longest), float(last), last, False, {}


def words(episode, turn, context):
    return "ab" * random.Random(f"{episode} {turn}").randint(0, 7)


def make_env(env=Chatter, **kwargs):
    sizes = {"tokenizer": TOKENIZER, "num_envs": 2, "max_model_len": 160, "max_output_tokens": 16, "overflow": "slide"}
    return GEMEnv(env, **{**sizes, **kwargs})


def collected(env, policy, batch_size=4, collector=TurnCollector, **kwargs):
    (batch,) = collector(env, policy, batch_size=batch_size, total_batches=1, **kwargs)
    return batch


def scripted_policy():
    return ScriptedPolicy(words, tokenizer=TOKENIZER, max_output_tokens=16)


def turns_of(policy, *args, batch_size=4, **kwargs):
    """The turn view ``[B, T]`` of B episodes, as a stock rollout gives it."""
    env = make_env(*args, **{"num_envs": batch_size, "on_done": "idle", **kwargs})
    return env.rollout(10, policy, break_when_any_done=False)


def scripted(*args, **kwargs):
    return turns_of(scripted_policy(), *args, **kwargs)


def contexts(batch, row):
    """The context and the response of each turn, with its segment."""
    for turn in range(int((batch[keys.PROMPT_LENGTH][row] > 0).sum())):
        step = batch[row, turn]
        response = step[keys.RESPONSE][step[keys.RESPONSE_MASK]].tolist()
        yield step[keys.PROMPT][: int(step[keys.PROMPT_LENGTH])].tolist(), response, int(step[keys.SEGMENT])


class TestEnvironment:
    @settings(max_examples=30)
    @given(seed=st.integers(0, 2**20), room=st.integers(60, 200))
    def test_a_full_context_keeps_the_first_prompt_and_the_latest_turns(self, seed, room):
        batch = scripted(seed=seed, max_model_len=room)
        first = list(make_env().formatter.start("Speak."))
        for row in range(len(batch)):
            before = None
            for context, response, segment in contexts(batch, row):
                assert len(context) + 16 <= room
                if before is not None:
                    grown = before[0] + before[1]
                    if segment == before[2]:
                        assert context[: len(grown)] == grown
                    else:
                        assert segment == before[2] + 1
                        rest, tail = context[len(first) :], grown[len(first) :]
                        assert context[: len(first)] == first
                        # What stays is what was there, word for word, the last response at least.
                        cut = next(i for i in range(len(tail)) if rest[: len(tail) - i] == tail[i:])
                        assert 0 < cut <= len(tail) - len(before[1])
                        assert len(rest) <= (room - 16 - len(first)) // 2 or cut == len(tail) - len(before[1])
                before = context, response, segment

    def test_an_episode_that_would_be_truncated_ends_by_itself(self):
        cut, slid = (scripted(overflow=overflow) for overflow in ("truncate", "slide"))
        assert (cut["next", keys.STOP_REASON] == StopReason.CONTEXT).any()
        assert (slid[keys.PROMPT_LENGTH] > 0).sum(1).flatten().tolist() == [8] * 4
        assert (slid["next", keys.STOP_REASON][:, 7] == StopReason.WON).all()
        assert int(slid[keys.SEGMENT].max()) >= 2
        assert cut.get(keys.SEGMENT, None) is None

    def test_a_turn_that_does_not_fit_truncates(self):
        batch = scripted(lambda: Chatter(longest=400), max_model_len=120)
        assert (batch["next", keys.STOP_REASON] == StopReason.CONTEXT).any()
        assert batch["next", keys.TRUNCATED].any()

    @settings(max_examples=30)
    @given(seed=st.integers(0, 2**20), room=st.integers(70, 200))
    def test_a_cut_off_episode_ends_with_all_of_its_last_feedback(self, seed, room):
        """What follows is valued by the last context: it may not end in the middle of what the
        policy was told."""
        endless = {"env": lambda: Chatter(turns=99), "seed": seed, "max_turns": 6}
        slid, whole = (scripted(**endless, max_model_len=size) for size in (room, 2000))
        first = list(make_env().formatter.start("Speak."))
        for row in range(len(slid)):
            seen, response, _ = [*contexts(slid, row)][-1]
            turns = int((slid[keys.PROMPT_LENGTH][row] > 0).sum())
            last, full = (
                batch["next", *keys.PROMPT][row, turns - 1, : int(batch["next", *keys.PROMPT_LENGTH][row, turns - 1])]
                for batch in (slid, whole)
            )
            piece = full[int(whole[keys.PROMPT_LENGTH][row, turns - 1]) :].tolist()
            assert piece[: len(response)] == response
            if len(first) + len(piece) <= room:
                assert last[: len(first)].tolist() == first
                assert last[-len(piece) :].tolist() == piece
            assert len(last) <= room
            grows = last[: len(seen)].tolist() == seen
            assert int(slid["next", keys.SEGMENT][row, turns - 1] - slid[keys.SEGMENT][row, turns - 1]) == (not grows)

    def test_a_running_episode_is_restored(self):
        env, policy = make_env(), ScriptedPolicy(words, tokenizer=TOKENIZER, max_output_tokens=16)
        env.rollout(6, policy, break_when_any_done=False)
        again = make_env()
        again.load_state_dict(env.state_dict())
        assert int(env.observe()[keys.SEGMENT].max()) > 0
        assert (again.observe() == env.observe()).all()

    def test_another_word_for_it(self):
        with pytest.raises(ValueError, match="overflow is 'window'"):
            make_env(overflow="window")


class TestRows:
    def test_a_row_holds_every_context_once(self):
        batch = scripted()
        rows = turns_to_rows(batch)
        for i, row in enumerate(rows):
            tokens, mask, turn_ids = row[keys.TOKENS].tolist(), row[keys.ATTENTION_MASK].tolist(), row[keys.TURN_IDS]
            parts = "".join("1" if m else "0" for m in mask).split("0")
            starts = [0]
            for part in parts[:-1]:
                starts.append(starts[-1] + len(part) + 1)
            for turn, (context, response, segment) in enumerate(contexts(batch, i)):
                start = starts[segment]
                places = (turn_ids == turn).nonzero().flatten().tolist()
                assert tokens[start : places[0]] == context
                assert tokens[places[0] : places[-1] + 1] == response
                assert places == list(range(places[0], places[0] + len(response)))
            assert (turn_ids.max(), row[keys.TURN_MASK].sum()) == (7, 8)

    @pytest.mark.parametrize("max_turns", [None, 5])
    def test_both_collectors_deliver_the_same(self, max_turns):
        batches = [
            collected(make_env(max_turns=max_turns), scripted_policy(), collector=collector, **kwargs)
            for collector, kwargs in (
                (TurnCollector, {}),
                (AsyncTurnCollector, {}),
                (AsyncTurnCollector, {"num_threads": 2}),
            )
        ]
        assert all((batches[0] == batch).all() for batch in batches[1:])
        assert (batches[0] == turns_to_rows(scripted(max_turns=max_turns), max_turns=max_turns or 8)).all()

    def test_undeclared_it_is_an_error(self):
        batch = scripted()
        with pytest.raises(HistoryRewrittenError, match="'segment' counts a cut"):
            turns_to_rows(batch.exclude(keys.SEGMENT))
        batch[keys.SEGMENT] += batch[keys.SEGMENT] > 0
        with pytest.raises(TurnViewError, match="skips a segment"):
            turns_to_rows(batch)

    def test_a_report_says_where(self):
        rows = turns_to_rows(scripted())
        assert episodes_text(rows, TOKENIZER, count=1).count("earlier turns leave the context") >= 2

    def test_what_is_too_wide_is_an_error(self):
        with pytest.raises(TurnViewError, match="max_model_len=160"):
            TurnsToSequence(max_model_len=160).inv(scripted())


class TestModels:
    SAMPLING = SamplingConfig(max_output_tokens=8)

    @pytest.fixture(scope="class")
    def model(self):
        return load_tiny_model()

    @pytest.fixture(scope="class")
    def batch(self, model):
        tokenizer = load_tiny_tokenizer()
        sizes = {"tokenizer": tokenizer, "max_model_len": 60, "max_output_tokens": 8}
        batch = turns_of(HFPolicy(model, tokenizer, self.SAMPLING), lambda: Echo(turns=9), batch_size=8, **sizes)
        assert int(batch[keys.SEGMENT].max()) >= 2
        return batch

    def test_scores_are_those_of_the_contexts_the_policy_saw(self, model, batch):
        rows = turns_to_rows(batch)
        scores = TokenScorer(model, self.SAMPLING, entropy=True)(rows)
        torch.testing.assert_close(scores[keys.LOG_PROB].detach(), rows[keys.SAMPLE_LOG_PROB], rtol=0, atol=1e-5)
        # The row read as one context is something else.
        joined = rows.clone().set(keys.ATTENTION_MASK, rows[keys.TOKENS] != -1)
        other = TokenScorer(model, self.SAMPLING)(joined)[keys.LOG_PROB]
        assert (other - rows[keys.SAMPLE_LOG_PROB]).abs().max() > 0.1

    def test_micro_batches_keep_whole_rows(self, model, batch):
        rows = turns_to_rows(batch)
        scorer = TokenScorer(model, self.SAMPLING)
        whole = scorer(rows.clone())[keys.LOG_PROB].sum()
        parts = micro_batches(rows, 400)
        assert len(parts) > 2
        assert sum(int(part[keys.ATTENTION_MASK].sum()) for part in parts) == int(rows[keys.ATTENTION_MASK].sum())
        torch.testing.assert_close(sum(scorer(part)[keys.LOG_PROB].sum() for part in parts), whole)

    def test_values_are_those_of_the_contexts(self, model, batch):
        rows = turns_to_rows(batch)
        critic = TurnCritic(model)
        torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
        critic(rows)
        for i, row in enumerate(rows):
            seen = list(contexts(batch, i))
            for turn, (context, response, _) in enumerate(seen):
                alone = critic.value(*(torch.tensor([x]) for x in self.one_turn(context, response)))[0][0, len(context)]
                place = int((row[keys.TURN_IDS] == turn).nonzero()[0])
                torch.testing.assert_close(row[keys.STATE_VALUE][place], alone, rtol=0, atol=1e-5)
            last = batch["next", *keys.PROMPT][i, len(seen) - 1]
            last = last[: int(batch["next", *keys.PROMPT_LENGTH][i, len(seen) - 1])].tolist()
            expected = critic.value(*(torch.tensor([x]) for x in self.one_turn(last[:-1], last[-1:])))[1]
            torch.testing.assert_close(row[keys.BOOTSTRAP_VALUE], expected[0], rtol=0, atol=1e-5)

    def test_what_follows_a_cut_off_episode_is_valued_by_its_last_context(self, model):
        """The value of the rows of a collector is the value of the first prompt, the latest turns
        and all of the last feedback."""
        tokenizer = load_tiny_tokenizer()
        env = make_env(
            lambda: Echo(turns=99), tokenizer=tokenizer, max_model_len=60, max_output_tokens=8, max_turns=5, num_envs=4
        )
        policy = ScriptedPolicy(lambda episode, *_: "b" * (3 + episode % 4), tokenizer=tokenizer, max_output_tokens=8)
        rows = collected(env, policy)
        critic = TurnCritic(model)
        torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
        critic(rows)
        slid = 0
        for row in rows:
            mask = row[keys.ATTENTION_MASK].tolist()
            end = max(i for i, valid in enumerate(mask) if valid) + 1
            start = max((i + 1 for i in range(end) if not mask[i]), default=0)
            last = row[keys.TOKENS][start:end].tolist()
            assert tokenizer.decode(last).endswith("assistant\n")  # the policy is to speak
            slid += not (row[keys.TURN_IDS][start:end] == 4).any()
            expected = critic.value(*(torch.tensor([x]) for x in self.one_turn(last[:-1], last[-1:])))[1]
            torch.testing.assert_close(row[keys.BOOTSTRAP_VALUE], expected[0], rtol=0, atol=1e-5)
        assert slid

    @staticmethod
    def one_turn(context, response):
        return context + response, [True] * len(context + response), [-1] * len(context) + [0] * len(response)

    def test_credit_passes_from_segment_to_segment(self, batch):
        rows = turns_to_rows(batch)
        returns = rows[keys.TURN_REWARD].flip(-1).cumsum(-1).flip(-1)
        rows[keys.STATE_VALUE] = torch.zeros_like(rows[keys.SAMPLE_LOG_PROB])
        rows[keys.BOOTSTRAP_VALUE] = torch.zeros(len(rows))
        TurnGAE(gamma=1.0, lmbda=1.0)(rows)
        played = rows[keys.TURN_MASK]
        torch.testing.assert_close(rows[keys.TURN_VALUE_TARGET][played], returns[played])


class TestRun:
    @pytest.mark.parametrize("algo", ["LLMPPO", "LLMREINFORCE", "GRPO"])
    @pytest.mark.parametrize("collector", ["turn", "async"])
    def test_the_trainer_scores_what_the_policy_saw(self, tmp_path, algo, collector):
        config = RunSettings.from_values(
            algo=algo, model_path="tiny", env_name="chatter", collector=collector, num_envs=4, batch_size=8, group_size=4,
            max_model_len=60, max_output_tokens=8, overflow="slide", max_iterations=2, lora_r=0, dtype="float32",
            device="cpu", evaluation_interval=1, evaluation_episodes=4, final_episodes=4, output_dir=tmp_path,
        )  # fmt: skip
        run = build_run(config, make_env=partial(GEMEnv, lambda: Chatter(turns=6, longest=20)))
        try:
            history = run.trainer.train()
        finally:
            run.close()
        assert len(history) == 2
        assert max(metrics["policy/log_prob_gap"] for metrics in history) < 1e-5
        assert min(metrics["rollout/turns"] for metrics in history) > 4
