"""Makes the parts of a run from its settings, one function a part.

The parts are plain TorchRL; :func:`~torchrl_llm.runs.build_run` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torchrl.data import LazyStackStorage, ReplayBuffer
from transformers import AutoConfig, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from torchrl_llm.collectors import (
    AsyncTurnCollector,
    Branches,
    EpisodeCollector,
    RayTurnCollector,
    RecordedCollector,
    SelfPlayCollector,
    Trees,
    TurnCollector,
    adapt_mixture,
)
from torchrl_llm.data import TurnsToSequence
from torchrl_llm.envs import ChatFormatter, GEMEnv, SeenTasks
from torchrl_llm.modules import ActorCritic, HFPolicy, PlayerPolicy, TurnPolicy, load_actor_critic
from torchrl_llm.modules.policy import SamplingConfig
from torchrl_llm.modules.weights import holds_adapter
from torchrl_llm.objectives import TurnLoss
from torchrl_llm.objectives.steps import own_parameters
from torchrl_llm.runs.config import ConfigError, RunSettings
from torchrl_llm.runs.demonstrations import check_player, find_demonstrations, read_demonstrations
from torchrl_llm.runs.settings import RayRollouts, SelfPlayRollouts, TurnRollouts
from torchrl_llm.runs.sources import model_path
from torchrl_llm.stops import response_end_ids
from torchrl_llm.trainers.callbacks import Callback
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.evaluation import evaluate
from torchrl_llm.utils.named import find_class, make_named
from torchrl_llm.weight_update import EngineWeightSync, RayWeightSync

_PARITY_LENGTH = 257
"""Two blocks of 128 tokens, the largest of vLLM's prefix caches, and one."""

MODEL = ("dtype", "attn_implementation", "trust_remote_code", "quantization")
"""Settings of the model wherever it is loaded by transformers: here and on workers."""


def given_options(config: RunSettings, *names: str, **renamed: str) -> dict[str, Any]:
    """The settings that are not ``None``, as keyword arguments of a part, whose own defaults hold
    for the rest.

    Args:
        names: settings that the part calls by the same name.
        renamed: the part's name for a setting, and the setting.
    """
    settings = {name: name for name in names} | renamed
    given = config.values()
    values = {option: given[name] for option, name in settings.items()}
    return {option: value for option, value in values.items() if value is not None}


def check_sharding(config: RunSettings, distributed: Distributed) -> None:
    """Refuse settings that do not work with sharded weights (FSDP2)."""
    refused = {
        "quantization": (("nf4",), "None, or DDP"),
        "compile": ((True,), "false, or DDP"),
        "base_products": (("bfloat16",), "None, or DDP"),
        "export_merged": ((True,), "false, and to merge the checkpoint's adapter in one process"),
        "collector": (("self_play",), "another, or DDP"),
        **config.engine.not_sharded,
    }
    values = config.values()
    for name, (not_sharded, expected) in refused.items():
        if distributed.sharded and values[name] in not_sharded:
            raise ConfigError(
                f"{name} is {values[name]!r}, but the weights are sharded over {distributed.world_size} processes (FSDP2): "
                f"expected {expected}."
            )


def make_sampling(config: RunSettings, formatter: ChatFormatter) -> SamplingConfig:
    """The sampling settings, with the ids that end a response: those given, or
    :func:`torchrl_llm.stops.response_end_ids`."""
    if config.sampling.stop_ids is not None:
        return config.sampling
    path = model_path(config)
    try:
        named = GenerationConfig.from_pretrained(path)
    except OSError:  # the model comes without one; transformers reads its configuration then
        named = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    # The formatter's kwargs may change how a turn ends, and the template may need them.
    kwargs = formatter.chat_template_kwargs
    ids = response_end_ids(formatter.tokenizer, named.eos_token_id, chat_template_kwargs=kwargs)
    return replace(config.sampling, stop_ids=tuple(sorted({*formatter.end_of_turn_ids, *ids})))


def make_lora(config: RunSettings) -> LoraConfig | None:
    """The settings of the adapters; ``None``: all weights train."""
    rank = config.weights.lora_r
    if not rank:
        return None
    alpha, targets = config.weights.lora_alpha or 2 * rank, config.weights.lora_targets
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")


def has_own_reference(config: RunSettings, start: Path | None = None) -> bool:
    """Whether the reference is an adapter: with LoRA the frozen base model serves, unless the
    reference is to change.

    Args:
        start: the checkpoint that the run continues, whose reference may be one; ``None``: it
            starts.
    """
    changed = start is not None and holds_adapter(start / "reference")
    return bool(config.weights.lora_r and (config.weights.init_reference or config.model.refresh_reference or changed))


def start_engine(
    config: RunSettings, tokenizer: Any, sampling: SamplingConfig, distributed: Distributed, device: torch.device
) -> TurnPolicy | None:
    """The engine of this process; ``None`` where there is none.

    It starts before the trainer's model is loaded: vLLM asks for its whole share at once, and
    measures on an empty GPU what it needs itself. With ``sleep_mode`` it sleeps until the first
    weight sync.

    Args:
        device: of model and training.

    Raises:
        ConfigError: there can be none with these settings.
    """
    if not config.engine.owns_weights or config.collector == "ray":
        return None
    place = {"device": device, "processes": distributed.world_size}
    engine = config.engine.make_policy(config, model_path(config), tokenizer, sampling, **place)
    if config.engine.sleeps:
        engine.sleep(1)
    return engine


def load_models(
    config: RunSettings, tokenizer: Any, sampling: SamplingConfig, *, device: Any, start: Path | None = None
) -> ActorCritic:
    """Actor, critic and reference of ``config`` on one base model; of a run that continues the
    checkpoint ``start``, if any."""
    reference: Any = config.has_reference and config.model.teacher is None
    if reference and has_own_reference(config, start):
        reference = "adapter"
    models = load_actor_critic(
        model_path(config),
        tokenizer=tokenizer,
        lora=make_lora(config),
        critic=config.algo == "LLMPPO" and ("shared" if config.weights.critic_trunk == "shared" else True),
        reference=reference,
        sampling=sampling,
        entropy=True,
        device=device,
        **given_options(config, *MODEL, "gradient_checkpointing", "compile", "share_prefixes", "chunk_logits", "seed"),
        base_products=config.model.base_products,
    )
    if config.weights.init_from is not None:
        models.load_pretrained(
            config.weights.init_from,
            overwrite_reference_adapter=config.weights.init_reference,
            overwrite_critic_adapter=config.weights.init_critic,
            merge_lora_configs=config.weights.merge_lora_configs,
        )
    return models


def make_policy(
    config: RunSettings, tokenizer: Any, sampling: SamplingConfig, models: ActorCritic, engine: TurnPolicy | None
) -> tuple[TurnPolicy, EngineWeightSync | RayWeightSync | None]:
    """The policy of this process, and the weight sync of engines that hold weights of their own.

    With ``collector="ray"`` those are the workers', and the policy here samples in evaluations
    only.

    Args:
        engine: of this process (:func:`start_engine`), if there is one: it is the policy.
    """
    if engine is not None:
        return engine, EngineWeightSync(models.model, models.adapter, policy=engine, **config.engine.sync_options())
    policy = _model_policy(config, tokenizer, sampling, models)
    if config.collector != "ray":
        return policy, None
    merged = True if config.engine.owns_weights and not config.engine.serves_adapter(config) else None
    # An engine needs room for one token after a prompt.
    length = min(_PARITY_LENGTH, config.env.max_model_len - 1)
    return policy, RayWeightSync(models.model, models.adapter, policy=policy, merged=merged, parity_length=length)


def _model_policy(config: RunSettings, tokenizer: Any, sampling: SamplingConfig, models: ActorCritic) -> HFPolicy:
    """The model itself as policy, here and on workers, with one seed for all: noise goes by episode
    and turn too, so it does not matter which worker samples."""
    options: Any = {} if config.engine.owns_weights else vars(config.engine)
    return HFPolicy(models.model, tokenizer, sampling, adapter=models.adapter, seed=config.trainer.seed, **options)


def worker_options(
    config: RunSettings, make_env: Callable[[], GEMEnv], tokenizer: Any, sync: RayWeightSync
) -> dict[str, Any]:
    """What :class:`~torchrl_llm.collectors.RayTurnCollector` needs for its workers, which ``sync``
    sends the weights to."""
    resources = {"num_cpus": 1.0, "num_gpus": 0} | given_options(
        config, num_cpus="ray_worker_cpus", num_gpus="ray_worker_gpus"
    )
    return {
        "make_env": make_env,
        "make_policy": partial(_worker_policy, config, tokenizer, sync.policy.sampling, sync.lora),
        "num_workers": config.rollouts.num_collectors,
        "worker_options": resources,
        "weight_sync_schemes": {"policy": sync},
    }


def _worker_policy(
    config: RunSettings, tokenizer: Any, sampling: SamplingConfig, lora: LoraConfig | None
) -> TurnPolicy:
    """The policy of a worker; its weights come with its first task.

    Args:
        lora: the settings of the adapter that is sent; ``None``: whole models are sent.
    """
    # Ray shows what workers print: each would draw its bar into the output of the run.
    disable_progress_bar()
    if config.engine.owns_weights:
        return config.engine.make_policy(config, model_path(config), tokenizer, sampling, device=None)
    models = load_actor_critic(
        model_path(config),
        tokenizer=tokenizer,
        lora=lora,
        base_products=None if lora is None else config.model.base_products,
        sampling=sampling,
        # A worker only samples; float32 weights are for training.
        master_weights=False,
        device="cuda" if config.values().get("ray_worker_gpus") else "cpu",
        **given_options(config, *MODEL),
    )
    return _model_policy(config, tokenizer, sampling, models)


def make_collector(
    config: RunSettings,
    env: GEMEnv,
    policy: TurnPolicy,
    replay_buffer: ReplayBuffer,
    distributed: Distributed,
    estimator: Any,
    **workers: Any,
) -> EpisodeCollector:
    """The collector, which fills the replay buffer with this rank's share of
    ``config.rollouts.batch_size`` episodes an iteration.

    Args:
        estimator: of the loss, whose discount the continuations of ``branches`` have.
        workers: :func:`worker_options`, with ``collector="ray"``.
    """
    options = {"batch_size": _batch_share(config, distributed.world_size), "replay_buffer": replay_buffer, **workers}
    shown = None if config.rollouts.demonstrations is None else find_demonstrations(config.rollouts.demonstrations)
    if isinstance(shown, Path):
        episodes = read_demonstrations(shown, env, max_model_len=config.env.max_model_len, sampling=policy.sampling)
        return RecordedCollector(env, policy, episodes, seed=config.trainer.seed, **options)
    if shown is not None:
        check_player(shown, config, env)
        policy = PlayerPolicy(
            shown,
            env.formatter.tokenizer,
            env.formatter.answer,
            trained=policy,
            **given_options(config, "max_output_tokens", "min_output_tokens", "seed"),
        )
    options |= given_options(config, "max_faults")
    if config.env.adaptive_mixture:
        options["post_collect_hook"] = partial(adapt_mixture, env, gather=distributed.all_gather)
    if isinstance(config.rollouts, TurnRollouts):
        return TurnCollector(env, policy, **_continuations(config.rollouts, estimator), **options)
    if isinstance(config.rollouts, SelfPlayRollouts):
        return SelfPlayCollector(env, policy, **options)
    options |= given_options(config, "max_staleness", "step_timeout", num_threads="env_threads")
    return (RayTurnCollector if isinstance(config.rollouts, RayRollouts) else AsyncTurnCollector)(
        env, policy, **options
    )


def _continuations(rollouts: TurnRollouts, estimator: Any) -> dict[str, Any]:
    if rollouts.tree_branches:
        return {"trees": Trees(branches=rollouts.tree_branches, depth=rollouts.tree_depth)}
    if not rollouts.branches:
        return {}
    return {"branches": Branches(count=rollouts.branches, share=rollouts.branch_share, gamma=estimator.gamma)}


def make_objective(config: RunSettings, models: ActorCritic) -> TurnLoss:
    """The loss of ``config.algo`` with its value estimator; fields that are None keep the class's
    default."""
    return config.make_loss(models.actor, models.critic, models.joint)


def make_optimizer(config: RunSettings, models: ActorCritic, loss: TurnLoss | None = None) -> torch.optim.Optimizer:
    """AdamW with a parameter group for the actor and, if there are any, one for the critic and one
    for the parameters that ``loss`` has of its own.

    Raises:
        ConfigError: ``lr_loss`` is given, and it has none.
    """
    groups: list[dict[str, Any]] = [{"params": list(models.actor_parameters()), "lr": config.optim.lr_actor}]
    if models.critic is not None:
        lr = config.optim.lr_actor if config.optim.lr_critic is None else config.optim.lr_critic
        groups.append({"params": list(models.critic_parameters()), "lr": lr})
    if loss is not None and (own := own_parameters(loss)):
        lr = config.optim.lr_actor if config.optim.lr_loss is None else config.optim.lr_loss
        groups.append({"params": own, "lr": lr})
    elif config.optim.lr_loss is not None:
        raise ConfigError(
            f"lr_loss={config.optim.lr_loss} does nothing: the loss has no parameters of its own. Leave it out."
        )
    return torch.optim.AdamW(groups, **adamw_options(config))


def adamw_options(config: RunSettings) -> dict[str, Any]:
    """The options of AdamW that all parameter groups share."""
    return {"weight_decay": config.optim.weight_decay, "betas": (0.9, config.optim.adam_beta2)}


def make_replay_buffer(config: RunSettings) -> ReplayBuffer:
    """A buffer of one batch of rows. Batches differ in their longest row, hence no storage of fixed
    shape."""
    storage = LazyStackStorage(config.rollouts.batch_size)
    return ReplayBuffer(storage=storage, transform=TurnsToSequence(), batch_size=config.rollouts.batch_size)


def make_callbacks(config: RunSettings) -> dict[str, Callback]:
    """The callbacks that the settings name, by their names with dots.

    Raises:
        ConfigError: there is no such class, it is no ``Callback``, or does not take its arguments.
    """
    made = {}
    for name, arguments in config.output.callbacks.items():
        kind = find_class("callbacks", name, Callback)
        if not isinstance(arguments, Mapping | None):
            raise ConfigError(f"callbacks has {name}: {arguments!r}; expected a mapping of its arguments, or null.")
        made[name.replace(":", ".")] = make_named("callbacks", name, kind, **arguments or {})
    return made


def make_evaluator(
    config: RunSettings,
    policy: TurnPolicy,
    env: GEMEnv,
    distributed: Distributed,
    seen_tasks: SeenTasks,
    opponent: TurnPolicy | None = None,
) -> Callable[[], dict]:
    """A function that evaluates the policy during the run, and returns metrics."""
    options: dict[str, Any] = {"distributed": distributed, "seen_tasks": seen_tasks, "opponent": opponent}
    collect = partial(evaluate, env, policy, config.evaluation.evaluation_episodes, **options)

    def evaluator() -> dict[str, float]:
        metrics = collect().metrics("evaluation")
        if config.evaluation.evaluation_greedy:
            metrics |= collect(greedy=True).metrics("evaluation_greedy")
        return metrics

    return evaluator


def _batch_share(config: RunSettings, num_ranks: int) -> int:
    """The episodes of a batch that each rank collects."""
    if config.rollouts.batch_size % (num_ranks * config.rollouts.group_size):
        raise ConfigError(
            f"batch_size={config.rollouts.batch_size} counts the episodes of all {num_ranks} processes, and a group of "
            f"group_size={config.rollouts.group_size} is collected by one of them: make it a multiple of {num_ranks * config.rollouts.group_size}."
        )
    return config.rollouts.batch_size // num_ranks
