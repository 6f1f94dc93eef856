"""What must hold on a GPU: log-probs, gradients and losses that agree, and runs of every kind that
train."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.place import SHALLOW, Place, groups
from benchmarks.gpu.report import Part, Skip, expect
from torchrl_llm import keys
from torchrl_llm.envs import PromptDatasetEnv

ROOT = Path(__file__).parents[2]


CORRECTED: dict[str, Any] = {"sampler_correction": "truncate", "sampler_bounds": 2.0}
"""Settings with an engine, whose log-probs are not the scorer's to the last bit."""


def weights(run: Any) -> list[torch.Tensor]:
    """Copies of all that the run trains."""
    return [p.detach().float().cpu().clone() for p in run.models.actor_parameters() + run.models.critic_parameters()]


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest difference of two lists of tensors."""
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@contextmanager
def products_of(model: nn.Module) -> Iterator[dict[str, int]]:
    """Yields how many outputs of linear layers of ``model`` were in each dtype, as it grows."""
    found: dict[str, int] = {}

    def count(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        name = str(output.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + 1

    hooks = [each.register_forward_hook(count) for each in model.modules() if isinstance(each, nn.Linear)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def expect_only(found: dict[str, int], dtype: str) -> None:
    """Each product was in ``dtype``."""
    if {*found} != {dtype}:
        raise AssertionError(f"products were computed in {found}; expected {dtype} only")


def trained(place: Place, name: str, *, computes_in: str | None = None, **settings: Any) -> dict[str, float]:
    """Two iterations change every tensor of the actor, by finite amounts; each forward of the
    update ``computes_in`` a dtype."""
    run = place.run(name, **settings)
    try:
        before = [weight.detach().clone() for weight in run.models.actor_parameters()]
        learn = run.trainer.learn

        def learn_and_look(rows: Any, **more: Any) -> dict[str, float]:
            with products_of(run.models.model) as found:
                metrics = learn(rows, **more)
            if computes_in is not None:
                expect_only(found, computes_in)
            return metrics

        run.trainer.learn = learn_and_look
        history = run.trainer.train()
        after = run.models.actor_parameters()
        if not all(torch.isfinite(value).all() for value in weights(run)):
            raise AssertionError("weights are not finite")
        still = sum(bool((old == new).all()) for old, new in zip(before, after, strict=True))
    finally:
        run.close()
    norm = max(metrics["optim/grad_norm_actor"] for metrics in history)
    figures = {"log_prob_gap": history[0]["policy/log_prob_gap"], "still": still, "grad_norm": norm}
    return expect(figures, still=0, grad_norm=1e3)


def sampler_is_scorer(place: Place, dtype: str, bound: float, **settings: Any) -> dict[str, float]:
    """The log-probs of HFPolicy are the scorer's, for each sampled token of ragged conversations;
    both compute in ``dtype``."""
    played = groups(place, "SmolLM2-135M", prompt=100, rows=16) | {"min_output_tokens": 0}
    run = place.run(f"scorer-{dtype}", **played | {"dtype": dtype, "kl_coeff": 0.0} | settings)
    try:
        with products_of(run.models.model.get_base_model()) as sampled:
            rows = run.trainer.collect(iter(run.trainer.collector))
        with torch.no_grad(), run.trainer.accelerator.autocast(), products_of(run.models.model) as scored:
            log_probs = run.models.actor(rows.clone().to(run.trainer.accelerator.device))[keys.LOG_PROB].cpu()
    finally:
        run.close()
    # Without autocast, as the sampler computes, PEFT's products are float32 whatever the base is
    # in.
    if dtype not in sampled:
        raise AssertionError(f"the sampler's products were in {sampled}; expected {dtype} among them")
    expect_only(scored, dtype)
    gaps = (log_probs - rows[keys.SAMPLE_LOG_PROB].cpu()).abs()[rows[keys.TURN_IDS].cpu() >= 0]
    figures = {"mean": gaps.mean().item(), "largest": gaps.max().item(), "tokens": gaps.numel()}
    return expect(figures, mean=bound)


def gradient_of(place: Place, name: str, rows: Any, **settings: Any) -> tuple[list[torch.Tensor], int]:
    """The gradient of one batch on a device, as it reaches the optimizer, and the tokens that were
    computed."""
    run, counts = place.run(name, **settings), [0]
    try:
        embedding = run.models.model.get_input_embeddings()
        embedding.register_forward_hook(lambda _, given, __: counts.append(given[0].numel()))
        run.trainer.optimizer.step = lambda *_: None
        run.trainer.optimizer.zero_grad = lambda *_, **__: None
        run.trainer.learn(rows.clone())
        trained = run.models.actor_parameters() + run.models.critic_parameters()
        found = [p.grad.detach().float().cpu() if p.grad is not None else torch.zeros(1) for p in trained]
        return found, sum(counts)
    finally:
        run.close()


def gradients_agree(
    place: Place, name: str, there: Place, changed: dict[str, Any], *, computed: float | None = None, **settings: Any
) -> dict[str, float]:
    """The gradient of one batch here, with ``changed`` settings, which must not change it, and
    there, without them.

    Args:
        computed: most tokens that may be computed there, for each that is here; default: any
            number.
    """
    run = there.run(f"{name}-played", **settings)
    try:
        rows = run.trainer.collect(iter(run.trainer.collector))
    finally:
        run.close()
    one, fewer = gradient_of(there, f"{name}-one", rows, **settings)
    other, more = gradient_of(place, f"{name}-other", rows.to(place.device), **settings | changed)
    size = max(value.abs().max().item() for value in one)
    figures = {"difference": difference(one, other) / size, "size": size, "computed": fewer / more}
    return expect(figures, difference=1e-3, computed=float("inf") if computed is None else computed)


def losses_agree(place: Place, there: Place, dtype: str, bound: float, iterations: int = 10) -> dict[str, Any]:
    """Ten iterations on the episodes of a run there, in float32, have the losses and gradients that
    the run has."""
    # Of six layers: the CPU has to play and learn as well.
    size: dict[str, Any] = {"model": SHALLOW, "num_envs": 16, "max_iterations": iterations, "lr_actor": 1e-3}
    first = there.run(f"losses-{dtype}-there", **size)
    second = place.run(
        f"losses-{dtype}-here", **size, dtype=dtype, mixed_precision="no" if dtype == "float32" else "bf16"
    )
    names, found = ("loss/objective", "loss/critic", "loss/kl", "optim/grad_norm_actor"), []
    try:
        batches = iter(first.trainer.collector)
        for _ in range(iterations):
            rows = first.trainer.collect(batches)
            metrics = second.trainer.learn(rows.to(place.device)), first.trainer.learn(rows)
            found.append([[each[name] for name in names] for each in metrics])
    finally:
        first.close()
        second.close()
    here, expected = torch.tensor(found).unbind(1)
    # A loss near 0 is a sum of what cancels: its size is taken from the largest.
    gaps = ((here - expected).abs() / expected.abs().amax(0).clamp(min=1e-3)).amax(0)
    figures = {"largest": gaps.max().item()} | dict(zip(names, gaps.tolist(), strict=True))
    return expect(figures, largest=bound)


def checkpoint_resume(place: Place) -> dict[str, float]:
    """A run that stops after its second of three iterations and continues ends where the whole one
    does."""
    saved = {"save_checkpoints": True, "checkpoint_interval": 1}
    whole = place.run("whole", max_iterations=3, **saved)
    whole.trainer.train()
    whole.close()
    first = place.run("parts", max_iterations=2, **saved)
    first.trainer.train()
    first.close()
    again = place.run("parts", max_iterations=3, resume=True, accept_changes=["max_iterations"], **saved)
    at = again.trainer.iteration
    again.trainer.train()
    again.close()
    if at != 2:
        raise AssertionError(f"the resumed run began after iteration {at}; expected 2")
    return expect({"difference": difference(weights(whole), weights(again))}, difference=1e-6 if place.on_gpu else 0.0)


def offloaded_base(place: Place) -> dict[str, float]:
    """Without the base on the device its memory is free, and afterwards the log-probs are the
    same."""
    if not place.on_gpu:
        raise Skip("the memory of a CUDA device is measured")
    run = place.run("offload")
    try:
        rows = run.trainer.collect(iter(run.trainer.collector)).to(place.device)
        with torch.no_grad():
            before = run.models.actor(rows.clone())[keys.LOG_PROB]
            torch.cuda.empty_cache()
            held = torch.cuda.memory_reserved()
            with run.models.offload_base():
                freed = held - torch.cuda.memory_reserved()
            after = run.models.actor(rows.clone())[keys.LOG_PROB]
    finally:
        run.close()
    size = sum(p.nbytes for p in run.models.base_parameters())
    # The allocator gives back whole blocks of up to 20 MiB.
    figures = {"kept": 1 - freed / size, "difference": (before - after).abs().max().item()}
    return expect(figures, kept=0.1, difference=1e-5)


def dataset(place: Place) -> dict[str, float]:
    """Questions with a reward function, in groups."""
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(16)]
    make_env = partial(
        PromptDatasetEnv, {"train": rows[:8], "test": rows[8:]}, lambda completion, *_: len(completion) % 5
    )
    return trained(place, "dataset", make_env=make_env, algo="GRPO", group_size=4)


def gem(place: Place) -> dict[str, float]:
    """A game of GEM."""
    if find_spec("gem") is None:
        raise Skip("needs GEM: pip install gem-llm==0.1.0")
    run = place.run("gem", env_name="game:GuessTheNumber-v0-easy", algo="LLMREINFORCE", max_model_len=2048)
    try:
        history = run.trainer.train()  # a random model wins nothing, so nothing has to move
    finally:
        run.close()
    if history[-1]["rollout/episodes"] != 32:
        raise AssertionError(f"{history[-1]['rollout/episodes']} episodes were played; expected 32")
    return {"log_prob_gap": history[0]["policy/log_prob_gap"], "turns": history[-1]["rollout/turns"]}


def four_bits(place: Place) -> dict[str, float]:
    """LoRA on a base in 4 bits."""
    if find_spec("bitsandbytes") is None:
        raise Skip("needs bitsandbytes: pip install bitsandbytes")
    figures = trained(place, "nf4", quantization="nf4", dtype="bfloat16", mixed_precision="bf16")
    return expect(figures, log_prob_gap=0.1)


def launched(place: Place, kind: str) -> dict[str, float]:
    """A run of the example script in one process that accelerate starts, with NCCL on a GPU."""
    output = place.folder / f"launched-{kind}"
    settings = {
        "config": "examples/configs/tiny_ppo_llm.yaml", "device": place.device, "output-dir": output, "max-iterations": 2,
        "batch-size": 32, "num-envs": 32, "evaluation-episodes": 32, "final-episodes": 32,
    }  # fmt: skip
    launch = ["accelerate.commands.launch", "--config_file", f"examples/configs/accelerate_{kind}.yaml"]
    command = [sys.executable, "-m", *launch, "--num_processes", "1", "examples/multiturn.py"]
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    here = os.environ | {"PYTHONPATH": paths} | ({} if place.on_gpu else {"ACCELERATE_USE_CPU": "true"})
    limits: dict[str, Any] = {"timeout": 240, "check": False}
    done = subprocess.run(command + flags, cwd=ROOT, env=here, capture_output=True, text=True, **limits)
    if done.returncode:
        raise AssertionError((done.stdout + done.stderr)[-4000:])
    result = json.loads((output / "result.json").read_text())
    return {"iterations": result["iterations"], "wall_s": result["wall_s"]}


def needs_vllm(place: Place) -> None:
    """Skip where there is no vLLM for the GPU."""
    if find_spec("vllm") is None:
        raise Skip("needs vLLM: pip install 'torchrl-llm[vllm]'")
    if not place.on_gpu:
        raise Skip("on a CPU make test-vllm runs what needs vLLM")


def vllm(place: Place, **settings: Any) -> dict[str, float]:
    """A vLLM engine on the GPU plays, and gets each update."""
    needs_vllm(place)
    shared = {"policy": "vllm", "dtype": "bfloat16", "max_iterations": 3} | CORRECTED
    figures = trained(place, f"vllm-{len(settings)}", **shared | settings)
    return expect(figures, log_prob_gap=0.1)


def marked_tests(place: Place) -> dict[str, str]:
    """The tests with the marker ``gpu``."""
    missing = [name for name in ("pytest", "pytest_timeout", "hypothesis") if find_spec(name) is None]
    if missing or not place.on_gpu:
        raise Skip(f"needs {', '.join(missing)}" if missing else "they need a CUDA device")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/modules", "tests/runs", "tests/weight_update"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode not in (0, 5):
        raise AssertionError(done.stdout[-4000:])
    return {"summary": done.stdout.strip().rpartition("\n")[2]}


def half(place: Place, name: str, **settings: Any) -> dict[str, float]:
    """Training that computes in bfloat16: log-probs stay near the sampler's."""
    return expect(trained(place, name, computes_in="bfloat16", **settings), log_prob_gap=0.1)


def checks(place: Place) -> dict[str, Part]:
    """All checks by name."""
    cpu = Place(device="cpu", tiny=place.tiny, folder=place.folder)
    bfloat16 = {"dtype": "bfloat16", "mixed_precision": "bf16"}
    shared = groups(place, "SmolLM2-135M", rows=16) | {"kl_coeff": 0.0}
    return {
        "sampler is scorer, float32": partial(sampler_is_scorer, place, "float32", 1e-4),
        "sampler is scorer, bfloat16": partial(sampler_is_scorer, place, "bfloat16", 2e-2, mixed_precision="bf16"),
        "gradient equals the CPU's": partial(gradients_agree, place, "cpu", cpu, {}),
        "gradient with shared prefixes of 600 tokens": partial(
            gradients_agree, place, "shared", place, {"share_prefixes": False}, computed=0.8, **shared
        ),
        "gradient checkpointing": partial(gradients_agree, place, "recompute", place, {"gradient_checkpointing": True}),
        "losses of ten iterations, float32": partial(losses_agree, place, cpu, "float32", 1e-2),
        "losses of ten iterations, bfloat16": partial(losses_agree, place, cpu, "bfloat16", 0.2),
        "training, bfloat16 with LoRA": partial(half, place, "bfloat16", **bfloat16),
        "training, mixed precision with LoRA": partial(half, place, "mixed", mixed_precision="bf16"),
        "training, mixed precision of all weights": partial(
            half, place, "full", mixed_precision="bf16", lora_r=0, algo="LLMREINFORCE", kl_coeff=0.0
        ),
        "training, prompts of 600 tokens in groups of 8": partial(half, place, "groups", **shared | bfloat16),
        "sampler is scorer, compiled step": partial(
            sampler_is_scorer, place, "bfloat16", 2e-2, mixed_precision="bf16", compile_decode=True
        ),
        "training, 4 bits with LoRA": partial(four_bits, place),
        "training, one process of accelerate, DDP": partial(launched, place, "ddp"),
        "training, one process of accelerate, FSDP2": partial(launched, place, "fsdp2"),
        "checkpoint and resume": partial(checkpoint_resume, place),
        "offloaded base": partial(offloaded_base, place),
        "data set": partial(dataset, place),
        "GEM": partial(gem, place),
        "vLLM": partial(vllm, place),
        "vLLM that sleeps during updates": partial(vllm, place, sleep_mode=True, offload_base=True),
        "tests marked gpu": partial(marked_tests, place),
    }
