"""The paired comparison of evaluations that were run: what they keep, at the end of a run, and
after a resume."""

import json
import logging
from dataclasses import replace
from functools import partial

import pytest
from small_runs import small_config

from torchrl_llm import keys
from torchrl_llm.envs import EnvSpec, GEMEnv, TaskSampler
from torchrl_llm.metrics import Evaluation, PairedComparison, paired_comparison
from torchrl_llm.report import compare_runs, run_and_report
from torchrl_llm.report.run_report import RunReport
from torchrl_llm.runs import build_run
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.trainers import evaluate

QUICK = {"lr_actor": 0.05, "final_episodes": 32, "batch_size": 16, "record_interval": 0}


class Picky(StopOrGo):
    """Answers "what?" with a penalty, and has no board at the seeds ``bad``."""

    bad, texts = frozenset(), {"greeting": "Say stop or go on."}

    def reset(self, seed=None):
        if seed in self.bad:
            raise RuntimeError("no board")
        return self.texts["greeting"], {}

    def step(self, action):
        if "what" in action:
            return "Go on.", -0.1, False, False, {}
        return super().step(action)


class OneWord(Picky):
    """Wins by another word."""

    def step(self, action):
        return super().step(action.replace("go", "stop"))


@pytest.fixture
def result_of(tokenizer):
    def result_of(script, episodes=8, make=Picky, **options):
        sizes = {"num_envs": 4, "max_model_len": 256, "max_output_tokens": 32, "stream": "test", "max_turns": 2}
        env = GEMEnv(make, tokenizer=tokenizer, **sizes | options)
        return evaluate(env, ScriptedPolicy(script, tokenizer=tokenizer), episodes)

    return result_of


def stop(episode, turn, context):
    return "stop"


def won_by_id(evaluation):
    won = (evaluation.rows[keys.TURN_SUCCESS] & evaluation.rows[keys.TURN_MASK]).any(-1)
    return dict(zip(evaluation.rows[keys.EPISODE_ID].tolist(), won.tolist(), strict=True))


class TestEvaluation:
    def test_outcomes_are_those_of_the_rows_in_task_order(self, result_of):
        result = result_of(lambda episode, turn, context: "stop" if episode % 3 else "go on")
        won = won_by_id(result)
        assert result.outcomes == "".join(str(int(won[episode])) for episode in sorted(won))
        assert 0 < result.outcomes.count("1") / 8 == result.success < 1

    def test_an_episode_that_failed_at_its_reset_is_not_won(self, result_of, monkeypatch):
        whole = result_of(stop)
        monkeypatch.setattr(Picky, "bad", {TaskSampler(stream="test")[i].seed for i in (1, 6)})
        less = result_of(stop)
        assert (whole.outcomes, less.outcomes, len(less.rows)) == ("1" * 8, "10111101", 6)
        for pair, changes in (((whole, less), (0, 2)), ((less, whole), (2, 0))):
            found = paired_comparison(*pair)
            assert (found.episodes, found.gained, found.lost) == (8, *changes)

    def test_tasks_are_told_apart(self, result_of):
        digest = result_of(stop).task_digest
        assert result_of(lambda *_: "go on").task_digest == result_of(stop, num_envs=2).task_digest == digest
        others = (result_of(stop, episodes=7), result_of(stop, seed=1), result_of(stop, stream="eval"))
        assert len({digest, *(other.task_digest for other in others)}) == 4

    @pytest.mark.parametrize(
        "other",
        [
            {"make": EnvSpec("Picky", OneWord)},
            {"make": EnvSpec("Picky", Picky, success_by="return")},
            {"max_turns": 3},
            {"max_model_len": 255},
            {"max_output_tokens": 31},
            {"overflow": "slide"},
            {"success_reward": 0.5},
            {"system_prompt": "Be brief."},
            {"template": "raw"},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ],
        ids=lambda other: " ".join(map(str, other)),
    )
    def test_other_games_are_no_pair(self, result_of, other):
        """All that decides what is played and what is won, with the same label, seed and stream,
        and often the same first context."""
        one, two = result_of(stop), result_of(stop, **other)
        with pytest.raises(ValueError, match="not of the same games"):
            paired_comparison(one, two)

    def test_how_a_policy_samples_and_the_machine_are_no_part_of_the_game(self, result_of):
        one, two = (
            result_of(stop),
            result_of(lambda *_: "go on", num_envs=2, num_threads=1, step_timeout=50.0, max_faults=3),
        )
        assert paired_comparison(one, two).lost == 8

    def test_an_environment_that_gives_other_tasks_than_before_is_no_pair(self, result_of, monkeypatch):
        """Other data or code behind the same names, or one that does not follow its seed."""
        before = result_of(stop)
        monkeypatch.setitem(Picky.texts, "greeting", "Say stop.")
        after = result_of(stop)
        assert before.task_digest == after.task_digest
        with pytest.raises(ValueError, match="None of 8 episodes began alike"):
            paired_comparison(before, after)

    def test_penalized_turns_are_a_share_of_the_turns(self, result_of):
        result = result_of(lambda episode, turn, context: "what?" if turn == 0 and episode % 2 else "stop")
        assert (result.turns, result.penalized) == (1.5, pytest.approx(1 / 3))


class TestRun:
    def test_before_and_after_and_again_after_a_resume(self, tmp_path):
        config = small_config(tmp_path, save_checkpoints=True, max_iterations=1, **QUICK)
        before, said = untrained(config), []
        result = run_and_report(config, partial(build_run, config), say=said.append)
        table, line = said[1].rstrip().splitlines()[-2:]
        assert table.startswith("after ")
        assert line == str(PairedComparison(**result["paired"]))
        page = (config.output.output_dir / "report.html").read_text()
        assert f"Episode by episode: {line}." in page
        assert "penalized turns" in page
        assert result["penalized_before"] == before.penalized
        # The second report reads the evaluation before the run from its file.
        config = config.replace(resume=True, max_iterations=2, accept_changes=["max_iterations"])
        result, run = run_and_report(config, partial(build_run, config), say=said.append), build_run(config)
        earlier, later = won_by_id(before), won_by_id(run.final_evaluation())
        run.close()
        gained = sum(later[episode] and not earlier[episode] for episode in later)
        lost = sum(earlier[episode] and not later[episode] for episode in later)
        assert gained + lost > 0
        found = result["paired"]
        assert (found["gained"], found["lost"], found["episodes"]) == (gained, lost, 32)
        assert json.loads((config.output.output_dir / "result.json").read_text())["paired"] == result["paired"]

    @pytest.mark.extra
    def test_a_run_that_is_resumed_in_another_game_has_no_pair(self, tmp_path, caplog):
        """A policy that never changes gained 86 episodes of 128, for it got more turns."""
        config = small_config(tmp_path, save_checkpoints=True, max_iterations=1, **QUICK | {"lr_actor": 0.0})
        config, said = config.replace(env_options={"max_turns": 2}), []
        run_and_report(config, partial(build_run, config), say=said.append)
        changed = {"env_options": {"max_turns": 10}, "max_iterations": 2}
        config = config.replace(resume=True, accept_changes=[*changed], **changed)
        result = run_and_report(config, partial(build_run, config), say=said.append)
        assert result["success_after"] > result["success_before"]
        assert (result["paired"], result["same_games"]) == (None, False)
        page = (config.output.output_dir / "report.html").read_text()
        for text in (page, said[-2]):
            assert "before and after are of different games" in text
            assert "McNemar" not in text
        other = config.replace(
            env_options={"max_turns": 2}, output_dir=tmp_path / "other", resume=False, accept_changes=[]
        )
        run_and_report(other, partial(build_run, other), say=said.append)
        lines = compare_runs([other.output.output_dir, config.output.output_dir]).splitlines()
        assert lines[2].split()[-1] == "-"
        assert lines[2].split()[4] == "-"  # before
        assert "not of the same games" in caplog.text

    @pytest.mark.parametrize(
        ("lacks", "logged"), [(("penalized", "outcomes", "task_digest", "beginnings"), False), ((), True)]
    )
    def test_without_a_pair_the_line_is_left_out(self, tmp_path, caplog, lacks, logged):
        """The file of an earlier version, and a run that was resumed with another number of
        episodes."""
        config = small_config(tmp_path, max_iterations=1, **QUICK | {"final_episodes": 4})
        run, said = build_run(config), []
        before = run.final_evaluation()
        kept = {name: value for name, value in before.statistics().items() if name not in lacks}
        config.output.output_dir.mkdir(exist_ok=True)
        report = RunReport(said.append, Evaluation(**kept), before if lacks else replace(before, task_digest="other"))
        with caplog.at_level(logging.WARNING):
            result = report.write(run, "stopped")
        run.close()
        assert result["paired"] is None
        assert "McNemar" not in said[0] + (config.output.output_dir / "report.html").read_text()
        assert ("not of the same games" in caplog.text) is logged


def untrained(config):
    run = build_run(config)
    try:
        return run.final_evaluation()
    finally:
        run.close()
