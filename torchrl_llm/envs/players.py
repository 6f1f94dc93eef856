"""Scripted players of games, to imitate: what ``demonstrations`` of a run may name.

A player is a function ``(context, rng) -> text``: it reads the conversation as the model does, and
takes all chance from ``rng``. Each task has one that plays legally at random, one of some of the
skill, and a good one. Imitate the second where reinforcement learning is to have something left to
teach.
"""

from __future__ import annotations

import math
import random
import re
from itertools import permutations, product


def _find(pattern: re.Pattern[str], context: str, known: str) -> re.Match[str]:
    """What a player reads in a context; ``known`` names its game, for the error."""
    if (found := pattern.search(context)) is None:
        raise _other_game(known, context)
    return found


def _other_game(known: str, context: str) -> ValueError:
    return ValueError(f"The player knows {known}; it was shown {context[:120]!r}.")


# ---------------------------------------- GuessTheNumber

_RANGE = re.compile(r"number between (\d+) and (\d+)")
_GUESS = re.compile(r"you guessed (\d+)")
_HINT = re.compile(r"you guessed (\d+), and the target number is (higher|lower) than")


def guess_at_random(context: str, rng: random.Random) -> str:
    """Plays GEM's GuessTheNumber legally: any number that was not guessed yet; hints are not read.

    Examples:
        >>> guess_at_random("Guess the number between 1 and 2. At turn 1, you guessed 2, and so on", random.Random(0))
        '\\\\boxed{1}'
    """
    return _guess(context, rng, reads=0.0)


def guess_by_half_the_hints(context: str, rng: random.Random) -> str:
    """Plays GEM's GuessTheNumber: any number that was not guessed yet and fits the hints, of which
    every other one is read.

    Examples:
        >>> seen = "Guess the number between 1 and 3. At turn 1, you guessed 2, and the target number is lower than 2."
        >>> sorted({guess_by_half_the_hints(seen, random.Random(i)) for i in range(20)})
        ['\\\\boxed{1}', '\\\\boxed{3}']
    """
    return _guess(context, rng, reads=0.5)


def guess_by_hints(context: str, rng: random.Random) -> str:
    """Plays GEM's GuessTheNumber: any number that was not guessed yet and fits all hints.

    Examples:
        >>> guess_by_hints("the number between 1 and 3. you guessed 2, and the target number is lower than 2.", random.Random(0))
        '\\\\boxed{1}'
    """
    return _guess(context, rng, reads=1.0)


def _guess(context: str, rng: random.Random, reads: float) -> str:
    found = _find(_RANGE, context, 'GuessTheNumber, whose rules say "number between"')
    low, high = int(found[1]), int(found[2])
    for number, hint in _HINT.findall(context):
        if rng.random() < reads:
            low, high = (max(low, int(number) + 1), high) if hint == "higher" else (low, min(high, int(number) - 1))
    guessed = {int(number) for number in _GUESS.findall(context)}
    left = [number for number in range(low, high + 1) if number not in guessed]
    return f"\\boxed{{{rng.choice(left)}}}"


# ---------------------------------------- Mastermind

_RULES = re.compile(r"secret (\d+) digit code within \d+ turns\.\s+The code consists of digits from 1 to (\d+)")
_CODE = re.compile(r"you guessed \[([\d, ]+)\]")
_PEGS = re.compile(r"you guessed \[([\d, ]+)\]\. This guess receives (\d+) black peg\(s\) and (\d+) white peg")

_Code = tuple[int, ...]


def break_code_at_random(context: str, rng: random.Random) -> str:
    """Plays GEM's Mastermind legally: any code that was not guessed yet; pegs are not read.

    Examples:
        >>> rules = "the secret 1 digit code within 4 turns. The code consists of digits from 1 to 2. Duplicate numbers are not allowed."
        >>> break_code_at_random(rules + " At turn 1, you guessed [2], and so on", random.Random(0))
        '\\\\boxed{1}'
    """
    return _break_code(context, rng, reads=0.0)


def break_code_by_half_the_pegs(context: str, rng: random.Random) -> str:
    """Plays GEM's Mastermind: any code that was not guessed yet and fits the answers in pegs, of
    which every other one is read.

    Examples:
        >>> rules = "the secret 2 digit code within 4 turns. The code consists of digits from 1 to 2. Duplicate numbers are allowed."
        >>> seen = rules + " you guessed [1, 2]. This guess receives 0 black peg(s) and 2 white peg(s)."
        >>> sorted({break_code_by_half_the_pegs(seen, random.Random(i)) for i in range(20)})
        ['\\\\boxed{1 1}', '\\\\boxed{2 1}', '\\\\boxed{2 2}']
    """
    return _break_code(context, rng, reads=0.5)


def break_code_by_pegs(context: str, rng: random.Random) -> str:
    """Plays GEM's Mastermind: any code that was not guessed yet and fits all answers in pegs.

    Examples:
        >>> rules = "the secret 2 digit code within 4 turns. The code consists of digits from 1 to 2. Duplicate numbers are allowed."
        >>> seen = rules + " you guessed [1, 2]. This guess receives 0 black peg(s) and 2 white peg(s)."
        >>> break_code_by_pegs(seen, random.Random(0))
        '\\\\boxed{2 1}'
    """
    return _break_code(context, rng, reads=1.0)


def _break_code(context: str, rng: random.Random, reads: float) -> str:
    found = _find(_RULES, context, 'Mastermind, whose rules say "digit code within"')
    length, digits = int(found[1]), range(1, int(found[2]) + 1)
    repeats = "Duplicate numbers are allowed" in context
    codes = product(digits, repeat=length) if repeats else permutations(digits, length)
    read = [(_digits(guess), (int(b), int(w))) for guess, b, w in _PEGS.findall(context) if rng.random() < reads]
    guessed = {_digits(guess) for guess in _CODE.findall(context)}
    left = [code for code in codes if code not in guessed and all(_pegs(guess, code) == pegs for guess, pegs in read)]
    return f"\\boxed{{{' '.join(map(str, rng.choice(left)))}}}"


def _digits(text: str) -> _Code:
    return tuple(map(int, text.split(",")))


def _pegs(guess: _Code, code: _Code) -> tuple[int, int]:
    """The black pegs and the white ones that ``guess`` receives where ``code`` is secret."""
    black = sum(map(int.__eq__, guess, code))
    return black, sum(min(guess.count(digit), code.count(digit)) for digit in set(guess)) - black


# ---------------------------------------- 2048

_BOARD = re.compile(r"Current board:\n((?:[ .\d]+\n)+)")

_Line = list[int]


def slide_at_random(context: str, rng: random.Random) -> str:
    """Plays GEM's 2048 legally: any move that changes the board.

    Examples:
        >>> slide_at_random("Current board:\\n   2    .\\n   4    .\\nEnter your move.", random.Random(0))
        '\\\\boxed{right}'
    """
    return _choose_move(context, rng, greed=0.0)


def slide_to_merge_half_the_time(context: str, rng: random.Random) -> str:
    """Plays GEM's 2048: every other move as :func:`slide_to_merge`, and the others as
    :func:`slide_at_random`.

    Examples:
        >>> board = "Current board:\\n   2    4\\n   2    .\\nEnter your move."
        >>> sorted({slide_to_merge_half_the_time(board, random.Random(i)) for i in range(20)})
        ['\\\\boxed{down}', '\\\\boxed{right}', '\\\\boxed{up}']
    """
    return _choose_move(context, rng, greed=0.5)


def slide_to_merge(context: str, rng: random.Random) -> str:
    """Plays GEM's 2048: a move that merges the largest tiles there are to merge, or any that
    changes the board.

    Examples:
        >>> board = "Current board:\\n   2    4\\n   2    .\\nEnter your move."
        >>> sorted({slide_to_merge(board, random.Random(i)) for i in range(20)})
        ['\\\\boxed{down}', '\\\\boxed{up}']
    """
    return _choose_move(context, rng, greed=1.0)


def _choose_move(context: str, rng: random.Random, greed: float) -> str:
    _find(_BOARD, context, '2048, which shows a "Current board:"')
    board = _BOARD.findall(context)[-1]
    rows = [[0 if cell == "." else int(cell) for cell in line.split()] for line in board.splitlines()]
    after = {direction: _slide(rows, direction) for direction in ("up", "down", "left", "right")}
    moves = [direction for direction, board in after.items() if board != rows]
    if rng.random() < greed:
        # What a merge makes is larger than what it takes, and a square tells a large tile from two
        # small ones.
        worth = {direction: sum(tile**2 for row in after[direction] for tile in row) for direction in moves}
        moves = [direction for direction in moves if worth[direction] == max(worth.values())]
    return f"\\boxed{{{rng.choice(moves)}}}"


def _slide(rows: list[_Line], direction: str) -> list[_Line]:
    if direction in ("up", "down"):
        turned = {"up": "left", "down": "right"}[direction]
        return [list(row) for row in zip(*_slide([list(row) for row in zip(*rows, strict=True)], turned), strict=True)]
    if direction == "right":
        return [_merge(row[::-1])[::-1] for row in rows]
    return [_merge(row) for row in rows]


def _merge(line: _Line) -> _Line:
    tiles, merged = [tile for tile in line if tile], []
    while tiles:
        tile = tiles.pop(0)
        merged.append(tile + tiles.pop(0) if tiles[:1] == [tile] else tile)
    return merged + [0] * (len(line) - len(merged))


# ---------------------------------------- Tower of Hanoi

_TOWER = re.compile(r"^([ABC]): \[([\d, ]*)\]$", re.MULTILINE)


def move_disks_at_random(context: str, rng: random.Random) -> str:
    """Plays GEM's TowerofHanoi legally: any move that may be made.

    Examples:
        >>> board = "A: [2]\\nB: [1]\\nC: []\\n"
        >>> sorted({move_disks_at_random(board, random.Random(i)) for i in range(20)})
        ['\\\\boxed{A C}', '\\\\boxed{B A}', '\\\\boxed{B C}']
    """
    return _move_disk(context, rng, skill=0.0)


def move_most_disks_right(context: str, rng: random.Random) -> str:
    """Plays GEM's TowerofHanoi: four moves of five as :func:`move_disks_right`, and the others as
    :func:`move_disks_at_random`.

    Examples:
        >>> board = "A: [2]\\nB: [1]\\nC: []\\n"
        >>> sorted({move_most_disks_right(board, random.Random(i)) for i in range(80)})
        ['\\\\boxed{A C}', '\\\\boxed{B A}', '\\\\boxed{B C}']
    """
    return _move_disk(context, rng, skill=0.8)


def move_disks_right(context: str, rng: random.Random) -> str:
    """Plays GEM's TowerofHanoi: the first move of the shortest way to tower C.

    Examples:
        >>> move_disks_right("A: [2]\\nB: [1]\\nC: []\\n", random.Random(0))
        '\\\\boxed{A C}'
    """
    return _move_disk(context, rng, skill=1.0)


def _move_disk(context: str, rng: random.Random, skill: float) -> str:
    shown = dict(_TOWER.findall(context)[-3:])
    if set(shown) != {"A", "B", "C"}:
        raise _other_game('TowerofHanoi, which shows towers as "A: [3, 2, 1]"', context)
    towers = {name: [int(disk) for disk in re.findall(r"\d+", disks)] for name, disks in shown.items()}
    # An empty tower takes every disk, another one a smaller disk than its top.
    tops = {name: min(disks, default=math.inf) for name, disks in towers.items()}
    moves = [(a, b) for a, b in permutations(towers, 2) if tops[a] < tops[b]]
    source, target = _shortest_way(towers) if rng.random() < skill else rng.choice(moves)
    return f"\\boxed{{{source} {target}}}"


def _shortest_way(towers: dict[str, list[int]]) -> tuple[str, str]:
    """The first move of the shortest way to have all disks on tower C."""
    place = {disk: name for name, disks in towers.items() for disk in disks}
    move, target = ("A", "C"), "C"
    for disk in sorted(place, reverse=True):
        # The largest disk that is elsewhere has to get there, and before that all smaller ones to
        # the third tower.
        if place[disk] != target:
            move = (place[disk], target)
            (target,) = set("ABC") - set(move)
    return move


# ---------------------------------------- reasoning_gym's "Alice in Wonderland"

_WOMEN = re.compile(r"(\d+) (?:sisters|female friends|female colleagues)")
_MOST = 6  # sisters, friends or colleagues of the questions that GEM makes


def count_at_random(context: str, rng: random.Random) -> str:
    """Answers a question of ``rg:aiw`` with one of the numbers that are the answers to all of them.

    Examples:
        >>> count_at_random("Alice has 2 brothers and 3 sisters. How many sisters does her brother have?", random.Random(0))
        '\\\\boxed{5}'
    """
    return f"\\boxed{{{rng.randint(2, _MOST + 1)}}}"


def count_half_right(context: str, rng: random.Random) -> str:
    """Answers a question of ``rg:aiw``; every other time it forgets the woman who is asked about,
    as language models do.

    Examples:
        >>> question = "Alice has 2 brothers and 3 sisters. How many sisters does her brother have?"
        >>> sorted({count_half_right(question, random.Random(i)) for i in range(20)})
        ['\\\\boxed{3}', '\\\\boxed{4}']
    """
    return _count(context, herself=rng.randint(0, 1))


def count_right(context: str, rng: random.Random) -> str:
    """Answers a question of ``rg:aiw`` right: her brother has her sisters, and her.

    Examples:
        >>> count_right("Alice has 2 brothers and 3 sisters. How many sisters does her brother have?", random.Random(0))
        '\\\\boxed{4}'
    """
    return _count(context, herself=1)


def _count(context: str, herself: int) -> str:
    # The first number that names women is of her circle; of two circles the second does not count.
    found = _find(_WOMEN, context, "rg:aiw, whose questions are of sisters, friends or colleagues")
    return f"\\boxed{{{int(found[1]) + herself}}}"
