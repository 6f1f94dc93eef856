"""What a run takes in memory, estimated from its settings and the shapes of its model
(:func:`memory_estimate`), and the ``max_tokens`` of a run that gives none
(:func:`with_max_tokens`).
"""

from __future__ import annotations

import copy
import logging
import platform
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from torchrl_llm.modules.checks import FAILURES
from torchrl_llm.modules.hf._head import packs_head
from torchrl_llm.modules.lm import embedding_of
from torchrl_llm.modules.prefixes import forward_bound
from torchrl_llm.modules.scorer import default_chunk_logits
from torchrl_llm.runs.build import has_own_reference, make_lora
from torchrl_llm.runs.config import RunSettings
from torchrl_llm.runs.device import mixed_precision
from torchrl_llm.runs.sources import model_path
from torchrl_llm.runs.teacher import find_teacher
from torchrl_llm.trainers.config import MOST_TOKENS
from torchrl_llm.trainers.distributed import Distributed
from torchrl_llm.utils.host import free_memory, host_memory
from torchrl_llm.utils.options import ConfigError

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")

_TRAINED = 16
"""Bytes of a trained weight: the weight, its gradient and AdamW's two moments, in float32."""

_START = "weights before the step"
"""The copy of the actor's trained weights from which ``target_kl`` shortens steps, in float32."""

OF_UPDATES = ("activations", "logits", _START)
"""The parts of :func:`memory_estimate` that are freed where an update ends; the others stay while
an engine samples."""

_NF4 = 0.55
"""Bytes of a weight of the base in 4 bits, with its scales."""

_ROW = 29
"""Bytes of a token of the batch."""

_LOGIT = 12
"""Bytes of a logit of the chunk that a scorer works on, at the peak of its backward: log-probs,
probabilities and gradient in float32 (measured for a head in float32 and in bfloat16)."""

_HALF = 2
"""Bytes of a number in half precision."""

# Numbers that the backward of a layer keeps for each token, in multiples of the hidden size and of
# the width of the MLP: inputs, queries, keys, values and outputs; the two projections, their
# activation and its product. For the models of docs/memory.md this is within a tenth of what was
# measured with LoRA.
_HIDDEN, _WIDTH = 8, 4

# In half precision without autocast PEFT casts the inputs of adapters (queries, keys, values,
# outputs, the three projections of the MLP) to float32, and the backward keeps the casts, and two
# inputs less in half precision. With LoRA on all linear layers in the shapes of Qwen2.5-0.5B a
# layer kept 82,048 bytes a token; this makes 82,688 of it.
_CAST_HIDDEN, _CAST_WIDTH = 6, 1

_ROOM, _ROOM_SHARE = 4 * 2**30, 0.25
"""Bytes that the activations of a micro-batch may take on the host where ``max_tokens`` is not
given, and their share of a GPU's memory. More tokens are hardly faster on a CPU. A GPU waits for
the next launch where tokens are few: an update of Qwen2.5-0.5B took an H100 3.7 s at 4,096, 1.6 s
at 16,384 (docs/results/gpu.md). There PyTorch's allocator held half as much again as was in use,
and an engine beside it takes 0.4 of the card."""

TAKEN = 0.95
"""Share of a GPU's memory that a run may take: CUDA itself and fragments take the rest."""


def empty_model(config: RunSettings) -> Any:
    """The run's model without weights: its shapes, on PyTorch's meta device."""
    options: dict[str, Any] = {"trust_remote_code": config.model.trust_remote_code}
    model_config = AutoConfig.from_pretrained(model_path(config), **options)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config, **options)


def memory_estimate(config: RunSettings, model: Any, *, shards: int = 1, device: torch.device = _CPU) -> dict[str, int]:
    """Bytes by part, at the peak of an update of one process. An estimate: allocators keep more
    than is in use.

    Args:
        config: the settings; ``max_tokens=None`` counts as 16,384. For long rows a forward may have
            more tokens (:func:`torchrl_llm.modules.prefixes.forward_bound`).
        model: :func:`empty_model`.
        shards: processes that share the weights (FSDP2). Each gathers all of them for rollouts and
            scores.
        device: of model and training, by whose kind autocast and the size of chunks are chosen;
            default the CPU.

    Raises:
        ConfigError: the model's configuration does not say how large its layers are; or there is no
            such ``teacher``.

    Examples:
        >>> config = RunSettings.from_values(model_path="tiny", lora_r=0, kl_coeff=0.0, algo="LLMREINFORCE")
        >>> model = empty_model(config)
        >>> memory_estimate(config, model)["trained weights"] == 16 * model.num_parameters()
        True
    """
    kept = _kept(config, model, shards, device)
    tokens = forward_bound(config.trainer.micro_batch_tokens, config.env.max_model_len)
    return {**kept, **_activations(config, model, tokens, device)}


def default_max_tokens(
    config: RunSettings, model: Any, *, shards: int = 1, device: torch.device = _CPU, card: int | None = None
) -> int:
    """The ``max_tokens`` of a run that gives none: of the shapes of its model, its settings and the
    device.

    It depends neither on the memory of the host nor on what is free, so that a run is the same on
    each machine with such a device.

    Args:
        config: the settings.
        model: :func:`empty_model`.
        shards, device: see :func:`memory_estimate`.
        card: bytes of a GPU's memory; ``None``: those of ``device``. On a CPU not read.

    Returns:
        The largest power of two up to 16,384 whose activations are estimated to take at most 4 GiB
        on a CPU; on a GPU a quarter of its memory, and with which the run is estimated to fit. At
        least ``config.env.max_model_len`` (but no more than 16,384), because a row is not cut.

    Raises:
        ConfigError: as :func:`memory_estimate`.

    Examples:
        >>> config = RunSettings.from_values(model_path="tiny", lora_r=0)
        >>> default_max_tokens(config, empty_model(config))
        16384
    """
    room, limit = float(_ROOM), float("inf")
    if device.type == "cuda":
        total = card or torch.cuda.get_device_properties(device).total_memory
        engine = 0 if config.engine.sleeps else config.engine.memory(config, device, total)
        room, limit = _ROOM_SHARE * total, TAKEN * total - engine
    kept = sum(_kept(config, model, shards, device).values())

    def fits(tokens: int) -> bool:
        parts = _activations(config, model, tokens, device)
        return parts["activations"] <= room and kept + sum(parts.values()) <= limit

    least, tokens = min(config.env.max_model_len, MOST_TOKENS), MOST_TOKENS
    while tokens > least and not fits(tokens):
        tokens //= 2
    return max(tokens, least)


def what_to_lower(
    config: RunSettings, model: Any, memory: int, *, shards: int = 1, device: torch.device = _CPU
) -> str | None:
    """What to change in settings that are estimated to take more than ``memory`` bytes; ``None``:
    they do not.

    Args:
        config: the settings, with a number of ``max_tokens``.
        model, shards, device: see :func:`memory_estimate`.

    Raises:
        ConfigError: as :func:`memory_estimate`.

    Examples:
        >>> config = RunSettings.from_values(model_path="tiny", lora_r=0, max_tokens=16_384, max_model_len=256)
        >>> model = empty_model(config)
        >>> [what_to_lower(config, model, memory) for memory in (2**34, 2**28)]
        [None, 'give max_tokens=8192']
        >>> what_to_lower(config, model, 2**20)
        'lower max_model_len or num_envs, or set gradient_checkpointing or lora_r'
    """
    tokens = config.trainer.micro_batch_tokens

    def fits(tokens: int) -> bool:
        parts = memory_estimate(config.replace(max_tokens=tokens), model, shards=shards, device=device)
        return sum(parts.values()) <= memory

    if fits(tokens):
        return None
    powers = [2**power for power in range(tokens.bit_length() - 1, -1, -1)]
    # The least that a run can do with is often no power of two.
    lower = [number for number in [*powers, config.env.max_model_len] if config.env.max_model_len <= number < tokens]
    best = next(filter(fits, lower), None)
    others = "lower max_model_len or num_envs, or set gradient_checkpointing or lora_r"
    return others if best is None else f"give max_tokens={best}"


def with_max_tokens(
    config: RunSettings, saved: Mapping[str, Any] | None, device: torch.device, distributed: Distributed
) -> RunSettings:
    """The settings with a number of ``max_tokens``.

    A given number counts. Else a resumed run takes the number that it was saved with, unless
    ``accept_changes`` names it. Else it is :func:`default_max_tokens`. If the run may need more
    than is free, a warning says so, and what to lower.

    Args:
        config: the settings.
        saved: settings of the checkpoint that the run continues; ``None``: it is new.
        device: of model and training.
        distributed: the training processes.
    """
    if config.trainer.max_tokens is not None:
        return config
    here = distributed.all_gather([platform.node()]).count(platform.node())
    free, _ = trainer_memory(config, device, here)
    known = None if saved is None or "max_tokens" in config.output.accept_changes else saved.get("max_tokens")
    shards = distributed.world_size if distributed.sharded else 1
    try:
        model = empty_model(config)
        config = config.replace(max_tokens=known or default_max_tokens(config, model, shards=shards, device=device))
        advice = what_to_lower(config, model, free, shards=shards, device=device)
        needed = sum(memory_estimate(config, model, shards=shards, device=device).values())
    # A family whose shapes are not known may be trained all the same; what is wrong otherwise is
    # said where it is loaded.
    except (*FAILURES, OSError, ImportError) as error:
        config = config.replace(max_tokens=known or MOST_TOKENS)
        logger.warning(
            "max_tokens is %d, for the memory of the run cannot be estimated: %s",
            config.trainer.micro_batch_tokens,
            error,
        )
        return config
    if advice is not None:
        if saved is not None and advice.startswith("give max_tokens"):
            advice += " with accept_changes: [max_tokens]"
        logger.warning(
            "the run may take %.1f GiB of memory (max_tokens=%d, max_model_len=%d), and %.1f GiB are free: %s (torchrl-llm doctor "
            "shows the parts)",
            needed / 2**30, config.trainer.max_tokens, config.env.max_model_len, free / 2**30, advice,
        )  # fmt: skip
    return config


def trainer_memory(config: RunSettings, device: torch.device, processes: int = 1) -> tuple[int, int]:
    """Bytes of the device's memory for this training process: free, and in total.

    Args:
        config: the settings. An engine of this process has its share of a GPU, unless it sleeps
            during updates. What an engine on a CPU and workers on Ray take is not known here, and
            not taken off.
        device: of model and training; on other devices than CUDA's it is the host's memory.
        processes: training processes on this host. They have equal parts of its memory, and each a
            GPU of its own.

    Examples:
        >>> trainer_memory(RunSettings(), torch.device("cpu"), processes=2)[1] == host_memory() // 2
        True
    """
    if device.type != "cuda":
        return free_memory() // processes, host_memory() // processes
    free, total = torch.cuda.mem_get_info(device)
    engine = 0 if config.engine.sleeps else config.engine.memory(config, device)
    return free - engine, total - engine


def engine_weights(config: RunSettings, model: Any) -> int:
    """Bytes of the weights that an engine holds on each of its GPUs.

    Args:
        model: :func:`empty_model`.
    """
    return model.num_parameters() * _engine_bytes(config) // config.engine.num_gpus


def engine_context(config: RunSettings, model: Any) -> int:
    """Bytes of the keys and values of a context of ``max_model_len`` tokens in an engine, on all
    its GPUs together.

    Args:
        model: :func:`empty_model`.

    Raises:
        ConfigError: the model's configuration does not say how large its layers are.
    """
    return _cached_numbers(model) * _engine_bytes(config) * config.env.max_model_len


def engine_contexts(config: RunSettings, model: Any, memory: int) -> int:
    """How many whole contexts of ``max_model_len`` tokens an engine can hold at most, beside its
    weights.

    Args:
        model: :func:`empty_model`.
        memory: bytes that the engine takes of each of its GPUs.

    Raises:
        ConfigError: as :func:`engine_context`.

    Examples:
        >>> config = RunSettings.from_values(model_path="tiny", policy="vllm", max_model_len=256)
        >>> model = empty_model(config)
        >>> room = 10 * engine_context(config, model)
        >>> engine_contexts(config, model, engine_weights(config, model) + room), engine_contexts(config, model, 0)
        (10, 0)
    """
    free = (memory - engine_weights(config, model)) * config.engine.num_gpus
    return max(0, free // engine_context(config, model))


def _engine_bytes(config: RunSettings) -> int:
    """Bytes of a number in an engine."""
    dtype = config.engine.weights_dtype(config)
    return _HALF if dtype == "auto" else int(getattr(torch, dtype).itemsize)


def _kept(config: RunSettings, model: Any, shards: int, device: torch.device) -> dict[str, int]:
    """The parts that do not depend on ``max_tokens``."""
    weights = _weights(config, model)
    if shards > 1:
        computed = {name: size for name, size in weights.items() if name != _START}
        gathered = {name: size // 4 if name == "trained weights" else size for name, size in computed.items()}
        weights = {name: size // shards for name, size in weights.items()}
        weights["gathered weights"] = sum(gathered.values())
    return {**weights, **_casts(config, model, device), **_sampler(config, model, device)}


def _weights(config: RunSettings, model: Any) -> dict[str, int]:
    parameters, size, lora = model.num_parameters(), _bytes(config, model), make_lora(config)
    critics = config.algo == "LLMPPO" and config.weights.critic_trunk == "separate"
    if lora is None:
        copies = 4 * parameters if config.has_reference and config.model.teacher is None else 0
        trained = _TRAINED * parameters * (1 + critics)
        return {"trained weights": trained, **_start(config, parameters), "reference": copies, **_teacher(config)}
    base = parameters * (_NF4 if config.model.quantization else size + (_HALF if config.model.base_products else 0))
    with torch.device("meta"), warnings.catch_warnings():
        # PEFT asks transformers under a name that transformers has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapter, _ = get_peft_model(copy.deepcopy(model), lora).get_nb_trainable_parameters()
    own = 4 * adapter if has_own_reference(config) else 0
    trained = _TRAINED * adapter * (1 + critics)
    parts = {"base weights": int(base), "trained weights": trained, **_start(config, adapter)}
    return {**parts, "reference": own, **_teacher(config)}


def _start(config: RunSettings, trained: int) -> dict[str, int]:
    """The copy that a trust region keeps of the actor's ``trained`` weights."""
    return {} if config.trainer.target_kl is None else {_START: 4 * trained}


def _casts(config: RunSettings, model: Any, device: torch.device) -> dict[str, int]:
    """Autocast's copies of float32 weights, which the backward of a micro-batch needs."""
    wide = not config.weights.lora_r or (_bytes(config, model) == 4 and not config.model.quantization)
    return (
        {"weights in half precision": _HALF * model.num_parameters()}
        if wide and _autocast(config, model, device)
        else {}
    )


def _autocast(config: RunSettings, model: Any, device: torch.device) -> bool:
    return mixed_precision(config, device, model.config.dtype) != "no"


def _teacher(config: RunSettings) -> dict[str, int]:
    if config.model.teacher is None:
        return {}
    settings = find_teacher(config)[1]
    model = empty_model(settings)
    size = _NF4 if settings.model.quantization else _bytes(settings, model)
    return {"teacher": int(model.num_parameters() * size)}


def _activations(config: RunSettings, model: Any, tokens: int, device: torch.device) -> dict[str, int]:
    text = model.config.get_text_config()
    layers, hidden, width = (_size(text, name) for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    autocast = _autocast(config, model, device)
    narrow = autocast or _bytes(config, model) == _HALF
    size = _HALF if narrow else 4
    layer = size * (_HIDDEN * hidden + _WIDTH * width)
    if narrow and config.weights.lora_r and not autocast:
        layer += 4 * (_CAST_HIDDEN * hidden + _CAST_WIDTH * width) - size * (hidden + width)
    # Recomputed one layer at a time, from the inputs of all.
    kept = size * layers * hidden + layer if config.model.gradient_checkpointing else layers * layer
    rows = embedding_of(model).shape[0]
    logits = _LOGIT * min(config.model.chunk_logits or default_chunk_logits(device), tokens * rows)
    # The backward of the head comes before the layers' backward: the one that is recomputed is not
    # there yet.
    return {
        "activations": tokens * kept,
        "logits": max(0, logits - tokens * layer) if config.model.gradient_checkpointing else logits,
    }


def _sampler(config: RunSettings, model: Any, device: torch.device) -> dict[str, int]:
    """At most: contexts and rows are as long as their longest."""
    size = 4 if not config.weights.lora_r else _bytes(config, model)
    cache = _cached_numbers(model) * size * config.slots * config.env.max_model_len
    rows = {"rows": _ROW * config.rollouts.batch_size * config.env.max_model_len}
    # an engine takes its own share of the memory, whatever its contexts need
    if config.engine.owns_weights:
        return rows
    head = model.get_output_embeddings().weight
    packs = packs_head(head.numel(), torch.float32 if size == 4 else torch.float16, device)
    return {"keys and values": cache, **({"packed head": head.numel() * size} if packs else {}), **rows}


def _cached_numbers(model: Any) -> int:
    """Numbers that the keys and values of one token are."""
    text = model.config.get_text_config()
    heads, hidden = _size(text, "num_attention_heads"), _size(text, "hidden_size")
    # families differ
    known = {name: getattr(text, name, None) for name in ("num_key_value_heads", "head_dim")}
    each = (known["num_key_value_heads"] or heads) * (known["head_dim"] or hidden // heads)
    return 2 * _size(text, "num_hidden_layers") * each


def _size(text: Any, name: str) -> int:
    value = getattr(text, name, None)
    if name == "intermediate_size" and value is None:
        value = 4 * text.hidden_size  # of the families that do not name it, as GPT-2
    if not isinstance(value, int):
        raise ConfigError(f"The configuration of the model does not say its {name}: its memory cannot be estimated.")
    return value


def _bytes(config: RunSettings, model: Any) -> int:
    """Bytes of a weight of the base, or of what training computes in."""
    dtype = model.config.dtype if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
    return int((dtype or torch.float32).itemsize)
