"""The parts of a run from its settings: a function each, from accelerate to the evaluator.

What they return is plain TorchRL; :func:`~torchrl_llm.trainers.build_run` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from peft import LoraConfig
from torchrl.data import LazyStackStorage, ReplayBuffer
from transformers import AutoConfig, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from torchrl_llm.collectors import AsyncTurnCollector, RayTurnCollector, TurnCollector, adapt_mixture
from torchrl_llm.collectors.async_turn import STEP_TIMEOUT
from torchrl_llm.data import TurnsToSequence
from torchrl_llm.envs import GEMEnv, SeenTasks
from torchrl_llm.envs.tasks import Stream
from torchrl_llm.modules import ActorCritic, HFPolicy, TurnPolicy, VLLMPolicy, load_actor_critic
from torchrl_llm.modules.policy import SamplingConfig
from torchrl_llm.objectives import TurnPolicyLoss
from torchrl_llm.stops import response_end_ids
from torchrl_llm.trainers.config import LOSSES, ConfigError, RunConfig
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.trainers.evaluation import evaluate
from torchrl_llm.trainers.precision import mixed_precision
from torchrl_llm.trainers.sources import model_path
from torchrl_llm.weight_update import EngineWeightSync, RayWeightSync

_CANARY_LENGTH = 257
"""Two blocks of 128 tokens, the largest of vLLM's prefix caches, and one."""

_MODEL = ("dtype", "attn_implementation", "trust_remote_code", "quantization")
"""Settings of the model wherever it is loaded by transformers: here and on workers."""

_ENGINE = (
    *("tensor_parallel_size", "gpu_memory_utilization", "kv_cache_memory_bytes", "enforce_eager", "prefix_caching"),
    "sleep_mode",
)
"""Settings that vLLM's engine has defaults for."""

_ENVIRONMENT = (
    *(
        "num_envs",
        "max_turns",
        "max_model_len",
        "max_output_tokens",
        "overflow",
        "system_prompt",
        "template",
        "history",
    ),
    *("chat_template_kwargs", "seed"),
)
"""Settings of every environment of a run."""


def _values(config: RunConfig, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def _given(config: RunConfig, *names: str, **renamed: str) -> dict[str, Any]:
    """The settings that are not ``None``, by the names that a part has for them; the part's own default stands for the rest.

    Args:
        names: settings that the part calls by the same name.
        renamed: the part's name for a setting, and the setting.
    """
    found = _values(config, *names) | {option: getattr(config, name) for option, name in renamed.items()}
    return {option: value for option, value in found.items() if value is not None}


class Workers(NamedTuple):
    """What makes the workers on Ray, and sends them the weights."""

    make_env: Callable[[], GEMEnv]
    make_policy: Callable[[], TurnPolicy]
    weight_sync: RayWeightSync


def make_workers(
    config: RunConfig,
    make_env: Callable[[], GEMEnv],
    tokenizer: Any,
    sampling: SamplingConfig,
    models: ActorCritic,
    weight_sync: RayWeightSync,
) -> Workers:
    """The parts of ``collector="ray"``: workers get merged weights, or the adapter of ``models`` alone."""
    lora = None if weight_sync.merged or models.adapter is None else models.model.peft_config[models.adapter]
    return Workers(make_env, partial(_worker_policy, config, tokenizer, sampling, lora), weight_sync)


def check_sharding(config: RunConfig, distributed: Distributed) -> None:
    """Refuse what weights that are shared out (FSDP2) do not go with."""
    instead = {
        "weight_sync": (config.weight_sync == "nccl", "another, or DDP"),
        "quantization": (config.quantization is not None, "None, or DDP"),
        "compile": (config.compile, "false, or DDP"),
        "export_merged": (config.export_merged, "false, and to merge the checkpoint's adapter in one process"),
    }
    for name, (refused, expected) in instead.items():
        if distributed.sharded and refused:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but the weights are shared out over {distributed.world_size} processes (FSDP2): "
                f"expected {expected}."
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
        device=device,
        **_values(config, *_MODEL, "gradient_checkpointing", "compile", "seed"),
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
) -> tuple[TurnPolicy, EngineWeightSync | RayWeightSync | None]:
    """The policy of this process, and the weight sync of engines that hold weights of their own.

    With ``collector="ray"`` those are the workers', and the policy here plays evaluations only.
    """
    if config.collector == "ray" or config.policy == "hf":
        policy = HFPolicy(models.model, tokenizer, sampling, adapter=models.adapter, seed=config.seed)
        return policy, _ray_sync(config, models, policy) if config.collector == "ray" else None
    engine = _make_engine(config, path, tokenizer, sampling)
    sync = EngineWeightSync(
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
    return RayWeightSync(models.model, models.adapter, policy=policy, merged=merged, parity_length=length)


def _serves_adapter(config: RunConfig) -> bool:
    """Whether the engine serves the adapter beside the base model."""
    # On CPUs vLLM generates faster with merged weights.
    on_gpu = bool(config.ray_worker_gpus) if config.collector == "ray" else torch.cuda.is_available()
    return config.lora_r > 0 and (config.weight_sync == "adapter" or (config.weight_sync is None and on_gpu))


def _make_engine(config: RunConfig, path: str, tokenizer: Any, sampling: SamplingConfig) -> VLLMPolicy:
    return VLLMPolicy(
        path,
        tokenizer,
        sampling,
        dtype=config.engine_dtype or config.dtype,
        max_num_seqs=config.num_envs,
        max_lora_rank=config.lora_r if _serves_adapter(config) else 0,
        multiprocess=bool(config.engine_process),
        **_values(config, "seed", "max_model_len", "trust_remote_code"),
        **_given(config, *_ENGINE),
    )


def _worker_policy(config: RunConfig, tokenizer: Any, sampling: SamplingConfig, lora: LoraConfig | None) -> TurnPolicy:
    """The policy of a worker; its weights come with its first task.

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
        master_weights=False,
        device="cuda" if config.ray_worker_gpus else "cpu",
        **_values(config, *_MODEL),
    )
    return HFPolicy(models.model, tokenizer, sampling, adapter=models.adapter, seed=config.seed)


def make_collector(
    config: RunConfig,
    env: GEMEnv,
    policy: TurnPolicy,
    replay_buffer: ReplayBuffer,
    distributed: Distributed,
    workers: Workers | None = None,
) -> TurnCollector | AsyncTurnCollector | RayTurnCollector:
    """The collector, which fills the replay buffer with this rank's share of ``config.batch_size`` episodes an iteration."""
    common: dict[str, Any] = {"batch_size": _share(config, distributed.world_size), "replay_buffer": replay_buffer}
    common |= _given(config, "max_faults")
    if config.adaptive_mixture:
        common["post_collect_hook"] = partial(adapt_mixture, env, gather=distributed.all_gather)
    if config.collector == "turn":
        return TurnCollector(env, policy, **common)
    common |= _given(config, "max_staleness", "step_timeout", num_threads="env_threads")
    if workers is None:
        return AsyncTurnCollector(env, policy, **common)
    return RayTurnCollector(
        env,
        policy,
        make_env=workers.make_env,
        make_policy=workers.make_policy,
        num_workers=config.ray_workers or 2,
        worker_options={
            "num_cpus": 1.0,
            "num_gpus": 0,
            **_given(config, num_cpus="ray_worker_cpus", num_gpus="ray_worker_gpus"),
        },
        weight_sync_schemes={"policy": workers.weight_sync},
        **common,
    )


def _reference(config: RunConfig) -> bool | Literal["adapter"]:
    """Which reference the KL has.

    With LoRA the frozen base model serves as the reference. A separate reference adapter is needed only if
    ``init_reference`` or ``refresh_reference`` is set.
    """
    if config.kl_coeff == 0:
        return False
    return "adapter" if config.lora_r and (config.init_reference or config.refresh_reference) else True


def make_objective(config: RunConfig, models: ActorCritic) -> TurnPolicyLoss:
    """The loss of ``config.algo`` with its value estimator; fields that are None keep the class's default."""
    loss_class: Any = LOSSES[config.algo]
    networks = (models.actor, models.critic) if config.algo == "LLMPPO" else (models.actor,)
    return loss_class(*networks, **config.loss_options())


def make_optimizer(config: RunConfig, models: ActorCritic) -> torch.optim.Optimizer:
    """AdamW with one parameter group for the actor and, if there is one, a second for the critic."""
    groups: list[dict[str, Any]] = [{"params": list(models.actor_parameters()), "lr": config.lr_actor}]
    if models.critic is not None:
        lr = config.lr_actor if config.lr_critic is None else config.lr_critic
        groups.append({"params": list(models.critic_parameters()), "lr": lr})
    return torch.optim.AdamW(groups, **adamw_options(config))


def adamw_options(config: RunConfig) -> dict[str, Any]:
    """The options of AdamW that all parameter groups share."""
    return {"weight_decay": config.weight_decay, "betas": (0.9, config.adam_beta2)}


def make_replay_buffer(config: RunConfig) -> ReplayBuffer:
    """A buffer of one batch of rows. Batches differ in their longest row, hence no storage of fixed shape."""
    storage = LazyStackStorage(config.batch_size)
    return ReplayBuffer(storage=storage, transform=TurnsToSequence(), batch_size=config.batch_size)


def make_environment(
    config: RunConfig,
    tokenizer: Any,
    make: Callable[..., GEMEnv],
    *,
    stream: Stream,
    group_size: int = 1,
    worker: int = 0,
    num_workers: int = 1,
) -> GEMEnv:
    """An environment of the run, made by ``make`` from the keyword arguments of :class:`~torchrl_llm.envs.GEMEnv`."""
    shared = {"worker": worker, "num_workers": num_workers} if num_workers > 1 else {}
    timeout = _step_timeout(config)
    return make(
        tokenizer=tokenizer,
        group_size=group_size,
        stream=stream,
        **shared,
        **_values(config, *_ENVIRONMENT),
        **_given(config, "max_faults", "success_reward", num_threads="env_threads"),
        **({} if timeout is None else {"step_timeout": timeout}),
    )


def _step_timeout(config: RunConfig) -> float | None:
    """Seconds that an environment may take for a step: evaluation allows what training allows."""
    if config.step_timeout is not None or config.collector == "turn" or config.env_threads == 0:
        return config.step_timeout
    return STEP_TIMEOUT


def make_evaluator(
    config: RunConfig, policy: TurnPolicy, env: GEMEnv, distributed: Distributed, seen_tasks: SeenTasks
) -> Callable[[], dict]:
    """Plays the evaluations during the run, and returns their metrics."""
    play = partial(evaluate, env, policy, config.evaluation_episodes, distributed=distributed, seen_tasks=seen_tasks)

    def evaluator() -> dict[str, float]:
        metrics = play().metrics("evaluation")
        if config.evaluation_greedy:
            metrics |= play(greedy=True).metrics("evaluation_greedy")
        return metrics

    return evaluator


def _share(config: RunConfig, num_ranks: int) -> int:
    """The conversations that each rank plays of a batch."""
    if config.batch_size % (num_ranks * config.group_size):
        raise ConfigError(
            f"batch_size={config.batch_size} counts the conversations of all {num_ranks} processes, and a group of "
            f"group_size={config.group_size} is played by one of them: make it a multiple of {num_ranks * config.group_size}."
        )
    return config.batch_size // num_ranks
