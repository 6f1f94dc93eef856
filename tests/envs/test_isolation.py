"""Games in threads: who has the global generators."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from waiting import LIMIT, wait_until

from torchrl_llm.envs import EnvSpec, isolation
from torchrl_llm.envs.isolation import IsolatedEnv, kept_global_rng, revoke_global_rng
from torchrl_llm.testing.environments import Dice, Slow, StopOrGo


class Patient(Dice):
    """Gives other threads time between its two draws."""

    def _next_task(self):
        first = random.randrange(10**6)
        time.sleep(0.002)
        return f"{first} {np.random.randint(10**6)} {np.random.normal()}"


def played(make, seed):
    game = IsolatedEnv(make)
    return [game.reset(seed), *(game.step("x").message for _ in range(3))]


class TestIsolation:
    @pytest.mark.parametrize("make", [Patient, lambda: Slow(Patient, mean=0.002, sigma=1.0)])
    def test_games_in_threads_are_the_games_of_one_thread(self, make):
        alone = [played(Patient, seed) for seed in range(12)]
        state = random.getstate(), np.random.get_state()[1].tolist()
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(lambda seed: played(make, seed), range(12)))
        assert together == alone
        assert (random.getstate(), np.random.get_state()[1].tolist()) == state

    def test_the_same_thread_may_enter_again(self):
        random.seed(1)
        expected = random.Random(1).random()
        with kept_global_rng():
            random.seed(2)
            with kept_global_rng():
                random.seed(3)
            assert random.random() == random.Random(2).random()
            played(Dice, 0)
        assert random.random() == expected

    def test_declared_environments_run_in_parallel_and_others_do_not(self):
        class Meeting(StopOrGo):
            meet = threading.Barrier(2, timeout=0.3)  # nobody comes, however long it waits

            def step(self, action):
                self.meet.wait()
                return super().step(action)

        class Declared(Meeting):
            thread_safe = True
            meet = threading.Barrier(2, timeout=LIMIT)

        def play(make):
            game = IsolatedEnv(make)
            game.reset(0)
            return game.step("stop").reward

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(play, [Declared] * 2)) == [1.0, 1.0]
            with pytest.raises(threading.BrokenBarrierError):
                list(pool.map(play, [Meeting] * 2))


class TestBusy:
    def test_waiting_for_others_is_not_being_busy(self):
        class Waits(StopOrGo):
            def step(self, action):
                assert release.wait(LIMIT)
                return super().step(action)

        release, game, other = threading.Event(), IsolatedEnv(Waits), IsolatedEnv(StopOrGo)
        game.reset(0), other.reset(0)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(game.step, "x")
            wait_until(lambda: game.busy_since is not None)
            second = pool.submit(other.step, "x")
            wait_until(lambda: isolation._loan.wanted, "the wait of the second")
            assert other.busy_since is None
            assert not second.done()
            release.set()
            first.result(LIMIT), second.result(LIMIT)
        assert game.busy_since is None

    def test_keeping_others_waiting_is_told_once(self, caplog, clock):
        class Long(StopOrGo):
            def step(self, action):
                if others.pop():
                    wait_until(lambda: isolation._loan.wanted, "the wait of the other one")
                clock.sleep(0.25)
                return super().step(action)

        def play(_):
            game = IsolatedEnv(EnvSpec("long-and-undeclared", Long))
            game.reset(0)
            game.step("stop")

        others = [False]
        play(0)
        assert "thread_safe" not in caplog.text, "nobody waited"
        for _ in range(2):
            others = [False, True]  # from the end: one of two waits for the other
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(play, range(2)))
        assert caplog.text.count("thread_safe = True") == 1
        assert "long-and-undeclared" in caplog.text


class TestRevoke:
    def test_the_generators_are_put_back_and_free(self, caplog):
        class Hangs(StopOrGo):
            def step(self, action):
                random.seed(1)
                np.random.seed(1)
                release.wait(LIMIT)
                return super().step(action)

        release, game = threading.Event(), IsolatedEnv(Hangs)
        state = random.getstate(), np.random.get_state()[1].tolist()
        game.reset(0)
        thread = threading.Thread(target=game.step, args=("x",), daemon=True)
        thread.start()
        wait_until(lambda: game.busy_since is not None)
        assert not revoke_global_rng(threading.get_ident())
        assert revoke_global_rng(thread.ident)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == state
        assert "taken from it" in caplog.text
        expected = played(Dice, 3)
        random.random()
        state = random.getstate()
        release.set()
        thread.join(LIMIT)
        assert random.getstate() == state, "its own restore does nothing"
        assert played(Dice, 3) == expected


def test_threads_that_read_the_global_generators_meet_no_freed_one():
    # numpy would crash: its global generator is exchanged around every call of a game, and games
    # come and go.
    code = """
import gc, sys, threading
import numpy as np
from torchrl_llm.envs import IsolatedEnv
from torchrl_llm.testing.environments import Dice

class Late:
    def __init__(self):
        self.me = self
    def __del__(self):
        sum(range(1000))  # a moment for the other thread, wherever the collection happens

class Long(Dice):
    def reset(self):
        sum(range(1000))
        return super().reset()

def play():
    while True:
        IsolatedEnv(Long).reset(0)

sys.setswitchinterval(1e-5)
gc.set_threshold(1)
threading.Thread(target=play, daemon=True).start()
for _ in range(1_500):
    late = Late()
    del late
    try:
        np.random.get_state()
    except RuntimeError:  # numpy notices that its lock is another one now: an error, but no crash
        pass
print("alive", flush=True)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
    assert result.stdout.strip() == "alive", result.stderr[-2000:]


class TestImportOfGEM:
    SCRIPT = """
import sys, warnings
from torchrl_llm.envs.gem_catalog import import_gem
sys.pycache_prefix = sys.argv[1]  # nothing is compiled there: all that is imported now warns if it ever does
filters = warnings.filters[:]
import_gem("game:GuessTheNumber-v0")
assert "cellpylib" in sys.modules
assert warnings.filters == filters
sys.path.insert(0, sys.argv[1])
import mine
"""

    @pytest.mark.extra
    def test_syntax_warnings_of_cellpylib_are_not_shown_and_others_are(self, tmp_path):
        pytest.importorskip("gem")
        (tmp_path / "mine.py").write_text('x = 1\ny = x is "literal"\n')
        done = subprocess.run(
            [sys.executable, "-c", self.SCRIPT, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "mine.py:2: SyntaxWarning" in done.stderr
        assert "cellpylib" not in done.stderr
