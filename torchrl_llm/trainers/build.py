"""Settings -> components: :func:`build_run` makes everything a :class:`~torchrl_llm.trainers.RunConfig` names.

The only place that knows every part. What it returns is plain TorchRL pieces: replace any of them and build
:class:`~torchrl_llm.trainers.LLMTrainer` yourself (``examples/custom_loop.py`` does without it).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from peft import LoraConfig
from torchrl.checkpoint import CheckpointError
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.record.loggers import Logger, TensorboardLogger, get_logger
from transformers import AutoConfig, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from torchrl_llm.collectors import AsyncTurnCollector, RayTurnCollector, TurnCollector, adapt_tasks
from torchrl_llm.collectors.async_turn import STEP_TIMEOUT
from torchrl_llm.data import TurnsToSequence
from torchrl_llm.envs import GEMEnv, SeenTasks
from torchrl_llm.envs.tickets import Stream
from torchrl_llm.interrupts import run_begins
from torchrl_llm.modules import ActorCritic, HFPolicy, TurnPolicy, VLLMPolicy, load_actor_critic
from torchrl_llm.modules.policy import SamplingConfig
from torchrl_llm.objectives import TurnPolicyLoss
from torchrl_llm.optional import running_ray
from torchrl_llm.stops import response_end_ids
from torchrl_llm.trainers.callbacks import Callback, ProgressBar, RefreshReference
from torchrl_llm.trainers.checkpoint import (
    CheckpointStore,
    Optimizer,
    config_changes,
    environment,
    states_of,
    verify,
)
from torchrl_llm.trainers.config import HOW_TO_RUN, LOSSES, ConfigError, RunConfig
from torchrl_llm.trainers.evaluation import Evaluation, evaluate
from torchrl_llm.trainers.precision import mixed_precision
from torchrl_llm.trainers.ranks import Ranks
from torchrl_llm.trainers.run_folder import RunFolder
from torchrl_llm.trainers.sources import load_tokenizer, model_path
from torchrl_llm.trainers.trainer import LLMTrainer
from torchrl_llm.weight_update import RayWeightSync, VLLMWeightSync

logger = logging.getLogger(__name__)

MakeLoss = Callable[[RunConfig, ActorCritic], TurnPolicyLoss]
"""Makes a run's loss: ``make_loss(config, models)``, see :func:`build_run`."""

_CANARY_LENGTH = 257
"""Two blocks of 128 tokens, the largest of vLLM's prefix caches, and one."""


class Workers(NamedTuple):
    """What workers on Ray are made of, and what brings them the weights."""

    make_env: Callable[[], GEMEnv]
    make_policy: Callable[[], TurnPolicy]
    weight_sync: RayWeightSync


@dataclass(kw_only=True)
class Run:
    """What :func:`build_run` made.

    Attributes:
        config: the settings.
        tokenizer: the model's.
        models: actor, critic and reference.
        policy: plays; shares the actor's weights, or gets them from ``weight_sync``.
        weight_sync: brings the actor's weights to the policy's engine, or to the workers on Ray; ``None`` where they are shared.
        trainer: the loop.
        checkpoints: where the trainer saves.
        evaluation_env: what evaluations during the run play.
        make_env: makes an environment for a ticket stream: ``make_env(stream="test")``.
        opening: the callback behind :meth:`begin`.
    """

    config: RunConfig
    tokenizer: Any
    models: ActorCritic
    policy: TurnPolicy
    weight_sync: VLLMWeightSync | RayWeightSync | None
    trainer: LLMTrainer
    checkpoints: CheckpointStore
    evaluation_env: GEMEnv
    make_env: Callable[..., GEMEnv]
    opening: Any

    def begin(self) -> None:
        """Make ``config.output_dir`` this run's, as ``trainer.train()`` does first: an earlier run there is moved aside.

        To be called before something is written there; to build a run changes nothing. A second call does nothing. No other
        process may run there before :meth:`close`, or, where this was not called, before ``trainer.train()`` ends.
        """
        self.opening.until_close = True
        self.opening.on_start(self.trainer)

    def final_evaluation(self, *, greedy: bool = False) -> Evaluation:
        """Play ``config.final_episodes`` tickets that nothing else uses."""
        env = self.make_env(stream="test")
        try:
            with self.trainer.playing():
                return evaluate(
                    env,
                    self.policy,
                    self.config.final_episodes,
                    greedy=greedy,
                    ranks=self.trainer.ranks,
                    seen_tasks=self.trainer.seen_tasks,
                )
        finally:
            env.close()

    def save_checkpoint(self, path: str | Path, *, lora_only: bool = True, save_optimizer: bool = True) -> Path:
        """Save the run to ``path``, beside what the trainer saves by itself.

        Args:
            path: the checkpoint's folder. A checkpoint that it held is replaced, once the new one is whole; a folder that
                holds anything else is refused.
            lora_only: with LoRA write adapters only; ``False`` adds the actor as one whole model in ``merged/``, which
                transformers and vLLM load. Without LoRA whole models are written anyway.
            save_optimizer: and all else that a resume needs; ``False`` writes weights and tokenizer only.

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
        """Take weights, and the optimizer's state, from a checkpoint; counters and tickets stay (``resume`` is exact).

        Args:
            path: what :meth:`save_checkpoint` or the trainer saved.
            load_optimizer: read the optimizer's state, if the checkpoint has one and its parameters are the ones here.
            overwrite_reference_adapter, overwrite_critic_adapter, merge_lora_configs: see
                :meth:`~torchrl_llm.modules.ActorCritic.load_pretrained`. Merged adapters begin with a fresh optimizer.

        Raises:
            CheckpointError: the checkpoint is damaged, or has no optimizer to load.
        """
        if merge_lora_configs and self.trainer.ranks.count > 1:
            raise ConfigError(
                "load_checkpoint(merge_lora_configs=True) makes new parameters, but several processes share the old ones "
                "already: start a run with init_from and merge_lora_configs."
            )
        load_optimizer = load_optimizer and not merge_lora_configs
        manifest = verify(path)
        if load_optimizer and "optimizer" not in manifest["components"]:
            raise CheckpointError(f"{path} has no optimizer: pass load_optimizer=False.")
        with self.trainer.ranks.weights_in_files(read=True):
            self.models.load_pretrained(
                path,
                overwrite_reference_adapter=overwrite_reference_adapter,
                overwrite_critic_adapter=overwrite_critic_adapter,
                merge_lora_configs=merge_lora_configs,
            )
        if load_optimizer:
            states_of(optimizer=Optimizer(self.trainer.optimizer, self.trainer.ranks)).load(path)
        elif merge_lora_configs:
            self.trainer.replace_optimizer(make_optimizer(self.config, self.models))
        if self.weight_sync is None:
            self.policy.weights_changed()
        else:
            self.weight_sync.send()

    def close(self) -> None:
        """Shut collector, environments, engine and loggers down, and release the folder; a second call does nothing."""
        self.trainer.close()
        self.evaluation_env.close(raise_if_closed=False)
        if self.weight_sync is not None:
            self.weight_sync.close()
        self.policy.close()
        self.opening.folder.close()


def build_run(
    config: RunConfig,
    *,
    env: Any = None,
    make_env: Callable[..., GEMEnv] | None = None,
    make_loss: MakeLoss | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Build model, environment, policy, collector, buffer, loss, optimizer, loggers and the trainer.

    Args:
        config: the settings.
        env: what :class:`~torchrl_llm.envs.GEMEnv` plays instead of ``config.env_name``: a factory of text environments.
        make_env: makes the environments of all streams from the keyword arguments of ``GEMEnv``, such as
            ``partial(PromptDatasetEnv, splits, reward_fn)``; default ``GEMEnv`` itself. Excludes ``env``.
        make_loss: makes the loss, ``make_loss(config, models)``, of ``models.actor`` and ``models.critic``;
            :meth:`RunConfig.loss_options` gives it the loss's settings. Default: :func:`make_objective`.
        callbacks: added to the progress bar.

    Returns:
        A :class:`Run`.

    Raises:
        ConfigError: settings that contradict each other or an earlier run; both ``env`` and ``make_env``; a loss of other
            networks than ``models``.
        ImportError, RuntimeError: with ``collector="ray"``, Ray is not installed, or not running.
    """
    if env is not None and make_env is not None:
        raise ConfigError("build_run got env and make_env: the second decides what is played, so leave env out.")
    if config.env_weights is not None and make_env is not None:
        raise ConfigError(
            f"env_weights={config.env_weights} does nothing with build_run(make_env=...), which decides what is played: leave it "
            "out, or give make_env the weights."
        )
    if config.collector == "ray":
        running_ray()  # before the models are loaded
    accelerator = make_accelerator(config)
    ranks = Ranks(accelerator)
    _check_sharding(config, ranks)
    folder = RunFolder(config)
    start = ranks.on_first(lambda: _where_to_start(config, folder))  # before the models are loaded
    tokenizer = load_tokenizer(config)
    path = model_path(config)
    make_env = make_env or partial(GEMEnv, env or config.env_name, weights=config.env_weights, divide=True)
    make_env = partial(_make_env, config, tokenizer, make_env, worker=ranks.index, num_workers=ranks.count)
    train_env, evaluation_env = make_env(stream="train", group_size=config.group_size), make_env(stream="eval")
    _check_mixture(config, train_env)
    sampling = make_sampling(config, path, train_env)
    models = load_models(config, path, tokenizer, sampling, device=accelerator.device)
    policy, weight_sync = make_policy(config, path, tokenizer, sampling, models)
    replay_buffer = make_replay_buffer(config)
    workers = None
    if isinstance(weight_sync, RayWeightSync):
        lora = None if weight_sync.merged or models.adapter is None else models.model.peft_config[models.adapter]
        make_train_env = partial(make_env, stream="train", group_size=config.group_size)
        workers = Workers(make_train_env, partial(_worker_policy, config, tokenizer, sampling, lora), weight_sync)
    collector = make_collector(config, train_env, policy, replay_buffer, ranks, workers)
    loss = (make_loss or make_objective)(config, models)
    if not isinstance(loss, TurnPolicyLoss):
        raise ConfigError(f"make_loss(config, models) returned a {type(loss).__name__}; expected a TurnPolicyLoss.")
    checkpoints = CheckpointStore(
        folder.checkpoints.directory,
        models=models,
        tokenizer=tokenizer,
        config=config.as_json(),
        keep_last=config.keep_checkpoints,
        on_save=folder.settle,
    )
    opening = _Opening(config, folder, start)
    seen_tasks = SeenTasks()
    trainer = LLMTrainer(
        collector=collector,
        replay_buffer=replay_buffer,
        policy=policy,
        loss=loss,
        optimizer=make_optimizer(config, models),
        config=config,
        reference=models.reference,
        weight_sync=weight_sync,
        evaluator=_make_evaluator(config, policy, evaluation_env, ranks, seen_tasks),
        checkpoints=checkpoints if config.save_checkpoints else None,
        callbacks=[opening, *_callbacks(config, models, callbacks, progress=config.progress and ranks.first)],
        accelerator=accelerator,
        seen_tasks=seen_tasks,
    )
    if start is not None:
        manifest = checkpoints.resume(trainer, start)
        _accept(config, trainer, manifest["metadata"]["config"])
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
    )


def _check_mixture(config: RunConfig, env: GEMEnv) -> None:
    """Refuse settings of a mixture where one environment is played."""
    given = [name for name in ("adaptive_tasks", "env_weights") if getattr(config, name)]
    if given and env.tickets.num_tasks < 2:
        raise ConfigError(
            f"{' and '.join(given)} chooses among environments, and {env.names[0]!r} is the only one: leave it out, or play a "
            "mixture."
        )


def _accept(config: RunConfig, trainer: LLMTrainer, saved: dict[str, Any]) -> None:
    """Let the changes count that ``config.accept_changes`` names and that a checkpoint's state has overwritten."""
    for group in trainer.optimizer.param_groups:
        group |= _adamw_options(config)
    if saved["seed"] != config.seed:  # in a resume of a resume it is that of the checkpoint already
        trainer.generator.manual_seed(config.seed)
        # The tasks from here on; what was dealt is counted on, so that ids stay unique.
        env = trainer.collector.env
        env.tickets = replace(env.tickets, seed=config.seed)


class _Opening(Callback):
    """Makes the folder of a run its own when training begins."""

    def __init__(self, config: RunConfig, folder: RunFolder, start: Path | None) -> None:
        self.config, self.folder, self.start, self.opened = config, folder, start, False
        self.until_close = False  # the folder stays locked when training ends, for the caller writes there

    def on_start(self, trainer: LLMTrainer) -> None:
        if self.opened:
            trainer.ranks.on_first(self.folder.lock)
        else:
            self.opened = True
            trainer.ranks.on_first(lambda: self._open(trainer))
            run_begins()

    def on_end(self, trainer: LLMTrainer) -> None:
        if not self.until_close:
            self.folder.close()

    def _open(self, trainer: LLMTrainer) -> None:
        loggers = self.folder.open(self.start, trainer.logged_steps, partial(make_loggers, self.config))
        if self.start is not None:
            for target in loggers:
                _forget_after(target, trainer.logged_steps)
        trainer.loggers = (*loggers, *trainer.loggers)  # the caller's, put there since the run was built, stay


def _check_sharding(config: RunConfig, ranks: Ranks) -> None:
    """Refuse what weights that are shared out (FSDP2) do not go with."""
    instead = {
        "weight_sync": (config.weight_sync == "nccl", "another, or DDP"),
        "quantization": (config.quantization is not None, "None, or DDP"),
        "compile": (config.compile, "false, or DDP"),
        "export_merged": (config.export_merged, "false, and to merge the checkpoint's adapter in one process"),
    }
    for name, (refused, expected) in instead.items():
        if ranks.sharded and refused:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but the weights are shared out over {ranks.count} processes (FSDP2): "
                f"expected {expected}."
            )


def _share(config: RunConfig, num_ranks: int) -> int:
    """The conversations that each rank plays of a batch."""
    if config.batch_size % (num_ranks * config.group_size):
        raise ConfigError(
            f"batch_size={config.batch_size} counts the conversations of all {num_ranks} processes, and a group of "
            f"group_size={config.group_size} is played by one of them: make it a multiple of {num_ranks * config.group_size}."
        )
    return config.batch_size // num_ranks


def _callbacks(config: RunConfig, models: ActorCritic, own: Sequence[Callback], *, progress: bool) -> list[Callback]:
    refresh = [RefreshReference(models, config.refresh_reference)] if config.refresh_reference else []
    return [*refresh, *([ProgressBar()] if progress else []), *own]


def _where_to_start(config: RunConfig, folder: RunFolder) -> Path | None:
    """The checkpoint to go on from, if any; ``folder`` and the checkpoint are checked, and nothing is changed."""
    folder.check()
    checkpoints = folder.checkpoints
    latest = checkpoints.latest()
    if not config.resume:
        if latest is not None and not config.overwrite:
            raise ConfigError(
                f"{config.output_dir} holds a run already (checkpoint {latest}): resume=true goes on with it, overwrite=true "
                "replaces it, or choose another output_dir."
            )
        return None
    if config.resume_from is None:
        start = latest
    else:
        start = config.resume_from.resolve()
        if start.parent == checkpoints.directory.resolve():
            start = checkpoints.directory / start.name
        elif latest is not None:
            raise ConfigError(
                f"resume_from is {config.resume_from}, but {config.output_dir} holds another run (checkpoint {latest}): "
                "resume=true without resume_from goes on with that one, or choose another output_dir."
            )
    if start is not None:
        manifest = checkpoints.verify(start)
        if "optimizer" not in manifest["components"]:
            raise ConfigError(
                f"{start} holds weights only (save_optimizer=False): start a run from them with init_from."
            )
        _check_same(config, manifest["metadata"], start)
    return start


def _check_same(config: RunConfig, saved: dict[str, Any], start: Path) -> None:
    changes = config_changes(saved["config"], config.as_json(), ignore=[*HOW_TO_RUN, *config.accept_changes])
    if changes:
        listed = "; ".join(f"{name} was {old!r}, is {new!r}" for name, (old, new) in changes.items())
        raise ConfigError(
            f"The settings are not those of {start}: {listed}. Use the old ones, or name those that are meant to differ "
            f"in accept_changes: {list(changes)}."
        )
    present = environment()
    different = [name for name in present if saved["environment"].get(name) != present[name]]
    if different:
        logger.warning(
            "resuming %s under another %s: the run goes on, but not in the same bytes", start, " and ".join(different)
        )


def make_accelerator(config: RunConfig) -> Accelerator:
    """accelerate with the precision of ``config``, on its device.

    Raises:
        ConfigError: accelerate chose another device than ``config.device``.
    """
    precision = mixed_precision(config, model_path(config))
    accelerator = Accelerator(mixed_precision=precision, cpu=config.device == "cpu")
    chosen = accelerator.device
    if config.device is not None:
        wanted = torch.device(config.device)
        if wanted.type != chosen.type or wanted.index not in (None, chosen.index):
            raise ConfigError(
                f"device is {config.device!r}, but accelerate chose {str(chosen)!r}: leave device out, and say which "
                "GPU is meant with CUDA_VISIBLE_DEVICES."
            )
    return accelerator


def make_sampling(config: RunConfig, path: str, env: GEMEnv) -> SamplingConfig:
    """The sampling settings, with the ids that end a response (:func:`torchrl_llm.stops.response_end_ids`)."""
    try:
        named = GenerationConfig.from_pretrained(path)
    except OSError:  # the model comes without; as transformers does then
        named = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    # The formatter's own, for its settings (chat_template_kwargs) may change how a turn ends.
    ids = {*env.formatter.end_of_turn_ids, *response_end_ids(env.formatter.tokenizer, named.eos_token_id)}
    return replace(config.sampling(), stop_ids=tuple(sorted(ids)))


def load_models(config: RunConfig, path: str, tokenizer: Any, sampling: SamplingConfig, *, device: Any) -> ActorCritic:
    """Actor, critic and reference of ``config`` on one base model."""
    lora = None
    if config.lora_r:
        lora = LoraConfig(
            r=config.lora_r,
            lora_alpha=config.lora_alpha or 2 * config.lora_r,
            target_modules=config.lora_targets,
            task_type="CAUSAL_LM",
        )
    models = load_actor_critic(
        path,
        tokenizer=tokenizer,
        lora=lora,
        critic=config.algo == "LLMPPO" and ("shared" if config.critic_trunk == "shared" else True),
        reference=_reference(config),
        sampling=sampling,
        entropy=True,
        dtype=config.dtype,
        device=device,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
        gradient_checkpointing=config.gradient_checkpointing,
        compile=config.compile,
        quantization=config.quantization,
        seed=config.seed,
    )
    if config.init_from is not None:
        models.load_pretrained(
            config.init_from,
            overwrite_reference_adapter=config.init_reference,
            overwrite_critic_adapter=config.init_critic,
            merge_lora_configs=config.merge_lora_configs,
        )
    return models


def make_policy(
    config: RunConfig, path: str, tokenizer: Any, sampling: SamplingConfig, models: ActorCritic
) -> tuple[TurnPolicy, VLLMWeightSync | RayWeightSync | None]:
    """Who plays here, and what brings the weights to those who play elsewhere, if any do.

    With ``collector="ray"`` that is the workers, and the policy here plays evaluations only.
    """
    if config.collector == "ray" or config.policy == "hf":
        policy = HFPolicy(models.model, tokenizer, sampling, adapter=models.adapter, seed=config.seed)
        return policy, _ray_sync(config, models, policy) if config.collector == "ray" else None
    engine = _make_engine(config, path, tokenizer, sampling)
    sync = VLLMWeightSync(
        models.model,
        models.adapter,
        policy=engine,
        method=config.weight_sync or "auto",
        sleep_level=1 if config.sleep_mode else 0,
    )
    return engine, sync


def _ray_sync(config: RunConfig, models: ActorCritic, policy: TurnPolicy) -> RayWeightSync:
    merged = True if config.policy == "vllm" and not _serves_adapter(config) else None
    length = min(_CANARY_LENGTH, config.max_model_len - 1)
    return RayWeightSync(models.model, models.adapter, policy=policy, merged=merged, canary_length=length)


def _serves_adapter(config: RunConfig) -> bool:
    """Whether the engine serves the adapter beside the base: on CPUs merged weights are served faster."""
    on_gpu = bool(config.ray_worker_gpus) if config.collector == "ray" else torch.cuda.is_available()
    return config.lora_r > 0 and (config.weight_sync == "adapter" or (config.weight_sync is None and on_gpu))


def _make_engine(config: RunConfig, path: str, tokenizer: Any, sampling: SamplingConfig) -> VLLMPolicy:
    names = (
        "tensor_parallel_size", "gpu_memory_utilization", "kv_cache_memory_bytes", "enforce_eager", "prefix_caching",
        "sleep_mode",
    )  # fmt: skip
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    return VLLMPolicy(
        path,
        tokenizer,
        sampling,
        seed=config.seed,
        dtype=config.engine_dtype or config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.num_envs,
        max_lora_rank=config.lora_r if _serves_adapter(config) else 0,
        multiprocess=bool(config.engine_process),
        trust_remote_code=config.trust_remote_code,
        **given,
    )


def _worker_policy(config: RunConfig, tokenizer: Any, sampling: SamplingConfig, lora: LoraConfig | None) -> TurnPolicy:
    """What plays on a worker; its weights come with its first task.

    Args:
        lora: the settings of the adapter that is sent; ``None``: whole models are.
    """
    disable_progress_bar()
    if config.policy == "vllm":
        return _make_engine(config, model_path(config), tokenizer, sampling)
    models = load_actor_critic(
        model_path(config),
        tokenizer=tokenizer,
        lora=lora,
        sampling=sampling,
        dtype=config.dtype,
        master_weights=False,
        device="cuda" if config.ray_worker_gpus else "cpu",
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
        quantization=config.quantization,
    )
    return HFPolicy(models.model, tokenizer, sampling, adapter=models.adapter, seed=config.seed)


def make_collector(
    config: RunConfig,
    env: GEMEnv,
    policy: TurnPolicy,
    replay_buffer: ReplayBuffer,
    ranks: Ranks,
    workers: Workers | None = None,
) -> TurnCollector | AsyncTurnCollector | RayTurnCollector:
    """What fills the replay buffer with this rank's share of ``config.batch_size`` conversations an iteration."""
    common: dict[str, Any] = {"batch_size": _share(config, ranks.count), "replay_buffer": replay_buffer}
    if config.adaptive_tasks:
        common["post_collect_hook"] = partial(adapt_tasks, env, gather=ranks.gather)
    if config.max_faults is not None:
        common["max_faults"] = config.max_faults
    if config.collector == "turn":
        return TurnCollector(env, policy, **common)
    options = {"max_staleness": "max_staleness", "num_threads": "env_threads", "step_timeout": "step_timeout"}
    given = {name: getattr(config, field) for name, field in options.items() if getattr(config, field) is not None}
    if workers is None:
        return AsyncTurnCollector(env, policy, **common, **given)
    cpus = 1.0 if config.ray_worker_cpus is None else config.ray_worker_cpus
    return RayTurnCollector(
        env,
        policy,
        make_env=workers.make_env,
        make_policy=workers.make_policy,
        num_workers=config.ray_workers or 2,
        worker_options={"num_cpus": cpus, "num_gpus": config.ray_worker_gpus or 0},
        weight_sync_schemes={"policy": workers.weight_sync},
        **common,
        **given,
    )


def _reference(config: RunConfig) -> bool | Literal["adapter"]:
    """Under LoRA the base will do, unless the reference is to be something else some day."""
    if config.kl_coeff == 0:
        return False
    return "adapter" if config.lora_r and (config.init_reference or config.refresh_reference) else True


def make_objective(config: RunConfig, models: ActorCritic) -> TurnPolicyLoss:
    """The loss of ``config.algo`` with its value estimator; fields that are None keep the class's default."""
    loss_class: Any = LOSSES[config.algo][0]
    networks = (models.actor, models.critic) if config.algo == "LLMPPO" else (models.actor,)
    return loss_class(*networks, **config.loss_options())


def make_optimizer(config: RunConfig, models: ActorCritic) -> torch.optim.Optimizer:
    """AdamW with one parameter group for the actor and, if there is one, a second for the critic."""
    groups: list[dict[str, Any]] = [{"params": list(models.actor_parameters()), "lr": config.lr_actor}]
    if models.critic is not None:
        lr = config.lr_actor if config.lr_critic is None else config.lr_critic
        groups.append({"params": list(models.critic_parameters()), "lr": lr})
    return torch.optim.AdamW(groups, **_adamw_options(config))


def _adamw_options(config: RunConfig) -> dict[str, Any]:
    return {"weight_decay": config.weight_decay, "betas": (0.9, config.adam_beta2)}


def make_replay_buffer(config: RunConfig) -> ReplayBuffer:
    """A buffer of one batch of rows. Batches differ in their longest row, hence no storage of fixed shape."""
    storage = LazyStackStorage(config.batch_size)
    return ReplayBuffer(storage=storage, transform=TurnsToSequence(), batch_size=config.batch_size)


def make_loggers(config: RunConfig) -> list[Logger]:
    """CSV always, TensorBoard and Weights & Biases by flag."""
    where = config.output_dir
    loggers = [get_logger("csv", str(where), "csv")]
    if config.tensorboard:
        loggers.append(get_logger("tensorboard", str(where), "tensorboard"))
    if config.wandb:
        kwargs = {"project": config.wandb_project, "id": _wandb_id(where), "resume": "allow"}
        loggers.append(get_logger("wandb", str(where), where.name, wandb_kwargs=kwargs))
    for target in loggers:
        target.log_hparams({name: str(value) for name, value in vars(config).items()})
    return loggers


def _forget_after(target: Logger, steps: int) -> None:
    """Tell TensorBoard that what it has beyond ``steps`` is written anew."""
    if isinstance(target, TensorboardLogger):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        target.experiment.file_writer.add_event(Event(step=steps + 1, session_log=start))


def _wandb_id(where: Path) -> str:
    """The run's id at Weights & Biases, drawn once and kept in its folder, so that a resumed run writes to the same one."""
    path = where / "wandb_id"
    if not path.exists():
        where.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text()


def _make_env(
    config: RunConfig,
    tokenizer: Any,
    make: Callable[..., GEMEnv],
    *,
    stream: Stream,
    group_size: int = 1,
    worker: int = 0,
    num_workers: int = 1,
) -> GEMEnv:
    options: dict[str, Any] = {
        "num_threads": config.env_threads,
        "step_timeout": _step_timeout(config),
        "max_faults": config.max_faults,
        "success_reward": config.success_reward,
    }
    options |= {"worker": worker, "num_workers": num_workers} if num_workers > 1 else {}
    return make(
        **{name: value for name, value in options.items() if value is not None},
        tokenizer=tokenizer,
        num_envs=config.num_envs,
        max_turns=config.max_turns,
        max_model_len=config.max_model_len,
        max_output_tokens=config.max_output_tokens,
        overflow=config.overflow,
        group_size=group_size,
        system_prompt=config.system_prompt,
        template=config.template,
        history=config.history,
        chat_template_kwargs=config.chat_template_kwargs,
        seed=config.seed,
        stream=stream,
    )


def _step_timeout(config: RunConfig) -> float | None:
    """Seconds that an environment may take for a step, wherever it is played: what training allows, evaluation does too."""
    if config.step_timeout is not None or config.collector == "turn" or config.env_threads == 0:
        return config.step_timeout
    return STEP_TIMEOUT


def _make_evaluator(
    config: RunConfig, policy: TurnPolicy, env: GEMEnv, ranks: Ranks, seen_tasks: SeenTasks
) -> Callable[[], dict]:
    play = partial(evaluate, env, policy, config.evaluation_episodes, ranks=ranks, seen_tasks=seen_tasks)

    def evaluator() -> dict[str, float]:
        metrics = play().metrics("evaluation")
        if config.evaluation_greedy:
            metrics |= play(greedy=True).metrics("evaluation_greedy")
        return metrics

    return evaluator
