"""What fits on cards of 24 and 80 GB and on a node of eight, by the library's estimate of memory:
the table of docs/gpu.md.

    python -m benchmarks.gpu.fits

Nothing of it was measured on a GPU, and none is needed.
"""

import json
import tempfile
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.place import SHAPES
from torchrl_llm.runs import RunSettings
from torchrl_llm.runs.memory import OF_UPDATES, TAKEN, default_max_tokens, empty_model, engine_contexts, memory_estimate

CARDS = {"24 GB": 23.5, "80 GB": 79.1, "8 of 80 GB": 79.1}
"""GiB of each card that PyTorch finds: of an RTX 4090 and an H100."""

_TABLE: dict[str, Any] = {
    "algo": "GRPO", "group_size": 8, "batch_size": 64, "max_model_len": 4_096, "policy": "vllm", "target_kl": 0.01
}  # fmt: skip
"""Settings of all cases."""

_LESS: dict[str, Any] = {"gradient_checkpointing": True}
_FULL: dict[str, Any] = {"lora_r": 0, "kl_coeff": 0.0, **_LESS}


def asleep(share: float) -> dict[str, Any]:
    """Settings of an engine with a share of the card that sleeps during updates."""
    return {"sleep_mode": True, "gpu_memory_utilization": share}


class Case(NamedTuple):
    """A card, a model, settings beside the settings of all cases, and processes that share the
    weights (FSDP2)."""

    card: str
    model: str
    settings: dict[str, Any]
    shards: int = 1


CASES = (
    Case("24 GB", "Qwen2.5-0.5B", {}),
    Case("24 GB", "Qwen2.5-0.5B", _FULL),
    Case("24 GB", "Qwen2.5-1.5B", {}),
    Case("24 GB", "Qwen2.5-1.5B", _LESS),
    Case("24 GB", "Qwen2.5-1.5B", _LESS | asleep(0.7)),
    Case("24 GB", "Qwen2.5-7B", _LESS | asleep(0.7)),
    Case("24 GB", "Qwen2.5-7B", _LESS | asleep(0.75) | {"quantization": "nf4"}),
    Case("80 GB", "Qwen2.5-1.5B", {}),
    Case("80 GB", "Qwen2.5-1.5B", _FULL),
    Case("80 GB", "Qwen2.5-7B", {}),
    Case("80 GB", "Qwen2.5-7B", _LESS),
    Case("80 GB", "Qwen2.5-7B", _LESS | asleep(0.7)),
    Case("8 of 80 GB", "Qwen2.5-7B", _LESS),
    Case("8 of 80 GB", "Qwen2.5-7B", _FULL | asleep(0.4), shards=8),
    Case("8 of 80 GB", "Qwen2.5-7B", _FULL | {"collector": "ray"}, shards=4),
    Case("8 of 80 GB", "Qwen2.5-7B", _FULL | {"collector": "ray", "target_kl": None, "max_tokens": 8_192}, shards=4),
)


class Estimate(NamedTuple):
    """GiB of one card, ``max_tokens``, and how many contexts of ``max_model_len`` the engine can
    hold."""

    tokens: int
    engine: float
    contexts: int
    weights: float
    working: float
    update: float
    sync: float


def shaped(model: str, **settings: Any) -> tuple[RunSettings, Any]:
    """The settings of a case, and its model without weights."""
    with tempfile.TemporaryDirectory() as folder:
        SHAPES[model](architectures=["Qwen2ForCausalLM"], dtype="bfloat16").save_pretrained(folder)
        config = RunSettings.from_values(model_path=folder, **_TABLE | settings)
        return config, empty_model(config)


def estimate(case: Case) -> Estimate:
    """What a case takes on each card."""
    total, cuda = CARDS[case.card], torch.device("cuda")
    config, model = shaped(case.model, **case.settings)
    engine = 0.0 if config.collector == "ray" else total * config.engine.share(config, cuda)
    beside = 0.0 if config.engine.sleeps else engine
    there: dict[str, Any] = {"shards": case.shards, "device": cuda}
    tokens = config.trainer.max_tokens or default_max_tokens(config, model, **there, card=int(total * 2**30))
    parts = memory_estimate(config.replace(max_tokens=tokens), model, **there)
    working = (parts["activations"] + parts["logits"]) / 2**30
    weights = sum(parts.values()) / 2**30 - working
    contexts = engine_contexts(config, model, int(engine * 2**30))
    stays = sum(size for name, size in parts.items() if name not in OF_UPDATES) / 2**30
    return Estimate(tokens, engine, contexts, weights, working, beside + weights + working, engine + stays)


def fits(case: Case, found: Estimate) -> bool:
    """Whether a case leaves a part of the card free, and its engine holds a context."""
    enough = max(found.update, found.sync) <= TAKEN * CARDS[case.card]
    return enough and bool(found.contexts or not found.engine)


def row(case: Case) -> list[str]:
    """The cells of a case."""
    found = estimate(case)
    shown = [f"`{name}: {json.dumps(value).strip(chr(34))}`" for name, value in case.settings.items()]
    sharded = [f"FSDP2, {case.shards} processes"] if case.shards > 1 else []
    engine = f"{found.engine:.1f}, {found.contexts} contexts" if found.engine else "on other cards"
    sizes = [f"{size:.1f}" for size in (found.weights, found.working, found.update, found.sync)]
    settings = ", ".join(sharded + shown) or "the table's"
    return [
        case.card,
        case.model[8:],
        settings,
        f"{found.tokens:,}",
        engine,
        *sizes,
        "yes" if fits(case, found) else "**no**",
    ]


def table() -> str:
    """The table as Markdown."""
    head = ["card", "model", "settings", "`max_tokens`", "engine", "weights", "activations, logits"]
    head += ["update", "weight sync", "fits"]
    lines = [head, ["---"] * len(head), *map(row, CASES)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return text.replace("| --- ", "|---").replace("|--- |", "|---|").replace("--- |", "---|")


if __name__ == "__main__":
    print(table())
