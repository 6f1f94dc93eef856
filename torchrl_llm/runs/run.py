"""A run made from its settings: :func:`build_run` and :class:`Run`.

Its parts are plain TorchRL (:mod:`torchrl_llm.runs.build`): replace any of them and build
:class:`~torchrl_llm.trainers.LLMTrainer` yourself (``examples/custom_loop.py`` does without it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchrl.checkpoint import CheckpointError

from torchrl_llm.envs import GEMEnv, SeenTasks
from torchrl_llm.modules import ActorCritic, TurnPolicy
from torchrl_llm.objectives import TurnPolicyLoss
from torchrl_llm.runs import build, table
from torchrl_llm.runs.checkpoint import CheckpointStore
from torchrl_llm.runs.checkpoint_files import verify
from torchrl_llm.runs.config import RunConfig
from torchrl_llm.runs.demonstrations import check_demonstrations
from torchrl_llm.runs.device import make_accelerator, make_numerics
from torchrl_llm.runs.effective_settings import python_settings
from torchrl_llm.runs.engines import start_engine
from torchrl_llm.runs.granularity import with_granularity
from torchrl_llm.runs.identity import names_of_parts
from torchrl_llm.runs.memory import with_max_tokens
from torchrl_llm.runs.opponents import make_opponent
from torchrl_llm.runs.recorder import RolloutRecorder
from torchrl_llm.runs.recording import FOLDER
from torchrl_llm.runs.resume import Opening, accept_changes, find_start
from torchrl_llm.runs.run_folder import RunFolder
from torchrl_llm.runs.run_info import run_info
from torchrl_llm.runs.sources import check_length, load_tokenizer
from torchrl_llm.runs.teacher import check_teacher, load_teacher
from torchrl_llm.runs.template_date import with_template_date
from torchrl_llm.runs.trackers import MetricsTable
from torchrl_llm.runs.trained_tasks import tasks_of_weights
from torchrl_llm.runs.wrong_settings import missing_extras
from torchrl_llm.trainers.callbacks import Callback, HealthWatch, ProgressBar, RefreshReference
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.evaluation import Evaluation, evaluate
from torchrl_llm.trainers.loss_state import LossState
from torchrl_llm.trainers.states import Optimizer, read_states
from torchrl_llm.trainers.trainer import LLMTrainer
from torchrl_llm.utils.optional import running_ray
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.weight_update import EngineWeightSync, RayWeightSync

MakeLoss = Callable[[RunConfig, ActorCritic], TurnPolicyLoss]
"""Makes a run's loss: ``make_loss(config, models)``, see :func:`build_run`."""


@dataclass(kw_only=True)
class Run:
    """The parts of a run, made by :func:`build_run`.

    Attributes:
        config: the settings, with the ``max_tokens`` and the ``template_date`` that were chosen if
            none were given, and with what ``granularity="auto"`` means.
        tokenizer: the model's.
        models: actor, critic and reference.
        policy: samples; shares the actor's weights, or gets them from ``weight_sync``.
        weight_sync: brings the actor's weights to the policy's engine, or to the workers on Ray;
            ``None`` where they are shared.
        trainer: the loop.
        checkpoints: where the trainer saves.
        evaluation_env: the environment of evaluations during the run.
        make_env: makes an environment for a task stream: ``make_env(stream="test")``.
        opening: the callback behind :meth:`begin`.
        resources: closes what was opened for the run, from the last to the first.
        recorder: keeps episodes for the run report; ``None``: none are kept.
        opponent: whom evaluations of ``collector="self_play"`` play against; ``None`` elsewhere.
    """

    config: RunConfig
    tokenizer: Any
    models: ActorCritic
    policy: TurnPolicy
    weight_sync: EngineWeightSync | RayWeightSync | None
    trainer: LLMTrainer
    checkpoints: CheckpointStore
    evaluation_env: GEMEnv
    make_env: Callable[..., GEMEnv]
    opening: Opening
    resources: ExitStack
    recorder: RolloutRecorder | None = None
    opponent: TurnPolicy | None = None

    def begin(self) -> None:
        """Make ``config.output_dir`` this run's, as ``trainer.train()`` does first: an earlier run
        there is moved aside.

        To be called before something is written there; to build a run changes nothing. A second
        call does nothing. No other process may run there before :meth:`close`, or, where this was
        not called, before ``trainer.train()`` ends.
        """
        self.opening.until_close = True
        self.opening.on_start(self.trainer)

    def final_evaluation(self, *, greedy: bool = False) -> Evaluation:
        """Evaluate on ``config.final_episodes`` tasks that nothing else uses."""
        env = self.make_env(stream="test")
        try:
            with self.trainer.policy_weights():
                return evaluate(
                    env,
                    self.policy,
                    self.config.final_episodes,
                    greedy=greedy,
                    distributed=self.trainer.distributed,
                    seen_tasks=self.trainer.seen_tasks,
                    opponent=self.opponent,
                )
        finally:
            env.close()

    def save_checkpoint(self, path: str | Path, *, lora_only: bool = True, save_optimizer: bool = True) -> Path:
        """Save the run to ``path``, in addition to what the trainer saves.

        Args:
            path: the checkpoint's folder. A checkpoint that it held is replaced, once the new one
                is whole; a folder that holds anything else is refused.
            lora_only: with LoRA write adapters only; ``False`` adds the actor as one whole model in
                ``merged/``, which transformers and vLLM load. Without LoRA whole models are written
                anyway.
            save_optimizer: save the optimizer and all else that a resume needs; ``False`` writes
                weights and tokenizer only.

        Returns:
            The folder.

        Raises:
            CheckpointError: ``path`` holds files that are no checkpoint's.
        """
        return self.checkpoints.save_to(path, self.trainer, lora_only=lora_only, save_optimizer=save_optimizer)

    def load_checkpoint(
        self,
        path: str | Path,
        *,
        load_optimizer: bool = True,
        overwrite_reference_adapter: bool = False,
        overwrite_critic_adapter: bool = False,
        merge_lora_configs: bool = False,
    ) -> None:
        """Take weights, and the optimizer's state, from a checkpoint; counters and tasks stay
        (``resume`` is exact).

        The settings of the optimizer stay those of this run. A loss or an estimator that keeps a
        state gets the checkpoint's.

        Args:
            path: what :meth:`save_checkpoint` or the trainer saved.
            load_optimizer: read the optimizer's state, if the checkpoint has one and its parameters
                are the ones here.
            overwrite_reference_adapter, overwrite_critic_adapter, merge_lora_configs: see
                :meth:`~torchrl_llm.modules.ActorCritic.load_pretrained`. Merged adapters begin with
                a fresh optimizer.

        Raises:
            CheckpointError: the checkpoint is damaged, or has no optimizer to load, or one of other
                parameters. Nothing has changed then.
            ConfigError: adapters would be merged, and there are several processes, which share the
                old ones.
        """
        if merge_lora_configs:
            self.trainer.distributed.check_replaceable()
        load_optimizer = load_optimizer and not merge_lora_configs
        saved = verify(path)["components"]
        if load_optimizer and "optimizer" not in saved:
            raise CheckpointError(f"{path} has no optimizer: pass load_optimizer=False.")
        wanted = [
            name for name, read in (("optimizer", load_optimizer), ("loss_state", True)) if read and name in saved
        ]
        states = read_states(path, *wanted)
        # The settings of the run, which the state of the checkpoint holds too, are those of this
        # one.
        optimizer = Optimizer(self.trainer.optimizer, self.trainer.distributed, keep=build.adamw_options(self.config))
        if load_optimizer:
            optimizer.check(states["optimizer"])  # before weights are changed
        with self.trainer.distributed.full_state_on_cpu(read=True):
            self.models.load_pretrained(
                path,
                overwrite_reference_adapter=overwrite_reference_adapter,
                overwrite_critic_adapter=overwrite_critic_adapter,
                merge_lora_configs=merge_lora_configs,
            )
            if "loss_state" in states:
                LossState(self.trainer).load_state_dict(states["loss_state"])
        self.trainer.seen_tasks.include(tasks_of_weights(path))
        if load_optimizer:
            optimizer.load_state_dict(states["optimizer"])
        elif merge_lora_configs:
            self.trainer.replace_optimizer(build.make_optimizer(self.config, self.models))
        if self.weight_sync is None:
            self.policy.weights_changed()
        else:
            self.weight_sync.send()

    def close(self) -> None:
        """Shut collector, environments, engine and loggers down, and release the folder; a second
        call does nothing.

        All are closed if one of them fails; then its error is raised.
        """
        self.resources.close()


def build_run(
    config: RunConfig,
    *,
    env: Any = None,
    make_env: Callable[..., GEMEnv] | None = None,
    make_loss: MakeLoss | None = None,
    callbacks: Sequence[Callback] = (),
    components: Mapping[str, Any] | None = None,
) -> Run:
    """Build model, environment, policy, collector, buffer, loss, optimizer, loggers and the
    trainer.

    Args:
        config: the settings.
        env: a factory of text environments, for :class:`~torchrl_llm.envs.GEMEnv`, instead of
            ``config.env_name``.
        make_env: makes the environments of all streams from the keyword arguments of ``GEMEnv``,
            such as ``partial(PromptDatasetEnv, splits, reward_fn)``; default ``GEMEnv`` itself.
            Excludes ``env``.
        make_loss: makes the loss, ``make_loss(config, models)``, of ``models.actor`` and
            ``models.critic``; :meth:`RunConfig.loss_options` gives it the loss's settings. Default:
            :func:`make_objective`.
        callbacks: added to the progress bar.
        components: further objects with ``state_dict`` and ``load_state_dict``, by name: they are
            saved in the run's checkpoints, and continue with a resumed run.

    Returns:
        A :class:`Run`.

    Raises:
        ConfigError: settings that contradict each other or an earlier run; both ``env`` and
            ``make_env``; a loss of other networks than ``models``.
        ImportError, RuntimeError: with ``collector="ray"``, Ray is not installed, or not running.
    """
    _check_arguments(config, env, make_env, make_loss)
    with ExitStack() as opened:
        return _build(
            config, opened, env=env, make_env=make_env, make_loss=make_loss, callbacks=callbacks, components=components
        )


def _build(
    config: RunConfig,
    opened: ExitStack,
    *,
    env: Any,
    make_env: Callable[..., GEMEnv] | None,
    make_loss: MakeLoss | None,
    callbacks: Sequence[Callback],
    components: Mapping[str, Any] | None,
) -> Run:
    """:func:`build_run`; ``opened`` closes what it opens, and is empty when all is well."""
    accelerator = make_accelerator(config)
    numerics = make_numerics(config, accelerator.device)
    distributed = Distributed.of(accelerator)
    build.check_sharding(config, distributed)
    folder = RunFolder(config)
    opened.callback(folder.close)
    python_parts = names_of_parts(env=env, make_env=make_env, make_loss=make_loss)
    from_python = python_settings(env=env, make_env=make_env, make_loss=make_loss, callbacks=[*callbacks])
    # before the models are loaded
    start = distributed.on_main(lambda: find_start(config, folder, python_parts))
    tokenizer = load_tokenizer(config)
    check_length(config, config.max_model_len)
    check_teacher(config, tokenizer)
    saved = None if start is None else start.manifest["metadata"]["config"]
    config = build.with_num_envs(config, saved, distributed)
    config = with_max_tokens(config, saved, accelerator.device, distributed)
    config = with_template_date(config, saved, tokenizer, distributed)
    shard = {"worker": distributed.rank, "num_workers": distributed.world_size} if distributed.world_size > 1 else {}
    make_env = partial(build.make_environment, config, tokenizer, make_env or build.stock_env(config, env), **shard)
    make_train_env = partial(make_env, stream="train", group_size=config.group_size // (1 + config.tree_branches))
    train_env = make_train_env()
    opened.callback(train_env.close, raise_if_closed=False)
    config = with_granularity(config, saved, train_env)
    evaluation_env = make_env(stream="eval")
    opened.callback(evaluation_env.close, raise_if_closed=False)
    given = [name for name in ("adaptive_mixture", "env_weights") if getattr(config, name)]
    if given and train_env.task_sampler.mixture_size < 2:
        raise ConfigError(
            f"{' and '.join(given)} chooses among environments, and {train_env.names[0]!r} is the only one: leave it out, or give "
            "a mixture."
        )
    sampling = build.make_sampling(config, train_env.formatter)
    engine = start_engine(config, tokenizer, sampling, distributed, accelerator.device)
    if engine is not None:
        opened.callback(engine.close)
    path = None if start is None else start.path
    models = build.load_models(config, tokenizer, sampling, device=distributed.load_device, start=path)
    # Before workers are started.
    loss = (make_loss or build.make_objective)(config, models)
    if not isinstance(loss, TurnPolicyLoss):
        raise ConfigError(f"make_loss(config, models) returned a {type(loss).__name__}; expected a TurnPolicyLoss.")
    for problem in missing_extras(loss.value_estimator, train_env.extras):
        raise ConfigError(problem)
    reference = models.reference if config.teacher is None else load_teacher(config, sampling)
    policy, weight_sync = build.make_policy(config, tokenizer, sampling, models, engine)
    opened.callback(policy.close)
    if weight_sync is not None:
        opened.callback(weight_sync.close)
    opponent = None
    if config.collector == "self_play":
        opponent = make_opponent(config, train_env.formatter, sampling, models)
    replay_buffer = build.make_replay_buffer(config)
    workers = {}
    if isinstance(weight_sync, RayWeightSync):
        workers = build.worker_options(config, make_train_env, tokenizer, weight_sync)
    collector = build.make_collector(config, train_env, policy, replay_buffer, distributed, **workers)
    # Before engine and environments are closed: its threads use them.
    opened.callback(collector.shutdown)
    checkpoints = CheckpointStore(
        folder.checkpoints.directory,
        models=models,
        tokenizer=tokenizer,
        config=config.as_json(),
        keep_last=config.keep_checkpoints,
        on_save=folder.settle,
        python_parts=python_parts,
        components=components,
    )
    opening = Opening(config, folder, None if start is None else start.path, run_info(config, loss, from_python))
    seen_tasks = SeenTasks() if config.init_from is None else tasks_of_weights(config.init_from)
    # First: it locks and prepares the folder before another callback writes there.
    watchers: list[Callback] = [opening]
    if distributed.is_main:
        watchers += [MetricsTable(config.output_dir / table.FILE), HealthWatch(teacher=config.teacher is not None)]
    recorder = _recorder(config, tokenizer)
    watchers += [] if recorder is None else [recorder]
    if config.refresh_reference:
        watchers.append(RefreshReference(models, config.refresh_reference))
    if config.progress is not False and distributed.is_main:
        watchers.append(ProgressBar(config.algo, watched_only=config.progress is None))
    trainer = LLMTrainer(
        collector=collector,
        replay_buffer=replay_buffer,
        policy=policy,
        loss=loss,
        optimizer=build.make_optimizer(config, models),
        config=config,
        reference=reference,
        weight_sync=weight_sync,
        evaluator=build.make_evaluator(config, policy, evaluation_env, distributed, seen_tasks, opponent),
        checkpoints=checkpoints if config.save_checkpoints else None,
        callbacks=[*watchers, *callbacks],
        accelerator=accelerator,
        seen_tasks=seen_tasks,
        offload=build.make_offload(config, models),
        numerics=numerics,
    )
    opened.callback(trainer.close)
    if start is not None:
        checkpoints.resume(trainer, start.path, start.manifest)
        accept_changes(config, trainer, start.manifest["metadata"]["config"])
        policy.drop_cache()
        if config.accept_changes:
            trainer.reconsider()
    if weight_sync is not None:
        # The engine has the weights of model_path so far. This is no update: the version stays.
        policy.policy_version -= 1
        weight_sync.send()
    return Run(
        config=config,
        tokenizer=tokenizer,
        models=models,
        policy=policy,
        weight_sync=weight_sync,
        trainer=trainer,
        checkpoints=checkpoints,
        evaluation_env=evaluation_env,
        make_env=make_env,
        opening=opening,
        resources=opened.pop_all(),
        recorder=recorder,
        opponent=opponent,
    )


def _recorder(config: RunConfig, tokenizer: Any) -> RolloutRecorder | None:
    if not config.record_interval:
        return None
    return RolloutRecorder(
        config.output_dir / FOLDER,
        tokenizer,
        interval=config.record_interval,
        tasks=config.record_tasks,
        max_bytes=int(config.record_megabytes * 10**6),
        log_episodes=config.log_episodes,
    )


def _check_arguments(config: RunConfig, env: Any, make_env: Any, make_loss: Any) -> None:
    """Refuse arguments of :func:`build_run` that leave another argument or a setting without
    effect."""
    build.check_environment(config, env, make_env)
    if config.env_weights is not None and make_env is not None:
        raise ConfigError(
            f"env_weights={config.env_weights} does nothing with build_run(make_env=...), which decides on the environments: leave it "
            "out, or give make_env the weights."
        )
    if config.estimator is not None and make_loss is not None:
        raise ConfigError(
            f"estimator={config.estimator!r} does nothing with build_run(make_loss=...): leave it out, or call "
            "make_value_estimator(config.value_estimator()) of the loss there."
        )
    check_demonstrations(config)
    if config.collector == "ray":
        running_ray()  # before the models are loaded
