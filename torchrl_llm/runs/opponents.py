"""Matches: the opponents of evaluations in self-play (:func:`make_opponent`), and
:func:`play_match`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrl_llm import keys
from torchrl_llm.envs import ChatFormatter, SelfPlayEnv
from torchrl_llm.metrics import Evaluation, wilson_interval
from torchrl_llm.modules import ActorCritic, HFPolicy, PlayerPolicy, SamplingConfig, TurnPolicy, load_actor_critic
from torchrl_llm.runs import build
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.demonstrations import find_demonstrations
from torchrl_llm.runs.saved import find_saved_model, for_run, load_saved_model
from torchrl_llm.runs.settings import SelfPlayRollouts
from torchrl_llm.runs.sources import MODELS, model_path
from torchrl_llm.trainers.evaluation import evaluate
from torchrl_llm.utils.options import ConfigError


@dataclass(frozen=True, kw_only=True)
class Match:
    """The result of :func:`play_match`, for the first policy.

    Attributes:
        wins, draws, losses: games, by the policy's seat.
        unfinished: games that were cut by a limit or whose environment failed. They count as games,
            and as 0 in the score.
        evaluation: the same as an evaluation, with the rows of the policy's episodes.
    """

    wins: tuple[int, ...]
    draws: tuple[int, ...]
    losses: tuple[int, ...]
    unfinished: int
    evaluation: Evaluation

    @property
    def games(self) -> int:
        """How many were played."""
        return self.evaluation.episodes

    @property
    def score(self) -> float:
        """Share of the games that were won; a draw is half."""
        return (sum(self.wins) + sum(self.draws) / 2) / self.games

    @property
    def score_ci95(self) -> tuple[float, float]:
        """Its 95 % interval, Wilson's; with draws the true one is narrower."""
        return wilson_interval(self.score * self.games, self.games)

    def __str__(self) -> str:
        low, high = self.score_ci95
        seats = "; ".join(
            f"as player {seat}: {won} won, {drawn} drawn, {lost} lost"
            for seat, (won, drawn, lost) in enumerate(zip(self.wins, self.draws, self.losses, strict=True))
        )
        return f"score {self.score:.3f} [{low:.3f}, {high:.3f}] of {self.games} games ({seats}; {self.unfinished} unfinished)"


def play_match(env: SelfPlayEnv, policy: TurnPolicy, opponent: TurnPolicy, games: int) -> Match:
    """Play the first ``games`` games of ``env``; the policy has seat 0 in the first, seat 1 in the
    second, and so on.

    Games and sampling noise are the same at each call, so that two policies are compared with one
    opponent game by game.

    Args:
        env: with a task stream of its own (``SelfPlayEnv(..., stream="test")``).
        policy, opponent: sample with their own settings.
        games: how many, >= 1; an even number gives each seat as many.

    Raises:
        EnvironmentFault: more than ``env.max_faults`` of the games failed.

    Examples:
        >>> from functools import partial
        >>> from torchrl_llm.testing.take_away import TakeAway, take_at_random, take_well
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> env = SelfPlayEnv(TakeAway, tokenizer=tokenizer, num_envs=8, stream="test")
        >>> player = partial(PlayerPolicy, tokenizer=tokenizer, encode=env.formatter.answer, max_output_tokens=4)
        >>> match = play_match(env, player(take_well), player(take_at_random), 40)
        >>> match.score > 0.8, sum(match.wins) + sum(match.losses)
        (True, 40)
    """
    evaluation = evaluate(env, policy, games, opponent=opponent)
    rows: Any = evaluation.rows
    last = (rows[keys.TURN_MASK].sum(1) - 1).unsqueeze(1)
    outcome = rows[keys.turn_extra("outcome")].gather(1, last).squeeze(1)
    seat = (rows[keys.EPISODE_ID] - env.task_sampler.base) % env.group_size
    won, drawn, lost = (
        tuple(torch.bincount(seat[outcome == result], minlength=env.group_size).tolist()) for result in (1, 0, -1)
    )
    unfinished = games - sum(won) - sum(drawn) - sum(lost)
    return Match(wins=won, draws=drawn, losses=lost, unfinished=unfinished, evaluation=evaluation)


def make_opponent(
    config: RunSettings, formatter: ChatFormatter, sampling: SamplingConfig, models: ActorCritic | None = None
) -> TurnPolicy:
    """The policy that the setting ``opponent`` names.

    Args:
        config: the settings of the run.
        formatter: of its environments.
        sampling: how it samples; a model that is an opponent samples alike.
        models: of the run; ``None``: only a model is used, and its start is not known.

    Raises:
        ConfigError: there is no such player or model, it has another tokenizer, or none is named
            and there is no run.
    """
    opponent = config.rollouts.opponent if isinstance(config.rollouts, SelfPlayRollouts) else None
    if opponent is None:
        if models is None:
            raise ConfigError(
                "opponent is None, the weights that a run starts from, and there is no run here: name a player or a model."
            )
        return _start(config, formatter.tokenizer, sampling, models)
    found = _find(opponent)
    if isinstance(found, str):
        return _saved(config, found, formatter.tokenizer, sampling)
    length, seed = sampling.max_output_tokens, config.trainer.seed
    return PlayerPolicy(found, formatter.tokenizer, formatter.answer, max_output_tokens=length, seed=seed)


def _find(given: str) -> Any:
    """The player that a setting names, or the setting itself where it names a model."""
    if given in MODELS:
        return given
    found = find_demonstrations(given, "opponent")
    return given if isinstance(found, Path) else found


def _start(config: RunSettings, tokenizer: Any, sampling: SamplingConfig, models: ActorCritic) -> HFPolicy:
    """The weights that a run starts from, frozen."""
    if config.weights.lora_r and config.weights.init_from is None:
        # The base of LoRA with its adapters off, which costs no memory.
        return HFPolicy(models.model, tokenizer, sampling, seed=config.trainer.seed)
    start = load_actor_critic(
        model_path(config),
        tokenizer=tokenizer,
        lora=build.make_lora(config),
        sampling=sampling,
        device=next(models.model.parameters()).device,
        **build.given_options(config, *build.MODEL, "seed"),
    )
    if config.weights.init_from is not None:
        start.load_pretrained(config.weights.init_from, merge_lora_configs=config.weights.merge_lora_configs)
    return HFPolicy(start.model, tokenizer, sampling, adapter=start.adapter, seed=config.trainer.seed)


def _saved(config: RunSettings, path: str, tokenizer: Any, sampling: SamplingConfig) -> HFPolicy:
    saved = find_saved_model(path)
    loaded = load_saved_model(saved, saved.config(only_model=True, **for_run(config)))
    if loaded.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"opponent={path!r} has another tokenizer than the run, whose environments write its contexts: take one of the same family."
        )
    return HFPolicy(loaded.models.model, tokenizer, sampling, adapter=loaded.models.adapter, seed=config.trainer.seed)
