"""One rule decides which ids end a response, and everybody who has to know it follows it."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.collectors._worker import RolloutWorker, WorkerRequest
from torchrl_llm.envs import ChatFormatter, GEMEnv, PromptDatasetEnv
from torchrl_llm.modules import HFPolicy, load_actor_critic
from torchrl_llm.modules.policy import SamplingConfig
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.stops import response_end_ids, share_stop_ids
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import byte_tokenizer
from torchrl_llm.trainers import evaluate

TOKENIZER = byte_tokenizer()
PAD, TURN_END = TOKENIZER.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
(WORD,) = TOKENIZER.encode("!")
# the model's own list: a second special token, and a token that is text elsewhere
ENDS = [PAD, TURN_END, WORD]


def model(seed: int = 0):
    """A model that writes what it likes, often one of its three end tokens."""
    lm = random_model(TOKENIZER, hidden=16, layers=1, seed=seed)
    lm.generation_config.eos_token_id = ENDS
    return lm


class Listener:
    """A game of one turn that keeps what it is told."""

    heard: list[str]

    def __init__(self, heard):
        self.heard = heard

    def reset(self, seed=None):
        return "Say.", {}

    def step(self, action):
        self.heard.append(action)
        return "", 0.0, True, False, {}


def rollout(env, policy):
    for _ in range(4):
        env.rollout(1, policy)


def collected(env, policy):
    TurnCollector(env, policy, batch_size=16).rollout()


def collected_in_threads(env, policy):
    collector = AsyncTurnCollector(env, policy, batch_size=16, num_threads=0)
    collector.rollout()
    collector.shutdown(close_env=False)


def evaluated(env, policy):
    evaluate(env, policy, 16)


def worked(env, policy):
    settings = {"install": None, "greedy": False, "num_threads": 0, "step_timeout": 10.0}
    worker = RolloutWorker(lambda: env, lambda: policy, **settings)
    worker.run(WorkerRequest(env.task_sampler, [(i, i) for i in range(16)], [], 100.0, 100.0))
    while worker.run(WorkerRequest(env.task_sampler, [], [], 100.0, 100.0)).finished:
        pass


WAYS = [rollout, collected, collected_in_threads, evaluated, worked]


def is_text(said: str) -> bool:
    return not any(said.endswith(end) for end in ("<|endoftext|>", "<|im_end|>", "!"))


class TestWhatAnEnvironmentHears:
    """A response that ended is heard without the token that ended it, whoever built and plays the
    environment."""

    @pytest.fixture(autouse=True)
    def policy(self):
        self.policy = HFPolicy(model(), TOKENIZER, SamplingConfig(max_output_tokens=48))
        assert self.policy.stop_ids == tuple(sorted(ENDS))

    @pytest.mark.parametrize("play", WAYS)
    def test_a_game(self, play):
        heard: list[str] = []
        play(GEMEnv(partial(Listener, heard), tokenizer=TOKENIZER, num_envs=4, max_model_len=128, max_output_tokens=48),
             self.policy)  # fmt: skip
        assert len(heard) >= 16
        assert all(map(is_text, heard)), [said[-15:] for said in heard if not is_text(said)]

    @pytest.mark.parametrize("play", WAYS)
    @pytest.mark.parametrize("batched", [False, True])
    def test_a_reward_function(self, play, batched):
        heard: list[str] = []

        def reward(completion, answer, question):
            heard.extend(completion if batched else [completion])
            return [0.0] * len(completion) if batched else 0.0

        rows = [{"question": f"{i}?", "answer": "2"} for i in range(8)]
        env = PromptDatasetEnv(
            rows, reward, tokenizer=TOKENIZER, batched=batched, num_envs=4, max_model_len=128, max_output_tokens=48
        )
        play(env, self.policy)
        assert len(heard) >= 16
        assert all(map(is_text, heard)), [said[-15:] for said in heard if not is_text(said)]

    def test_an_episode_that_is_replayed_hears_the_same(self):
        class Two(Listener):
            def step(self, action):
                over = len(self.heard) % 2 == 1
                self.heard.append(action)
                return "Go on.", 0.0, over, False, {}

        first, again = [], []
        make = partial(GEMEnv, tokenizer=TOKENIZER, max_model_len=256, max_output_tokens=48)
        env = make(partial(Two, first))
        env.rollout(1, self.policy, break_when_any_done=False)
        copy = make(partial(Two, again))
        TurnCollector(copy, self.policy, batch_size=1)
        copy.load_state_dict(env.state_dict())
        assert again == first != []


class TestStopIdsOfTheCaller:
    def test_they_end_a_response_and_are_no_text(self):
        heard: list[str] = []
        env = GEMEnv(partial(Listener, heard), tokenizer=TOKENIZER, num_envs=4, max_model_len=128, max_output_tokens=48)
        policy = HFPolicy(model(), TOKENIZER, SamplingConfig(max_output_tokens=48, stop_ids=(TURN_END, WORD)))
        collected(env, policy)
        assert not any(said.endswith(("!", "<|im_end|>")) for said in heard)

    def test_an_environment_without_text_is_not_passed_over(self):
        policy = HFPolicy(model(), TOKENIZER, SamplingConfig(max_output_tokens=48))
        with pytest.raises(AttributeError, match="formatter"):
            share_stop_ids(object(), policy)

    @given(ids=st.lists(st.integers(3, 258), max_size=6), end=st.sampled_from([*ENDS, None]))
    @settings(max_examples=50, deadline=None)
    def test_only_the_last_token_goes_and_only_if_it_ends(self, ids, end):
        formatter = ChatFormatter(TOKENIZER)
        formatter.stop_ids = (PAD, TURN_END)
        response = ids if end is None else [*ids, end]
        kept = ids if end in (PAD, TURN_END) else response
        assert formatter.decode(response) == TOKENIZER.decode(kept, skip_special_tokens=False)


class TestBuildRun:
    def test_policy_environments_and_scorers_agree(self, tmp_path):
        lm = model()
        lm.save_pretrained(tmp_path / "model")
        TOKENIZER.save_pretrained(tmp_path / "tokenizer")
        heard: list[str] = []
        config = RunSettings.from_values(
            model_path=str(tmp_path / "model"), tokenizer_path=str(tmp_path / "tokenizer"), output_dir=tmp_path / "run",
            lora_r=2, lora_targets="all-linear", batch_size=8, num_envs=8, max_iterations=1, max_output_tokens=48,
            min_output_tokens=2, max_model_len=128, progress=False, final_episodes=8, evaluation_interval=0,
            save_checkpoints=False,
        )  # fmt: skip
        run = build_run(config, env=partial(Listener, heard))
        run.trainer.train()
        run.final_evaluation()
        assert run.policy.stop_ids == run.models.actor.held_back == tuple(sorted(ENDS))
        assert len(heard) == 16
        assert all(map(is_text, heard)), [said[-15:] for said in heard if not is_text(said)]
        run.close()


class TestResponseEndIds:
    def test_the_chat_template_has_its_say(self):
        """A model that names its end of text only would otherwise never end a turn."""
        tokenizer = byte_tokenizer()
        tokenizer.eos_token = "<|endoftext|>"
        assert response_end_ids(tokenizer) == (PAD, TURN_END)
        policy = HFPolicy(random_model(tokenizer, hidden=16, layers=1), tokenizer)
        models = load_actor_critic(
            policy.model, tokenizer=tokenizer, sampling=SamplingConfig(min_output_tokens=1, max_output_tokens=4)
        )
        assert policy.stop_ids == models.actor.held_back == (PAD, TURN_END)

    @pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{ messages | length }}"])
    def test_a_template_without_an_end_adds_nothing(self, template):
        assert response_end_ids(byte_tokenizer(chat_template=template), WORD) == (TURN_END, WORD)

    def test_nobody_names_one(self):
        tokenizer = byte_tokenizer(chat_template=None)
        tokenizer.eos_token = None
        assert response_end_ids(tokenizer) == ()
