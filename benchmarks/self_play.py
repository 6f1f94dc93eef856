"""Does self-play learn? A small model that plays both sides, against the weights that it started
from.

    python benchmarks/self_play.py --game take-away --seeds 3
    python benchmarks/self_play.py --game nim --seeds 3
    python benchmarks/self_play.py --report

``take-away`` is :class:`~torchrl_llm.testing.take_away.TakeAway`, ``nim`` is TextArena's ``Nim-v0``
with two piles of up to 3 (the extra ``textarena``). A small model imitates random legal play, once
for each game; that is the start. From it each seed trains by self-play: LLMREINFORCE with
role-relative advantages, both seats learn from every game. Then the trained weights play 400 games
against their frozen start, and against two scripted players, with seats swapped from game to game,
on games used for nothing else.

The seeds are drawn and not chosen, as in ``learning.py``: 32-bit words of the SHA-256 of
``--draw``. Finished runs (they have a ``result.json``) are not repeated. ``--report`` writes the
table of ``docs/results/self_play.md``.
"""

import argparse
import json
import random
import re
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from torchrl_llm.envs import EnvSpec, SelfPlayEnv, resolve_env
from torchrl_llm.modules import PlayerPolicy
from torchrl_llm.runs import Match, Run, RunSettings, build_run, play_match
from torchrl_llm.testing.take_away import TakeAway, take_at_random, take_well
from torchrl_llm.testing.tiny import random_model
from torchrl_llm.testing.tokenizers import byte_tokenizer, word_tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from learning import drawn_seeds  # noqa: E402
from report import fill, machine  # noqa: E402

PAGE = ROOT / "docs" / "results" / "self_play.md"
MATCH = 400
"""Games of a match."""

# ---------------------------------------- games

NIM = "textarena:Nim-v0"
PILES = [[1, 2], [2, 1], [1, 3], [3, 1], [2, 3], [3, 2], [2, 2], [3, 3]]
"""Of the games. Where all begin alike, the first player soon plays one line only, and nobody learns
what to do in others."""
_PILE = re.compile(r"pile (\d): (\d)")


def piles_of(context: str) -> list[int]:
    """The piles of the last state that a player of Nim was shown."""
    found = _PILE.findall(context)
    last = max(int(pile) for pile, _ in found) + 1
    return [int(size) for _, size in found[-last:]]


def nim_at_random(context: str, rng: random.Random) -> str:
    """Plays Nim legally, at random."""
    return _nim(rng.choice([(pile, n) for pile, size in enumerate(piles_of(context)) for n in range(1, size + 1)]))


def nim_well(context: str, rng: random.Random) -> str:
    """Plays Nim as well as can be: leaves sizes whose binary sum without carry is 0 where it can
    (Bouton, 1901), else any."""
    piles = piles_of(context)
    total = 0
    for size in piles:
        total ^= size
    good = [(pile, size - (size ^ total)) for pile, size in enumerate(piles) if size ^ total < size]
    return _nim(rng.choice(good)) if total else nim_at_random(context, rng)


def _nim(move: tuple[int, int]) -> str:
    return f"[{move[0]} {move[1]}]"


def nim_games() -> list[EnvSpec]:
    """Nim with each of the piles."""
    spec = resolve_env(NIM)
    return [replace(spec, name=f"{NIM}, piles {piles}", make=partial(spec.make, piles=piles)) for piles in PILES]


def nim_tokenizer() -> PreTrainedTokenizerFast:
    """The phrases of Nim's messages, and bytes: it can spell whatever a player writes, control
    tokens too, for Nim repeats it."""
    games, rng = [env.make() for env in nim_games()], random.Random(0)
    messages = []
    for seed in range(80):
        game = games[seed % len(games)]
        game.start(seed)
        while game.seat is not None:
            seen = [game.observe(seat) for seat in (0, 1)][game.seat]
            game.move(
                nim_at_random(seen, rng) if rng.random() < 0.8 else rng.choice(["none", "[7 1]", "[1 7]", "[1 0]"])
            )
            messages.append(f"user\n{seen}")
    return byte_tokenizer(corpus=[*messages, "assistant\n"], vocab_size=1024, phrases=True)


GAMES: dict[str, dict[str, Any]] = {
    "take-away": {
        "draw": "self-play-1",
        "env": lambda: TakeAway,
        "tokenizer": partial(word_tokenizer, TakeAway.WORDS),
        "players": {"random": take_at_random, "best": take_well},
        "model": {"hidden": 32, "max_length": 128},
        "settings": {"max_model_len": 96, "max_output_tokens": 2},
        "warm": {"lr_actor": 1e-2, "max_iterations": 60},
        "train": {"lr_actor": 2e-3, "max_iterations": 40},
    },
    "nim": {
        "draw": "self-play-2",  # nothing was chosen on its seeds
        "env": nim_games,
        "tokenizer": nim_tokenizer,
        "players": {"random": nim_at_random, "best": nim_well},
        "model": {"hidden": 64, "max_length": 512},
        "settings": {"max_model_len": 512, "max_output_tokens": 6},
        "warm": {"lr_actor": 4e-3, "max_iterations": 60, "minibatch_size": 32},
        # A KL to the start instead of an entropy bonus: Nim forgives a first illegal move, so that
        # a bonus would pay for them.
        "train": {
            "lr_actor": 1e-3,
            "schedule": "cosine",
            "max_steps": 20_000,
            "entropy_coeff": 0.0,
            "kl_coeff": 0.1,
            "kl_kind": "k2",
            "kl_in": "loss",
            "target_kl": 0.02,
        },
    },
}
"""What sets the games apart: environment, vocabulary, scripted players, and the settings of model,
warm start and training."""

COMMON = {
    "collector": "self_play",
    "dtype": "float32",
    "device": "cpu",
    "lora_r": 0,
    "num_envs": 128,
    "batch_size": 128,
    "max_steps": 10**9,
    "evaluation_interval": 0,
    "final_episodes": MATCH,
    "max_faults": 64,
    "save_checkpoints": False,
    "record_interval": 0,
    "progress": False,
}
SELF_PLAY = {
    "algo": "LLMREINFORCE",
    "estimator": "RoleRelative",
    "gamma": 1.0,
    "kl_coeff": 0.0,
    "entropy_coeff": 0.01,
    "epochs": 2,
    "minibatch_size": 64,
    "schedule": "constant",
    "adam_beta2": 0.99,
}


def make_run(game: str, folder: Path, model: Path, **settings: Any) -> Run:
    """A run of self-play from the weights in ``model``."""
    chosen = GAMES[game]
    paths = {"model_path": str(model), "tokenizer_path": str(model.parent / "tokenizer"), "output_dir": folder}
    config = RunSettings.from_values(**COMMON | chosen["settings"] | settings | paths)  # type: ignore[arg-type]
    return build_run(config, env=chosen["env"]())


def warm_start(game: str, folder: Path) -> Path:
    """The model that a game starts from, made once."""
    start = folder / "start"
    if start.exists():
        return start
    started, chosen = time.process_time(), GAMES[game]
    tokenizer = chosen["tokenizer"]()
    tokenizer.save_pretrained(folder / "tokenizer")
    random_model(tokenizer, **chosen["model"]).save_pretrained(folder / "untrained")
    player = (
        f"self_play:{chosen['players']['random'].__name__}"
        if game == "nim"
        else "torchrl_llm.testing.take_away:take_at_random"
    )
    run = make_run(game, folder / "warm", folder / "untrained", algo="SFT", demonstrations=player, **chosen["warm"])
    history = run.trainer.train()
    run.models.model.save_pretrained(start)  # type: ignore[operator]
    losses = [round(row["loss/nll"], 3) for row in (history[0], history[-1])]
    run.close()
    (folder / "warm.json").write_text(json.dumps({"nll": losses, "cpu_s": time.process_time() - started}) + "\n")
    return start


def against(run: Run, opponent: Any) -> Match:
    """A match of the run's policy against a policy, or a scripted player."""
    env = run.make_env(stream="test")
    assert isinstance(env, SelfPlayEnv)
    if not hasattr(opponent, "submit"):
        limit = run.config.sampling.max_output_tokens
        opponent = PlayerPolicy(opponent, run.tokenizer, env.formatter.answer, max_output_tokens=limit)
    try:
        return play_match(env, run.policy, opponent, MATCH)
    finally:
        env.close()


def train(game: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run; writes ``result.json``."""
    path = folder / str(seed) / "result.json"
    if path.exists():
        return json.loads(path.read_text())
    start = warm_start(game, folder)
    started = time.process_time()
    run = make_run(game, path.parent, start, seed=seed, **SELF_PLAY | GAMES[game]["train"])
    opponents = {"start": run.opponent, **GAMES[game]["players"]}
    before = {name: against(run, opponent) for name, opponent in opponents.items()}
    trained = time.process_time()
    run.trainer.train()
    trained = time.process_time() - trained
    after = {name: against(run, opponent) for name, opponent in opponents.items()}
    result = {"game": game, "seed": seed, "games": run.trainer.episodes // 2, "iterations": run.trainer.iteration}
    for when, matches in (("before", before), ("after", after)):
        result[when] = {name: summary(match) for name, match in matches.items()}
    result |= {"train_cpu_s": round(trained, 1), "cpu_s": round(time.process_time() - started, 1)}
    result |= {name: run.trainer.collector.metrics()[name] for name in ("data/faults", "data/passed")}
    run.close()
    path.write_text(json.dumps(result, indent=2) + "\n")
    for name, match in after.items():
        print(f"{game}, seed {seed}, against {name}: before {before[name].score:.3f}, after {match}", flush=True)
    return result


def summary(match: Match) -> dict[str, Any]:
    """A match as JSON has it."""
    names = ("wins", "draws", "losses", "unfinished", "games", "score", "score_ci95")
    return {name: getattr(match, name) for name in names}


# ---------------------------------------- report


def table(results: list[dict[str, Any]]) -> str:
    """One line a run."""
    lines = [
        "| game | seed | before, against its start | after, against its start | as first player | as second player | "
        "against random legal play, before, after | against best play, before, after | games trained on | CPU-seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        before, after = each["before"], each["after"]
        low, high = after["start"]["score_ci95"]
        seats = [f"{after['start']['wins'][seat]} of {MATCH // 2}" for seat in (0, 1)]
        pairs = [f"{before[name]['score']:.3f}, {after[name]['score']:.3f}" for name in ("random", "best")]
        lines.append(
            f"| {each['game']} | {each['seed']} | {before['start']['score']:.3f} | **{after['start']['score']:.3f}** "
            f"({low:.3f} to {high:.3f}) | {' | '.join(seats)} | {' | '.join(pairs)} | {each['games']} | {each['train_cpu_s']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", choices=list(GAMES), help="what is played")
    parser.add_argument("--seeds", type=int, default=3, help="how many are drawn; default 3")
    parser.add_argument("--seed", type=int, help="one seed, in place of those drawn")
    parser.add_argument("--draw", help="text that the seeds are drawn from; default: the game's")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/self_play"), help="default: runs/self_play")
    parser.add_argument("--report", action="store_true", help="write the table of docs/results/self_play.md")
    arguments = parser.parse_args()
    if arguments.game:
        draw = arguments.draw or GAMES[arguments.game]["draw"]
        seeds = drawn_seeds(draw, arguments.seeds) if arguments.seed is None else [arguments.seed]
        for each in map(partial(train, arguments.game, folder=arguments.output_dir / arguments.game), seeds):
            print(json.dumps({name: each[name] for name in ("game", "seed", "cpu_s")}), flush=True)
    if arguments.report:
        paths = [
            arguments.output_dir / name / str(seed) / "result.json"
            for name, game in GAMES.items()
            for seed in drawn_seeds(game["draw"], arguments.seeds)
        ]
        fill(PAGE, "runs", table([json.loads(path.read_text()) for path in paths if path.exists()]))
        fill(PAGE, "machine", f"| machine |\n|---|\n| {machine()} |")


if __name__ == "__main__":
    main()
