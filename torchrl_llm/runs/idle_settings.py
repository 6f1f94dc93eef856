"""Which settings have no effect beside settings of other sections: :data:`IDLE`.

The rules of :class:`~torchrl_llm.runs.RunSettings`, which refuses a setting that is given where it
would be idle. Those about settings of one section are the section's.
"""

from __future__ import annotations

from torchrl_llm.utils.options import Idle

IDLE: tuple[Idle, ...] = (
    Idle(
        ("lr_critic", "critic_warmup", "critic_trunk", "init_critic"),
        {"algo": ("LLMREINFORCE", "GRPO", "SFT")},
        'set algo to "LLMPPO", which has a critic',
    ),
    Idle(("critic_warmup",), {"critic_coeff": (0,)}, "give the critic's loss a weight"),
    Idle(("critic_warmup",), {"lr_critic": (0,)}, "give the critic a learning rate"),
    Idle(("critic_warmup",), {"lr_critic": (None,), "lr_actor": (0,)}, "give the critic a learning rate"),
    Idle(("demonstrations",), {"algo": ("LLMPPO", "LLMREINFORCE", "GRPO")}, 'set algo to "SFT"'),
    Idle(
        ("old_log_probs", "target_kl", "kl_decay_fraction", "init_reference", "refresh_reference", "teacher"),
        {"algo": ("SFT",)},
        "use an algorithm of reinforcement learning: supervised fine-tuning compares with no other policy",
    ),
    Idle(("base_products",), {"lora_r": (0,)}, "set lora_r"),
    Idle(("min_entropy_fraction",), {"entropy_target": (None,)}, "set entropy_target"),
    Idle(
        ("init_reference", "refresh_reference", "kl_decay_fraction", "teacher"),
        {"kl_coeff": (0,)},
        "give the KL a weight",
    ),
    Idle(("min_output_tokens",), {"stop_ids": ((), [])}, "name ids that end a response"),
    Idle(("evaluation_greedy",), {"evaluation_interval": (0,)}, "set evaluation_interval to 1 or more"),
    Idle(("checkpoint_interval", "keep_checkpoints"), {"save_checkpoints": (False,)}, "save checkpoints"),
)
"""The rules, read from first to last."""
