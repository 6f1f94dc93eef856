"""Which settings have no effect beside which others: :data:`IDLE`.

The rules of :class:`~torchrl_llm.runs.RunSettings`, which refuses a setting that is given where it
would be idle.
"""

from __future__ import annotations

from torchrl_llm.runs import settings
from torchrl_llm.runs.loss_settings import missing_in, only_of
from torchrl_llm.runs.settings import names_of
from torchrl_llm.trainers.config import TrainerConfig
from torchrl_llm.utils.options import Idle

IDLE: tuple[Idle, ...] = (
    *TrainerConfig.idle,
    Idle(
        (*only_of("LLMPPO"), "lr_critic", "critic_warmup", "critic_trunk", "init_critic"),
        {"algo": ("LLMREINFORCE", "GRPO", "SFT")},
        'set algo to "LLMPPO", which has a critic',
        {"critic_coeff": 0, "clip_value": 0},
    ),
    Idle(("critic_warmup",), {"critic_coeff": (0,)}, "give the critic's loss a weight"),
    Idle(("critic_warmup",), {"lr_critic": (0,)}, "give the critic a learning rate"),
    Idle(("critic_warmup",), {"lr_critic": (None,), "lr_actor": (0,)}, "give the critic a learning rate"),
    Idle(only_of("LLMREINFORCE"), {"algo": ("LLMPPO", "GRPO", "SFT")}, 'set algo to "LLMREINFORCE"'),
    Idle(missing_in("GRPO"), {"algo": ("GRPO", "SFT")}, 'set algo to "LLMPPO" or "LLMREINFORCE"'),
    Idle(missing_in("LLMPPO"), {"algo": ("LLMPPO",)}, 'set algo to "LLMREINFORCE" or "GRPO"'),
    Idle(
        missing_in("LLMREINFORCE"),
        {"algo": ("LLMREINFORCE",)},
        'set algo to "LLMPPO" or "GRPO"',
        {"whiten": False},
    ),
    Idle(only_of("GRPO"), {"algo": ("LLMPPO", "LLMREINFORCE", "SFT")}, 'set algo to "GRPO"'),
    Idle((*only_of("SFT"), "demonstrations"), {"algo": ("LLMPPO", "LLMREINFORCE", "GRPO")}, 'set algo to "SFT"'),
    Idle(
        (
            *(name for name in missing_in("SFT") if name not in missing_in("GRPO")),
            "old_log_probs",
            "target_kl",
            "kl_decay_fraction",
            "init_reference",
            "refresh_reference",
            "teacher",
        ),
        {"algo": ("SFT",)},
        "use an algorithm of reinforcement learning: supervised fine-tuning compares with no other policy",
        {"kl_coeff": 0, "whiten": False},
    ),
    Idle(("compile_decode",), {"policy": ("vllm",)}, 'set policy to "hf"'),
    Idle(("base_products",), {"lora_r": (0,)}, "set lora_r"),
    Idle(("base_products",), {"compile": (True,)}, "set compile to false"),
    Idle(("base_products",), {"mixed_precision": ("bf16", "fp16")}, 'set mixed_precision to "no"'),
    Idle(
        names_of(settings.EngineSettings),
        {"policy": ("hf",)},
        'set policy to "vllm"',
        {"sleep_mode": False, "engine_process": False, "offload_base": False},
    ),
    Idle(
        names_of(settings.RaySettings),
        {"collector": ("turn", "async", "self_play")},
        'set collector to "ray"',
        {"ray_worker_gpus": 0},
    ),
    Idle(
        ("max_staleness",),
        {"collector": ("turn", "self_play")},
        'set collector to "async" or "ray"',
        {"max_staleness": 0},
    ),
    Idle(("branches",), {"collector": ("async", "ray", "self_play")}, 'set collector to "turn"', {"branches": 0}),
    Idle(
        ("tree_branches",),
        {"collector": ("async", "ray", "self_play")},
        'set collector to "turn"',
        {"tree_branches": 0},
    ),
    Idle(("tree_depth",), {"tree_branches": (0,)}, "set tree_branches"),
    Idle(("branch_share",), {"branches": (0,)}, "set branches"),
    Idle(("opponent",), {"collector": ("turn", "async", "ray")}, 'set collector to "self_play"'),
    Idle(("env_threads", "step_timeout"), {"collector": ("self_play",)}, 'set collector to "turn" or "async"'),
    Idle(("init_reference", "init_critic", "merge_lora_configs"), {"init_from": (None,)}, "say what to start from"),
    Idle(("min_entropy_fraction",), {"entropy_target": (None,)}, "set entropy_target"),
    Idle(
        ("init_reference", "refresh_reference", "kl_decay_fraction", "teacher"),
        {"kl_coeff": (0,)},
        "give the KL a weight",
    ),
    Idle(("lora_alpha", "lora_targets", "merge_lora_configs"), {"lora_r": (0,)}, "give LoRA a rank"),
    Idle(("min_output_tokens",), {"stop_ids": ((), [])}, "name ids that end a response"),
    Idle(
        ("chat_template", "history", "chat_template_kwargs", "missing_thinking", "template_date"),
        {"template": ("raw",)},
        'set template to "chat"',
    ),
    Idle(("evaluation_greedy",), {"evaluation_interval": (0,)}, "set evaluation_interval to 1 or more"),
    Idle(("checkpoint_interval", "keep_checkpoints"), {"save_checkpoints": (False,)}, "save checkpoints"),
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
"""The rules, read from first to last."""
