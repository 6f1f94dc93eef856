"""``granularity="auto"`` in the settings: decided by the environment when the run is built, and
kept by a resumed run."""

from __future__ import annotations

from functools import partial

import pytest
from small_runs import Won, one_batch, small_config

from torchrl_llm import keys
from torchrl_llm.envs import EnvSpec, GEMEnv, PromptDatasetEnv, resolve_env
from torchrl_llm.runs import ConfigError, RunSettings, build_run
from torchrl_llm.runs.settled import with_granularity
from torchrl_llm.testing.tiny import load_tiny_tokenizer

ROWS = [{"question": f"{i} + 1?", "answer": str(i)} for i in range(8)]


def reward_fn(completion, answer, question):
    """Differs from row to row, whatever the answer is."""
    return float(answer)


DATASET = partial(PromptDatasetEnv, {"train": ROWS, "test": [{"question": "Q?", "answer": "1"}]}, reward_fn)


class Guess:
    """A game of several turns, of which every episode happens to end with its first response: it is
    won at once."""

    single_turn = False

    def reset(self, seed=None):
        self.seed = seed
        return "Speak.", {}

    def step(self, action):
        return "Over.", self.seed % 7 / 7, True, False, {}


class Question(Guess):
    single_turn = True


def auto(tmp_path, algo="LLMREINFORCE", **settings) -> RunSettings:
    return small_config(tmp_path, algo, granularity="auto", **settings)


def environment(*env, **options) -> GEMEnv:
    return GEMEnv(list(env), tokenizer=load_tiny_tokenizer(), num_envs=2, **options)


def standardized_by_hand(steps: list[list[float]]) -> list[list[float]]:
    """Returns of the steps of every row, less their mean, divided by their standard deviation."""
    every = [value for row in steps for value in row]
    mean = sum(every) / len(every)
    std = (sum((value - mean) ** 2 for value in every) / (len(every) - 1)) ** 0.5
    return [[(value - mean) / (std + 1e-8) for value in row] for row in steps]


class TestCredit:
    """Against returns written down by hand; all episodes of both runs have one turn."""

    def advantages(self, run):
        rows = one_batch(run)
        assert (rows[keys.TURN_MASK].sum(1) == 1).all()
        lengths = (rows[keys.TURN_IDS] >= 0).sum(1).tolist()
        assert len(set(lengths)) > 1  # at this temperature lengths differ
        rewards = rows[keys.TURN_REWARD][:, 0].tolist()
        run.trainer.loss.value_estimator(rows)
        found = [row[ids >= 0].tolist() for row, ids in zip(rows[keys.ADVANTAGE], rows[keys.TURN_IDS], strict=True)]
        return found, rewards, lengths

    def test_of_a_data_set_is_per_token(self, tmp_path):
        run = build_run(auto(tmp_path, gamma=0.9, temperature=3.0), make_env=DATASET)
        found, rewards, lengths = self.advantages(run)
        returns = [[r * 0.9 ** (n - 1 - i) for i in range(n)] for r, n in zip(rewards, lengths, strict=True)]
        for mine, expected in zip(found, standardized_by_hand(returns), strict=True):
            assert mine == pytest.approx(expected, abs=1e-5)
        run.close()

    def test_of_a_game_is_per_turn_also_where_every_episode_of_the_batch_has_one(self, tmp_path):
        run = build_run(auto(tmp_path, gamma=0.9, temperature=3.0), env=Guess)
        found, rewards, lengths = self.advantages(run)
        for mine, (expected,), n in zip(found, standardized_by_hand([[r] for r in rewards]), lengths, strict=True):
            assert mine == pytest.approx([expected] * n, abs=1e-5)
        run.close()


class TestMeaning:
    @pytest.mark.parametrize("algo", ["LLMPPO", "LLMREINFORCE"])
    @pytest.mark.parametrize(("env", "granularity"), [({"make_env": DATASET}, "token"), ({"env": Guess}, "turn")])
    def test_it_is_the_settings_of_the_run_and_of_its_loss(self, tmp_path, algo, env, granularity):
        run = build_run(auto(tmp_path, algo), **env)
        assert run.config.loss.granularity == run.trainer.loss.value_estimator.granularity == granularity
        run.close()

    @pytest.mark.parametrize(
        ("env", "options", "granularity"),
        [
            (("rg:leg_counting", "gem:rg:leg_counting"), {}, "token"),
            (("game:GuessTheNumber-v0-easy", Guess), {}, "turn"),
            ((EnvSpec("mine", Won, single_turn=True), Question), {}, "token"),
            (("game:GuessTheNumber-v0-easy", Won), {"max_turns": 1}, "token"),
            (("game:GuessTheNumber-v0-easy",), {"max_turns": 2}, "turn"),
        ],
    )
    def test_of_environments(self, tmp_path, env, options, granularity):
        config = with_granularity(auto(tmp_path), None, environment(*env, **options))
        assert config.loss.granularity == granularity

    @pytest.mark.parametrize("granularity", ["turn", "token"])
    def test_what_is_given_stays(self, tmp_path, granularity):
        config = small_config(tmp_path, granularity=granularity)
        assert with_granularity(config, None, environment(Won)) is config

    def test_environments_that_do_not_say_are_refused(self, tmp_path):
        with pytest.raises(ConfigError, match=r"'Won' does not say .* declare it, as single_turn"):
            build_run(auto(tmp_path), env=Won)

    def test_a_mixture_of_both_is_refused(self, tmp_path):
        mixture = environment("rg:leg_counting", Guess, Question)
        with pytest.raises(ConfigError, match=r"\"token\" for 'rg:leg_counting', 'Question', .* \"turn\" for 'Guess'"):
            with_granularity(auto(tmp_path), None, mixture)

    def test_settings_that_do_not_fit_the_meaning_are_refused_when_it_is_known(self, tmp_path):
        config = auto(tmp_path, discounted_objective=True)  # per token gamma is 1
        assert with_granularity(config, None, environment(Guess)).loss.granularity == "turn"
        with pytest.raises(ConfigError, match="discounted_objective=True does nothing with granularity='token'"):
            with_granularity(config, None, environment(Question))

    def test_other_wrong_options_are_refused_before(self, tmp_path):
        with pytest.raises(ConfigError, match="clip_epsilon"):
            auto(tmp_path, clipping="none", clip_epsilon=0.3)

    @pytest.mark.parametrize("algo", ["GRPO", "SFT"])
    def test_algorithms_without_it(self, tmp_path, algo):
        with pytest.raises(ConfigError, match=r"granularity='auto' does nothing with"):
            auto(tmp_path, algo)


class TestDeclarations:
    @pytest.mark.parametrize("env_id", ["rg:leg_counting", "rg:chain_sum", "rg:spell_backward", "rg:countdown"])
    def test_gems_questions_end_with_the_first_response(self, env_id):
        spec = resolve_env(env_id)
        env = spec.make()
        env.reset(seed=0)
        assert spec.single_turn
        assert env.step("?")[2]

    def test_gems_games_do_not(self):
        spec = resolve_env("game:GuessTheNumber-v0-easy")
        env = spec.make()
        env.reset(seed=0)
        assert spec.single_turn is False
        wrong = 1 if env.game_number > 1 else 2
        assert not env.step(f"\\boxed{{{wrong}}}")[2]

    def test_a_class_that_is_unknown_says_nothing(self, monkeypatch):
        from torchrl_llm.envs import gem_catalog

        monkeypatch.delitem(gem_catalog.GEM_CLASSES, "GuessTheNumberEnv")
        assert resolve_env("game:GuessTheNumber-v0-easy").single_turn is None

    def test_a_declaration_that_is_no_boolean_is_refused(self):
        with pytest.raises(TypeError, match="single_turn is 'yes'"):
            EnvSpec("mine", Won, single_turn="yes")


class TestResume:
    def saved(self, tmp_path, **env):
        config = auto(tmp_path, save_checkpoints=True, checkpoint_interval=1, max_iterations=1)
        run = build_run(config, **env)
        run.trainer.train()
        run.close()

    def test_it_is_saved_and_resumed_by_its_meaning(self, tmp_path):
        self.saved(tmp_path, env=Guess)
        assert RunSettings.from_yaml(tmp_path / "run" / "config.yaml").loss.granularity == "turn"
        run = build_run(
            auto(tmp_path, save_checkpoints=True, checkpoint_interval=1, max_iterations=1, resume=True), env=Guess
        )
        assert run.config.loss.granularity == "turn"
        assert run.trainer.iteration == 1
        run.close()

    @pytest.mark.parametrize(("before", "env"), [("turn", Guess), ("token", Question)])
    def test_the_same_meaning_is_that_of_the_checkpoint(self, tmp_path, before, env):
        config = with_granularity(auto(tmp_path), {"granularity": before}, environment(env))
        assert config.loss.granularity == before

    def test_another_meaning_is_refused_unless_it_is_accepted(self, tmp_path):
        saved = {"granularity": "turn"}
        with pytest.raises(ConfigError, match=r"means 'token' in this environment, .* had 'turn'"):
            with_granularity(auto(tmp_path), saved, environment(Question))
        accepted = auto(tmp_path, resume=True, accept_changes=["granularity"])
        assert with_granularity(accepted, saved, environment(Question)).loss.granularity == "token"
