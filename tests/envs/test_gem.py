"""GEMEnv: text environments as one EnvBase."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from gem_episodes import EASY, contexts, play
from tensordict import TensorDict
from torchrl.envs import check_env_specs

from torchrl_llm import keys
from torchrl_llm.keys import StopReason
from torchrl_llm.metrics import rollout_metrics
from torchrl_llm.metrics.rollouts import named
from torchrl_llm.testing.environments import Dice, Echo, StopOrGo


def guess(episode, turn, context):
    return f"\\boxed{{{(episode * 7 + turn * 3) % 10 + 1}}}"


def bisect(episode, turn, context):
    low, high = 1, 10
    for number, hint in re.findall(r"you guessed (\d+), and the target number is (\w+) than", context):
        low, high = (int(number) + 1, high) if hint == "higher" else (low, int(number) - 1)
    return f"\\boxed{{{(low + high) // 2}}}"


class TestSpecs:
    @pytest.mark.parametrize("on_done", ["refill", "idle"])
    def test_check_env_specs(self, make, on_done):
        check_env_specs(make(num_envs=3, on_done=on_done))

    def test_shapes(self, make, says):
        rollout = play(make(num_envs=4), says(guess), 3)
        assert rollout[keys.PROMPT].shape == (4, 3, 2048)
        assert rollout[keys.RESPONSE].shape == (4, 3, 32)
        for key in (keys.PROMPT_LENGTH, "turn", "episode_id", "group_id", "env_id", "stop_reason"):
            assert rollout[key].shape == (4, 3, 1)
            assert rollout[key].dtype == torch.int64
        assert rollout["next", "reward"].dtype == torch.float32


class TestContexts:
    def test_a_context_is_the_last_one_with_response_and_feedback(self, make, says, tokenizer):
        env = make(num_envs=3)
        rollout = play(env, says(guess), 8)
        for td in rollout.flatten().unbind(0):
            before, after = (part[keys.PROMPT][: int(part[keys.PROMPT_LENGTH])].tolist() for part in (td, td["next"]))
            response = td[keys.RESPONSE][td[keys.RESPONSE_MASK]].tolist()
            assert after[: len(before) + len(response)] == before + response
            assert tokenizer.decode(after).endswith("<|im_start|>assistant\n")
            assert not td[keys.PROMPT][int(td[keys.PROMPT_LENGTH]) :].any()

    def test_what_the_player_reads(self, make, says, tokenizer):
        env = make(system_prompt="Be brief.")
        context = contexts(env, play(env, says("\\boxed{11}"), 1))[0, 1]
        system, user, assistant, feedback, prompt = context.split("<|im_start|>")[1:]
        assert system == "system\nBe brief.<|im_end|>\n"
        assert user.endswith("Enter your first guess to start the game.\nEnter your next guess.<|im_end|>\n")
        assert assistant == "assistant\n\\boxed{11}<|im_end|>\n"
        assert feedback.startswith("user\nAt turn 1, you guessed 11, which is outside")
        assert prompt == "assistant\n"

    def test_repr_names_environments_and_settings(self, make):
        env = make([StopOrGo, EASY], num_envs=4, group_size=2, stream="eval", seed=3, max_turns=5)
        env.reset()
        for part in ("StopOrGo", EASY, "num_envs=4", "group_size=2", "stream='eval'", "seed=3", "max_model_len=2048",
                     "max_output_tokens=32", "max_turns=5", "4 tasks sampled", "4 slots running"):  # fmt: skip
            assert part in repr(env)

    def test_a_returned_observation_is_not_written_to_later(self, make, says):
        env = make()
        first = env.reset()
        before = first.clone()
        env.step(says(guess)(first.clone()))
        assert (first == before).all()

    def test_tool_output_and_suffix(self, make, says, tokenizer):
        env = make(partial(Echo, info={"use_tool": True, "suffix": "Go on."}))
        context = contexts(env, play(env, says("hi"), 1))[0, 1]
        assert "<|im_start|>user\nSpeak.\nGo on.<|im_end|>" in context
        assert "<|im_start|>tool\nhi\nGo on.<|im_end|>" in context

    def test_the_environment_gets_the_text_of_the_response(self, make, says):
        env = make(Echo)
        assert "user\n<|im_start|> hö\n<|im_end|>" in contexts(env, play(env, says("<|im_start|> hö\n"), 1))[0, 1]


class Shaped:
    """One turn, which earns ``reward``."""

    def __init__(self, reward, success=None):
        self.reward, self.success = reward, success

    def reset(self, seed=None):
        return "Land.", {}

    def step(self, action):
        return "", self.reward, True, False, {} if self.success is None else {"success": self.success}


class TestEndings:
    def ending(self, env, policy, steps=20):
        rollout = env.rollout(steps, policy)["next"][0, -1]
        flags = [bool(rollout[name]) for name in ("terminated", "truncated", "done", "success")]
        return StopReason(int(rollout["stop_reason"])), flags, int(rollout["turn"]), float(rollout["reward"])

    def test_won(self, make, says):
        reason, flags, _, reward = self.ending(make(), says(bisect, read_context=True))
        assert (reason, flags, reward) == (StopReason.WON, [True, False, True, True], 1.0)

    def test_lost(self, make, says):
        ending = self.ending(make(), says("no idea"))
        assert ending[:3] == (StopReason.LOST, [True, False, True, False], 1)
        assert ending[3] == pytest.approx(-0.1)

    def test_the_environments_own_turn_limit_terminates(self, make, says):
        # GEM pays 1 - distance / range at its limit: nearly a win, but none.
        ending = self.ending(make(), says("\\boxed{10}"))
        assert ending[:3] == (StopReason.TURN_LIMIT, [True, False, True, False], 4)
        assert 0 < ending[3] < 1

    def test_our_turn_budget_truncates(self, make, says):
        ending = self.ending(make(max_turns=2), says("\\boxed{11}"))
        assert ending[:3] == (StopReason.MAX_TURNS, [False, True, True, False], 2)

    def test_no_room_for_the_next_response_truncates(self, make, says):
        env = make(StopOrGo, max_model_len=300)
        ending = self.ending(env, says("go on"))
        assert ending[:2] == (StopReason.CONTEXT, [False, True, True, False])
        fits = len(env.formatter.start("Say stop or go on."))
        added = len(env.formatter.feedback([2], "On we go.")) + len("go on") + 1
        turn = next(k for k in range(1, 20) if fits + k * added + 32 > 300)
        assert ending[2] == turn

    def test_the_last_words_are_cut_to_fit(self, make, says):
        env = make(Echo, max_model_len=160, max_output_tokens=80)
        last = env.rollout(9, says("a" * 79, max_output_tokens=80))["next"][0, -1]
        assert int(last["stop_reason"]) == StopReason.CONTEXT
        assert int(last[keys.PROMPT_LENGTH]) == 160
        assert last[keys.PROMPT].all()

    def test_the_environment_truncates(self, make, says):
        class Cut(StopOrGo):
            def step(self, action):
                return "Enough.", 1.0, False, True, {}

        assert self.ending(make(Cut), says("x"))[:2] == (StopReason.ENV_TRUNCATED, [False, True, True, False])

    def test_success_reward(self, make, says):
        assert self.ending(make(StopOrGo, success_reward=1.5), says("stop"))[0] == StopReason.LOST
        assert self.ending(make(partial(Echo, turns=1), success_reward=0.5), says("x"))[0] == StopReason.WON

    @pytest.mark.parametrize(
        ("success", "reason"), [(True, StopReason.WON), (False, StopReason.LOST), (None, StopReason.LOST)]
    )
    def test_the_environment_says_what_a_success_is(self, make, says, success, reason):
        env = make(partial(Shaped, 0.95, success))
        assert env.rollout(1, says("x"))["next", "stop_reason"].item() == reason
        env = make(partial(Shaped, 1.0, success))
        won = reason == StopReason.WON or success is None
        assert env.rollout(1, says("x"))["next", "success"].item() == won

    def test_what_it_says_before_the_end_is_not_looked_at(self, make, says):
        env = make(partial(Echo, 3, {"success": True}))
        reasons = env.rollout(3, says("x"))["next", "stop_reason"].flatten().tolist()
        assert reasons == [StopReason.RUNNING, StopReason.RUNNING, StopReason.WON]

    def test_what_is_no_boolean_is_a_fault(self, make, says):
        env = make(partial(Shaped, 1.0, "yes"))
        env.rollout(1, says("x"))
        assert env.faults == {"error": 1}
        assert "info['success'] 'yes'" in str(env.last_fault)

    @pytest.mark.parametrize(
        ("reward", "success", "options", "warns"),
        [
            (0.95, None, {}, True),
            (0.95, None, {"success_reward": 0.9}, False),
            (0.95, False, {}, False),
            (0.0, None, {}, False),
            (0.3, None, {}, False),
        ],
    )
    def test_a_reward_just_short_of_a_success_is_warned_of_once(
        self, make, says, caplog, reward, success, options, warns
    ):
        env = make(partial(Shaped, reward, success), num_envs=50, **options)
        env.rollout(4, says("x"), break_when_any_done=False)
        told = [record for record in caplog.records if "success_reward" in record.message]
        assert len(told) == warns
        assert not warns or "0.95" in told[0].message

    def test_bisection_always_wins(self, make, says):
        env = make(num_envs=8)
        rollout = play(env, says(bisect, read_context=True), 12)
        done = rollout["next", "done"]
        assert done.sum() >= 24
        assert rollout["next", "success"][done].all()


class TestMixture:
    def test_groups_take_turns(self, make, says):
        env = make([EASY, Echo, "game:GuessTheNumber-v0-hard"], num_envs=6, group_size=2)
        td = env.reset()
        assert td["env_id"].flatten().tolist() == [0, 0, 1, 1, 2, 2]
        texts = [env.formatter.tokenizer.decode(ids) for ids in td[keys.PROMPT]]
        assert ["1 and 10" in text for text in texts] == [True, True, False, False, False, False]
        assert ["Speak." in text for text in texts] == [False, False, True, True, False, False]

    def test_a_refilled_slot_may_change_its_environment(self, make, says):
        env = make([StopOrGo, partial(Echo, turns=1)])
        rollout = play(env, says("stop"), 4)
        assert rollout["env_id"].flatten().tolist() == [0, 1, 0, 1]
        assert rollout["next", "reward"].flatten().tolist() == [1.0, 0.5, 1.0, 0.5]


class TestMixtures:
    def test_weights_decide_how_often_each_is_sampled(self, make):
        env = make([StopOrGo, Echo], weights=[9, 1], num_envs=100)
        share = env.reset()["env_id"].float().mean().item()
        assert 0.03 < share < 0.2

    def test_weights_of_another_mixture_are_refused(self, make):
        with pytest.raises(ValueError, match="weights"):
            make([StopOrGo, Echo], weights=[1.0])

    def test_each_environment_is_reported_by_its_name(self):
        rows = TensorDict(
            {
                "turn_ids": torch.tensor([[-1, 0, 0, -1]] * 3),
                "attention_mask": torch.ones(3, 4, dtype=torch.bool),
                "env_id": torch.tensor([0, 2, 2]),
                "turn": {
                    "mask": torch.ones(3, 1, dtype=torch.bool),
                    "reward": torch.tensor([[1.0], [0.0], [0.5]]),
                    "success": torch.tensor([[True], [False], [False]]),
                    "truncated": torch.zeros(3, 1, dtype=torch.bool),
                    "terminated": torch.ones(3, 1, dtype=torch.bool),
                },
            },
            [3],
        )
        figures = rollout_metrics(rows, ["a", "b", "c"])
        assert figures["rollout/reward/a"] == figures["rollout/success/a"] == 1.0
        assert figures["rollout/reward/c"] == 0.25
        assert not any(name.endswith("/b") for name in figures)
        assert all(named(name) for name in figures)
        assert rollout_metrics(rows, ["a"]) == rollout_metrics(rows)


class TestFinishedSlots:
    def test_refill_samples_the_next_tasks(self, make, says):
        rollout = play(make(StopOrGo, num_envs=2), says(lambda e, t, c: "stop" if t == e % 2 else "go"), 4)
        assert rollout["episode_id"].squeeze(-1).tolist() == [[0, 2, 3, 3], [1, 1, 4, 5]]

    def test_idle_until_a_full_reset(self, make, says):
        calls = []

        def script(episode, turn, context):
            calls.append(episode)
            return "stop" if turn == episode % 2 * 2 else "go"

        env = make(StopOrGo, num_envs=2, on_done="idle")
        rollout = play(env, says(script), 5)
        assert (rollout[keys.PROMPT_LENGTH].squeeze(-1) > 0).tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0]]
        assert calls == [0, 1, 1, 1]
        assert rollout["next", "done"].squeeze(-1).tolist() == [[1, 0, 0, 0, 0], [0, 0, 1, 0, 0]]
        assert rollout["next", "reward"].sum() == 2
        assert env.reset()["episode_id"].flatten().tolist() == [2, 3]

    def test_one_idle_slot_too(self, make, says):
        env = make(StopOrGo, on_done="idle")
        rollout = play(env, says("stop"), 3)
        assert (rollout[keys.PROMPT_LENGTH].flatten() > 0).tolist() == [True, False, False]

    def test_a_finished_slot_cannot_be_stepped(self, make, says):
        env = make(StopOrGo, num_envs=2)
        td = env.step(says(lambda e, t, c: "stop" if e else "go")(env.reset()))
        with pytest.raises(RuntimeError, match=r"slots \[1\]"):
            env.step(says("x")(env.step_mdp(td)))


class TestPartialSteps:
    def test_slots_outside_the_mask_keep_their_state(self, make, says):
        env = make(StopOrGo, num_envs=3)
        td = says("go")(env.reset())
        td["_step"] = torch.tensor([[True], [False], [True]])
        after = env.step(td.clone())["next"]
        assert after["turn"].flatten().tolist() == [1, 0, 1]
        assert (after[keys.PROMPT][1] == td[keys.PROMPT][1]).all()
        assert (after[keys.PROMPT_LENGTH][0] > td[keys.PROMPT_LENGTH][0]).all()

    def test_rollout_until_all_are_done(self, make, says):
        env = make(StopOrGo, num_envs=3)
        policy = says(lambda episode, turn, context: "stop" if turn == episode else "go")
        rollout = env.rollout(10, policy, break_when_any_done=False, break_when_all_done=True)
        assert rollout.shape == (3, 3)
        assert rollout["next", "done"][:, -1].all()


class TestSingleSlots:
    """Slots played one by one are the slots of a batched step."""

    def test_the_same_episodes(self, make, says, tokenizer):
        env, other = make(Dice, num_envs=2), make(Dice, num_envs=2)
        td = says("x")(env.reset())
        response = tokenizer.encode("x<|im_end|>")
        for slot in (1, 0):
            other.slots.start(slot, slot, other.slots.open(slot, slot))
        for turn in range(3):
            shown = td[keys.PROMPT_LENGTH].flatten().tolist()
            for slot in range(2):
                assert other.slots.context(slot).tolist() == td[keys.PROMPT][slot, : shown[slot]].tolist()
                assert other.slots[slot].turn == turn
            td = env.step(td)["next"]
            for slot in range(2):
                reply = other.slots.answer(slot, response)
                assert other.slots[slot].turn == turn, "nothing changes until advance"
                other.slots.advance(slot, response, reply)
            td = says("x")(td)
        assert all(slot.finished for slot in other.slots)
        assert (td.select(*other.observe().keys(True, True)) == other.observe()).all()

    def test_next_task_counts_up(self, make):
        env = make(Dice, num_envs=2)
        assert [env.slots.next_task(), env.slots.next_task()] == [0, 1]
        assert env.reset()["episode_id"].flatten().tolist() == [2, 3]

    def test_renew_leaves_the_games_behind(self, make, says):
        made = []

        def factory():
            made.append(StopOrGo())
            return made[-1]

        env = make(factory)
        env.reset()
        env.slots.renew(0)
        assert env.slots.busy_since(0) is None
        assert not env.observe()[keys.PROMPT].any()
        env.slots.start(0, 5, env.slots.open(0, 5))
        assert len(made) == 2
        assert env.slots[0].task_spec.episode_id == 5


class TestCost:
    def test_a_step_renders_what_is_new_and_nothing_else(self, make, says):
        """Of a conversation of any length: a change of kind. ``benchmarks/environments.py``
        measures the time."""
        env, policy = make(partial(Echo, 40), num_envs=4, max_turns=40, max_model_len=4096), says(lambda *_: "go on")
        rendered = []
        for name in ("_render_start", "_render_feedback"):
            render = getattr(env.formatter, name)
            setattr(env.formatter, name, lambda *args, render=render: rendered.append(args) or render(*args))
        env.formatter._make_caches()
        td, counts = policy(env.reset()), []
        for _ in range(30):
            rendered.clear()
            _, td = env.step_and_maybe_reset(td)
            counts.append(sum(len(str(args)) for args in rendered))
            td = policy(td)
        assert max(counts) <= 2 * max(counts[:3])
