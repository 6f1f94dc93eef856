"""Objects that watch a run: :class:`Callback`, :class:`ProgressBar`, :class:`HealthWatch`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from tensordict import TensorDictBase
from torch import Tensor
from tqdm.auto import tqdm

from torchrl_llm.metrics.health import HealthRules
from torchrl_llm.trainers.schedule import endless_warm_up, run_share
from torchrl_llm.utils.fingerprint import fingerprint

logger = logging.getLogger(__name__)


class RunStore(Protocol):
    """Saves a run, as :class:`~torchrl_llm.runs.CheckpointStore` does."""

    def save(self, trainer: Any, metrics: Mapping[str, float], *, early: bool = False) -> Any:
        """Save it after an iteration with these metrics; ``early``: because an error or a signal
        ends it."""


class Callback:
    """Watches a run. Override what you need; every hook gets the trainer and may set
    ``trainer.stop_reason`` to end the run.

    Examples:
        >>> class Watch(Callback):
        ...     def on_iteration(self, trainer, metrics):
        ...         if metrics["rollout/reward"] > 0.9:
        ...             trainer.stop_reason = "reward above 0.9"
        >>> class LargestAdvantage(Callback):
        ...     def on_batch(self, trainer, rows, metrics):
        ...         metrics["my/advantage"] = rows["advantage"].abs().max().item()
    """

    def fingerprint(self) -> str:
        """What tells it from other callbacks, for ``torchrl-llm compare``: its class and its plain
        attributes."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, str | int | float | None)}
        return fingerprint((type(self), plain))

    def on_start(self, trainer: Any) -> None:
        """Before the first iteration."""

    def on_batch(self, trainer: Any, rows: TensorDictBase, metrics: dict[str, float]) -> None:
        """Before each update, with the rows ``[B]`` that it learns from, scored and credited.

        What is added to ``metrics``, numbers under names of their own, is logged with the
        iteration. Of several processes each has its own rows, and the metrics of the first are
        logged. One that has none gets copies of others without a turn (``("turn", "mask")`` is
        False), which count nowhere.
        """

    def on_minibatch(self, trainer: Any, rows: TensorDictBase, metrics: dict[str, Tensor]) -> None:
        """After each optimizer step, with its rows ``[b]`` and its metrics, scalars.

        ``target_kl`` may shorten a step afterwards, unless it is the update's last.

        What is added to ``metrics``, scalars under names of their own, is logged as the mean over
        the steps that add it.
        """

    def on_evaluation(self, trainer: Any, metrics: dict[str, float]) -> None:
        """After each evaluation, with its metrics; what is added, as in :meth:`on_batch`, is logged
        with them."""

    def on_iteration(self, trainer: Any, metrics: dict[str, float]) -> None:
        """After each iteration, with a copy of its metrics (evaluation included where there was
        one); what is added is not logged."""

    def on_end(self, trainer: Any) -> None:
        """After the last iteration, also when the run failed; the callbacks end from the last to
        the first."""


class ProgressBar(Callback):
    """A tqdm bar over turns, with reward, success and KL of the last iteration.

    It ends where the run will end: at ``max_steps`` turns, or at the turns that are expected by
    then if iterations or seconds end it before. In a resumed run earlier turns count as done, but
    do not enter the rate.

    Args:
        label: what the bar is called, such as the algorithm; ``None``: the loss's class.
        watched_only: show it in a terminal or a notebook only; elsewhere, such as in a file, a line
            tells of an iteration now and then: of the first, and of one every :attr:`line_interval`
            seconds. Default ``False``: wherever standard error goes.
    """

    line_interval: ClassVar[float] = 60.0

    _shown = ("rollout/reward", "rollout/success", "evaluation/success", "evaluation/task_overlap", "policy/kl_old")

    def __init__(self, label: str | None = None, *, watched_only: bool = False) -> None:
        self.label, self.watched_only = label, watched_only
        self._bar: tqdm | None = None
        self._postfix: dict[str, str] = {}
        self._next_line = 0.0

    def on_start(self, trainer: Any) -> None:
        self._next_line = 0.0
        if trainer.iteration:
            # To standard error, where the bar is: by default tqdm.write() takes standard output.
            tqdm.write(f"resumed at iteration {trainer.iteration}", file=sys.stderr)
        self._bar = tqdm(
            total=self._end(trainer),
            initial=min(trainer.steps, self._end(trainer)),
            unit="turn",
            desc=self.label or type(trainer.loss).__name__,
            smoothing=0.05,
            mininterval=0,  # every update is an iteration, and is drawn
            miniters=1,
            disable=None if self.watched_only else False,  # tqdm's None looks where it writes to
        )

    def on_iteration(self, trainer: Any, metrics: dict[str, float]) -> None:
        if self._bar is None:
            raise RuntimeError("ProgressBar.on_iteration was called before on_start.")
        shown = [name for name in self._shown if name in metrics]
        self._postfix |= {name.removeprefix("rollout/"): f"{metrics[name]:.3g}" for name in shown}
        self._bar.set_postfix(self._postfix, refresh=False)  # update() draws
        self._bar.total = self._end(trainer)
        # The last iteration may collect more than max_steps.
        self._bar.update(min(trainer.steps, self._bar.total) - self._bar.n)
        if self._bar.disable and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self.line_interval
            figures = ", ".join(f"{name}={value}" for name, value in self._postfix.items())
            line = f"iteration {trainer.iteration}, {trainer.steps:,} of {self._bar.total:,} turns: {figures}"
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()

    @staticmethod
    def _end(trainer: Any) -> int:
        """The turns at the end of the run, as far as it can be seen now."""
        config, steps = trainer.config, trainer.steps
        share = run_share(config, steps=steps, iteration=trainer.iteration, seconds=trainer.seconds)
        return min(config.max_steps, round(steps / share)) if steps else config.max_steps

    def on_end(self, trainer: Any) -> None:
        if self._bar is not None:  # another callback may have failed before this one started
            self._bar.close()


class HealthWatch(Callback):
    """Warns in the log, once of each kind, of what precedes a collapse, of the collapse itself, and
    of a warm-up that the run is too short for.

    A warning says what to change; the section "My run collapsed" of the documentation says more.
    Nothing is changed here.

    Args:
        teacher: the reference of the KL is a teacher, which may be far away. Default ``False``.
    """

    def __init__(self, *, teacher: bool = False) -> None:
        self.teacher = teacher
        self._rules = HealthRules(teacher=teacher)

    def on_start(self, trainer: Any) -> None:
        """Take note of the iterations before: a resumed run falls from its best, and has been
        warned of what it was warned of."""
        self._rules = HealthRules(teacher=self.teacher)
        for metrics in trainer.history:
            self._rules.problems(metrics)

    def on_iteration(self, trainer: Any, metrics: dict[str, float]) -> None:
        problems = self._rules.problems(metrics)
        if trainer.iteration == 1:  # later it does not help to start again
            wrong = endless_warm_up(trainer.config, trainer.steps)
            problems += [wrong] if wrong else []
        for problem in problems:
            logger.warning("iteration %d: %s", trainer.iteration, problem)
