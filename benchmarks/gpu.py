"""What needs a GPU, on one: checks and speed, with the packages that are there.

    python benchmarks/gpu.py test --output runs/gpu/test.json
    python benchmarks/gpu.py bench --output runs/gpu/bench.json
    python benchmarks/gpu.py bench --device cpu --tiny          # the same code on a CPU, with small shapes

Installs and downloads nothing: models have the shapes of SmolLM2-135M and Qwen2.5-0.5B and random weights, and the
tokenizer knows bytes. Needs torch >= 2.11, transformers, peft, accelerate, tensordict and torchrl; what needs vLLM, GEM
or pytest is skipped with a reason where it is missing. Writes one JSON object; the exit status counts the failures.
"""

import argparse
import gc
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedConfig, Qwen2Config

sys.path.insert(0, str(Path(__file__).parents[1]))  # nothing is installed, this package neither

from torchrl_llm import keys
from torchrl_llm.envs import PromptDatasetEnv
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.testing.tokenizers import byte_tokenizer
from torchrl_llm.trainers import RunConfig, build_run

ROOT = Path(__file__).parents[1]
TURNS = 3
SHAPES: dict[str, Callable[..., PreTrainedConfig]] = {
    "SmolLM2-135M": partial(
        LlamaConfig,
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": partial(
        Qwen2Config,
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
}


class Skip(Exception):
    """A check cannot run here; the message says why."""


class Scored(StopOrGo):
    """A few turns in which every response has a reward, so that there is a gradient whatever is said."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode with a number, so that contexts differ."""
        self.turn = 0
        return f"Say anything, {random.Random(seed).randrange(10**6)}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """A reward that depends on every character."""
        self.turn += 1
        return "Go on.", sum(map(ord, action)) % 7 / 7, self.turn == TURNS, False, {}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and how large: the device, whether shapes are tiny, and a folder."""

    device: str
    tiny: bool
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """Whether it is a CUDA device."""
        return self.device != "cpu"

    def model(self, name: str) -> Path:
        """A folder with a random model of the shape and a byte tokenizer; made once."""
        path = self.folder / name
        if not path.exists():
            tokenizer = byte_tokenizer()
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
            small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512, **heads}
            config = SHAPES[name](eos_token_id=2, pad_token_id=0, bos_token_id=None, **small if self.tiny else {})
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
        return path

    def run(self, name: str, *, model: str = "SmolLM2-135M", **settings: Any) -> Any:
        """A run of two iterations in ``folder / name``; ``settings`` are of ``RunConfig``, ``env`` or ``make_env``."""
        played = {key: settings.pop(key) for key in ("env", "make_env") if key in settings}
        defaults = {
            "algo": "LLMPPO", "dtype": "float32", "lora_r": 8, "num_envs": 8, "batch_size": 16, "max_model_len": 512,
            "max_output_tokens": 12, "min_output_tokens": 12, "max_iterations": 2, "schedule": "constant", "lr_actor": 1e-4,
            "kl_coeff": 0.01, "evaluation_interval": 0, "save_checkpoints": False, "progress": False,
        }  # fmt: skip
        place = {"model_path": str(self.model(model)), "device": self.device, "output_dir": self.folder / name}
        AcceleratorState._reset_state(reset_partial_state=True)  # a process has one device and precision otherwise
        chosen = RunConfig(**defaults | place | settings)
        return build_run(chosen, **played or {} if "env_name" in settings or played else {"env": Scored})


# ---------------------------------------------------------------------- checks


def weights(run: Any) -> list[torch.Tensor]:
    """Copies of all that the run trains."""
    return [p.detach().float().cpu().clone() for p in run.models.actor_parameters() + run.models.critic_parameters()]


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest difference of two lists of tensors."""
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def expect(figures: dict[str, float], **bounds: float) -> dict[str, float]:
    """The figures, if each is a number and at most its bound."""
    for name, bound in bounds.items():
        if not figures[name] <= bound:
            raise AssertionError(f"{name} is {figures[name]:.4g}; expected at most {bound}")
    return figures


def trained(place: Place, name: str, **settings: Any) -> dict[str, float]:
    """Two iterations change every tensor of the actor, by finite amounts."""
    run = place.run(name, **settings)
    try:
        before = [weight.detach().clone() for weight in run.models.actor_parameters()]
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


def sampler_is_scorer(place: Place, dtype: str, bound: float) -> dict[str, float]:
    """The log-probs of HFPolicy are those of the scorer, for each sampled token of ragged conversations."""
    run = place.run(f"scorer-{dtype}", dtype=dtype, lora_r=0, kl_coeff=0.0, algo="LLMREINFORCE", min_output_tokens=0)
    try:
        rows = run.trainer.collect(iter(run.trainer.collector))
        with torch.no_grad():
            scored = run.models.actor(rows.clone().to(run.trainer.accelerator.device))[keys.LOG_PROB].cpu()
    finally:
        run.close()
    gaps = (scored - rows[keys.SAMPLE_LOG_PROB].cpu()).abs()[rows[keys.TURN_IDS].cpu() >= 0]
    figures = {"mean": gaps.mean().item(), "largest": gaps.max().item(), "tokens": gaps.numel()}
    return expect(figures, mean=bound)


def gradient_of(place: Place, name: str, rows: Any, **settings: Any) -> list[torch.Tensor]:
    """The gradient of one batch on a device, as it reaches the optimizer."""
    run = place.run(name, **settings)
    try:
        run.trainer.optimizer.step = lambda *_: None
        run.trainer.optimizer.zero_grad = lambda *_, **__: None
        run.trainer.learn(rows.clone())
        trained = run.models.actor_parameters() + run.models.critic_parameters()
        return [p.grad.detach().float().cpu() if p.grad is not None else torch.zeros(1) for p in trained]
    finally:
        run.close()


def gradients_agree(place: Place, name: str, there: Place, **settings: Any) -> dict[str, float]:
    """The gradient of one batch here, with settings that must not change it, and there, without them."""
    run = there.run(f"{name}-played")
    try:
        rows = run.trainer.collect(iter(run.trainer.collector))
    finally:
        run.close()
    one = gradient_of(there, f"{name}-one", rows)
    other = gradient_of(place, f"{name}-other", rows.to(place.device), **settings)
    size = max(value.abs().max().item() for value in one)
    return expect({"difference": difference(one, other) / size, "size": size}, difference=1e-3)


def checkpoint_resume(place: Place) -> dict[str, float]:
    """A run that stops after its second of three iterations and goes on ends where the whole one does."""
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
    """Without the base on the device its memory is free, and afterwards the log-probs are the same."""
    if not place.on_gpu:
        raise Skip("the memory of a CUDA device is measured")
    run = place.run("offload")
    try:
        rows = run.trainer.collect(iter(run.trainer.collector)).to(place.device)
        with torch.no_grad():
            before = run.models.actor(rows.clone())[keys.LOG_PROB]
            held = torch.cuda.memory_allocated()
            with run.models.offload_base():
                freed = held - torch.cuda.memory_allocated()
            after = run.models.actor(rows.clone())[keys.LOG_PROB]
    finally:
        run.close()
    size = sum(p.nbytes for p in run.models.base_parameters())
    return expect({"kept": 1 - freed / size, "difference": (before - after).abs().max().item()}, kept=0, difference=0)


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


def vllm(place: Place) -> dict[str, float]:
    """A vLLM engine on the GPU plays, and gets each update."""
    if find_spec("vllm") is None:
        raise Skip("needs vLLM: pip install 'torchrl-llm[vllm]'")
    if not place.on_gpu:
        raise Skip("on a CPU make test-vllm runs what needs vLLM")
    figures = trained(
        place, "vllm", policy="vllm", dtype="bfloat16", gpu_memory_utilization=0.3, sampler_correction="truncate"
    )
    return expect(figures, log_prob_gap=0.1)


def marked_tests(place: Place) -> dict[str, float]:
    """The tests with the marker ``gpu``."""
    missing = [name for name in ("pytest", "pytest_timeout", "hypothesis") if find_spec(name) is None]
    if missing or not place.on_gpu:
        raise Skip(f"needs {', '.join(missing)}" if missing else "they need a CUDA device")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode not in (0, 5):
        raise AssertionError(done.stdout[-4000:])
    return {"summary": done.stdout.strip().rpartition("\n")[2]}


def half(place: Place, name: str, **settings: Any) -> dict[str, float]:
    """Training in half precision: log-probs stay near the sampler's."""
    return expect(trained(place, name, **settings), log_prob_gap=0.1)


def checks(place: Place) -> dict[str, Callable[[], dict[str, float]]]:
    """All checks by name."""
    cpu = Place(device="cpu", tiny=place.tiny, folder=place.folder)
    return {
        "sampler is scorer, float32": partial(sampler_is_scorer, place, "float32", 1e-4),
        "sampler is scorer, bfloat16": partial(sampler_is_scorer, place, "bfloat16", 2e-2),
        "gradient is that of the CPU": partial(gradients_agree, place, "cpu", cpu),
        "gradient checkpointing": partial(gradients_agree, place, "recompute", place, gradient_checkpointing=True),
        "training, bfloat16 with LoRA": partial(half, place, "bfloat16", dtype="bfloat16"),
        "training, mixed precision with LoRA": partial(half, place, "mixed", mixed_precision="bf16"),
        "training, mixed precision of all weights": partial(
            half, place, "full", mixed_precision="bf16", lora_r=0, algo="LLMREINFORCE", kl_coeff=0.0
        ),
        "checkpoint and resume": partial(checkpoint_resume, place),
        "offloaded base": partial(offloaded_base, place),
        "data set": partial(dataset, place),
        "GEM": partial(gem, place),
        "vLLM": partial(vllm, place),
        "tests marked gpu": partial(marked_tests, place),
    }


# ---------------------------------------------------------------------- speed


def synchronized(place: Place) -> float:
    """The time, once the device has done what it was given."""
    if place.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def speed(place: Place, model: str, algo: str, rounds: int = 3, **settings: Any) -> dict[str, float]:
    """Tokens per second of playing and learning, after one iteration of warm-up, and the peak memory."""
    size = {"num_envs": 64, "batch_size": 64, "max_model_len": 1024, "max_output_tokens": 64, "min_output_tokens": 64}
    size = {"num_envs": 4, "batch_size": 4} if place.tiny else size
    run = place.run(f"{model}-{algo}-{len(settings)}", model=model, algo=algo, **size | settings)
    found = []
    try:
        batches = iter(run.trainer.collector)
        for _ in range(1 + rounds):
            if place.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            start = synchronized(place)
            rows = run.trainer.collect(batches)
            played = synchronized(place)
            run.trainer.learn(rows)
            learned = synchronized(place)
            sampled, held = int((rows[keys.TURN_IDS] >= 0).sum()), int(rows[keys.ATTENTION_MASK].sum())
            peak = torch.cuda.max_memory_allocated() / 2**20 if place.on_gpu else float("nan")
            found.append((sampled / (played - start), held / (learned - played), peak))
    finally:
        run.close()
    rollout, learn, peak = (sorted(values)[rounds // 2] for values in zip(*found[1:], strict=True))
    return {"rollout_tok_s": rollout, "learn_tok_s": learn} | ({"peak_mb": peak} if place.on_gpu else {})


def benchmarks(place: Place) -> dict[str, Callable[[], dict[str, float]]]:
    """All measurements by name."""
    lora, full = {"dtype": "bfloat16"}, {"lora_r": 0, "mixed_precision": "bf16", "kl_coeff": 0.0}
    named = {}
    for model in SHAPES:
        named[f"{model}, LLMPPO, LoRA, bfloat16"] = partial(speed, place, model, "LLMPPO", **lora)
        named[f"{model}, GRPO, LoRA, bfloat16"] = partial(speed, place, model, "GRPO", **lora, group_size=4)
        named[f"{model}, LLMREINFORCE, all weights, mixed"] = partial(speed, place, model, "LLMREINFORCE", **full)
        recompute = partial(speed, place, model, "LLMPPO", **lora, gradient_checkpointing=True)
        named[f"{model}, LLMPPO, LoRA, bfloat16, gradient checkpointing"] = recompute
    return named


# ---------------------------------------------------------------------- the command line


def attempt(work: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """What one check or measurement found: ``passed``, ``skipped`` or ``failed``, figures, a reason and the seconds."""
    start = time.perf_counter()
    try:
        found: dict[str, Any] = {"outcome": "passed", "figures": work()}
    except Skip as reason:
        found = {"outcome": "skipped", "reason": str(reason)}
    except Exception:  # noqa: BLE001 one that fails must not hide the others
        found = {"outcome": "failed", "reason": traceback.format_exc()}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def machine(device: str) -> dict[str, str]:
    """What it ran on."""
    found = {"python": platform.python_version(), "device": "cpu"}
    if device != "cpu":
        found |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    for name in ("torch", "transformers", "peft", "accelerate", "tensordict", "torchrl", "vllm", "gem-llm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, print a line each, write the JSON; returns the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["test", "bench"])
    parser.add_argument("--device", default="cuda", help='"cuda" or "cpu"')
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--only", default="", help="what has this in its name")
    parser.add_argument("--limit", type=float, default=340.0, help="seconds after which nothing more is begun")
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    given = parser.parse_args(arguments)
    if given.device != "cpu" and not torch.cuda.is_available():
        parser.error("no CUDA device is found; --device cpu --tiny runs the same on a CPU, with small shapes")
    began, found = time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as folder:
        place = Place(device=given.device, tiny=given.tiny, folder=Path(folder))
        for name, work in (checks if given.what == "test" else benchmarks)(place).items():
            if given.only not in name:
                continue
            late = time.perf_counter() - began > given.limit
            found[name] = {"outcome": "skipped", "reason": f"{given.limit:.0f} s were over"} if late else attempt(work)
            told = found[name].get("figures") or found[name]["reason"]
            print(f"{found[name]['outcome']:8}{name}: {told}", flush=True)
    failed = sum(each["outcome"] == "failed" for each in found.values())
    result = {
        "what": given.what,
        "tiny": given.tiny,
        "machine": machine(given.device),
        "results": found,
        "failed": failed,
    }
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(result, indent=2) + "\n")
    return failed


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
