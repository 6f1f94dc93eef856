"""Episodes kept for the run report: :class:`RolloutRecorder`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.record.loggers import Logger, TensorboardLogger, WandbLogger
from torchrl.record.loggers.trackio import TrackioLogger

from torchrl_llm import keys
from torchrl_llm.data import apply_in_micro_batches
from torchrl_llm.modules.positions import prefix_cost
from torchrl_llm.objectives import TurnEstimator
from torchrl_llm.runs.episode_texts import COLUMNS, EpisodeText, episode_texts, markdown, table_rows
from torchrl_llm.runs.pieces import TokenTexts
from torchrl_llm.runs.recording import (
    Kind,
    Recording,
    RecordingError,
    RecordingFolder,
    read_recording,
    trimmed,
    used_texts,
)
from torchrl_llm.trainers.callbacks import Callback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_EPISODES = 16
"""Most episodes of a task in a recording: a group of usual size."""

_CLIPPED = "clipped"

_NEW = ("log_prob", "entropy", _CLIPPED)
"""What the scoring pass adds to the rows: log-prob and entropy after the update, and whether the
clip binds then."""


class RolloutRecorder(Callback):
    """Writes some episodes of a training batch to a file, every few iterations, always of the first
    and the last one.

    The rows are those that the update learns from, with credit, loss weights and what else was
    scored. After the update the recorded rows are scored once more, so that ratios and entropy can
    be shown; where weights are sharded they are not. No number of the run changes.

    Episodes of a few tasks are kept, the same tasks in all recordings where they come again.

    Args:
        path: the folder of the recordings.
        tokenizer: the model's.
        interval: iterations between recordings, >= 1; it grows where they would take more than
            ``max_bytes``. Default: 10.
        tasks: tasks of a recording, >= 1, with up to 16 episodes each. Default: 4.
        max_bytes: what all recordings may take on disk. Default: 64 MB.
        log_episodes: episodes of each recording whose text TensorBoard, Weights & Biases and
            trackio get, where the trainer has such a logger, see :func:`log_episodes`.
            Default: 0.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        interval: int = 10,
        tasks: int = 4,
        max_bytes: int = 64_000_000,
        log_episodes: int = 0,
    ) -> None:
        self.folder = RecordingFolder(path, interval=interval, max_bytes=max_bytes)
        self.tasks, self.log_episodes, self._texts = tasks, log_episodes, TokenTexts(tokenizer)
        self._followed: list[int] = []
        self._rows: TensorDictBase | None = None
        self._weights: dict[int, Tensor] = {}
        # An iteration that ended and was not due: written if it turns out to be the last.
        self._unwritten: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def on_start(self, trainer: Any) -> None:
        self._rows = self._unwritten = None
        if trainer.distributed.is_main:
            self.folder.resume(trainer.iteration, ended=trainer.stop_reason is not None)
            self._followed = self._recorded_tasks()

    def _recorded_tasks(self) -> list[int]:
        """The tasks of the evaluation before training and of the first recording, which the others
        follow."""
        tasks: list[int] = []
        before = self.folder.file("before")
        for path in [*([before] if before.exists() else []), *list(self.folder.training().values())[:1]]:
            try:
                tasks += read_recording(path).tasks
            except RecordingError as error:
                logger.warning("%s", error)
        return list(dict.fromkeys(tasks))

    def on_batch(self, trainer: Any, rows: TensorDictBase, metrics: dict[str, float]) -> None:
        if not trainer.distributed.is_main:
            return
        # Not the copies without turns that a process without rows of its own gets, to stay in step
        # with the others.
        played = rows[keys.TURN_MASK].any(-1).nonzero().flatten().cpu()
        if not len(played):
            return
        tasks = rows.select(keys.TASK_ID, keys.GROUP_ID, strict=False)[played]
        # A third of a batch: with one epoch, scoring all of it every ten iterations takes 2.3 % of
        # a run (SmolLM2-135M).
        chosen = played[choose_rows(tasks, self.tasks, self._followed, most=len(played) // 3)]
        # A copy: the update writes into the rows. Without what the old weights scored under the
        # names of the new ones.
        self._rows, self._weights = rows[chosen].exclude(*_NEW).clone(), {}
        # rows from elsewhere, whose log-probs were scored
        if keys.SAMPLE_LOG_PROB not in self._rows:
            self._rows[keys.SAMPLE_LOG_PROB] = torch.full_like(self._rows[keys.ADVANTAGE], torch.nan)

    def on_minibatch(self, trainer: Any, rows: TensorDictBase, metrics: dict[str, Tensor]) -> None:
        if self._rows is None or len(self._weights) == len(self._rows):
            return
        wanted = set(self._rows[keys.EPISODE_ID].tolist()) - self._weights.keys()
        for i, episode in enumerate(rows[keys.EPISODE_ID].tolist()):
            if episode in wanted:
                self._weights[episode] = rows[keys.LOSS_WEIGHT][i].clone()

    def on_iteration(self, trainer: Any, metrics: dict[str, float]) -> None:
        rows, self._rows = self._rows, None
        self._unwritten = None
        if rows is None:  # there was nothing to learn from, or this is not the main process
            return
        self._write_weights(rows)
        about = self._about_batch(trainer, rows)
        if self.folder.is_due(trainer.iteration) or trainer.stop_reason is not None:
            missing = self._scored(trainer, rows)
            self._write(trainer, trimmed_with_clip(rows), about | {"missing": missing})
        else:
            self._unwritten = trimmed(rows), about

    def on_end(self, trainer: Any) -> None:
        if self._rows is not None and trainer.unfinished is not None:
            # The run stops in the evaluation after an update. A resumed run makes up for that, and
            # not for the update.
            self._write_weights(self._rows)
            self._unwritten = trimmed(self._rows), self._about_batch(trainer, self._rows)
        if self._unwritten is not None:
            arrays, about = self._unwritten
            # Not scored now: an error may have ended the run within an update, whose weights
            # belong to no iteration.
            missing = dict.fromkeys(_NEW, "the run ended before these rows were scored")
            self._write(trainer, arrays, about | {"missing": missing})
        self._rows = self._unwritten = None

    def record_evaluation(
        self, trainer: Any, rows: TensorDictBase, kind: Kind, texts: Mapping[int, str] | None = None
    ) -> None:
        """Record episodes of the evaluation before or after training, of the tasks that the
        recordings follow.

        Args:
            trainer: the run's.
            rows: ``[B]``, :attr:`Evaluation.rows`.
            kind: ``"before"`` or ``"after"``.
            texts: :attr:`Evaluation.texts`; default none.
        """
        self._followed = self._followed or self._recorded_tasks()
        chosen = rows[choose_rows(rows, self.tasks, self._followed)]
        about = self._about(trainer, kind, None) | {"texts": used_texts(chosen, texts or {})}
        self._write(trainer, trimmed(chosen), about)

    def _about(self, trainer: Any, kind: Kind, gamma: float | None) -> dict[str, Any]:
        about = {"kind": kind, "iteration": trainer.iteration, "steps": trainer.steps, "gamma": gamma}
        return about | {"env_names": tuple(trainer.env_names), "missing": {}}

    def _about_batch(self, trainer: Any, rows: TensorDictBase) -> dict[str, Any]:
        about = self._about(trainer, "training", _gamma(trainer))
        return about | {"texts": used_texts(rows, trainer.rollouts.texts)}

    @staticmethod
    def _scored(trainer: Any, rows: TensorDictBase) -> dict[str, str]:
        try:
            return score_after_update(trainer, rows)
        # an update of micro-batches may just fit; a look at it must not end the run
        except torch.OutOfMemoryError:
            logger.warning("no memory was left to score the recorded episodes of iteration %d", trainer.iteration)
            return dict.fromkeys(_NEW, "no memory was left for the scoring pass")

    def _write(self, trainer: Any, arrays: dict[str, Tensor], about: dict[str, Any]) -> None:
        about = about | {"pieces": self._texts.of(arrays["tokens"][arrays["attention_mask"]].unique().tolist())}
        numpy = {name: value.numpy() for name, value in arrays.items()}
        recording = Recording(**about, interval=self.folder.interval, arrays=numpy)
        try:
            self.folder.write(arrays, **about)
        except OSError:  # such as a full disk: what is lost is a look at the run, and not the run
            logger.exception("the episodes of iteration %d could not be recorded", about["iteration"])
        # Held-out tasks first, and with the first batch its own.
        if about["kind"] == "before" or [about["iteration"]] == [*self.folder.training()]:
            self._followed = self._recorded_tasks()
        if self.log_episodes:
            try:
                log_episodes(trainer.loggers, recording, self.log_episodes)
            except Exception:  # of a tracker, which raises anything, such as a network's error
                logger.exception("the episodes of iteration %d did not reach every tracker", about["iteration"])

    def _write_weights(self, rows: TensorDictBase) -> None:
        """The loss weights of the optimizer batches in which the rows were; 0 for a row that no
        step reached."""
        weight = torch.zeros_like(rows[keys.SAMPLE_LOG_PROB])
        for i, episode in enumerate(rows[keys.EPISODE_ID].tolist()):
            if episode in self._weights:
                own = self._weights[episode][: weight.shape[1]]
                weight[i, : len(own)] = own
        rows[keys.LOSS_WEIGHT] = weight


def choose_rows(rows: TensorDictBase, tasks: int, followed: Sequence[int] = (), *, most: int | None = None) -> Tensor:
    """Indices of the rows to record: the first 16 episodes of each of a few tasks.

    Args:
        rows: ``[B]``; a task is told by ``"task_id"``, or by ``"group_id"`` where there is none.
        tasks: how many at most.
        followed: tasks that come first, if they are there.
        most: episodes beyond which no further task is added; the first is there in any case.
            Default: no bound.

    Returns:
        ``[b]`` int64, in the order of the rows.

    Examples:
        >>> from tensordict import TensorDict
        >>> rows = TensorDict({"task_id": torch.tensor([5, 6, 5, 7])}, [4])
        >>> choose_rows(rows, 2), choose_rows(rows, 2, followed=[7])
        (tensor([0, 1, 2]), tensor([0, 2, 3]))
    """
    task = rows.get(keys.TASK_ID, None)
    places: dict[int, list[int]] = {}
    for i, each in enumerate((rows[keys.GROUP_ID] if task is None else task).tolist()):
        places.setdefault(each, []).append(i)
    order = dict.fromkeys([each for each in followed if each in places] + list(places))
    chosen: list[int] = []
    for each in list(order)[:tasks]:
        own = places[each][:_EPISODES]
        if not chosen or most is None or len(chosen) + len(own) <= most:
            chosen += own
    return torch.tensor(sorted(chosen), dtype=torch.int64)


@torch.no_grad()
def score_after_update(trainer: Any, rows: TensorDictBase) -> dict[str, str]:
    """Write log-prob, entropy and ``"clipped"`` under the present weights into rows ``[B]``; what
    was not, and why."""
    if trainer.distributed.sharded:
        return dict.fromkeys(_NEW, "the weights are sharded (FSDP2), and scoring takes all processes")
    if trainer.weight_sync is not None and trainer.weight_sync.sleep_level:
        return dict.fromkeys(_NEW, "the engine has the memory that scoring takes (sleep_mode)")
    loss = trainer.loss
    limit = trainer.config.micro_batch_tokens
    with trainer.accelerator.autocast():
        apply_in_micro_batches(loss.actor_network, rows, limit, prefix_cost(loss.actor_network))
    rows[_CLIPPED] = loss.clipped(rows)
    return {} if keys.ENTROPY in rows else {"entropy": "the model's scorer does not compute it"}


def trimmed_with_clip(rows: TensorDictBase) -> dict[str, Tensor]:
    """:func:`trimmed` rows, and where the clip binds."""
    arrays = trimmed(rows)
    if _CLIPPED in rows:
        arrays[_CLIPPED] = rows[_CLIPPED][:, : arrays["tokens"].shape[1]].cpu().contiguous()
    return arrays


def _gamma(trainer: Any) -> float | None:
    estimator = trainer.loss.value_estimator
    return float(estimator.gamma) if isinstance(estimator, TurnEstimator) else None


def log_episodes(loggers: Iterable[Logger], recording: Recording, count: int) -> None:
    """Write the text of some episodes to the trackers, as ``episodes/training``,
    ``episodes/before`` or ``episodes/after``.

    TensorBoard gets a page of Markdown, Weights & Biases a table, trackio a trace for each episode;
    other loggers nothing.

    Args:
        loggers: of the run.
        recording: the episodes.
        count: how many at most.
    """
    name, texts = f"episodes/{recording.kind}", episode_texts(recording, count)
    for target in loggers:
        if isinstance(target, TensorboardLogger):
            target.experiment.add_text(name, markdown(recording, texts), recording.steps)
        elif isinstance(target, WandbLogger):
            import wandb

            table = wandb.Table(columns=[*COLUMNS], data=table_rows(recording, texts))
            target.experiment.log({name: table, "episodes/step": recording.steps})
        elif isinstance(target, TrackioLogger):
            import trackio

            traces = [trackio.Trace(**_trace(recording, each)) for each in texts]
            target.experiment.log({name: traces}, step=recording.steps)


def _trace(recording: Recording, each: EpisodeText) -> dict[str, object]:
    about = {"iteration": recording.iteration, "task": str(each.task), "environment": each.env, "outcome": each.outcome}
    return {
        "messages": [{"role": role, "content": text} for role, text in each.messages],
        "metadata": about | {"turns": each.turns, "return": each.reward},
    }
