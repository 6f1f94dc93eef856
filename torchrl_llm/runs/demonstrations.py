"""What supervised fine-tuning imitates: :func:`find_demonstrations` says what a setting means,
:func:`read_demonstrations` reads files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from inspect import isfunction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrl_llm.data import read_transcripts
from torchrl_llm.envs import GEMEnv, players
from torchrl_llm.envs.contexts import ids_of
from torchrl_llm.episode import Episode, Turn
from torchrl_llm.modules import Player, SamplingConfig
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.pieces import TokenTexts
from torchrl_llm.runs.recording import FOLDER, Recording, RecordingError, RecordingFolder, read_recording
from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.named import find_named
from torchrl_llm.utils.options import ConfigError

_HELD_BACK = "min_output_tokens={} lets no answer end before it has as many"

TRANSCRIPTS = (".jsonl", ".json", ".parquet")
"""What the names of files of messages end with."""


def find_demonstrations(given: str, setting: str = "demonstrations") -> Player | Path:
    """What the setting ``demonstrations`` names: a player, or a path that is there.

    Args:
        given: its value.
        setting: its name, for messages: others name players and paths too.

    Raises:
        ConfigError: neither.

    Examples:
        >>> find_demonstrations("guess_by_hints").__name__
        'guess_by_hints'
    """
    path = Path(given).expanduser()
    if given and path.exists():  # the path of no text is the working directory
        return path
    known = {name: each for name, each in vars(players).items() if isfunction(each) and not name.startswith("_")}
    if given in known:
        return known[given]
    if ":" in given:
        found = find_named(setting, given, "a function (context, rng) -> text")
        if callable(found):
            return found
        raise ConfigError(f"{setting}={given!r} is {found!r}; expected a function (context, rng) -> text.")
    raise ConfigError(
        f"{setting} is {given!r}: no file or folder, and no player; expected a path, a player of torchrl_llm.envs.players "
        f'({", ".join(known)}), or "package.module:name".{nearest(given, [*known])}'
    )


def check_demonstrations(config: RunSettings) -> None:
    """Raise what is wrong with the setting ``demonstrations``, before models are loaded for it.

    Raises:
        ConfigError: it names nothing that is there, or other settings ask for episodes that are
            played, and it names given ones.
    """
    demonstrations = config.rollouts.demonstrations
    if demonstrations is None or not isinstance(find_demonstrations(demonstrations), Path):
        return
    played = {"collector": "turn", "group_size": 1, "adaptive_mixture": False}
    given = config.values()
    asked = [f"{name}={given[name]!r}" for name, value in played.items() if given[name] != value]
    if asked:
        raise ConfigError(
            f"{', '.join(asked)}: for episodes that are played, and those of demonstrations={demonstrations!r} are given: "
            "leave it out."
        )


def check_player(player: Player, config: RunSettings, env: GEMEnv) -> None:
    """Raise if a player does not know the game, which it is asked to begin. In self-play nobody is
    asked: it may be another player's turn.

    Raises:
        ConfigError: the player refuses the first prompt, or its answer is longer than
            ``max_output_tokens`` or ends before ``min_output_tokens``.
    """
    if config.collector == "self_play":
        return
    given = f"demonstrations is {config.rollouts.demonstrations!r}"
    prompt = str(env.formatter.tokenizer.decode(ids_of(env.slots.open(0, 0).spans)))
    try:
        answer = player(prompt, random.Random(0))
    except ValueError as error:
        raise ConfigError(
            f"{given}, which cannot play env_name={config.env.env_name!r}: {error} "
            "docs/warm_start.md lists who plays what."
        ) from error
    try:
        length = len(env.formatter.answer(answer))
    except ValueError as error:
        raise ConfigError(f"{given}: {error}") from error
    said = f"whose answer {answer!r:.80} has {length} tokens, its end of the turn included"
    most, fewest = config.sampling.max_output_tokens, config.sampling.min_output_tokens
    if length > most:
        raise ConfigError(f"{given}, {said}: raise max_output_tokens, which is {most}.")
    if length <= fewest:
        raise ConfigError(f"{given}, {said}, and {_HELD_BACK.format(fewest)}: lower it.")


def read_demonstrations(
    path: Path, env: GEMEnv, *, max_model_len: int, sampling: SamplingConfig | None = None
) -> list[Episode]:
    """The episodes of a file of messages, of a recording, or of the recordings of a run's training.

    Args:
        path: ``.jsonl``, ``.json`` or ``.parquet`` (:func:`~torchrl_llm.data.read_transcripts`),
            ``.safetensors``, or the folder of a run. Its evaluations are left out: they are what a
            run is measured by.
        env: its formatter renders messages, and its tokenizer is the one of recordings.
        max_model_len: longest row in tokens.
        sampling: the policy's; default ``SamplingConfig()``, which holds no end of a turn back.

    Raises:
        ConfigError: there are none, they were recorded with another tokenizer, one is longer, or an
            answer has more tokens than ``env.max_output_tokens``, or none, or ends before
            ``sampling.min_output_tokens``.
    """
    try:
        episodes = _read(path, env)
    except (ValueError, OSError) as error:
        raise ConfigError(f"demonstrations={str(path)!r}: {error}") from error
    longest = max(episode.length for episode in episodes)
    if longest > max_model_len:
        raise ConfigError(
            f"demonstrations={str(path)!r}: an episode has {longest} tokens, and max_model_len is {max_model_len}: raise it, or "
            "leave out the long ones."
        )
    fewest, stops = (sampling.min_output_tokens, sampling.stop_ids or ()) if sampling is not None else (0, ())
    for tokens in (turn.tokens for episode in episodes for turn in episode.turns):
        length = len(tokens)
        if not 0 < length <= env.max_output_tokens:
            raise ConfigError(
                f"demonstrations={str(path)!r}: an answer has {length} tokens, its end of the turn included, and expected are 1 to "
                f"max_output_tokens={env.max_output_tokens}: raise it, or leave out such answers."
            )
        # Its log-prob would be minus infinity, and the end of the turn would not be learned.
        if np.isin(tokens[:fewest], stops).any():
            raise ConfigError(
                f"demonstrations={str(path)!r}: an answer has {length} tokens, its end of the turn included, and "
                f"{_HELD_BACK.format(fewest)}: lower it, or leave out such answers."
            )
    return episodes


def _read(path: Path, env: GEMEnv) -> list[Episode]:
    if path.suffix in TRANSCRIPTS:
        return read_transcripts(path, env.formatter, env.context_rule)
    if path.is_file() and path.suffix != ".safetensors":
        raise RecordingError(
            f"it is not {', '.join(TRANSCRIPTS)}, which hold messages, and no .safetensors, which is a recording."
        )
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    files = [path] if path.is_file() else [*RecordingFolder(folder, interval=1, max_bytes=1).training().values()]
    recordings = [read_recording(file) for file in files]
    for recording in recordings:
        _check_tokenizer(recording, env)
    episodes = [episode for recording in recordings for episode in episodes_of(recording)]
    if not episodes:
        raise RecordingError(
            f"it holds no recorded episodes of training (record_interval above 0), and is not a file of messages ({', '.join(TRANSCRIPTS)})."
        )
    return episodes


def _check_tokenizer(recording: Recording, env: GEMEnv) -> None:
    own = TokenTexts(env.formatter.tokenizer).of(recording.pieces)
    for token, text in recording.pieces.items():
        if own[token] != text:
            raise RecordingError(
                f"it was recorded with another tokenizer: the token {token} is {text!r} there, and {own[token]!r} of this model."
            )


def episodes_of(recording: Recording) -> Iterator[Episode]:
    """The recorded episodes, as they were collected."""
    arrays = recording.arrays
    for i in range(recording.episodes):
        row = {name: value[i] for name, value in arrays.items() if value.ndim == 2}
        count = int(row["turn.mask"].sum())
        episode = Episode(i, i, i, 0, rewards=row["turn.reward"][:count].tolist())
        episode.task_id = int(arrays["task_id"][i]) if "task_id" in arrays else None
        starts, episode.contexts = _segments(row)
        for number in range(count):
            place = (row["turn_ids"] == number).nonzero()[0]
            if not len(place):  # of a seat that never got to move: the turn has no response
                none = np.zeros(0, np.int64)
                episode.add(Turn(0, 0, none, none.astype(np.float32), none))
                continue
            segment = int(np.searchsorted(starts, place[0], "right")) - 1
            tokens = row["tokens"][place].astype(np.int64)
            turn = Turn(int(place[0] - starts[segment]), segment, tokens, row["sample_log_prob"][place], tokens * 0)
            episode.add(turn)
        for name in ("terminated", "truncated", "success", "stop_reason"):
            setattr(episode, name, row[f"turn.{name}"][count - 1].item())
        yield episode


def _segments(row: dict[str, npt.NDArray[Any]]) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
    """Where the segments of a row start, and their tokens."""
    valid = row["attention_mask"].astype(np.int64)
    edges = np.diff(valid, prepend=0, append=0)
    starts, ends = (edges == 1).nonzero()[0], (edges == -1).nonzero()[0]
    return starts, [row["tokens"][start:end].astype(np.int64) for start, end in zip(starts, ends, strict=True)]
