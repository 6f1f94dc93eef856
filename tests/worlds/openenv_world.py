"""A small environment of OpenEnv, here and as a server: ``python openenv_world.py PORT``."""

from __future__ import annotations

import random
import re
import sys
from typing import Any

from openenv.core import Action, Environment, Observation, State


class Guess(Action):
    text: str


class Hint(Observation):
    text: str


class HigherLower(Environment):
    """Guess a number from 1 to ``most``; four guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, most: int = 8) -> None:
        super().__init__()
        self.most, self.number, self.guesses = most, 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self.number, self.guesses = random.Random(seed).randint(1, self.most), 0
        return Hint(text=f"A number from 1 to {self.most}?")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.guesses += 1
        if action.text == "crash":
            raise ValueError("it was told to")
        found = re.search(r"\d+", action.text)
        guess = int(found[0]) if found else 0
        if guess == self.number:
            return Hint(text="Right.", reward=1.0, done=True)
        return Hint(text="Higher." if guess < self.number else "Lower.", reward=None, done=self.guesses == 4)

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)


class TwoTexts(Action):
    text: str
    channel: str


class Chatty(HigherLower):
    """An action with two texts."""

    def step(self, action: TwoTexts, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        return Hint(text=f"{action.channel}: {action.text}")


class Contained(HigherLower):
    """Starts a container, where there is no Docker."""

    def __init__(self) -> None:
        super().__init__()
        raise FileNotFoundError(2, "No such file or directory", "docker")


class Silent(HigherLower):
    """A step that does not say what it takes."""

    def step(self, action, timeout_s=None, **kwargs):
        return Hint(text="")


if __name__ == "__main__":
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app

    app = create_fastapi_app(HigherLower, Guess, Hint, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
