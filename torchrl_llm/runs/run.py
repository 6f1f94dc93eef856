"""A run made from its settings: :func:`build_run` and :class:`Run`.

Its parts are plain TorchRL (:mod:`torchrl_llm.runs.assembly`): replace any of them and build
:class:`~torchrl_llm.trainers.LLMTrainer` yourself (``examples/custom_loop.py`` does without it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl.checkpoint import CheckpointError

from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import ActorCritic, TurnPolicy
from torchrl_llm.runs import assembly, build
from torchrl_llm.runs.checkpoint import CheckpointStore
from torchrl_llm.runs.checkpoint_files import verify
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.recorder import RolloutRecorder
from torchrl_llm.runs.resume import OpenFolder
from torchrl_llm.runs.sources import load_tokenizer
from torchrl_llm.runs.states import Optimizer, read_states
from torchrl_llm.runs.trained_tasks import tasks_of_weights
from torchrl_llm.trainers.callbacks import Callback
from torchrl_llm.trainers.evaluation import Evaluation, evaluate
from torchrl_llm.trainers.trainer import LLMTrainer
from torchrl_llm.weight_update import EngineWeightSync, RayWeightSync


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
        open_folder: the callback behind :meth:`begin`.
        resources: closes what was opened for the run, from the last to the first.
        recorder: keeps episodes for the run report; ``None``: none are kept.
        opponent: whom evaluations of ``collector="self_play"`` play against; ``None`` elsewhere.
    """

    config: RunSettings
    tokenizer: Any
    models: ActorCritic
    policy: TurnPolicy
    weight_sync: EngineWeightSync | RayWeightSync | None
    trainer: LLMTrainer
    checkpoints: CheckpointStore
    evaluation_env: GEMEnv
    make_env: Callable[..., GEMEnv]
    open_folder: OpenFolder
    resources: ExitStack
    recorder: RolloutRecorder | None = None
    opponent: TurnPolicy | None = None

    def begin(self) -> None:
        """Make ``config.output.output_dir`` this run's, as ``trainer.train()`` does first: an
        earlier run there is moved aside.

        To be called before something is written there; to build a run changes nothing. A second
        call does nothing. No other process may run there before :meth:`close`, or, where this was
        not called, before ``trainer.train()`` ends.
        """
        self.open_folder.until_close = True
        self.open_folder.on_start(self.trainer)

    def final_evaluation(self, *, greedy: bool = False) -> Evaluation:
        """Evaluate on ``config.evaluation.final_episodes`` tasks that nothing else uses."""
        env = self.make_env(stream="test")
        try:
            with self.trainer.policy_weights():
                return evaluate(
                    env,
                    self.policy,
                    self.config.evaluation.final_episodes,
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
            CheckpointError: ``path`` holds files that are not a checkpoint's.
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

        The settings of the optimizer stay this run's. A loss or an estimator that keeps a
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
        wanted = ("optimizer", "loss_state") if load_optimizer else ("loss_state",)
        states = read_states(path, *(name for name in wanted if name in saved))
        # The settings of the run, which the state of the checkpoint holds too, are this
        # run's own.
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
                self.checkpoints.loss_state.load_state_dict(states["loss_state"])
        self.trainer.seen_tasks.include(tasks_of_weights(path))
        if load_optimizer:
            optimizer.load_state_dict(states["optimizer"])
        elif merge_lora_configs:
            self.trainer.replace_optimizer(build.make_optimizer(self.config, self.models, self.trainer.loss))
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
    config: RunSettings,
    *,
    env: Any = None,
    make_env: Callable[..., GEMEnv] | None = None,
    make_loss: assembly.MakeLoss | None = None,
    callbacks: Sequence[Callback] = (),
    components: Mapping[str, Any] | None = None,
) -> Run:
    """Build model, environment, policy, collector, buffer, loss, optimizer, loggers and the
    trainer.

    Args:
        config: the settings.
        env: a factory of text environments, for :class:`~torchrl_llm.envs.GEMEnv`, instead of
            ``config.env.env_name``.
        make_env: makes the environments of all streams from the keyword arguments of ``GEMEnv``,
            such as ``partial(PromptDatasetEnv, splits, reward_fn)``; default ``GEMEnv`` itself.
            Excludes ``env``.
        make_loss: makes the loss, ``make_loss(config, models)``, of ``models.actor`` and
            ``models.critic``; :meth:`RunSettings.loss_options` gives it the loss's settings.
            Default: :func:`make_objective`.
        callbacks: added to those of ``config.output.callbacks``.
        components: further objects with ``state_dict`` and ``load_state_dict``, by name: they are
            saved in the run's checkpoints, and continue with a resumed run.

    Returns:
        A :class:`Run`.

    Raises:
        ConfigError: settings that contradict each other or an earlier run; both ``env`` and
            ``make_env``; a loss of other networks than ``models``.
        ImportError, RuntimeError: with ``collector="ray"``, Ray is not installed, or not running.
    """
    given = assembly.Given(env, make_env, make_loss, (*callbacks,), components, build.make_callbacks(config))
    given.check(config)
    from_python = given.settings()
    with ExitStack() as opened:
        place = assembly.find_place(config, given, opened)
        tokenizer = load_tokenizer(config)
        config = assembly.settle(config, place, tokenizer)
        environments = assembly.make_environments(config, place, tokenizer)
        config = environments.config
        networks = assembly.load_networks(config, place, tokenizer, environments)
        loss, reference = assembly.make_loss_and_reference(config, networks, environments, given)
        rollouts = assembly.make_rollouts(config, place, tokenizer, environments, networks, loss)
        watchers = assembly.make_watchers(config, place, tokenizer, networks, loss, from_python)
        trainer = LLMTrainer(
            collector=rollouts.collector,
            replay_buffer=rollouts.replay_buffer,
            policy=rollouts.policy,
            loss=loss,
            optimizer=build.make_optimizer(config, networks.models, loss),
            config=config.trainer,
            reference=reference,
            weight_sync=rollouts.weight_sync,
            evaluator=rollouts.evaluator,
            checkpoints=watchers.checkpoints if config.output.save_checkpoints else None,
            callbacks=watchers.callbacks,
            accelerator=place.accelerator,
            seen_tasks=rollouts.seen_tasks,
            offload=config.engine.offload(networks.models),
            numerics=place.numerics,
        )
        opened.callback(trainer.close)
        assembly.continue_run(config, place, trainer, rollouts, watchers.checkpoints)
        return Run(
            config=config,
            tokenizer=tokenizer,
            models=networks.models,
            policy=rollouts.policy,
            weight_sync=rollouts.weight_sync,
            trainer=trainer,
            checkpoints=watchers.checkpoints,
            evaluation_env=environments.evaluation,
            make_env=environments.make,
            open_folder=watchers.open_folder,
            resources=opened.pop_all(),
            recorder=watchers.recorder,
            opponent=rollouts.opponent,
        )
