"""TurnsToSequence: rows out of random conversations, compared with rows built one token at a
time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_llm import keys
from torchrl_llm.collectors import TurnCollector
from torchrl_llm.data import HistoryRewrittenError, TurnsToSequence, TurnViewError, turns_to_rows
from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import HFPolicy, SamplingConfig, TokenScorer
from torchrl_llm.testing.environments import Dice
from torchrl_llm.testing.tokenizers import byte_tokenizer

WIDTH, RESPONSE_WIDTH = 40, 5  # of the contexts and of the responses


@dataclass
class Turn:
    response: list[int]
    feedback: list[int]
    reward: float = 0.0
    version: int = 0


@dataclass
class Episode:
    prompt: list[int]
    turns: list[Turn]
    truncated: bool = False
    padding: list[int] = field(default_factory=lambda: [0])  # what stands behind the contexts

    def contexts(self) -> list[list[int]]:
        """The contexts before each turn, and the one after the last."""
        found = [self.prompt]
        for turn in self.turns:
            found.append(found[-1] + turn.response + turn.feedback)
        return found


def turn_view(episodes: list[Episode], num_turns: int, mask_key: bool = False) -> TensorDict:
    """``[B, T]`` turns as a collector delivers them; steps after an episode's end idle."""
    shape = (len(episodes), num_turns)
    zeros = lambda *size, dtype=torch.int64: torch.zeros(*shape, *size, dtype=dtype)  # noqa: E731
    td = TensorDict(
        {
            keys.PROMPT: zeros(WIDTH),
            keys.PROMPT_LENGTH: zeros(1),
            keys.TURN: zeros(1),
            keys.EPISODE_ID: zeros(1),
            keys.GROUP_ID: zeros(1),
            keys.ENV_ID: zeros(1),
            keys.RESPONSE: zeros(RESPONSE_WIDTH),
            keys.RESPONSE_MASK: zeros(RESPONSE_WIDTH, dtype=torch.bool),
            keys.RESPONSE_LOG_PROBS: zeros(RESPONSE_WIDTH, dtype=torch.float32),
            keys.POLICY_VERSION: zeros(RESPONSE_WIDTH) - 1,
            ("next", *keys.PROMPT): zeros(WIDTH),
            ("next", *keys.PROMPT_LENGTH): zeros(1),
            ("next", keys.REWARD): zeros(1, dtype=torch.float32),
            ("next", keys.TERMINATED): zeros(1, dtype=torch.bool),
            ("next", keys.TRUNCATED): zeros(1, dtype=torch.bool),
            ("next", keys.SUCCESS): zeros(1, dtype=torch.bool),
            ("next", keys.STOP_REASON): zeros(1),
        },
        batch_size=shape,
    )
    for b, episode in enumerate(episodes):
        contexts = episode.contexts()
        for t, turn in enumerate(episode.turns):
            step, last = td[b, t], t == len(episode.turns) - 1
            for where, context in ((step, contexts[t]), (step["next"], contexts[t + 1])):
                where[keys.PROMPT].fill_(episode.padding[0])
                where[keys.PROMPT][: len(context)] = torch.tensor(context)
                where[keys.PROMPT_LENGTH].fill_(len(context))
            size = len(turn.response)
            step[keys.RESPONSE].fill_(episode.padding[0])
            step[keys.RESPONSE][:size] = torch.tensor(turn.response)
            step[keys.RESPONSE_MASK][:size] = True
            step[keys.RESPONSE_LOG_PROBS][:size] = -torch.tensor([float(x) for x in turn.response]) / 7
            step[keys.POLICY_VERSION][:size] = turn.version
            step[keys.TURN].fill_(t)
            step[keys.EPISODE_ID].fill_(100 + b)
            step[keys.GROUP_ID].fill_(10 + b)
            step[keys.ENV_ID].fill_(b % 2)
            step["next", keys.REWARD].fill_(turn.reward)
            step["next", keys.TERMINATED].fill_(last and not episode.truncated)
            step["next", keys.TRUNCATED].fill_(last and episode.truncated)
            step["next", keys.SUCCESS].fill_(last and turn.reward == 1)
            step["next", keys.STOP_REASON].fill_(3 if last else 0)
        fill_with_garbage(td[b, len(episode.turns) :], idle=not mask_key)
    if mask_key:
        played = torch.tensor([[t < len(e.turns) for t in range(num_turns)] for e in episodes])
        td["collector", "mask"] = played.view(shape)
    return td


def fill_with_garbage(steps: TensorDict, *, idle: bool) -> None:
    """Steps that were not played may hold anything; without a mask they are known by an empty
    context."""
    for key, value in steps.items(include_nested=True, leaves_only=True):
        value.fill_(True if value.dtype == torch.bool else 3)
        if idle and key == keys.PROMPT_LENGTH:
            value.zero_()


ids = st.integers(0, 30)
turns = st.builds(
    Turn,
    response=st.lists(ids, min_size=1, max_size=RESPONSE_WIDTH),
    feedback=st.lists(ids, max_size=2),
    reward=st.sampled_from([0.0, 1.0, -0.1]),
    version=st.integers(0, 3),
)
episodes = st.builds(
    Episode,
    prompt=st.lists(ids, min_size=1, max_size=6),
    turns=st.lists(turns, max_size=4),
    truncated=st.booleans(),
    padding=st.lists(ids, min_size=1, max_size=1),
)


class TestTurnsToRows:
    @settings(deadline=None, max_examples=60)
    @given(
        episodes=st.lists(episodes, min_size=1, max_size=4).filter(lambda every: any(each.turns for each in every)),
        idle=st.integers(0, 2),
        mask_key=st.booleans(),
        width=st.sampled_from([None, WIDTH, WIDTH + 9]),
        max_turns=st.sampled_from([None, 4, 9]),
    )
    def test_rows_hold_the_conversation_token_for_token(self, episodes, idle, mask_key, width, max_turns):
        num_turns = max(1, max(len(e.turns) for e in episodes)) + idle
        if max_turns is not None:
            max_turns = max(max_turns, 1)
        td = turn_view(episodes, num_turns, mask_key)
        rows = turns_to_rows(td, max_model_len=width, max_turns=max_turns)
        played = [(b, e) for b, e in enumerate(episodes) if e.turns]
        assert rows.batch_size == (len(played),)
        longest = max((len(e.contexts()[-1]) for _, e in played), default=0)
        assert rows[keys.TOKENS].shape[1] == (width or longest)
        assert rows[keys.TURN_MASK].shape[1] == (max_turns or num_turns)
        for row, (b, episode) in zip(rows, played, strict=True):
            self.check(row, b, episode)

    @staticmethod
    def check(row: TensorDict, b: int, episode: Episode) -> None:
        tokens, turn_ids, versions, log_probs = list(episode.prompt), [], [], []
        turn_ids += [-1] * len(tokens)
        versions += [-1] * len(tokens)
        log_probs += [0.0] * len(tokens)
        for t, turn in enumerate(episode.turns):
            size, rest = len(turn.response), len(turn.feedback)
            tokens += turn.response + turn.feedback
            turn_ids += [t] * size + [-1] * rest
            versions += [turn.version] * size + [-1] * rest
            log_probs += [-x / 7 for x in turn.response] + [0.0] * rest
        length, count = len(tokens), len(episode.turns)
        pad = row[keys.TOKENS].shape[0] - length
        assert row[keys.TOKENS].tolist() == tokens + [0] * pad
        assert row[keys.ATTENTION_MASK].tolist() == [True] * length + [False] * pad
        assert row[keys.TURN_IDS].tolist() == turn_ids + [-1] * pad
        assert row[keys.POLICY_VERSION].tolist() == versions + [-1] * pad
        assert row[keys.SAMPLE_LOG_PROB].tolist() == pytest.approx(log_probs + [0.0] * pad)
        idle = row[keys.TURN_MASK].shape[0] - count
        assert row[keys.TURN_MASK].tolist() == [True] * count + [False] * idle
        assert row[keys.TURN_REWARD].tolist() == pytest.approx([t.reward for t in episode.turns] + [0.0] * idle)
        ends = [False] * (count - 1) + [True] + [False] * idle
        assert row[keys.TURN_TERMINATED].tolist() == [x and not episode.truncated for x in ends]
        assert row[keys.TURN_TRUNCATED].tolist() == [x and episode.truncated for x in ends]
        assert row[keys.TURN_SUCCESS].tolist() == [x and episode.turns[-1].reward == 1 for x in ends]
        assert row[keys.TURN_STOP_REASON].tolist() == [3 if x else 0 for x in ends]
        assert (row[keys.EPISODE_ID], row[keys.GROUP_ID], row[keys.ENV_ID]) == (100 + b, 10 + b, b % 2)

    @settings(deadline=None, max_examples=60)
    @given(episode=episodes.filter(lambda e: e.turns), data=st.data())
    def test_any_rewritten_token_of_the_past_is_found(self, episode, data):
        td = turn_view([episode], len(episode.turns))
        t = data.draw(st.integers(0, len(episode.turns) - 1))
        if data.draw(st.booleans()):
            place = data.draw(st.integers(0, len(episode.contexts()[t]) - 1))
            td[keys.PROMPT][0, t, place] += 1
        else:
            place = data.draw(st.integers(0, len(episode.turns[t].response) - 1))
            td[keys.RESPONSE][0, t, place] += 1
        with pytest.raises(HistoryRewrittenError, match=f"Episode 100, turn {t}"):
            turns_to_rows(td)

    def test_a_context_that_loses_the_response_is_found(self):
        episode = Episode([1, 1], [Turn([1, 1, 1], []), Turn([1], [])])
        td = turn_view([episode], 2)
        td[keys.PROMPT_LENGTH][0, 1] = 3  # all ids are equal: only the lengths betray it
        with pytest.raises(HistoryRewrittenError, match="turn 0"):
            turns_to_rows(td)

    def test_width_of_the_context_does_not_matter(self):
        episode = Episode([1, 2], [Turn([3, 4], [5]), Turn([6], [7])], padding=[9])
        td = turn_view([episode], 3)
        for width in (8, 30):
            cut = td.clone()
            for key in (keys.PROMPT, ("next", *keys.PROMPT)):
                cut[key] = td[key][..., :width].clone()
            assert turns_to_rows(cut)[keys.TOKENS].tolist() == [[1, 2, 3, 4, 5, 6, 7]]

    def test_workers_of_a_parallel_env_come_one_after_the_other(self):
        every = [Episode([n, 2], [Turn([3], [4], reward=1.0)] * (1 + n % 2)) for n in range(6)]
        td = turn_view(every, 2)
        rows, expected = turns_to_rows(td.view(3, 2, 2)), turns_to_rows(td)
        assert rows.batch_size == (6,)
        assert (rows == expected).all()

    def test_only_one_element_a_row_below_extra_is_an_extra(self):
        every = [Episode([n, 2], [Turn([3], [4], reward=1.0)]) for n in range(3)]
        td, number = turn_view(every, 1), torch.tensor([0.5, 1.5, 2.5]).view(3, 1, 1)
        expected = turns_to_rows(td)
        td["next", "extra"] = TensorDict(
            {"number": number, "vector": torch.ones(3, 1, 3), "other": {"number": number}}, batch_size=[3, 1]
        )
        rows = turns_to_rows(td)
        assert rows[keys.turn_extra("number")].tolist() == [[0.5], [1.5], [2.5]]
        assert set(keys.turn_extras(rows)) == {"number"}
        td["next", "extra"] = torch.zeros(3, 1, 1)  # a key of an environment's own
        assert (turns_to_rows(td) == expected).all()

    def test_a_single_episode_is_no_batch(self):
        with pytest.raises(TurnViewError, match=r"Expected turns of batch size \[B, T\] .*given batch size \[2\]"):
            turns_to_rows(turn_view([Episode([1], [Turn([2], [])] * 2)], 2)[0])

    def test_floats_are_float32_or_wider(self):
        td = turn_view([Episode([1], [Turn([2], [3], reward=1.0)])], 1)
        for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
            td[keys.RESPONSE_LOG_PROBS] = td[keys.RESPONSE_LOG_PROBS].to(dtype)
            td["next", keys.REWARD] = td["next", keys.REWARD].to(dtype)
            rows = turns_to_rows(td)
            assert rows[keys.SAMPLE_LOG_PROB].dtype == rows[keys.TURN_REWARD].dtype == expected

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda td: td[keys.EPISODE_ID][1, 1].fill_(7), "several episodes, at step 1"),
            (lambda td: td[keys.TURN][1].add_(1), "does not begin with turn 0"),
            (lambda td: td[keys.PROMPT_LENGTH][1, 0].zero_(), "follow an idle step"),
            (lambda td: td["next", keys.TERMINATED][1].zero_(), "ends before its episode does"),
            (lambda td: td["next", keys.TRUNCATED][1, 0].fill_(True), "goes on after its episode has ended"),
            (lambda td: td[keys.RESPONSE_MASK][1, 0].logical_not_(), "response_mask with a gap"),
            (lambda td: td.exclude(keys.POLICY_VERSION, inplace=True), "missing .*policy_version"),
            (lambda td: td.exclude(("next", *keys.PROMPT), inplace=True), "compact_obs=False"),
        ],
    )
    def test_named_errors(self, change, match):
        episode = Episode([1, 2], [Turn([3, 4], [5]), Turn([6], [7])])
        td = turn_view([episode, episode], 3)
        turns_to_rows(td)
        change(td)
        with pytest.raises(TurnViewError, match=match):
            turns_to_rows(td)

    @pytest.mark.parametrize(
        ("collide", "match"),
        [
            (lambda td: td[keys.EPISODE_ID][1].fill_(100), r"Episode\(s\) \[100\] are in the batch more than once"),
            (lambda td: td[keys.GROUP_ID][1:3].fill_(7), r"Group\(s\) \[7\] hold episodes of different tasks"),
            (lambda td: td[keys.GROUP_ID][:2].fill_(7), r"Group\(s\) \[7\] hold episodes of different tasks"),
        ],
        ids=["episode", "context", "environment"],
    )
    def test_colliding_ids(self, collide, match):
        said = [Turn([3, 4], [5]), Turn([6], [7])]
        td = turn_view([Episode([1, 2], said), Episode([1, 2], said[:1]), Episode([1, 9], said)], 2)
        td[keys.ENV_ID] = torch.tensor([0, 1, 1]).view(3, 1, 1).expand(3, 2, 1).clone()
        turns_to_rows(td)
        collide(td)
        with pytest.raises(TurnViewError, match=match):
            turns_to_rows(td)

    def test_attempts_at_one_task_may_go_apart_after_it(self):
        td = turn_view([Episode([1, 2], [Turn([3], [5])]), Episode([1, 2], [Turn([4, 4], [6])])], 1)
        td[keys.GROUP_ID].fill_(7)
        td[keys.ENV_ID].fill_(0)
        assert turns_to_rows(td)[keys.GROUP_ID].tolist() == [7, 7]

    def test_limits_that_are_too_small(self):
        td = turn_view([Episode([1, 2], [Turn([3, 4], [5]), Turn([6], [7])])], 3)
        with pytest.raises(TurnViewError, match="max_model_len=6"):
            turns_to_rows(td, max_model_len=6)
        with pytest.raises(TurnViewError, match="max_turns=1"):
            turns_to_rows(td, max_turns=1)
        assert turns_to_rows(td, max_turns=2)[keys.TURN_MASK].tolist() == [[True, True]]


class TestTurnsToSequence:
    EPISODES = (
        Episode([1, 2], [Turn([3, 4], [5]), Turn([6], [7], reward=1.0)]),
        Episode([8], []),
        Episode([9], [Turn([10], [11, 12])], truncated=True),
    )

    def test_batches_of_different_shapes_stack_in_one_storage(self):
        transform = TurnsToSequence(max_model_len=20, max_turns=4)
        buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, transform=transform)
        buffer.extend(turn_view(list(self.EPISODES), 3))
        buffer.extend(turn_view(list(self.EPISODES[2:]), 1, mask_key=True))
        stored = buffer[:]
        assert stored.batch_size == (3,)
        assert stored[keys.EPISODE_ID].tolist() == [100, 102, 100]
        assert stored[keys.TURN_REWARD].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
        assert stored[keys.TOKENS][:, :7].tolist() == [[1, 2, 3, 4, 5, 6, 7], *[[9, 10, 11, 12, 0, 0, 0]] * 2]
        sample = buffer.sample()
        assert sample[keys.TOKENS].shape == (2, 20)
        assert ("collector", "mask") not in stored.keys(include_nested=True)

    def test_append_transform_and_rows_written_again(self):
        buffer = ReplayBuffer(storage=ListStorage(10), batch_size=2, collate_fn=torch.stack)
        buffer.append_transform(TurnsToSequence(max_model_len=20, max_turns=4))
        buffer.extend(turn_view([self.EPISODES[0]], 3))
        with pytest.raises(TurnViewError, match=r"batch size \[3\]"):
            buffer.extend(turn_view([self.EPISODES[0]], 3)[0])
        rows = turns_to_rows(turn_view([self.EPISODES[2]], 1), max_model_len=20, max_turns=4)
        buffer.extend(rows)
        assert buffer.sample(2)[keys.TOKENS].shape == (2, 20)
        assert buffer[0][keys.TOKENS][:7].tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert (buffer[1] == rows[0]).all()


class TestCollectedConversations:
    """A real model plays; one forward over each row gives back what the policy recorded turn by
    turn."""

    @pytest.mark.parametrize("min_output_tokens", [0, 3])
    def test_scorer_reproduces_the_log_probs_of_the_policy(self, min_output_tokens):
        tokenizer = byte_tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Qwen2ForCausalLM(
                Qwen2Config(
                    vocab_size=264,
                    hidden_size=32,
                    intermediate_size=40,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    eos_token_id=2,
                    bos_token_id=None,
                )
            ).eval()
        model.lm_head.weight.data.mul_(20)  # far from uniform
        sampling = SamplingConfig(max_output_tokens=8, min_output_tokens=min_output_tokens, temperature=0.8)
        env = GEMEnv(Dice, tokenizer=tokenizer, num_envs=3, max_model_len=400, max_output_tokens=8, max_turns=3)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(6), batch_size=6, transform=TurnsToSequence(max_model_len=400, max_turns=3)
        )
        policy = HFPolicy(model, tokenizer, sampling)
        collector = TurnCollector(env, policy, batch_size=6, total_batches=2, replay_buffer=buffer)
        scorer = TokenScorer(model, policy.sampling)
        for _ in collector:
            rows = buffer[:]
            buffer.empty()
            assert rows.shape == (6,)
            actions = rows[keys.TURN_IDS] >= 0
            assert actions.sum() >= 6 * 3 * max(1, min_output_tokens)
            assert rows[keys.TURN_MASK].sum() >= 6
            log_prob = scorer(rows)[keys.LOG_PROB].detach()
            assert float(log_prob.min()) < -2
            torch.testing.assert_close(log_prob, rows[keys.SAMPLE_LOG_PROB], rtol=0, atol=1e-5)
