"""GEMEnv: a seed, or a state, gives the same episodes again."""

from __future__ import annotations

import random

import numpy as np
import pytest
from gem_episodes import EASY, contexts, play
from global_generators import draws

from torchrl_llm import keys
from torchrl_llm.testing.environments import Dice


class TestReproducibility:
    def games(self, make, says, steps=12, noise=None, **kwargs):
        env = make(Dice, seed=5, **kwargs)
        td = env.reset()
        shown = {}
        for _ in range(steps):
            if noise is not None:
                noise()
            td, following = env.step_and_maybe_reset(says("x")(td))
            shown |= contexts(env, td.unsqueeze(-1))
            td = following
        return shown

    def test_nothing_outside_changes_the_games(self, make, says):
        def noise():
            random.seed(7)
            np.random.seed(7)
            np.random.normal()
            make(EASY, num_envs=2, seed=5).reset()

        assert self.games(make, says) == self.games(make, says, noise=noise)

    def test_games_change_nothing_outside(self, make, says):
        assert draws(lambda: None) == draws(lambda: self.games(make, says, num_envs=2))

    def test_the_number_of_slots_does_not_matter(self, make, says):
        one, six = self.games(make, says, steps=24), self.games(make, says, num_envs=6, steps=4)
        assert len(one) > 20
        both = one.keys() & six.keys()
        assert len(both) > 15
        assert all(one[key] == six[key] for key in both)

    def test_seeds_name_the_games(self, make, says):
        env = make(Dice, seed=1)
        first = env.reset()
        env.set_seed(2)
        other = env.reset()
        env.set_seed(1)
        assert (env.reset()[keys.PROMPT] == first[keys.PROMPT]).all()
        assert not (other[keys.PROMPT] == first[keys.PROMPT]).all()
        assert other["episode_id"] != first["episode_id"]
        assert not (make(Dice, seed=1, stream="eval").reset()[keys.PROMPT] == first[keys.PROMPT]).all()

    def test_groups_have_the_same_task(self, make, says):
        env = make(Dice, num_envs=4, group_size=2)
        rollout = play(env, says("x"), 6)
        assert rollout["group_id"][:, 0].flatten().tolist() == [0, 0, 1, 1]
        texts = contexts(env, rollout)
        for (episode, turn), text in texts.items():
            if episode % 2 == 0 and (episode + 1, turn) in texts:
                assert text == texts[episode + 1, turn]
        assert len({texts[episode, 0] for episode in range(0, 8, 2)}) == 4


class TestState:
    @pytest.mark.parametrize("steps", [0, 1, 5])
    def test_running_episodes_are_replayed(self, make, says, steps):
        def drive(env, td, n):
            seen = []
            for _ in range(n):
                td, following = env.step_and_maybe_reset(says("x")(td))
                seen.append(td["next"].clone())
                td = following
            return td, seen

        env = make(Dice, num_envs=2, seed=3)
        td, _ = drive(env, env.reset(), steps)
        state = env.state_dict()
        _, expected = drive(env, td, 6)
        again = make(Dice, num_envs=2, seed=99)
        again.load_state_dict(state)
        observed = again.observe()
        assert (observed == td.select(*observed.keys(True, True))).all()
        _, seen = drive(again, observed, 6)
        assert all((a == b).all() for a, b in zip(seen, expected, strict=True))

    def test_another_environments_state_is_refused(self, make):
        state = make(Dice, num_envs=2).state_dict()
        with pytest.raises(ValueError, match="group_size=2"):
            make(Dice, num_envs=2, group_size=2).load_state_dict(state)

    def test_other_number_of_slots(self, make):
        env = make(Dice, num_envs=2)
        make(Dice, num_envs=4).load_state_dict(env.state_dict())
        env.reset()
        with pytest.raises(ValueError, match="over 2 slots"):
            make(Dice, num_envs=4).load_state_dict(env.state_dict())

    def test_an_empty_state_is_logged(self, make, caplog):
        make().load_state_dict({})
        assert "env.state_dict()" in caplog.text
