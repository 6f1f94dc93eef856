"""A game that shows what a collector of games gets wrong: its lengths, turns and texts depend on
chance and on what was said."""

from __future__ import annotations

import random

from torchrl_llm.envs import Game


class Chatter(Game):
    """Players speak in an order of chance, twice in a row too; some never do. Everybody but the
    speaker hears what was said.

    Chance is drawn from the global generator, which must be the game's own.

    Args:
        num_players: of the game.
        most: moves of a game, at most.
    """

    def __init__(self, num_players: int = 2, most: int = 6) -> None:
        self.num_players, self.most = num_players, most
        self.seat: int | None = None
        self.rewards: tuple[float, ...] = ()
        self.news: dict[int, str] = {}

    def start(self, seed: int) -> None:
        self.left = random.randint(1, self.most)
        self.seat = random.randrange(self.num_players)
        self.news = {seat: f"You are {seat}. {random.randrange(1000)}" for seat in range(self.num_players)}

    def move(self, text: str) -> None:
        if "fail" in text:
            raise ValueError("it was told to")
        said = f"{self.seat}: {text} {random.randrange(1000)}"
        self.news = {seat: "" if seat == self.seat else said for seat in range(self.num_players)}
        self.left -= 1
        self.seat = random.randrange(self.num_players) if self.left and "end" not in text else None
        if self.seat is None:
            self.rewards = tuple(float(random.randint(-1, 1)) for _ in range(self.num_players))

    def observe(self, seat: int) -> str:
        return self.news[seat]


def played(game: Game, seed: int, say) -> list[tuple[str, list[tuple[str, str, float]]]]:
    """A game played by a plain loop: of each seat its first message, and of each turn the response,
    the next message and the reward.

    Args:
        game: draws from the global generator.
        seed: of the game.
        say: maps ``(seat, turn)`` to a response.
    """
    random.seed(seed)
    game.start(seed)
    firsts: list[str | None] = [None] * game.num_players
    said: list[list[str]] = [[] for _ in firsts]
    seen: list[list[str]] = [[] for _ in firsts]
    heard = [[game.observe(seat)] for seat in range(game.num_players)]
    while (seat := game.seat) is not None:
        news = "\n".join(filter(None, heard[seat]))
        heard[seat] = []
        if said[seat]:
            seen[seat].append(news)
        else:
            firsts[seat] = news
        said[seat].append(say(seat, len(said[seat])))
        game.move(said[seat][-1])
        for each in range(game.num_players):
            heard[each].append(game.observe(each))
    result = []
    for seat, texts in enumerate(heard):
        news = "\n".join(filter(None, texts))
        rewards = [0.0] * max(0, len(said[seat]) - 1) + [game.rewards[seat]]
        first = firsts[seat]
        turns = [*zip(said[seat], [*seen[seat], news], rewards, strict=True)] if said[seat] else [("", "", rewards[-1])]
        result.append((news if first is None else first, turns))
    return result
