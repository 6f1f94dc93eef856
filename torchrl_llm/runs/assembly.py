"""What a run is made of, one function a part; :func:`~torchrl_llm.runs.build_run` calls them in
this order.

Each part of a part is made in :mod:`torchrl_llm.runs.build`. What is opened is closed by the
``opened`` of its :class:`Place`, from the last to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from accelerate import Accelerator
from torchrl.data import ReplayBuffer

from torchrl_llm.collectors import EpisodeCollector
from torchrl_llm.envs import GEMEnv, SeenTasks
from torchrl_llm.modules import ActorCritic, TurnPolicy
from torchrl_llm.modules.kernels import Numerics
from torchrl_llm.modules.policy import SamplingConfig
from torchrl_llm.objectives import TurnLoss
from torchrl_llm.runs import build, table
from torchrl_llm.runs.checkpoint import CheckpointStore
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.demonstrations import check_demonstrations
from torchrl_llm.runs.device import make_accelerator, make_numerics
from torchrl_llm.runs.effective_settings import python_settings
from torchrl_llm.runs.environments import check_environment, make_environment, stock_env
from torchrl_llm.runs.identity import names_of_parts
from torchrl_llm.runs.loss_state import LossState
from torchrl_llm.runs.memory import with_max_tokens
from torchrl_llm.runs.opponents import make_opponent
from torchrl_llm.runs.recorder import RolloutRecorder
from torchrl_llm.runs.recording import FOLDER
from torchrl_llm.runs.resume import OpenFolder, Start, accept_changes, find_start
from torchrl_llm.runs.run_folder import RunFolder
from torchrl_llm.runs.run_info import run_info
from torchrl_llm.runs.settled import with_granularity, with_num_envs, with_template_date
from torchrl_llm.runs.sources import check_length
from torchrl_llm.runs.teacher import RefreshReference, check_teacher, load_teacher
from torchrl_llm.runs.trackers import MetricsTable
from torchrl_llm.runs.trained_tasks import tasks_of_weights
from torchrl_llm.runs.wrong_settings import missing_columns
from torchrl_llm.trainers.callbacks import Callback, HealthWatch, ProgressBar
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.trainer import LLMTrainer
from torchrl_llm.utils.optional import running_ray
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.weight_update import EngineWeightSync, RayWeightSync

MakeLoss = Callable[[RunSettings, ActorCritic], TurnLoss]
"""Makes a run's loss: ``make_loss(config, models)``, see :func:`~torchrl_llm.runs.build_run`."""


class Given(NamedTuple):
    """What a run is given in Python beside its settings: the arguments of
    :func:`~torchrl_llm.runs.build_run`."""

    env: Any
    make_env: Callable[..., GEMEnv] | None
    make_loss: MakeLoss | None
    callbacks: tuple[Callback, ...]
    components: Mapping[str, Any] | None
    named: Mapping[str, Callback] = MappingProxyType({})
    """The callbacks that settings name."""

    def check(self, config: RunSettings) -> None:
        """Refuse what leaves another argument or a setting without effect."""
        check_environment(config, self.env, self.make_env)
        if config.env.env_weights is not None and self.make_env is not None:
            raise ConfigError(
                f"env_weights={config.env.env_weights} does nothing with build_run(make_env=...), which decides on the environments: "
                "leave it out, or give make_env the weights."
            )
        check_demonstrations(config)
        if config.collector == "ray":
            running_ray()  # before the models are loaded

    def names(self) -> dict[str, str]:
        """By which a resumed run is told from one that was given something else."""
        return names_of_parts(env=self.env, make_env=self.make_env, make_loss=self.make_loss)

    def settings(self) -> dict[str, str]:
        """What ``run.json`` has of it. To be taken before anything is made: objects that are used
        may hold something else afterwards."""
        return python_settings(
            env=self.env, make_env=self.make_env, make_loss=self.make_loss, callbacks=[*self.callbacks]
        )


class Place(NamedTuple):
    """Where a run is: its processes and PyTorch's switches, its folder, and the checkpoint that it
    continues, if any; what it is given in Python, and what has been opened for it."""

    accelerator: Accelerator
    distributed: Distributed
    numerics: Numerics
    folder: RunFolder
    start: Start | None
    given: Given
    opened: ExitStack

    @property
    def saved(self) -> Mapping[str, Any] | None:
        """The settings of the checkpoint."""
        return None if self.start is None else self.start.manifest["metadata"]["config"]

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the checkpoint."""
        return None if self.start is None else self.start.path


def find_place(config: RunSettings, given: Given, opened: ExitStack) -> Place:
    """Processes and folder, checked before anything is loaded; nothing is changed on disk."""
    accelerator = make_accelerator(config)
    numerics = make_numerics(config, accelerator.device)
    distributed = Distributed.of(accelerator)
    build.check_sharding(config, distributed)
    folder = RunFolder(config)
    opened.callback(folder.close)
    start = distributed.on_main(lambda: find_start(config, folder, given.names()))
    return Place(accelerator, distributed, numerics, folder, start, given, opened)


def settle(config: RunSettings, place: Place, tokenizer: Any) -> RunSettings:
    """The settings with numbers and dates in place of ``None``: the checkpoint's, or the
    defaults of this run."""
    check_length(config, config.env.max_model_len)
    check_teacher(config, tokenizer)
    config = with_num_envs(config, place.saved, place.distributed)
    config = with_max_tokens(config, place.saved, place.accelerator.device, place.distributed)
    return with_template_date(config, place.saved, tokenizer, place.distributed)


class Environments(NamedTuple):
    """The environments of a run.

    Attributes:
        make: makes one for a task stream, ``make(stream="test")``.
        make_train: makes one of training, here and on workers.
        train, evaluation: of this process.
        config: the settings, with what ``granularity="auto"`` means in ``train``.
    """

    make: Callable[..., GEMEnv]
    make_train: Callable[[], GEMEnv]
    train: GEMEnv
    evaluation: GEMEnv
    config: RunSettings


def make_environments(config: RunSettings, place: Place, tokenizer: Any) -> Environments:
    """The environments of training and evaluation; each rank has its share of the tasks."""
    ranks = place.distributed
    shard = {"worker": ranks.rank, "num_workers": ranks.world_size} if ranks.world_size > 1 else {}
    source = place.given.make_env or stock_env(config, place.given.env)
    make = partial(make_environment, config, tokenizer, source, **shard)
    make_train = partial(make, stream="train", group_size=config.rollouts.num_started)
    train = make_train()
    place.opened.callback(train.close, raise_if_closed=False)
    config = with_granularity(config, place.saved, train)
    evaluation = make(stream="eval")
    place.opened.callback(evaluation.close, raise_if_closed=False)
    chosen = [name for name in ("adaptive_mixture", "env_weights") if getattr(config.env, name)]
    if chosen and train.task_sampler.mixture_size < 2:
        raise ConfigError(
            f"{' and '.join(chosen)} chooses among environments, and {train.names[0]!r} is the only one: leave it out, or give "
            "a mixture."
        )
    return Environments(make, make_train, train, evaluation, config)


class Networks(NamedTuple):
    """What computes with weights: the trained models, and the engine of this process, if it has
    one; how both sample."""

    models: ActorCritic
    engine: TurnPolicy | None
    sampling: SamplingConfig


def load_networks(config: RunSettings, place: Place, tokenizer: Any, environments: Environments) -> Networks:
    """The engine, and after it the models: vLLM measures on an empty GPU what it needs."""
    sampling = build.make_sampling(config, environments.train.formatter)
    engine = build.start_engine(config, tokenizer, sampling, place.distributed, place.accelerator.device)
    if engine is not None:
        place.opened.callback(engine.close)
    device, start = place.distributed.load_device, place.checkpoint
    models = build.load_models(config, tokenizer, sampling, device=device, start=start)
    return Networks(models, engine, sampling)


def make_loss_and_reference(
    config: RunSettings, networks: Networks, environments: Environments, given: Given
) -> tuple[TurnLoss, Any]:
    """The loss, and the model or teacher that its KL is to (``None``: there is none); before
    workers are started."""
    loss = (given.make_loss or build.make_objective)(config, networks.models)
    if not isinstance(loss, TurnLoss):
        raise ConfigError(f"make_loss(config, models) returned a {type(loss).__name__}; expected a TurnLoss.")
    credit = type(loss.value_estimator)
    if given.make_loss is not None and config.loss.loss_class is not None:
        raise ConfigError(
            f"loss_class={config.loss.loss_class!r} does nothing with build_run(make_loss=...), which makes the loss: leave one of them out."
        )
    if config.loss.estimator is not None and credit is not config.loss.estimator_type():
        raise ConfigError(
            f"estimator={config.loss.estimator!r}, but the loss that make_loss(config, models) returned has a {credit.__name__}: give it "
            "the estimator of config.loss_options(), or leave the setting out (and branches, which are TurnVine's)."
        )
    for problem in missing_columns(loss.value_estimator, environments.train.slots.columns):
        raise ConfigError(problem)
    if config.model.teacher is not None:
        return loss, load_teacher(config, networks.sampling)
    wanted = loss.tensor_keys.ref_log_prob in {*loss.in_keys, *loss.value_estimator.in_keys}
    if wanted and networks.models.reference is None:
        raise ConfigError(
            f"The {type(loss).__name__} that make_loss(config, models) returned has a KL to a reference (a kl_coeff above 0, its own or "
            "its estimator's), and the run has no reference, because its setting kl_coeff is 0: set that too, or give the loss "
            "kl_coeff=0."
        )
    return loss, networks.models.reference


class Rollouts(NamedTuple):
    """What makes episodes.

    Attributes:
        policy: samples in this process.
        weight_sync: brings the trained weights to its engine, or to workers; ``None`` where they
            are shared.
        opponent: whom evaluations of games are played against, if anyone.
        replay_buffer: takes the rows of a batch.
        collector: fills it.
        seen_tasks: the tasks that training has used.
        evaluator: evaluates during the run, and returns metrics.
    """

    policy: TurnPolicy
    weight_sync: EngineWeightSync | RayWeightSync | None
    opponent: TurnPolicy | None
    replay_buffer: ReplayBuffer
    collector: EpisodeCollector
    seen_tasks: SeenTasks
    evaluator: Callable[[], dict[str, float]]


def make_rollouts(
    config: RunSettings, place: Place, tokenizer: Any, environments: Environments, networks: Networks, loss: TurnLoss
) -> Rollouts:
    """Policy, buffer and collector of training, and the evaluations."""
    models, engine, sampling = networks.models, networks.engine, networks.sampling
    policy, weight_sync = build.make_policy(config, tokenizer, sampling, models, engine)
    place.opened.callback(policy.close)
    if weight_sync is not None:
        place.opened.callback(weight_sync.close)
    opponent = None
    if config.collector == "self_play":
        opponent = make_opponent(config, environments.train.formatter, sampling, models)
    buffer = build.make_replay_buffer(config)
    workers = {}
    if isinstance(weight_sync, RayWeightSync):
        workers = build.worker_options(config, environments.make_train, tokenizer, weight_sync)
    collector = build.make_collector(
        config, environments.train, policy, buffer, place.distributed, loss.value_estimator, **workers
    )
    # Before engine and environments are closed: its threads use them.
    place.opened.callback(collector.shutdown)
    seen = SeenTasks() if config.weights.init_from is None else tasks_of_weights(config.weights.init_from)
    evaluator = build.make_evaluator(config, policy, environments.evaluation, place.distributed, seen, opponent)
    return Rollouts(policy, weight_sync, opponent, buffer, collector, seen, evaluator)


class Watchers(NamedTuple):
    """What writes a run down: its checkpoints, and the callbacks, among them the one that opens the
    folder and the recorder."""

    checkpoints: CheckpointStore
    open_folder: OpenFolder
    recorder: RolloutRecorder | None
    callbacks: list[Callback]


def make_watchers(
    config: RunSettings, place: Place, tokenizer: Any, networks: Networks, loss: TurnLoss, from_python: dict[str, str]
) -> Watchers:
    """Checkpoints and callbacks. Nothing is written before training begins. ``from_python`` is
    :meth:`Given.settings`."""
    given = place.given
    loss_state = LossState(loss, place.distributed)
    stateful = {name: each for name, each in given.named.items() if hasattr(each, "state_dict")}
    checkpoints = CheckpointStore(
        place.folder.checkpoints.directory,
        models=networks.models,
        tokenizer=tokenizer,
        config=config.as_json(),
        keep_last=config.output.keep_checkpoints,
        on_save=place.folder.settle,
        python_parts=given.names(),
        components={**stateful, **(given.components or {})},
        optional=stateful,
        loss_state=loss_state,
    )
    open_folder = OpenFolder(config, place.folder, place.checkpoint, run_info(config, loss, from_python))
    # The folder is locked and prepared before another callback writes there, and only for a run
    # that can be saved.
    callbacks: list[Callback] = [loss_state, open_folder]
    if place.distributed.is_main:
        callbacks.append(MetricsTable(config.output.output_dir / table.FILE))
        callbacks.append(HealthWatch(teacher=config.model.teacher is not None))
    recorder = _make_recorder(config, tokenizer)
    callbacks += [] if recorder is None else [recorder]
    if config.model.refresh_reference:
        callbacks.append(RefreshReference(networks.models, config.model.refresh_reference))
    if config.output.progress is not False and place.distributed.is_main:
        callbacks.append(ProgressBar(config.algo, watched_only=config.output.progress is None))
    return Watchers(checkpoints, open_folder, recorder, [*callbacks, *given.named.values(), *given.callbacks])


def _make_recorder(config: RunSettings, tokenizer: Any) -> RolloutRecorder | None:
    if not config.output.record_interval:
        return None
    options = build.given_options(config, "log_episodes", interval="record_interval", tasks="record_tasks")
    folder, most = config.output.output_dir / FOLDER, int(config.output.record_megabytes * 10**6)
    return RolloutRecorder(folder, tokenizer, max_bytes=most, **options)


def continue_run(
    config: RunSettings, place: Place, trainer: LLMTrainer, rollouts: Rollouts, checkpoints: CheckpointStore
) -> None:
    """Give the trainer the state of the checkpoint that the run continues, if any, and the policy
    the weights."""
    if place.start is not None:
        checkpoints.resume(trainer, place.start.path, place.start.manifest)
        accept_changes(config, trainer, place.start.manifest["metadata"]["config"])
        rollouts.policy.drop_cache()
        if config.output.accept_changes:
            trainer.reconsider()
    if rollouts.weight_sync is not None:
        # The engine has the weights of model_path so far. This is not an update: the version stays.
        rollouts.policy.policy_version -= 1
        rollouts.weight_sync.send()
