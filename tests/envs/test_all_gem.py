"""All of GEM's registered environments through GEMEnv: which play, and what the others say they lack."""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from gem.envs.registration import ENV_REGISTRY, make

from torchrl_llm import keys
from torchrl_llm.envs import EnvironmentUnavailableError, GEMEnv
from torchrl_llm.envs.game import PAYS_PROGRESS, Game, resolve_env
from torchrl_llm.testing.policies import ScriptedPolicy

HAS_DATASETS = importlib.util.find_spec("datasets") is not None
HAS_PANDAS = importlib.util.find_spec("pandas") is not None
READS_WORDS = ("Wordle", "Hangman", "WordSearch")
BROKEN = ("game:FifteenPuzzle-v0-random", "rg:composite")
"""GEM's own registration of these does not make an environment."""

SLOW = ("game:Sokoban-v0-hard", "game:Sokoban-v0-random", "rg:knight_swap", "rg:futoshiki")


@pytest.fixture(scope="module")
def environments():
    """``benchmarks/environments.py``, whose players play here."""
    path = Path(__file__).parents[2] / "benchmarks" / "environments.py"
    spec = importlib.util.spec_from_file_location("benchmark_environments", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def needs_data(env_id):
    return "dataset_name" in ENV_REGISTRY[env_id].kwargs


def offline(kind):
    return [
        pytest.param(env_id, marks=pytest.mark.slow if env_id in SLOW else ())
        for env_id in ENV_REGISTRY
        if env_id.startswith(kind) and env_id not in BROKEN and "Crosswords" not in env_id
    ]


class TestPlaying:
    @pytest.mark.parametrize("env_id", offline("game:"))
    def test_a_random_player_plays_every_game(self, environments, env_id):
        with environments.word_lists():
            played = environments.play(env_id, environments.random_player(env_id), 2)
        assert played.faults == 0
        assert played.turns >= 1

    @pytest.mark.parametrize("name", ["GuessTheNumber", "TowerofHanoi", "Mastermind", "Sudoku", "Wordle", "Hangman"])
    def test_a_player_that_wins_is_a_success(self, environments, name):
        with environments.word_lists():
            played = environments.play(f"game:{name}-v0-easy", environments.SCRIPTED[name][1], 3)
        assert played.success == 1.0

    @pytest.mark.parametrize("env_id", offline("rg:"))
    def test_reasoning_gym_answers_are_successes(self, environments, env_id):
        played = environments.play(env_id, environments.SCRIPTED["rg"][1], 1)
        assert (played.faults, played.turns) == (0, 1)

    def test_questions_do_not_depend_on_what_the_slot_played(self):
        played, fresh = (Game(resolve_env("rg:basic_arithmetic")[1]) for _ in range(2))
        for seed in range(520):  # GEM would change its questions after 500
            played.reset(seed)
        assert [played.reset(seed) for seed in (1, 2)] == [fresh.reset(seed) for seed in (1, 2)]

    def test_games_that_pay_progress_are_registered(self):
        games = {env_id[5:].partition("-")[0] for env_id in ENV_REGISTRY if env_id.startswith("game:")}
        assert set(PAYS_PROGRESS) <= games


class TestSuccess:
    @pytest.mark.parametrize(("by", "won"), [(None, True), ("return", True), ("last", False)])
    def test_a_solved_sudoku(self, tokenizer, environments, by, won):
        env = GEMEnv(
            "game:Sudoku-v0-easy", tokenizer=tokenizer, max_model_len=2**15, max_output_tokens=64, success_by=by
        )
        env.reset()
        rng = random.Random(0)
        while env.slots[0].live:
            said = tokenizer.encode(environments.solve_sudoku(game_of(env), rng, 0), add_special_tokens=False)
            env.advance(0, said, env.answer(0, said))
        assert (env.slots[0].stop_reason == keys.StopReason.WON) is won
        assert env.slots[0].total == pytest.approx(1.0)

    def test_an_unknown_way_is_refused(self, tokenizer):
        with pytest.raises(ValueError, match="success_by"):
            GEMEnv("game:Sudoku-v0-easy", tokenizer=tokenizer, success_by="luck")


def game_of(env):
    return env.slots[0].games[0]._env


class TestLacking:
    @pytest.mark.skipif(HAS_DATASETS, reason="the package is there")
    @pytest.mark.parametrize("env_id", [env_id for env_id in ENV_REGISTRY if needs_data(env_id)])
    def test_the_package_and_the_dataset_are_named(self, tokenizer, env_id):
        with pytest.raises(EnvironmentUnavailableError, match="pip install datasets") as caught:
            GEMEnv(env_id, tokenizer=tokenizer).reset()
        assert ENV_REGISTRY[env_id].kwargs["dataset_name"] in str(caught.value)
        assert "dataset=" in str(caught.value)

    @pytest.mark.skipif(HAS_PANDAS, reason="the package is there")
    def test_crosswords_name_pandas(self, tokenizer):
        with pytest.raises(EnvironmentUnavailableError, match="pip install pandas"):
            GEMEnv("game:Crosswords-v0-easy", tokenizer=tokenizer).reset()

    @pytest.mark.parametrize("name", READS_WORDS)
    def test_the_word_list_is_named(self, tokenizer, environments, name):
        with (
            environments.word_lists([]),
            pytest.raises(EnvironmentUnavailableError, match="corpora/words/en"),
        ):
            GEMEnv(f"game:{name}-v0-easy", tokenizer=tokenizer).reset()

    @pytest.mark.parametrize("env_id", BROKEN)
    def test_registrations_that_make_nothing_say_so(self, tokenizer, env_id):
        with pytest.raises(EnvironmentUnavailableError, match="factory"):
            GEMEnv(env_id, tokenizer=tokenizer).reset()


@pytest.mark.skipif(not HAS_DATASETS, reason="needs the package datasets")
class TestLocalData:
    @pytest.mark.parametrize("env_id", ["math:GSM8K", "code:Taco8k", "logic:RuleTaker-d0", "qa:HotpotQA", "eval:2Wiki"])
    def test_small_data_made_here_plays(self, environments, env_id):
        winner = environments.SCRIPTED[environments.family(env_id)][1]
        played = environments.play(env_id, winner, 3)
        assert (played.faults, played.turns, played.success) == (0, 1, 1.0)


class TestTools:
    def test_the_python_tool_runs_what_is_said(self, tokenizer):
        from gem.tools.python_code_tool import PythonCodeTool
        from gem.tools.tool_env_wrapper import ToolEnvWrapper

        def factory():
            return ToolEnvWrapper(make("rg:basic_arithmetic"), tools=[PythonCodeTool()], max_tool_uses=2)

        lines = ["<python>print(6 * 7)</python>", r"\boxed{0}"]
        text, env = rollout(factory, lines, tokenizer)
        assert "<|im_start|>tool\nCode execution result: 42\n" in text
        assert env.slots[0].turn == 2
        assert env.slots[0].finished

    def test_the_search_tool_asks_a_server(self, tokenizer):
        pytest.importorskip("requests")
        import msgspec
        from gem.tools.search_tool import SearchTool
        from gem.tools.tool_env_wrapper import ToolEnvWrapper

        heard = []

        class Server(BaseHTTPRequestHandler):
            def do_POST(self):
                heard.append(msgspec.msgpack.decode(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()
                passage = {"document": {"contents": "Cats\nThey purr."}}
                self.wfile.write(msgspec.msgpack.encode({"result": [passage]}))

            def log_message(self, *_):
                pass

        with HTTPServer(("127.0.0.1", 0), Server) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}/search"

            def factory():
                return ToolEnvWrapper(make("rg:basic_arithmetic"), tools=[SearchTool(search_url=url, topk=1)])

            text, _ = rollout(factory, ["<search>do cats purr</search>", r"\boxed{0}"], tokenizer)
            server.shutdown()
        assert heard == [{"query": "do cats purr", "topk": 1, "return_scores": True}]
        assert "<information>Doc 1(Title: Cats) They purr." in text


def rollout(factory, lines, tokenizer):
    """The whole conversation of one episode in which the player says these lines, and the environment."""
    env = GEMEnv(factory, tokenizer=tokenizer, max_model_len=8192, max_output_tokens=64)
    policy = ScriptedPolicy(lambda episode, turn, context: lines[turn], tokenizer=tokenizer, max_output_tokens=64)
    env.rollout(len(lines), policy)
    return tokenizer.decode(env.context(0)), env
