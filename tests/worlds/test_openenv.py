"""Environments of OpenEnv, in this process and on a server that the test starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from waiting import LIMIT, wait_until

from torchrl_llm.envs import GEMEnv
from torchrl_llm.envs.faults import EnvironmentUnavailableError, UnknownEnvironmentError
from torchrl_llm.envs.registry import resolve_env
from torchrl_llm.keys import StopReason
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.utils.options import ConfigError

pytestmark = pytest.mark.families
pytest.importorskip("openenv")
ConnectionClosed = pytest.importorskip("websockets.exceptions").ConnectionClosed

HERE = Path(__file__).parent
WORLD = "openenv:openenv_world:HigherLower"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(HERE)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def server():
    """The process of a server, and its address."""
    port = free_port()
    process = subprocess.Popen([sys.executable, HERE / "openenv_world.py", str(port)], start_new_session=True)
    url = f"http://127.0.0.1:{port}"

    def answers():
        assert process.poll() is None
        try:
            with urlopen(f"{url}/health", timeout=LIMIT):
                return True
        except OSError:
            return False

    wait_until(answers, "the start of the server")
    yield process, url
    process.kill()
    process.wait(LIMIT)


@pytest.fixture(params=["here", "server"])
def env_id(request):
    return WORLD if request.param == "here" else f"openenv:{request.getfixturevalue('server')[1]}"


def number_of(env, seed: int) -> int:
    """The number of a seed, found by asking for each."""
    for guess in range(1, 9):
        env.reset(seed=seed)
        if env.step(str(guess))[2]:
            return guess
    raise AssertionError("no number from 1 to 8")


class TestEpisode:
    def test_it_is_played(self, env_id):
        env = resolve_env(env_id).make()
        assert env.reset(seed=5) == ("A number from 1 to 8?", {})
        steps = [env.step("0") for _ in range(4)]
        assert [step[:4] for step in steps] == [
            (
                "Higher.",
                0.0,
                False,
                False,
            )
        ] * 3 + [("Higher.", 0.0, True, False)]
        env.close()
        env.close()

    def test_a_seed_fixes_the_task(self, env_id):
        env, other = resolve_env(env_id).make(), resolve_env(env_id).make()
        numbers = [number_of(env, seed) for seed in range(6)]
        assert numbers == [number_of(other, seed) for seed in range(6)]
        assert len(set(numbers)) > 1
        for each in (env, other):
            each.close()

    def test_a_win_is_a_success(self, env_id, tokenizer):
        def answer(episode, turn, context):
            return str(turn + 1)

        env = GEMEnv(env_id, tokenizer=tokenizer, num_envs=4)
        rollout = env.rollout(4, ScriptedPolicy(answer, tokenizer=tokenizer), break_when_any_done=False)
        ended = rollout["next", "done"].any(1)
        assert ended.any()
        success, reward = rollout["next", "success"], rollout["next", "reward"]
        assert (success.any(1) == (reward == 1).any(1)).all()
        env.close()


class TestOptions:
    def test_arguments_of_the_class(self):
        assert resolve_env(WORLD).make(most=3).reset(seed=0)[0] == "A number from 1 to 3?"

    def test_an_argument_that_it_has_not(self):
        with pytest.raises(ConfigError, match=r"cannot be made with the options .*least"):
            resolve_env(WORLD).make(least=3)

    def test_a_server_takes_none(self, server):
        with pytest.raises(ConfigError, match="is a server, which takes no most"):
            resolve_env(f"openenv:{server[1]}").make(most=3)

    def test_a_field_must_be_chosen(self):
        spec = resolve_env("openenv:openenv_world:Chatty")
        with pytest.raises(
            ConfigError, match=r"no option 'action'; expected one of its text fields \['text', 'channel'\]"
        ):
            spec.make()
        with pytest.raises(ConfigError, match="action='txt'"):
            spec.make(action="txt")
        with pytest.raises(ConfigError, match=r"must have \['channel'\]"):
            spec.make(action="text")
        env = spec.make(action="text", action_fields={"channel": "a"})
        env.reset(seed=0)
        assert env.step("hello")[0] == "a: hello"

    def test_a_step_without_annotations(self):
        with pytest.raises(ConfigError, match=r"Silent\.step does not say what it takes"):
            resolve_env("openenv:openenv_world:Silent").make()


class TestFailures:
    @pytest.mark.parametrize(
        "env_id",
        [
            "openenv:no_such_module:Class",
            "openenv:openenv_world:Nobody",
            "openenv:echo_env:latest",
            "openenv:json:dumps",
            "openenv:json",
            "openenv:",
        ],
    )
    def test_an_id_that_names_no_environment(self, env_id):
        with pytest.raises(UnknownEnvironmentError, match=r"names no .*docker run"):
            resolve_env(env_id)

    def test_a_class_that_needs_what_is_not_here(self, tokenizer):
        """As those that start a container: not the fault of an episode, which would be
        contained."""
        env = GEMEnv("openenv:openenv_world:Contained", tokenizer=tokenizer)
        with pytest.raises(EnvironmentUnavailableError, match=r"Its class fails .*No such file or directory: 'docker'"):
            env.reset()

    def test_no_server(self):
        url = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(EnvironmentUnavailableError, match="no answer from an OpenEnv server at"):
            resolve_env(f"openenv:{url}").make(timeout=2.0)

    def test_a_server_that_is_none(self, tmp_path):
        port = free_port()
        web = subprocess.Popen(
            [sys.executable, "-m", "http.server", str(port), "-d", tmp_path], stderr=subprocess.DEVNULL
        )
        try:
            wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
            with pytest.raises(EnvironmentUnavailableError, match="no answer from an OpenEnv server"):
                resolve_env(f"openenv:http://127.0.0.1:{port}").make(timeout=5.0)
        finally:
            web.kill()
            web.wait(LIMIT)

    def test_an_error_of_the_environment_ends_the_episode(self, env_id, tokenizer):
        env = GEMEnv(env_id, tokenizer=tokenizer, num_envs=2)
        rollout = env.rollout(1, ScriptedPolicy(lambda *_: "crash", tokenizer=tokenizer))
        assert rollout["next", "truncated"].all()
        assert (rollout["next", "stop_reason"] == StopReason.ERROR).all()
        env.close()

    def test_a_server_that_dies_ends_the_episode(self, server, tokenizer):
        process, url = server
        env = resolve_env(f"openenv:{url}").make(timeout=5.0)
        env.reset(seed=0)
        process.kill()
        process.wait(LIMIT)
        with pytest.raises((OSError, RuntimeError, ConnectionClosed)):
            env.step("1")
        env.close()


def test_a_model_trains_on_it(tmp_path, server):
    run = build_run(
        RunSettings.from_values(
            model_path="tiny", algo="LLMREINFORCE", env_name=f"openenv:{server[1]}", num_envs=2, batch_size=4, max_model_len=512,
            max_output_tokens=4, lora_r=0, max_iterations=1, evaluation_interval=0, final_episodes=4, save_checkpoints=False,
            output_dir=tmp_path, progress=False,
        )
    )  # fmt: skip
    try:
        history = run.trainer.train()
    finally:
        run.close()
    assert history[0]["rollout/episodes"] == 4
    assert 1 <= history[0]["rollout/turns"] <= 4
