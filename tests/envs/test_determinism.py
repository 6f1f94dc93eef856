"""The same seed gives the same episodes, whoever plays them: any slots, threads, workers and other
users of chance."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from itertools import chain

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from waiting import LIMIT

from torchrl_llm import keys
from torchrl_llm.collectors import AsyncTurnCollector, TurnCollector
from torchrl_llm.envs import GEMEnv
from torchrl_llm.envs.isolation import kept_global_rng
from torchrl_llm.testing.environments import Dice, EarlyDecision, Slow, StopOrGo
from torchrl_llm.testing.policies import ScriptedPolicy

# every example plays; a failing one is small anyway
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
GROUPS = 4
"""Groups of episodes that a test plays."""


class Deck(Dice):
    """Draws when it is made, too, and keeps what it drew."""

    def __init__(self):
        super().__init__(turns=2)
        self.marks = random.randrange(10**6), np.random.randint(10**6)

    def _next_task(self):
        return f"{self.marks} {super()._draw()}"


class Careless(StopOrGo):
    """Seeds the global generators itself and draws from them, a different number of times each
    turn."""

    def step(self, action):
        random.seed(len(action))
        np.random.seed(len(action))
        np.random.normal(size=len(action) % 7)
        return super().step(action)


GAMES = (Dice, Deck, Careless, EarlyDecision, "game:GuessTheNumber-v0-easy")


def says(episode, turn):
    """Words of one episode and turn: now and then what a game understands."""
    rng = random.Random(f"{episode} {turn}")
    guess = rf"\boxed{{{rng.randint(1, 10)}}}"
    return rng.choice(["stop", "go on", "hat", guess, guess])


@contextmanager
def nothing():
    yield


def script(episode, turn, context, *, around=nothing):
    """Draws from the global generators on its own account."""
    with around():
        random.random(), np.random.random(3)
    return says(episode, turn)


@contextmanager
def neighbour():
    """A thread that seeds and draws from the global generators whenever it gets them."""
    over = threading.Event()

    def sample():
        while not over.wait(0.001):  # however long that is
            with kept_global_rng():
                random.seed(5), random.random(), np.random.seed(5), np.random.random(3)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def episodes(batch):
    """Everything that a batch holds, episode by episode: what it is padded to does not matter."""
    names = sorted(batch.keys(True, True), key=str)
    sizes = {
        "token": batch[keys.ATTENTION_MASK].sum(-1).tolist(),
        "turn": batch[keys.TURN_MASK].sum(-1).tolist(),
        "row": [1] * len(batch),
    }
    axes = {name: keys.row_axis(name, batch[name].shape) for name in names}
    return [
        {name: content(batch[name][i].flatten()[: sizes[axes[name]][i]], axes[name]) for name in names}
        for i in range(len(batch))
    ]


def content(values, axis):
    """The values of an episode, in a form that is quick to compare: numbers of turns as they are,
    tokens as bytes."""
    return values.numpy().tobytes() if axis == "token" else values.tolist()


def collect(collector, count):
    """The first ``count`` episodes that a collector delivers."""
    delivered = []
    try:
        while len(delivered) < count:
            delivered += episodes(collector.rollout())
    finally:
        collector.shutdown()
    return delivered[:count]


mixtures = st.lists(st.sampled_from(GAMES), min_size=1, max_size=4).flatmap(
    lambda games: st.tuples(
        st.just(games),
        st.none() | st.lists(st.floats(0.1, 5.0), min_size=len(games), max_size=len(games)),
    )
)


@pytest.fixture(scope="module")
def play(tokenizer):
    """Plays :data:`GROUPS` groups, with a barrier between turns or without one; environments are
    called in threads."""

    def play(games, *, slots=1, rounds=1, threads=0, barrier=True, staleness=0, groups=GROUPS, group_size=1, **kwargs):
        sizes = {"max_model_len": 1536, "max_output_tokens": 16, "max_turns": 6}
        if barrier:
            kwargs["num_threads"] = threads
        slots *= group_size
        env = GEMEnv(games, tokenizer=tokenizer, num_envs=slots, group_size=group_size, **sizes, **kwargs)
        # In this thread the draws lie between the turns; from another one they would lie within
        # the draws of a game.
        player = partial(script, around=nothing if barrier or not threads else kept_global_rng)
        policy = ScriptedPolicy(player, tokenizer=tokenizer, max_output_tokens=16)
        batch_size = rounds * group_size
        if barrier:
            collector = TurnCollector(env, policy, batch_size=batch_size)
        else:
            collector = AsyncTurnCollector(
                env, policy, batch_size=batch_size, num_threads=threads, max_staleness=staleness
            )
        return collect(collector, groups * group_size)

    return play


class TestTheLaw:
    @settings(max_examples=20, phases=NO_SHRINKING)
    @given(
        mixture=mixtures,
        seed=st.integers(0, 2**32),
        group_size=st.integers(1, 3),
        slots=st.integers(1, 4),
        rounds=st.integers(1, GROUPS + 1),
        threads=st.integers(0, 4),
        barrier=st.booleans(),
        staleness=st.integers(0, 2),
        latency=st.none() | st.integers(0, 99),
        chance=st.integers(0, 2**32 - 1),
    )
    def test_episodes_are_a_function_of_the_seed(
        self, play, mixture, seed, group_size, slots, rounds, threads, barrier, staleness, latency, chance
    ):
        games, weights = mixture
        task_spec = {"seed": seed, "group_size": group_size, "weights": weights}
        alone = play(games, **task_spec)
        if latency is not None:
            games = [partial(Slow, game, mean=0.001, sigma=1.5, seed=latency) for game in games]
        random.seed(chance), np.random.seed(chance)
        with neighbour() if threads else nothing():
            how = {"slots": slots, "rounds": rounds, "threads": threads, "barrier": barrier, "staleness": staleness}
            delivered = play(games, **how, **task_spec)
        assert delivered == alone

    @settings(max_examples=10, phases=NO_SHRINKING)
    @given(
        mixture=mixtures,
        seed=st.integers(0, 2**32),
        group_size=st.integers(1, 3),
        workers=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.booleans()), min_size=1, max_size=4),
    )
    @pytest.mark.extra
    def test_workers_play_together_what_one_plays_alone(self, play, mixture, seed, group_size, workers):
        games, weights = mixture
        task_spec = {"seed": seed, "group_size": group_size, "weights": weights}
        share = {"num_workers": len(workers), "groups": 2}
        shares = [
            play(games, slots=slots, threads=threads, barrier=barrier, worker=worker, **share, **task_spec)
            for worker, (slots, threads, barrier) in enumerate(workers)
        ]
        together = sorted(chain(*shares), key=lambda episode: episode[keys.EPISODE_ID][0])
        assert together == play(games, groups=2 * len(workers), **task_spec)

    @pytest.mark.parametrize(("threads", "barrier"), [(0, True), (3, True), (0, False)])
    def test_other_users_of_chance_see_no_game(self, play, threads, barrier):
        random.seed(3), np.random.seed(3)
        played = play(list(GAMES), slots=2, rounds=GROUPS, threads=threads, barrier=barrier)
        turns = sum(len(episode[keys.TURN_MASK]) for episode in played)
        seen = random.random(), np.random.random(3).tolist()
        random.seed(3), np.random.seed(3)
        drawn = [(random.random(), np.random.random(3).tolist()) for _ in range(turns + 1)]
        assert seen == drawn[-1], "what the policy drew, and no game"

    def test_other_seeds_give_other_episodes(self, play):
        first, second = (play(list(GAMES), seed=seed) for seed in (1, 2))
        assert [episode[keys.TOKENS] for episode in first] != [episode[keys.TOKENS] for episode in second]


GEM = """
import hashlib
from torchrl_llm.envs import GEMEnv
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tokenizers import byte_tokenizer

games = [f"game:{name}-v0-easy" for name in ("Mastermind", "TowerofHanoi", "FifteenPuzzle", "Minesweeper", "Sudoku")]
tokenizer = byte_tokenizer()
env = GEMEnv([*games, "rg:spell_backward"], tokenizer=tokenizer, num_envs=6, max_model_len=8192)
policy = ScriptedPolicy(lambda *_: "[1 2]", tokenizer=tokenizer, max_output_tokens=64)
contexts = env.rollout(3, policy)["next", "tokens", "prompt"]
print(hashlib.md5(contexts.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.extra
def test_the_order_of_a_set_of_texts_has_no_part_in_it(capsys):
    # Texts hash to something else in every process.
    exec(GEM, {})
    other = subprocess.run([sys.executable, "-c", GEM], capture_output=True, text=True, timeout=LIMIT, check=True)
    assert other.stdout == capsys.readouterr().out != ""
