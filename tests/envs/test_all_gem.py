"""All of GEM's registered environments through GEMEnv: which play, and what the others say they
lack."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from gem.envs.registration import ENV_REGISTRY, make
from gem.tools.python_code_tool import PythonCodeTool
from gem.tools.tool_env_wrapper import ToolEnvWrapper

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector
from torchrl_llm.envs import GEM_CLASSES, EnvironmentUnavailableError, GEMEnv, IsolatedEnv, resolve_env
from torchrl_llm.envs.gem_catalog import gem_class
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.utils.options import ConfigError

READS_WORDS = ("Wordle", "Hangman", "WordSearch")
BROKEN = ("game:Crosswords-v0-random", "game:FifteenPuzzle-v0-random", "rg:composite")
"""GEM's own registration of these does not make an environment."""

IMAGES = ("math:Geometry3K",)
"""Its questions are of text and images, and GEMEnv is of text."""

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
        pytest.param(env_id, marks=pytest.mark.extra if env_id in SLOW else ())
        for env_id in ENV_REGISTRY
        if env_id.startswith(kind) and env_id not in BROKEN
    ]


class TestPlaying:
    @pytest.mark.parametrize("env_id", offline("game:"))
    def test_a_random_player_plays_every_game(self, environments, env_id):
        with environments.word_lists():
            played = environments.play(env_id, environments.random_player(env_id), 2)
        assert not played.faults
        assert played.turns >= 1

    @pytest.mark.parametrize("name", ["GuessTheNumber", "TowerofHanoi", "Mastermind", "Sudoku", "Wordle", "Hangman"])
    def test_a_player_that_wins_is_a_success(self, environments, name):
        with environments.word_lists():
            played = environments.play(f"game:{name}-v0-easy", environments.SCRIPTED[name][1], 3)
        assert played.success == 1.0

    @pytest.mark.parametrize("env_id", offline("rg:"))
    def test_reasoning_gym_answers_are_successes(self, environments, env_id):
        played = environments.play(env_id, environments.SCRIPTED["rg"][1], 1)
        assert (played.faults, played.turns) == ([], 1)

    @pytest.mark.parametrize(
        "factory",
        [
            resolve_env("rg:basic_arithmetic").make,
            lambda: make("rg:basic_arithmetic", seed=7),
            lambda: ToolEnvWrapper(make("rg:basic_arithmetic"), tools=[PythonCodeTool()]),
        ],
        ids=["id", "factory", "wrapped"],
    )
    def test_questions_do_not_depend_on_what_the_slot_played(self, factory):
        played, fresh = IsolatedEnv(factory), IsolatedEnv(factory)
        for seed in range(520):  # GEM would change its questions after 500
            played.reset(seed)
        assert [played.reset(seed) for seed in (1, 2)] == [fresh.reset(seed) for seed in (1, 2)]

    def test_games_that_pay_progress_are_registered(self):
        classes = {str(spec.entry_point).rpartition(":")[2] for spec in ENV_REGISTRY.values()}
        assert {name for name, known in GEM_CLASSES.items() if known.pays_progress} <= classes


class TestSuccess:
    @pytest.mark.parametrize(("by", "won"), [(None, True), ("return", True), ("last", False)])
    def test_a_solved_sudoku(self, tokenizer, environments, by, won):
        env = GEMEnv(
            "game:Sudoku-v0-easy", tokenizer=tokenizer, max_model_len=2**15, max_output_tokens=64, success_by=by
        )
        env.reset()
        rng = random.Random(0)
        while env.slots[0].live:
            response = tokenizer.encode(environments.solve_sudoku(game_of(env), rng, 0), add_special_tokens=False)
            env.slots.advance(0, response, env.slots.answer(0, response))
        assert (env.slots[0].stop_reason == keys.StopReason.WON) is won
        assert env.slots[0].total == pytest.approx(1.0)

    def test_an_unknown_way_is_refused(self, tokenizer):
        with pytest.raises(ValueError, match="success_by"):
            GEMEnv("game:Sudoku-v0-easy", tokenizer=tokenizer, success_by="luck")


def game_of(env):
    return env.slots[0].envs[0].env


NEEDS = [(env_id, package) for env_id in ENV_REGISTRY for package in gem_class(env_id).packages]


class TestOptions:
    @pytest.mark.parametrize(
        ("env_id", "option", "known"),
        [
            ("game:GuessTheNumber-v0-easy", "max_turn", "min_number, max_number, max_turns"),
            ("rg:chain_sum", "max_terms", "name, "),
        ],
    )
    def test_a_name_that_gem_would_ignore_is_refused(self, env_id, option, known):
        with pytest.raises(ConfigError, match=f"no argument {option}, which env_options names; it has {known}"):
            resolve_env(env_id).make(**{option: 2})

    def test_the_others_are_taken(self):
        assert "within 2 turns" in resolve_env("game:GuessTheNumber-v0-easy").make(max_turns=2).reset(0)[0]


class TestLacking:
    @pytest.mark.parametrize(("env_id", "package"), NEEDS)
    def test_the_package_and_the_data_are_named(self, tokenizer, monkeypatch, env_id, package):
        for name in [name for name in sys.modules if name.startswith(("gem.envs.", "gem.utils.math_grader"))]:
            if name != "gem.envs.registration":
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(EnvironmentUnavailableError, match=f"pip install {package}\\.") as caught:
            GEMEnv(env_id, tokenizer=tokenizer).reset()
        if needs_data(env_id):
            assert ENV_REGISTRY[env_id].kwargs["dataset_name"] in str(caught.value)
            assert "dataset=" in str(caught.value)

    @pytest.mark.parametrize("env_id", ["math:GSM8K", "code:Taco8k", "qa:HotpotQA"])
    def test_data_that_is_not_there_is_named(self, tokenizer, monkeypatch, tmp_path, env_id):
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
        with pytest.raises(EnvironmentUnavailableError, match="connect to it, or pass local data") as caught:
            GEMEnv(env_id, tokenizer=tokenizer).reset()
        assert ENV_REGISTRY[env_id].kwargs["dataset_name"] in str(caught.value)

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


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """GEM runs programs in folders below the working directory, with the python of the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("elsewhere")
class TestLocalData:
    @pytest.mark.parametrize(
        "env_id", [env_id for env_id in ENV_REGISTRY if needs_data(env_id) and env_id not in IMAGES]
    )
    def test_small_data_made_here_plays(self, environments, env_id):
        winner = environments.SCRIPTED[environments.family(env_id)][1]
        played = environments.play(env_id, winner, 2)
        assert (played.faults, played.turns, played.success) == ([], 1, 1.0)

    @pytest.mark.parametrize("env_id", ["math:GSM8K", "code:Taco8k", "logic:RuleTaker-d0", "qa:HotpotQA"])
    def test_a_response_without_an_answer_is_no_success_and_no_fault(self, environments, env_id):
        played = environments.play(env_id, lambda env, rng, turn: "I do not know.", 2)
        assert (played.faults, played.turns, played.success) == ([], 1, 0.0)

    def test_an_answer_of_nothing_is_not_what_no_answer_is(self):
        from datasets import Dataset

        rows = Dataset.from_list([{"problem": "Which article is definite?", "answer": "the"}])
        game = IsolatedEnv(lambda: make("qa:HotpotQA", dataset=rows))
        rewards = []
        for response in ("I do not know.", "<answer>The</answer>"):
            game.reset(0)
            rewards.append(game.step(response).reward)
        assert rewards == [0.0, 1.0]

    @pytest.mark.slow
    def test_the_first_answer_to_a_grader_in_a_process_of_its_own_counts(self, environments):
        game = IsolatedEnv(lambda: make("math:GSM8K", dataset=environments.local_dataset("math:GSM8K")))
        rewards = []
        for seed, right in enumerate([True, False, True]):
            game.reset(seed)
            rewards.append(game.step(rf"\boxed{{{game.env.answer if right else 1}}}").reward)
        game.env.close()
        assert rewards == [1.0, 0.0, 1.0]

    @pytest.mark.parametrize("env_id", IMAGES)
    def test_questions_of_images_are_refused(self, environments, env_id):
        played = environments.play(env_id, environments.SCRIPTED["MathVisualEnv"][1], 1)
        assert "'images': []" in str(played.faults[0].cause)


def programs(environments, **tests):
    """A factory of a code environment of one task."""
    from datasets import Dataset

    rows = Dataset.from_list([{"problem": "Print the number read plus one.", "tests": json.dumps(tests)}])
    return lambda: make("code:Taco8k", dataset=rows)


def fenced(code):
    return f"```python\n{code}\n```"


@pytest.mark.usefixtures("elsewhere")
class TestSubmittedPrograms:
    def test_they_run_in_a_process_of_their_own(self, environments, tmp_path):
        game = IsolatedEnv(programs(environments, inputs=["1"], outputs=["2"]))
        game.reset(0)
        code = f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nprint(int(input()) + 1)"
        assert game.step(fenced(code)).reward == 1.0
        assert int((tmp_path / "pid").read_text()) != os.getpid()

    @pytest.mark.parametrize(
        "code",
        ["print(2); raise SystemExit(3)", "print('2'", "print(2); 1 / 0", "print(3)", "print(2)\nimport subprocess"],
    )
    def test_one_that_fails_is_a_wrong_answer(self, environments, code):
        game = IsolatedEnv(programs(environments, inputs=["1"], outputs=["2"]))
        game.reset(0)
        assert game.step(fenced(code)).reward == 0.0

    @pytest.mark.extra
    def test_one_that_hangs_is_ended_by_gem_and_wrong(self, environments, tmp_path):
        game, code = IsolatedEnv(programs(environments, inputs=["1", "2"], outputs=["2", "3"])), hangs(tmp_path)
        game.reset(0)
        assert game.step(fenced(code)).reward == 0.0
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)

    @pytest.mark.slow
    def test_one_that_hangs_holds_up_a_collector_for_its_time_limit(self, environments, tokenizer, tmp_path, hang):
        right, code = fenced("print(int(input()) + 1)"), fenced(hangs(tmp_path))

        def make():
            def step(action):
                if "while True" in action:
                    hang.threads.add(threading.get_ident())
                return inside(action)

            env = programs(environments, inputs=["1"], outputs=["2"])()
            inside, env.step = env.step, step
            return env

        env = GEMEnv(
            make,
            tokenizer=tokenizer,
            num_envs=2,
            max_model_len=1024,
            max_output_tokens=256,
        )
        policy = ScriptedPolicy(
            lambda episode, turn, context: code if episode == 1 else right, tokenizer=tokenizer, max_output_tokens=256
        )
        collector = AsyncTurnCollector(env, policy, batch_size=3, step_timeout=0.5)
        batch = collector.rollout()
        collector.shutdown()
        assert batch[keys.EPISODE_ID].tolist() == [0, 2, 3]
        assert batch[keys.TURN_SUCCESS].any(-1).all()
        assert (collector.faults, collector.dropped) == ({"timeout": 1}, {"timeout": 1})


ROWS = dict(
    line.removeprefix("| `").split("` |", 1)
    for line in (Path(__file__).parents[2] / "docs" / "environments.md").read_text().splitlines()
    if line.startswith("| `") and line.count("|") == 8
)


class TestPage:
    """The table of ``docs/environments.md``, which the benchmark writes."""

    def test_it_holds_every_id(self):
        assert list(ROWS) == list(ENV_REGISTRY)

    @pytest.mark.parametrize("env_id", ENV_REGISTRY)
    def test_it_says_what_plays_and_what_that_needs(self, env_id):
        status = ROWS[env_id].split("|")[-2].strip()
        start = "**lacks**" if env_id in BROKEN else "**fails**" if env_id in IMAGES else "plays"
        assert status.startswith(start)
        if start == "plays":
            needs = (
                [f"needs {' and '.join(f'`{name}`' for name in gem_class(env_id).packages)}"]
                if gem_class(env_id).packages
                else []
            )
            assert [part for part in status.split("; ") if part.startswith("needs")] == needs
            assert ("with local data" in status) == needs_data(env_id)


def hangs(folder):
    """A program that never ends, and leaves its process number."""
    return f"import os, time\nopen({str(folder / 'pid')!r}, 'w').write(str(os.getpid()))\nwhile True: time.sleep(0.1)"


@pytest.mark.usefixtures("elsewhere")
class TestTools:
    def test_the_python_tool_runs_the_response(self, tokenizer):
        def factory():
            return ToolEnvWrapper(make("rg:basic_arithmetic"), tools=[PythonCodeTool()], max_tool_uses=2)

        lines = ["<python>print(6 * 7)</python>", r"\boxed{0}"]
        text, env = rollout(factory, lines, tokenizer)
        assert "<|im_start|>tool\nCode execution result: 42\n" in text
        assert env.slots[0].turn == 2
        assert env.slots[0].finished

    def test_the_search_tool_asks_a_server(self, tokenizer):
        import msgspec
        from gem.tools.search_tool import SearchTool

        received = []

        class Server(BaseHTTPRequestHandler):
            def do_POST(self):
                received.append(msgspec.msgpack.decode(self.rfile.read(int(self.headers["Content-Length"]))))
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
        assert received == [{"query": "do cats purr", "topk": 1, "return_scores": True}]
        assert "<information>Doc 1(Title: Cats) They purr." in text


def rollout(factory, lines, tokenizer):
    """The whole conversation of one episode in which the player says these lines, and the
    environment."""
    env = GEMEnv(factory, tokenizer=tokenizer, max_model_len=8192, max_output_tokens=64)
    policy = ScriptedPolicy(lambda episode, turn, context: lines[turn], tokenizer=tokenizer, max_output_tokens=64)
    env.rollout(len(lines), policy)
    return tokenizer.decode(env.slots.context(0)), env
