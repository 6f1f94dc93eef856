"""Typed settings: :class:`TrainerConfig` for the loop, :class:`RunConfig` for a whole run.

Flat on purpose: a YAML file and the command line of ``examples/multiturn.py`` have exactly these names. Every field is
documented where it is declared; contradictions are errors at construction. Nothing here builds anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from torchrl_llm.modules.policy import SamplingConfig
from torchrl_llm.objectives import LLMGRPOLoss, LLMPPOLoss, LLMReinforceLoss, TurnPolicyLoss
from torchrl_llm.options import (
    Bound,
    Checked,
    ConfigError,
    Count,
    Idle,
    MinP,
    Natural,
    NonNegative,
    Positive,
    PositiveShare,
    Range,
    Ratio,
    Share,
    Temperature,
    check_options,
    nearest,
)

Algorithm = Literal["LLMPPO", "LLMREINFORCE", "GRPO"]
OldLogProbs = Literal["auto", "sampler", "scorer"]

HOW_TO_RUN = (
    "output_dir",
    "progress",
    "save_checkpoints",
    "keep_checkpoints",
    "export_merged",
    "resume",
    "resume_from",
    "accept_changes",
    "overwrite",
    "ray_workers",
    "ray_worker_cpus",
    "ray_worker_gpus",
)
"""Settings that change no number of a run: a resumed run may differ in them."""

SHARED = (
    "gamma",
    "keep_discount",
    "clip_advantage",
    "kl_coeff",
    "kl_in",
    "kl_kind",
    "clipping",
    "clip_epsilon",
    "dual_clip",
    "ratio_level",
    "ratio_reduction",
    "unit_weight",
    "weighting",
    "weight_constant",
    "entropy_coeff",
    "sampler_correction",
    "sampler_bounds",
    "sampler_level",
    "sampler_reduction",
)
"""The fields that go to every loss."""

PPO_ONLY = ("lmbda", "critic_coeff", "clip_value", "lr_critic", "granularity", "value_reduction", "whiten")
REINFORCE_ONLY = ("normalise_over",)
GRPO_ONLY = ("credit", "baseline", "scale")
VLLM_ONLY = (
    "engine_dtype",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "enforce_eager",
    "prefix_caching",
    "engine_process",
    "sleep_mode",
    "weight_sync",
)
RAY_ONLY = ("ray_workers", "ray_worker_cpus", "ray_worker_gpus")


FROM_THE_START = (
    "algo",
    "critic_trunk",
    "init_from",
    "init_reference",
    "init_critic",
    "merge_lora_configs",
    "lora_r",
    "lora_alpha",
    "lora_targets",
)
"""Settings of the weights that a run began with. A resumed run has those of its checkpoint, so they cannot be changed."""

LOSSES: dict[str, tuple[type[TurnPolicyLoss], tuple[str, ...]]] = {
    "LLMPPO": (LLMPPOLoss, tuple(name for name in PPO_ONLY if name != "lr_critic")),
    "LLMREINFORCE": (LLMReinforceLoss, REINFORCE_ONLY),
    "GRPO": (LLMGRPOLoss, GRPO_ONLY),
}
"""The loss of each algorithm, and the fields that go to it alone."""


def _kept_by_json(value: Any) -> bool:
    try:
        return repr(json.loads(json.dumps(value))) == repr(value)  # a tuple equals no list here, nor a number its text
    except (TypeError, ValueError):
        return False


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


@dataclass(kw_only=True)
class TrainerConfig(Checked):
    """What :class:`~torchrl_llm.trainers.LLMTrainer` itself reads.

    Attributes:
        epochs: passes over each batch.
        minibatch_size: conversations per optimizer step; None takes the whole batch in one step.
        max_tokens: tokens (padding included) of one forward and backward pass. It bounds memory and never changes the
            gradient.
        old_log_probs: what ratios are taken against: the "sampler"'s log-probs, or those that the "scorer" gives the tokens
            before the update (one more forward pass); "auto" takes the sampler's where they are the scorer's anyway.
        critic_warmup: iterations at the start in which only the critic learns, of a shared trunk its head alone (LLMPPO).
        dynamic_sampling: 0 is off; else learn only from groups that the estimator gives an advantage (GRPO: those that
            differ), and collect up to this many batches an iteration until there are enough of them.
        overlong_filter: leave conversations that a limit of length cut out of the update; credit still counts them.
        overlong_penalty: taken from the reward of a response that reaches max_output_tokens, less of it before; 0 is off.
        overlong_buffer: tokens before the limit over which that penalty grows; None takes the whole length.
        max_grad_norm: gradients are clipped to this 2-norm, actor and critic apart.
        schedule: the learning rates' course after the warm-up, over ``max_steps``.
        warmup_fraction: share of ``max_steps`` over which the learning rates rise from 0.
        min_lr_fraction: the cosine schedule ends at this share of the learning rate.
        max_steps: turns to play in training; the run ends with the iteration that reaches it.
        max_iterations: cap on iterations; None sets none.
        max_seconds: cap on wall-clock time, checked between iterations; None sets none.
        stop_at_success: end the run when the sampled evaluation's success rate reaches this; None never does.
        evaluation_interval: iterations between evaluations; 0 evaluates only before and after the run.
        checkpoint_interval: iterations between checkpoints; 0 saves only after the best evaluation and at the end.
        seed: of minibatch order (and, in :class:`RunConfig`, of everything else).
    """

    epochs: Count = 1
    minibatch_size: Count | None = None
    max_tokens: Count = 16_384
    old_log_probs: OldLogProbs = "auto"
    critic_warmup: Natural = 0
    dynamic_sampling: Natural = 0
    overlong_filter: bool = False
    overlong_penalty: NonNegative = 0.0
    overlong_buffer: Count | None = None
    max_grad_norm: Annotated[float, Range("(0, inf]")] = 1.0
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_fraction: Share = 0.0
    min_lr_fraction: Share = 0.0
    max_steps: Count = 100_000
    max_iterations: Count | None = None
    max_seconds: Positive | None = None
    stop_at_success: PositiveShare | None = None
    evaluation_interval: Natural = 10
    checkpoint_interval: Natural = 10
    seed: Natural = 0

    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(("overlong_buffer",), {"overlong_penalty": (0,)}, "set overlong_penalty"),
        Idle(("min_lr_fraction",), {"schedule": ("constant",)}, 'set schedule to "cosine"'),
        Idle(("schedule", "min_lr_fraction"), {"warmup_fraction": (1,)}, "let the warm-up end earlier"),
        Idle(("stop_at_success",), {"evaluation_interval": (0,)}, "set evaluation_interval to 1 or more"),
    )

    def __post_init__(self) -> None:
        _require(
            self.max_iterations is None or self.critic_warmup <= self.max_iterations,
            f"critic_warmup={self.critic_warmup} is more than max_iterations={self.max_iterations}: the policy would never "
            "learn. Lower the first or raise the second.",
        )


@dataclass(kw_only=True)
class RunConfig(TrainerConfig):
    """A whole run: model, environment, sampling, algorithm and loop, for :func:`~torchrl_llm.trainers.build_run`.

    Attributes:
        algo: the algorithm.
        model_path: a directory, or a model id of a hub, in transformers format. "tiny" is the small model that comes
            with the package.
        tokenizer_path: where the tokenizer is; None takes model_path.
        dtype: of the base weights; "auto" takes the checkpoint's. Adapters and heads are float32. Where all weights train
            (lora_r=0) they are kept in float32, and this is what training computes in.
        device: torch device of model and training, such as cpu; None lets accelerate choose. Another one than accelerate's
            choice is an error.
        mixed_precision: autocast of the training forward passes; None is that of dtype (the checkpoint's, if "auto") where
            all weights train, else "no".
        attn_implementation: as in transformers ("sdpa", "eager", "flash_attention_2"); None takes its default.
        trust_remote_code: run code that comes with the model.
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        compile: torch.compile the layers for scoring and training; generation is not compiled.
        quantization: "nf4" keeps the linear layers of the base in 4 bits (with LoRA and bitsandbytes).
        lora_r: rank of the LoRA adapters; 0 trains all weights, with 16 bytes of memory for each.
        lora_alpha: LoRA's scale is lora_alpha / lora_r; None takes 2 * lora_r.
        lora_targets: names of the linear modules that get adapters, as a list; or "all-linear", or a regular expression that
            matches whole module paths. Of a multimodal model those of its language model only.
        critic_trunk: the critic has a "separate" adapter (or copy of the model), or is a head on the "shared" trunk of the
            actor (LLMPPO).
        init_from: a checkpoint (or what ActorCritic.save_pretrained wrote) whose weights the run starts from.
        init_reference: with init_from, the reference of the KL is the checkpoint's actor, not the base model.
        init_critic: with init_from, the critic starts as the checkpoint's actor, with a fresh head.
        merge_lora_configs: with init_from, accept a checkpoint of other LoRA settings, by merging them.
        refresh_reference: make the reference what the actor is, every so many iterations; 0 never does.
        env_name: id of a GEM environment, or a list of ids (a mixture); a label where build_run is told what to play.
        env_weights: how often each environment of a mixture is dealt, relative to each other; None deals them in turn.
        adaptive_tasks: deal those environments of a mixture more often that are won about half of the time: env_weights count
            times p (1 - p) + 0.05 for a recent success rate p, which changes between batches.
        num_envs: environment slots played side by side, by each process and by each of its workers on Ray.
        max_turns: our own cap on turns (truncation); None leaves it to the environment.
        max_model_len: longest context in tokens, the last response included.
        overflow: what happens when it is full: "truncate" ends the conversation, "slide" drops its oldest turns.
        system_prompt: put before the first message; None adds none.
        template: "chat" for the tokenizer's chat template, "raw" for plain concatenation (base models).
        success_reward: an episode is a success if it terminates with at least this reward, and its environment does not say
            info["success"]; None takes 1.
        history: what to do with a template that renders earlier turns anew: "refuse" it, or "append", which keeps what was
            sampled and seen.
        chat_template_kwargs: passed to the chat template, such as enable_thinking.
        temperature: sampling temperature in training.
        top_k: keep the likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens of this mass; 1 keeps all.
        min_p: drop tokens less likely than this times the likeliest; 0 keeps all.
        repetition_penalty: 1 is off.
        min_output_tokens: responses cannot end earlier.
        max_output_tokens: responses are cut here.
        policy: who plays: "hf", the model itself, or "vllm", an engine that gets the weights after every update.
        engine_dtype: of the engine's weights; None takes dtype. This and the fields up to weight_sync are for policy="vllm";
            None takes the default of torchrl_llm.modules.load_engine.
        tensor_parallel_size: GPUs that share the engine's model.
        gpu_memory_utilization: the engine's share of the GPU's memory.
        kv_cache_memory_bytes: size of the engine's KV cache.
        enforce_eager: no graph capture in the engine.
        prefix_caching: the engine keeps the keys and values of earlier turns.
        engine_process: run the engine in a process of its own.
        sleep_mode: the engine gives its GPU memory to the trainer during updates.
        weight_sync: how weights get into the engine: "adapter", "reload", "shared_memory" or "nccl"; None takes the fastest
            that is correct.
        collector: "turn" plays each batch with a turn of all slots at a time; "async" lets no episode wait for another; "ray"
            does so on workers, of a Ray that is running.
        max_staleness: updates that the weights of a token may be behind those it trains; 0 is on-policy (not for
            collector="turn").
        ray_workers: how many workers play; None takes 2. This and the next two are for collector="ray".
        ray_worker_cpus: CPUs that each asks Ray for; None takes 1.
        ray_worker_gpus: GPUs that each asks Ray for, and plays on; None takes none.
        env_threads: threads that environments run in; None takes one a slot with a step_timeout or a collector other than
            "turn", else none.
        step_timeout: seconds that an environment may take for a step, in training and in evaluation; its episode is cut then.
            None takes 60 with a collector other than "turn" (and env_threads other than 0), else no limit.
        max_faults: episodes whose environment may fail in one batch, where their groups are dropped and others played; in
            one evaluation, where they count as not won; and in a row. None takes 16.
        batch_size: conversations per iteration, all groups and all processes together.
        group_size: conversations per task (GRPO's group); 1 for LLMPPO and LLMREINFORCE unless asked for.
        gamma: discount per turn. This and all fields below, up to the learning rates: None takes the default of the
            algorithm's loss or estimator.
        keep_discount: weigh turn k by gamma^k, as the gradient of the discounted return does.
        clip_advantage: bound on the absolute value of advantages.
        kl_coeff: weight of the KL to the reference model (AgileRL's beta); 0 needs no reference.
        kl_in: the KL in the "loss" or in the "reward".
        kl_kind: the KL in the loss: "k3" or "k2".
        clipping: "ppo", "cispo" (every token keeps its gradient), or "none".
        clip_epsilon: how far the ratio may move from 1, one number or [low, high].
        dual_clip: ratio beyond which a negative advantage has no gradient either ("ppo").
        ratio_level: importance ratio per "token", "turn" or "sequence".
        ratio_reduction: a unit's log-ratio is the "sum" of its tokens' or their "mean".
        unit_weight: a unit counts "by_tokens", or all units are "equal".
        weighting: what counts equally in the loss: "token", "turn", "sequence", or "constant".
        weight_constant: tokens per conversation of weighting="constant".
        entropy_coeff: weight of the entropy bonus.
        sampler_correction: for samplers whose log-probs are not the trainer's: "truncate", "mask" or "reject". None takes
            none, but with max_staleness "truncate".
        sampler_bounds: its cap ("truncate"), or [low, high]; None takes 2 where max_staleness asks for the correction.
        sampler_level: what has one such weight: "token", "turn" or "sequence".
        sampler_reduction: a unit's weight is that of the "sum" or of the "mean" of its tokens' log-ratios.
        lmbda: lambda of the turn-level GAE (LLMPPO).
        critic_coeff: weight of the critic's term (LLMPPO).
        clip_value: how far a value may move from the old one; 0 sets no bound (LLMPPO).
        granularity: credit per "turn" or per "token" (LLMPPO).
        value_reduction: the value of a turn: "first" (unbiased), "mean" or "last" (LLMPPO).
        whiten: whiten the advantages over the batch (LLMPPO).
        normalise_over: normalise returns over the "batch", or "none" (LLMREINFORCE).
        credit: compare the returns of the "episode", or those from each "turn" on (GRPO).
        baseline: the group's "mean", or "leave_one_out" (GRPO; with scale="none").
        scale: divide by the group's "std", or "none" (GRPO).
        lr_actor: learning rate of the policy.
        lr_critic: learning rate of the critic (LLMPPO); None takes lr_actor.
        weight_decay: AdamW's.
        adam_beta2: AdamW's second moment decay.
        evaluation_episodes: conversations per evaluation, the same held-out tasks each time.
        evaluation_greedy: evaluate greedy decoding too, each task once.
        final_episodes: conversations of the evaluations before and after the run, on tickets used for nothing else.
        output_dir: where metrics, checkpoints and the report go.
        save_checkpoints: write checkpoints to output_dir/checkpoints: the newest, and the best by evaluation.
        keep_checkpoints: how many of the newest are kept.
        export_merged: write the trained actor as one whole model to output_dir/merged at the end.
        resume: go on from the newest checkpoint in output_dir, in the same bytes as if the run had never stopped; from the
            start if there is none.
        resume_from: the checkpoint to go on from, instead of the newest; newer ones are moved aside.
        accept_changes: names of settings that may differ from those of the checkpoint, and take effect from there; any other
            change is an error, and those of the weights themselves (algo, critic_trunk, init_*, lora_*) cannot be accepted.
        overwrite: start anew in an output_dir that holds a run already; it is moved aside, and deleted when the new run has a
            whole checkpoint.
        tensorboard: log to TensorBoard too.
        wandb: log to Weights & Biases too.
        wandb_project: its project.
        progress: show a progress bar.
    """

    algo: Algorithm = "LLMPPO"
    # model
    model_path: str = "Qwen/Qwen2.5-0.5B-Instruct"
    tokenizer_path: str | None = None
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    compile: bool = False
    quantization: Literal["nf4"] | None = None
    lora_r: Annotated[int, Range("[0, inf)", "0 trains all weights")] = 16
    lora_alpha: Count | None = None
    lora_targets: list[str] | str = "all-linear"
    critic_trunk: Literal["separate", "shared"] = "separate"
    init_from: Path | None = None
    init_reference: bool = False
    init_critic: bool = False
    merge_lora_configs: bool = False
    refresh_reference: Natural = 0
    # environment
    env_name: str | list[str] = "game:GuessTheNumber-v0-easy"
    env_weights: list[Positive] | None = None
    adaptive_tasks: bool = False
    num_envs: Count = 16
    max_turns: Count | None = None
    max_model_len: Count = 1024
    overflow: Literal["truncate", "slide"] = "truncate"
    success_reward: float | None = None
    system_prompt: str | None = None
    template: Literal["chat", "raw"] = "chat"
    history: Literal["refuse", "append"] = "refuse"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # sampling
    temperature: Temperature = 1.0
    top_k: Natural = 0
    top_p: PositiveShare = 1.0
    min_p: MinP = 0.0
    repetition_penalty: Positive = 1.0
    min_output_tokens: Natural = 0
    max_output_tokens: Count = 64
    # rollout
    policy: Literal["hf", "vllm"] = "hf"
    engine_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    tensor_parallel_size: Count | None = None
    gpu_memory_utilization: PositiveShare | None = None
    kv_cache_memory_bytes: Count | None = None
    enforce_eager: bool | None = None
    prefix_caching: bool | None = None
    engine_process: bool | None = None
    sleep_mode: bool | None = None
    weight_sync: Literal["adapter", "reload", "shared_memory", "nccl"] | None = None
    collector: Literal["turn", "async", "ray"] = "turn"
    max_staleness: Natural | None = None
    ray_workers: Count | None = None
    ray_worker_cpus: NonNegative | None = None
    ray_worker_gpus: NonNegative | None = None
    env_threads: Natural | None = None
    step_timeout: Positive | None = None
    max_faults: Natural | None = None
    # algorithm
    batch_size: Count = 32
    group_size: Count = 1
    gamma: Share | None = None
    keep_discount: bool | None = None
    clip_advantage: Positive | None = None
    kl_coeff: NonNegative | None = None
    kl_in: Literal["loss", "reward"] | None = None
    kl_kind: Literal["k2", "k3"] | None = None
    clipping: Literal["ppo", "cispo", "none"] | None = None
    clip_epsilon: NonNegative | tuple[NonNegative, NonNegative] | None = None
    dual_clip: Ratio | None = None
    ratio_level: Literal["token", "turn", "sequence"] | None = None
    ratio_reduction: Literal["sum", "mean"] | None = None
    unit_weight: Literal["by_tokens", "equal"] | None = None
    weighting: Literal["token", "turn", "sequence", "constant"] | None = None
    weight_constant: Positive | None = None
    entropy_coeff: NonNegative | None = None
    sampler_correction: Literal["truncate", "mask", "reject"] | None = None
    sampler_bounds: Bound | tuple[Bound, Bound] | None = None
    sampler_level: Literal["token", "turn", "sequence"] | None = None
    sampler_reduction: Literal["sum", "mean"] | None = None
    lmbda: Share | None = None
    critic_coeff: NonNegative | None = None
    clip_value: NonNegative | None = None
    granularity: Literal["turn", "token"] | None = None
    value_reduction: Literal["first", "mean", "last"] | None = None
    whiten: bool | None = None
    normalise_over: Literal["batch", "none"] | None = None
    credit: Literal["episode", "turn"] | None = None
    baseline: Literal["mean", "leave_one_out"] | None = None
    scale: Literal["std", "none"] | None = None
    # optimisation
    lr_actor: NonNegative = 5e-6
    lr_critic: NonNegative | None = None
    weight_decay: NonNegative = 0.0
    adam_beta2: Annotated[float, Range("[0, 1)")] = 0.999
    # run
    evaluation_episodes: Count = 256
    evaluation_greedy: bool = False
    final_episodes: Count = 512
    output_dir: Path = Path("runs/multiturn")
    save_checkpoints: bool = True
    keep_checkpoints: Count = 2
    export_merged: bool = False
    resume: bool = False
    resume_from: Path | None = None
    accept_changes: list[str] = field(default_factory=list)
    overwrite: bool = False
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "torchrl_llm"
    progress: bool = True

    idle: ClassVar[tuple[Idle, ...]] = (
        *TrainerConfig.idle,
        Idle(
            (*PPO_ONLY, "critic_warmup", "critic_trunk", "init_critic"),
            {"algo": ("LLMREINFORCE", "GRPO")},
            'set algo to "LLMPPO", which has a critic',
            {"whiten": False, "critic_coeff": 0, "clip_value": 0},
        ),
        Idle(("critic_warmup",), {"critic_coeff": (0,)}, "give the critic's loss a weight"),
        Idle(("critic_warmup",), {"lr_critic": (0,)}, "give the critic a learning rate"),
        Idle(("critic_warmup",), {"lr_critic": (None,), "lr_actor": (0,)}, "give the critic a learning rate"),
        Idle(REINFORCE_ONLY, {"algo": ("LLMPPO", "GRPO")}, 'set algo to "LLMREINFORCE"'),
        Idle(GRPO_ONLY, {"algo": ("LLMPPO", "LLMREINFORCE")}, 'set algo to "GRPO"'),
        Idle(VLLM_ONLY, {"policy": ("hf",)}, 'set policy to "vllm"', {"sleep_mode": False, "engine_process": False}),
        Idle(RAY_ONLY, {"collector": ("turn", "async")}, 'set collector to "ray"', {"ray_worker_gpus": 0}),
        Idle(("max_staleness",), {"collector": ("turn",)}, 'set collector to "async" or "ray"', {"max_staleness": 0}),
        Idle(("init_reference", "init_critic", "merge_lora_configs"), {"init_from": (None,)}, "say what to start from"),
        Idle(("init_reference", "refresh_reference"), {"kl_coeff": (0,)}, "give the KL a weight"),
        Idle(("lora_alpha", "lora_targets", "merge_lora_configs"), {"lora_r": (0,)}, "give LoRA a rank"),
        Idle(("history", "chat_template_kwargs"), {"template": ("raw",)}, 'set template to "chat"'),
        Idle(("evaluation_greedy",), {"evaluation_interval": (0,)}, "set evaluation_interval to 1 or more"),
        Idle(("checkpoint_interval", "keep_checkpoints"), {"save_checkpoints": (False,)}, "save checkpoints"),
        Idle(("accept_changes",), {"resume": (False,), "resume_from": (None,)}, "set resume"),
        Idle(("wandb_project",), {"wandb": (False,)}, "set wandb"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.output_dir = Path(self.output_dir).expanduser()
        self.init_from = None if self.init_from is None else Path(self.init_from).expanduser()
        for name in ("clip_epsilon", "sampler_bounds"):
            if isinstance(value := getattr(self, name), list):
                setattr(self, name, tuple(value))
        if self.resume_from is not None:
            self.resume, self.resume_from = True, Path(self.resume_from).expanduser()
        _require(not (self.resume and self.overwrite), "resume goes on and overwrite starts anew: give one of them.")
        _require(
            _kept_by_json(self.chat_template_kwargs),
            f"chat_template_kwargs is {self.chat_template_kwargs!r}; expected text keys, and values that JSON has (lists, not tuples), "
            "because checkpoints keep the settings.",
        )
        self.sampling()  # raises what SamplingConfig says of its fields
        check_options(LOSSES[self.algo][0], self.loss_options())
        self._check_accepted()
        self._check_groups()
        self._check_lengths()
        self._check_rollout()
        self._check_ray()
        self._check_model()

    def _check_accepted(self) -> None:
        names = list(vars(self))
        for name in self.accept_changes:
            _require(name in names, f"accept_changes names {name}: no such setting.{nearest(name, names)}")
        fixed = [name for name in self.accept_changes if name in FROM_THE_START]
        _require(
            not fixed,
            f"accept_changes names {', '.join(fixed)}, but a resumed run has the weights that its checkpoint began with: leave "
            "out what changes them, or start another run with init_from.",
        )

    def _check_groups(self) -> None:
        group = self.group_size
        for name in ("batch_size", "num_envs"):
            value = getattr(self, name)
            _require(
                value % group == 0,
                f"{name}={value} is not a multiple of group_size={group}: a group must not be cut. "
                f"Use a multiple of {group}.",
            )
        _require(
            not self.dynamic_sampling or group >= 2,
            f"dynamic_sampling compares the conversations of one task: group_size={group}, expected at least 2.",
        )
        _require(
            self.minibatch_size is None or self.batch_size % self.minibatch_size == 0,
            f"minibatch_size={self.minibatch_size} does not divide batch_size={self.batch_size}: "
            "optimizer steps would differ in size.",
        )
        _require(
            self.algo != "GRPO" or group >= 2,
            f"GRPO compares the conversations of one task: group_size={group}, expected at least 2.",
        )

    def _check_lengths(self) -> None:
        _require(
            self.max_output_tokens < self.max_model_len,
            f"max_output_tokens={self.max_output_tokens} leaves no room for a prompt in "
            f"max_model_len={self.max_model_len}: lower the first or raise the second.",
        )
        _require(
            self.overlong_buffer is None or self.overlong_buffer <= self.max_output_tokens,
            f"overlong_buffer={self.overlong_buffer} is more than a response has, max_output_tokens="
            f"{self.max_output_tokens}: lower the first or raise the second.",
        )

    def _check_rollout(self) -> None:
        _require(
            self.step_timeout is None or self.env_threads != 0,
            f"step_timeout={self.step_timeout} with env_threads=0: what runs in the main thread cannot be left. Give it a "
            "thread, or leave env_threads out.",
        )
        stale = self.max_staleness or 0
        _require(
            stale == 0 or self.old_log_probs != "sampler",
            f'max_staleness={stale} with old_log_probs="sampler": the sampler may have had older weights. Use "auto".',
        )
        _require(
            stale == 0 or not self.adaptive_tasks,
            f"adaptive_tasks changes between batches what is dealt, and max_staleness={stale} leaves none between them: "
            "choose one.",
        )
        _require(
            stale == 0 or not self.sleep_mode,
            f"max_staleness={stale} plays on during updates, and sleep_mode stops the engine for them: choose one.",
        )
        _require(
            self.weight_sync != "adapter" or self.lora_r > 0,
            "weight_sync='adapter' sends an adapter, and lora_r=0 has none: leave it out.",
        )

    def _check_ray(self) -> None:
        if self.collector != "ray":
            return
        _require(
            not self.sleep_mode,
            "sleep_mode shares a GPU between trainer and engine, and the engines of collector='ray' have their own: leave it out.",
        )
        _require(
            self.weight_sync in (None, "adapter"),
            f"weight_sync={self.weight_sync!r} needs the engine at hand, and those of collector='ray' are elsewhere: leave it "
            "out.",
        )

    def _check_model(self) -> None:
        _require(
            not (self.compile and self.gradient_checkpointing),
            "compile and gradient_checkpointing exclude each other: choose one.",
        )
        _require(
            self.quantization is None or self.lora_r > 0,
            f"quantization={self.quantization!r} is for LoRA: lora_r=0 would train the weights that it rounds.",
        )
        # PEFT reads a string as a regular expression of whole module paths, which a bare name never matches.
        bare = isinstance(self.lora_targets, str) and self.lora_targets.isidentifier()
        _require(
            not bare,
            f"lora_targets is {self.lora_targets!r}; expected a list of names, [{self.lora_targets}], a regular expression "
            'that matches whole module paths, or "all-linear".',
        )

    def loss_options(self, loss_class: type[TurnPolicyLoss] | None = None) -> dict[str, Any]:
        """The keyword arguments of the algorithm's loss; fields that are ``None`` are left to its class.

        Args:
            loss_class: what they are for, if not the stock loss: a subclass of it.

        Returns:
            Names and values, with which ``loss_class(models.actor, **options)`` is made (LLMPPO: ``models.critic`` follows
            the actor).

        Raises:
            ConfigError: ``loss_class`` is the loss of another algorithm, whose settings these are not.

        Examples:
            >>> RunConfig(algo="GRPO", group_size=4, kl_coeff=0.0).loss_options()
            {'kl_coeff': 0.0, 'group_size': 4}
        """
        stock, own = LOSSES[self.algo]
        if loss_class is not None and not issubclass(loss_class, stock):
            raise ConfigError(
                f"The settings of algo={self.algo!r} are those of {stock.__name__}, which {loss_class.__name__} is no subclass "
                "of: choose the algorithm that it is one of, or make it from fields of the config by hand."
            )
        options = {name: getattr(self, name) for name in (*SHARED, *own) if getattr(self, name) is not None}
        if self.max_staleness and self.sampler_correction is None:
            options = {"sampler_correction": "truncate", "sampler_bounds": 2.0} | options
        if self.algo == "GRPO":
            options["group_size"] = self.group_size
        if options.get("clip_value") == 0:
            options["clip_value"] = None
        return options

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON has them: paths as text, tuples as lists."""
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    def sampling(self) -> SamplingConfig:
        """The sampling settings of training."""
        return SamplingConfig(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_output_tokens=self.min_output_tokens,
            max_output_tokens=self.max_output_tokens,
        )
