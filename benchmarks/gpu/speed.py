"""How fast sampling and updates are, which share of the hardware's arithmetic they reach, and how
much memory they take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from peft import LoraConfig
from tensordict import TensorDict, TensorDictBase
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer

from benchmarks.gpu.arithmetic import PEAKS, token_operations
from benchmarks.gpu.checks import CORRECTED, needs_vllm
from benchmarks.gpu.place import Place, groups
from benchmarks.gpu.report import Part
from torchrl_llm import keys
from torchrl_llm.metrics.rollouts import Timer
from torchrl_llm.modules import HFPolicy, SamplingConfig, load_actor_critic
from torchrl_llm.runs.memory import empty_model, memory_estimate

ROUNDS = 3
"""Measured after one of warm-up."""
LONGEST = 40
"""Kernels that are named."""

LORA: dict[str, Any] = {"dtype": "bfloat16", "lora_r": 16, "float32_matmul_precision": None}
FULL: dict[str, Any] = {"lora_r": 0, "mixed_precision": "bf16", "kl_coeff": 0.0, "float32_matmul_precision": None}


class WaitingTimer(Timer):
    """A trainer's timer whose phases end when the device has done their work. PyTorch runs ahead of
    it otherwise."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Around a phase."""
        with super().__call__(phase):
            try:
                yield
            finally:
                self.place.wait()


class Arithmetic:
    """Counts tokens and floating-point operations (:func:`token_operations`) of the forwards and
    backwards of a run's model, without a wait. Attention is counted over half of the mean context.
    """

    def __init__(self, run: Any) -> None:
        self.tokens = 0
        self.operations = 0.0
        self.model = run.models.model
        self.backward = 4 if run.config.weights.lora_r == 0 else 2

    @contextmanager
    def counted(self, rows: TensorDictBase) -> Iterator[None]:
        """Count what is computed inside for ``rows``."""
        lengths = rows[keys.ATTENTION_MASK].sum(-1).double()
        context = float((lengths**2).sum() / lengths.sum() / 2)
        acted = float((rows[keys.TURN_IDS] >= 0).sum() / lengths.sum())
        each = {
            learns: token_operations(self.model, context=context, acted=acted, backward=self.backward * learns)
            for learns in (False, True)
        }

        def count(_: Any, given: tuple[Any, ...], __: Any) -> None:
            self.tokens += given[0].numel()
            self.operations += given[0].numel() * each[torch.is_grad_enabled()]

        hook = self.model.get_input_embeddings().register_forward_hook(count)
        try:
            yield
        finally:
            hook.remove()


def reached(place: Place, operations: float, seconds: float) -> dict[str, float]:
    """Operations a second, in TFLOP/s, and their share of the data sheet's (model FLOPs
    utilization), if that is known."""
    rate = operations / seconds
    name = torch.cuda.get_device_name() if place.on_gpu else ""
    peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    return {"tflop_s": rate / 1e12} | ({"mfu": rate / peak} if peak else {})


def reset_memory(place: Place) -> None:
    """Begin to look for the peak."""
    if place.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory(place: Place) -> dict[str, float]:
    """GiB that PyTorch has reserved at most, which is what others lack, and those in use."""
    if not place.on_gpu:
        return {}
    peaks = {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
    return {f"{name}_gib": size / 2**30 for name, size in peaks.items()}


def collected(place: Place, run: Any, shape: tuple[Any, ...]) -> TensorDictBase:
    """Rows of a shape, which the first run that asks for them samples."""
    if shape not in place.rows:
        place.rows[shape] = run.trainer.collect(iter(run.trainer.collector)).cpu()
    return place.rows[shape].to(place.device)


def update(place: Place, model: str, played: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Seconds of scores and updates on the same rows, their tokens, arithmetic and memory; medians.

    Args:
        played: arguments of :func:`~benchmarks.gpu.place.groups`.
    """
    run = place.run(f"update-{model}", **groups(place, model, **played) | LORA | settings)
    found = []
    try:
        rows = collected(place, run, (model, *sorted(played.items())))
        run.trainer.timer, work = WaitingTimer(place), Arithmetic(run)
        held = int(rows[keys.ATTENTION_MASK].sum())
        reset_memory(place)
        for _ in range(1 + ROUNDS):
            work.tokens, work.operations, start = 0, 0.0, time.perf_counter()
            with work.counted(rows):
                run.trainer.learn(rows.clone())
            place.wait()
            found.append((time.perf_counter() - start, run.trainer.timer.read()))
    finally:
        run.close()
    rounds, phases = [each for each, _ in found[1:]], [each for _, each in found[1:]]
    # Of all rounds together: medians of each may add up to more than the whole.
    shares = {name: sum(each[f"time/{name}_s"] for each in phases) / sum(rounds) for name in ("score", "update")}
    seconds = median(rounds)
    return {
        "learn_s": seconds,
        "tokens": held,
        "tokens_s": held / seconds,
        "computed": work.tokens,
        **{f"{name}_share": share for name, share in shares.items()},
        **reached(place, work.operations, seconds),
        **peak_memory(place),
    }


def kernels(place: Place, model: str, played: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Where the time of scores and updates goes, by PyTorch's profiler: seconds with it, seconds in
    which kernels ran, their number, and those that took longest with their seconds and number.

    Args:
        played: arguments of :func:`~benchmarks.gpu.place.groups`.
    """
    run = place.run(f"kernels-{model}", **groups(place, model, **played) | LORA | settings)
    activity = ProfilerActivity.CUDA if place.on_gpu else ProfilerActivity.CPU
    try:
        rows = collected(place, run, (model, *sorted(played.items())))
        run.trainer.learn(rows.clone())
        place.wait()
        start = time.perf_counter()
        with profile(activities=[activity]) as seen:
            run.trainer.learn(rows.clone())
            place.wait()
        seconds = time.perf_counter() - start
    finally:
        run.close()
    # PyTorch counts in microseconds.
    ran = [
        (1e-6 * (each.self_device_time_total if place.on_gpu else each.self_cpu_time_total), each.count, each.key)
        for each in seen.key_averages()
    ]
    longest = sorted(ran, reverse=True)[:LONGEST]
    return {
        "learn_s": seconds,
        "kernels_s": sum(each for each, _, _ in ran),
        "kernels": sum(number for _, number, _ in ran),
        "longest": {name[:90]: [round(each, 4), number] for each, number, name in longest},
    }


def iteration(place: Place, model: str, played: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Episodes and tokens a second of whole iterations, and the share of each phase; medians.

    Args:
        played: arguments of :func:`~benchmarks.gpu.place.groups`.
    """
    if settings.get("policy") == "vllm":
        needs_vllm(place)
    run = place.run(f"iteration-{model}-{len(settings)}", **groups(place, model, **played) | LORA | settings)
    found = []
    try:
        run.trainer.timer = WaitingTimer(place)
        batches = iter(run.trainer.collector)
        reset_memory(place)
        for _ in range(1 + ROUNDS):
            start = time.perf_counter()
            rows = run.trainer.collect(batches)
            run.trainer.learn(rows)
            place.wait()
            sampled, held = int((rows[keys.TURN_IDS] >= 0).sum()), int(rows[keys.ATTENTION_MASK].sum())
            phases = run.trainer.timer.read()
            found.append({"seconds": time.perf_counter() - start, "sampled": sampled, "held": held} | phases)
    finally:
        run.close()
    middle = {name: median(each.get(name, 0.0) for each in found[1:]) for name in found[-1]}
    phases = {name: seconds for name, seconds in middle.items() if name.startswith("time/")}
    learned = middle["seconds"] - middle["time/rollout_s"]
    return {
        "episodes_s": rows.shape[0] / middle["seconds"],
        "rollout_tok_s": middle["sampled"] / middle["time/rollout_s"],
        "learn_tok_s": middle["held"] / learned,
        **{f"{name[5:-2]}_share": seconds / middle["seconds"] for name, seconds in phases.items()},
        **peak_memory(place),
    }


def decode(
    place: Place, model: str, rows: int, dtype: torch.dtype, lora: bool, compiled: bool = False
) -> dict[str, float]:
    """Milliseconds of a step of HFPolicy, behind prompts of 600 tokens: the difference of long and
    short answers."""
    path, rows = place.model(model, dtype), place.size(rows)
    settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    models = load_actor_critic(str(path), lora=settings, device=place.device, dtype=dtype)
    tokenizer, prompt = AutoTokenizer.from_pretrained(path), place.size(600)
    seconds, lengths = {}, (place.size(32), place.size(160))
    for length in lengths:
        sampling = SamplingConfig(max_output_tokens=length, min_output_tokens=length, stop_ids=(2,))
        policy = HFPolicy(models.model, tokenizer, sampling, adapter=models.adapter, compile_decode=compiled)
        for _ in range(2):  # the second is measured
            policy.drop_cache()
            place.wait()
            start = time.perf_counter()
            policy(first_turn(rows, prompt))
            place.wait()
            seconds[length] = time.perf_counter() - start
    short, long = lengths
    step = (seconds[long] - seconds[short]) / (long - short)
    return {"step_ms": 1e3 * step, "tokens_s": rows / step if step > 0 else float("nan")} | peak_memory(place)


def first_turn(rows: int, prompt: int) -> TensorDict:
    """Prompts of bytes, all different."""
    tokens = torch.randint(3, 259, (rows, prompt), generator=torch.Generator().manual_seed(0))
    return TensorDict(
        tokens={"prompt": tokens, "prompt_length": torch.full((rows, 1), prompt)},
        turn=torch.zeros(rows, 1, dtype=torch.int64),
        episode_id=torch.arange(rows).unsqueeze(1),
        batch_size=[rows],
    )


def memory(place: Place, model: str, rows: int, **settings: Any) -> dict[str, Any]:
    """By ``max_tokens``: GiB that an update reserves and allocates, and what the estimate says,
    without what is sampled."""
    run = place.run(f"memory-{model}", **groups(place, model, rows=rows) | LORA | {"share_prefixes": False} | settings)
    found: dict[str, Any] = {}
    try:
        batch = collected(place, run, (model, "memory", rows))
        longest, device = run.config.env.max_model_len, torch.device(place.device)
        for tokens in (2_048, 4_096, 8_192, 16_384):
            run.trainer.config.max_tokens = tokens
            parts = memory_estimate(
                run.config.replace(max_tokens=max(tokens, longest)), empty_model(run.config), device=device
            )
            estimated = sum(parts.values()) - parts.get("keys and values", 0)
            reset_memory(place)
            try:
                run.trainer.learn(batch.clone())
                peaks: dict[str, Any] = peak_memory(place)
            except torch.OutOfMemoryError:
                peaks = {"out_of_memory": True}
            found[str(tokens)] = {"estimated_gib": estimated / 2**30, **peaks}
            if "out_of_memory" in peaks:
                break
    finally:
        run.close()
    return found


def updates(place: Place, model: str, rows: int) -> dict[str, Part]:
    """Updates of a model: sharing, dtypes, contexts, chunks and gradient checkpointing, one setting
    changed at a time."""
    short, alone = {"rows": rows}, {"share_prefixes": False}
    changed: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "shared": (short, {}),
        "not shared": (short, alone),
        "float32": (short, {"dtype": "float32"}),
        "float32, mixed precision": (short, {"dtype": "float32", "mixed_precision": "bf16"}),
        "bfloat16 without autocast": (short, {"mixed_precision": "no"}),
        "gradient checkpointing": (short, {"gradient_checkpointing": True}),
        "LLMPPO": (short, {"algo": "LLMPPO", "group_size": 1}),
        "all weights": (short, FULL),
    }
    for exponent in (22, 24, 26, 28):
        changed[f"chunk_logits 2**{exponent}"] = (short, {"chunk_logits": 2**exponent})
    for name, feedback in (("2k", 400), ("8k", 2_400)):
        longer = {"rows": max(8, rows // 4), "feedback": feedback}
        changed[f"contexts of {name}"] = (longer, {})
        changed[f"contexts of {name}, not shared"] = (longer, alone)
    return {
        f"update: {model}, {name}": partial(update, place, model, played, **settings)
        for name, (played, settings) in changed.items()
    }


def measurements(place: Place) -> dict[str, Part]:
    """All measurements by name, what is most wanted first."""
    half, small, middle, large = torch.bfloat16, "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"
    found: dict[str, Part] = {f"iteration: {small}, hf": partial(iteration, place, small, {})}
    found |= updates(place, small, 64)
    for rows in (64, 256):
        for name, dtype, lora in (
            ("LoRA", half, True),
            ("no LoRA", half, False),
            ("float32, LoRA", torch.float32, True),
        ):
            found[f"decode: {small}, {rows} rows, {name}"] = partial(decode, place, small, rows, dtype, lora)
        found[f"decode: {small}, {rows} rows, compiled, LoRA"] = partial(decode, place, small, rows, half, True, True)
    found |= {f"memory: {model}": partial(memory, place, model, 32) for model in (small, middle, large)}
    found |= updates(place, middle, 64)
    for name, settings in (("shared", {}), ("not shared", {"share_prefixes": False})):
        found[f"update: {middle}, kernels, {name}"] = partial(kernels, place, middle, {"rows": 64}, **settings)
    shared = {"shared": {}, "not shared": {"share_prefixes": False}, "checkpointing": {"gradient_checkpointing": True}}
    for name, settings in shared.items():
        found[f"update: {large}, {name}"] = partial(update, place, large, {"rows": 16}, **settings)
    vllm = {"policy": "vllm"} | CORRECTED
    asleep = vllm | {"sleep_mode": True}
    turns, long = {"prompt": 60, "feedback": 16, "rows": 256}, {"answer": 171, "least": 171, "rows": 256}
    found |= {
        f"iteration: {small}, vllm, short turns": partial(iteration, place, small, turns, **vllm),
        f"iteration: {small}, vllm, short turns, asleep": partial(iteration, place, small, turns, **asleep),
        f"iteration: {middle}, vllm, 512 tokens": partial(iteration, place, middle, long, **vllm),
        f"iteration: {large}, vllm, short turns, asleep": partial(iteration, place, large, turns, **asleep),
    }
    return found
