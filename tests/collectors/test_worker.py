"""RolloutWorker in this process: when it answers, and that the simulated worker answers like it."""

import pytest

from torchrl_llm.collectors._worker import RolloutWorker, WorkerRequest
from torchrl_llm.envs import GEMEnv
from torchrl_llm.envs.tasks import TaskSampler
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.policies import SleepingPolicy
from torchrl_llm.testing.simulation import Costs, SimulatedWorker
from torchrl_llm.testing.tokenizers import byte_tokenizer

STEP = 0.02
LENGTHS = {0: [5], 1: [4, 5], 2: [30, 30]}
"""By the index of a task: the tokens of each response, its end-of-turn token included."""


def script(episode, turn, context):
    tokens = LENGTHS[episode]
    return ("stop" if turn == len(tokens) - 1 else "go").ljust(tokens[turn] - 1, ".")


@pytest.fixture
def worker(clock):
    made = RolloutWorker(
        lambda: GEMEnv(StopOrGo, tokenizer=byte_tokenizer(), num_envs=2, max_output_tokens=32, max_model_len=256),
        lambda: SleepingPolicy(script, tokenizer=byte_tokenizer(), max_output_tokens=32, seconds_per_step=STEP),
        install=None,
        greedy=False,
        num_threads=0,
        step_timeout=10.0,
    )
    yield made
    made.close()


def request(start=(), cancel=(), report=STEP / 2, poll=5.0):
    return WorkerRequest(TaskSampler(), list(start), list(cancel), report, poll)


def serials(result):
    return sorted(serial for serial, _ in result.finished)


def test_answers_at_once_when_nothing_is_left(worker, clock):
    result = worker.run(request([(7, 0)], report=60.0, poll=60.0))
    assert serials(result) == [7]
    assert clock.now == pytest.approx(5 * STEP)


def test_reports_together_what_ends_within_the_interval(worker):
    result = worker.run(request([(7, 0), (8, 1), (9, 2)], report=25 * STEP))
    assert serials(result) == [7, 8]


def test_answers_after_the_poll_interval_without_an_episode(worker):
    assert worker.run(request([(7, 2)], poll=3 * STEP)).finished == []
    assert serials(worker.run(request())) == [7]


def test_the_simulated_worker_answers_like_it(worker, clock):
    """The same answers to the same requests, at most a step of the engine later: it sees one step
    later that an episode ended."""
    simulated = SimulatedWorker(2, Costs(step=STEP, request=0.0), LENGTHS.__getitem__)
    requests = [request([(7, 0), (8, 1), (9, 2)]), request(), request(), request()]
    now = 0.0
    for each in requests:
        real = worker.run(each)
        now, expected = simulated.run(now, each)
        assert serials(real) == serials(expected)
        assert now - STEP / 2 < clock.now < now + 1.5 * STEP
