"""What the law of the settings is made of: cases, the runs that they change, and the traces of
these."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate.state import AcceleratorState
from small_runs import EVERY_ALGORITHM, weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from waiting import wait_until

from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import TurnPolicy
from torchrl_llm.modules.vllm import settings as of_vllm
from torchrl_llm.objectives import ImitationWeights, LLMReinforceLoss, ReBN
from torchrl_llm.runs import RunSettings, build, build_run
from torchrl_llm.runs import trackers as loggers
from torchrl_llm.runs.device import make_accelerator
from torchrl_llm.runs.recording import read_recording
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer
from torchrl_llm.trainers import Callback

BASE = {
    "model_path": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "algo": "LLMREINFORCE",
    "max_model_len": 256,
    "max_output_tokens": 16,
    "num_envs": 4,
    "batch_size": 4,
    "lora_r": 0,
    "kl_coeff": 0.0,
    "epochs": 2,
    "lr_actor": 1e-2,
    "max_iterations": 2,
    "max_steps": 100,
    "evaluation_interval": 0,
    "evaluation_episodes": 4,
    "final_episodes": 4,
    "save_checkpoints": False,
    "progress": False,
}
"""Two iterations of a few conversations, each with a second epoch, so that ratios differ from 1: a
quarter of a second."""


CALLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def look(place: str) -> str:
    """Look somewhere.

    Args:
        place: where.
    """
    return f"Nothing is in the {place}."


class Guess:
    """Two turns, each paid by what is said."""

    where: ClassVar[set[bool]] = set()

    def reset(self, seed=None):
        self.turn, self.seed = 0, seed
        return "Guess.", {}

    def step(self, action):
        self.where.add(threading.current_thread() is threading.main_thread())
        self.turn += 1
        return "Again.", float(sum(map(ord, action)) % 3), self.turn == 2, False, {}


class Rated(Guess):
    """Gives a number with every turn."""

    extras: ClassVar[dict[str, type]] = {"rating": float}

    def step(self, action):
        *step, _ = super().step(action)
        return *step, {"rating": float(len(action) % 4)}


class Half(Guess):
    """Pays in every second task, so that groups of the others have no spread."""

    def step(self, action):
        text, reward, *rest = super().step(action)
        return text, reward * (self.seed % 2), *rest


class Other(Guess):
    """Pays more."""

    def step(self, action):
        text, reward, *rest = super().step(action)
        return text, 2 * reward + 0.5, *rest


class Slow(Guess):
    """Hangs in some tasks, if there is a limit that ends it."""

    thread_safe = True
    limited: ClassVar[threading.Event] = threading.Event()

    def step(self, action):
        if self.seed % 3 == 0 and self.limited.is_set():
            wait_until(lambda: not self.limited.is_set())
        return super().step(action)


class Failing(Guess):
    """Fails in some tasks."""

    def step(self, action):
        if self.seed // 4 % 4 == 0:
            raise RuntimeError("out of order")
        return super().step(action)


class Halved(ReBN):
    """An estimator from outside the package."""

    def compare(self, *args):
        return super().compare(*args) / 2


@dataclass(kw_only=True, eq=False, repr=False)
class Tempered(LLMReinforceLoss):
    """A loss from outside the package, with an option of its own."""

    strength: float = 0.5

    def objective(self, log_ratio, advantage):
        return super().objective(log_ratio, self.strength * advantage)


class Biased(LLMReinforceLoss):
    """A parameter of its own, which is added to the objective."""

    def __init__(self, actor: Any, **options: Any):
        super().__init__(actor, **options)
        self.bias = torch.nn.Parameter(torch.ones(()))

    def objective(self, log_ratio, advantage):
        return self.bias * super().objective(log_ratio, advantage)


class Wider(Halved):
    """An option of its own."""

    def __init__(self, *, width: float = 1.0, **options: Any):
        super().__init__(**options)
        self.width = width

    def compare(self, *args):
        return super().compare(*args) * self.width


class Marker(Callback):
    """Ends the run."""

    def on_iteration(self, trainer, metrics):
        trainer.stop_reason = "marked"


class Silent(TurnPolicy):
    """What engine_class names: it holds what it was made with."""

    owns_weights = True

    def __init__(self, path: str, tokenizer: Any, sampling: Any, *, seed: int, turns: int = 1):
        super().__init__(sampling, seed=seed)
        self.turns = turns

    def generate(self, *args, **options):
        raise NotImplementedError


class Loud(Silent):
    pass


class Lighter(ImitationWeights):
    """Weights from outside the package."""

    def estimate(self, tensordict):
        found = super().estimate(tensordict)
        weight = found["turn_advantage"]
        return found | {"turn_advantage": weight / torch.arange(1, weight.shape[1] + 1)}


@dataclass(frozen=True)
class Case:
    """One field changed to ``value`` where the other settings are :data:`BASE` and ``context``.

    Attributes:
        value: the new value; a function makes it of the test's folder.
        context: other settings.
        env: what is played instead of ``env_name``.
        prior: settings of a run that has been in the folder before.
        run: what is done with the configuration; returns the trace.
        refused: whether a refusal is an answer. Without, the change must have an effect.
    """

    value: Any
    context: dict[str, Any] = field(default_factory=dict)
    env: Any = None
    prior: dict[str, Any] | None = None
    run: Callable[..., Any] | None = None
    refused: bool = False


def works(value: Any, algo: str | None = None, **context: Any) -> Case:
    special = {name: context.pop(name, None) for name in ("env", "prior", "run")}
    return Case(value, ({"algo": algo, **EVERY_ALGORITHM[algo]} if algo else {}) | context, **special)


def idle(value: Any, algo: str | None = None, **context: Any) -> Case:
    """A context in which the field has no effect to have."""
    return replace(works(value, algo, **context), refused=True)


def trained(config: RunSettings, env: Any) -> dict[str, Any]:
    """The trace of a run to its end."""
    Guess.where.clear()
    run = build_run(config, env=env)
    calls = []
    hook = run.models.model.register_forward_hook(lambda *_: calls.append(1))
    layers = []
    layer = next(module for name, module in run.models.model.named_modules() if name.endswith("layers.0.self_attn"))
    counted = layer.register_forward_hook(lambda *_: layers.append(1))
    try:
        history = run.trainer.train()
    finally:
        hook.remove()
        counted.remove()
        run.close()
    timeless = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in history]
    files = [
        re.sub(r"events\..*", "events", str(path)) for path in config.output.output_dir.rglob("*") if path.is_file()
    ]
    return {
        "metrics": str(timeless),
        "weights": weights(run).double().cpu().numpy().tobytes(),
        "files": sorted(name.removeprefix(str(config.output.output_dir)) for name in files),
        "calls": (len(calls), len(layers), sorted(Guess.where)),
        "end": run.trainer.stop_reason,
    }


def hanging(config: RunSettings, env: Any) -> dict[str, Any]:
    """The trace of a run of :class:`Slow`, whose steps hang where ``step_timeout`` ends them."""
    if getattr(config.rollouts, "step_timeout", None) is not None:
        Slow.limited.set()
    try:
        return trained(config, env)
    finally:
        Slow.limited.clear()


def made(config: RunSettings, env: Any) -> Any:
    """The engine of a worker."""
    made = build._worker_policy(config, load_tiny_tokenizer(), config.sampling, None)
    return (type(made).__name__, vars(made).get("turns"))


def built(config: RunSettings, env: Any) -> dict[str, Any]:
    """What is made for a run that a test of the suite plays elsewhere: parts whose work is not
    function of the settings."""
    run = build_run(config, env=env)
    try:
        return {
            "collector": type(run.trainer.collector).__name__,
            "opponent": type(run.opponent).__name__,
            "scored": run.trainer.scorer.scores_old,
            "callbacks": [type(each).__name__ for each in run.trainer.callbacks],
            "compiled": any("forward" in vars(module) for module in run.models.model.modules()),
            "compiles": run.policy.compile_decode,
        }
    finally:
        run.close()


def graded(config: RunSettings, env: Any) -> Any:
    """The gradient on a batch whose log-probs are not the model's: for runs that do not repeat,
    with ``max_staleness``."""
    run = build_run(config.replace(collector="turn", sampler_bounds=None, sampler_level="token"))
    next(iter(run.trainer.collector))
    rows = run.trainer.replay_buffer[:].contiguous()
    rows["old_log_prob"] = rows["sample_log_prob"] + torch.linspace(0, 2, rows["sample_log_prob"].shape[1])
    loss = build.make_objective(config, run.models)
    loss(loss.value_estimator(rows))["loss_objective"].backward()
    run.close()
    return {"gradient": [p.grad.cpu().numpy().tobytes() for p in run.models.actor_parameters() if p.grad is not None]}


def logged(config: RunSettings, env: Any) -> Any:
    """The loggers asked for."""
    asked = []

    def recorder(kind, *args, **options):
        asked.append((kind, {**options.get("wandb_kwargs", {}), "id": None}))
        return get_logger("csv", str(config.output.output_dir), "csv")

    get_logger = loggers.get_logger
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loggers, "get_logger", recorder)
        patch.setattr(loggers, "import_extra", lambda *_, **__: None)
        patch.setattr(loggers, "TrackioRun", lambda name, project, **_: recorder(project))
        loggers.make_loggers(config)
    return {"asked": asked}


class Recorder:
    """Stands where vLLM or Ray would be made, and keeps what it is given."""

    calls: ClassVar[list[Any]] = []
    policy_version = 1
    lora = None
    sleep_level = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        simple = (str, int, float, bool, dict, type(None))
        kept = {name: value for name, value in options.items() if isinstance(value, simple)}
        self.policy = options.get("policy")
        self.calls.append(str(kept | {"at": [each for each in args if isinstance(each, str)]}))

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")


def engine(config: RunSettings, env: Any) -> Any:
    """What the engine, its weight transfer, or the workers are made with."""
    names = ("VLLMPolicy", "EngineWeightSync", "RayWeightSync", "RayTurnCollector")
    Recorder.calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(of_vllm if name == "VLLMPolicy" else build, name, type(name, (Recorder,), {}))
        tokenizer = load_tiny_tokenizer()
        sampling = config.sampling
        models = build.load_models(config, tokenizer, sampling, device="cpu")
        distributed = build.Distributed.of(accelerator := make_accelerator(config))
        started = build.start_engine(config, tokenizer, sampling, distributed, accelerator.device)
        policy, sync = build.make_policy(config, tokenizer, sampling, models, started)
        worker = build._worker_policy(config, tokenizer, sampling, None) if config.policy == "vllm" else None
        if config.collector == "ray":
            game = GEMEnv(Guess, tokenizer=tokenizer)
            workers = build.worker_options(config, None, tokenizer, sync)
            buffer, estimator = build.make_replay_buffer(config), build.make_objective(config, models).value_estimator
            build.make_collector(config, game, policy, buffer, distributed, estimator, **workers)
    offload = config.engine.offload(models).__name__
    return {"calls": Recorder.calls, "offload": offload, "plays": (type(policy).__name__, type(worker).__name__)}


def scripted(config: RunSettings, env: Any) -> Any:
    """What ``examples/multiturn.py`` leaves behind."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("multiturn", Path(__file__).parents[2] / "examples" / "multiturn.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = module.main(config)
    merged = sorted(path.name for path in (config.output.output_dir / "merged").glob("*"))
    return {"rates": (result["reward_before"], result["turns_before"]), "merged": merged}


def fresh_state(config: RunSettings, env: Any) -> Any:
    """A run with a state of accelerate's own: it keeps one precision for a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcceleratorState, "_shared_state", {})
        return trained(config, env)


def switched(config: RunSettings, env: Any) -> Any:
    """PyTorch's switches in the forwards of a run: what they change in the numbers depends on the
    machine."""
    run, found = build_run(config, env=env), set()
    run.models.model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda *_: found.add((torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()))
    )
    try:
        run.trainer.train()
    finally:
        run.close()
    return found


def recorded(config: RunSettings, env: Any) -> Any:
    """The episodes of each recording."""
    trained(config, env)
    return {
        path.name: read_recording(path).episodes for path in config.output.output_dir.glob("rollouts/*.safetensors")
    }


def shown(config: RunSettings, env: Any) -> Any:
    """The texts in TensorBoard."""
    trained(config, env)
    events = EventAccumulator(str(config.output.output_dir / "tensorboard")).Reload()
    return [(tag, str(events.Tensors(tag)[0].tensor_proto.string_val)) for tag in events.Tags()["tensors"]]


def placed(config: RunSettings, env: Any) -> Any:
    """Where a run writes."""
    trained(config, env)
    return config.output.output_dir.exists() and config.output.output_dir.resolve()


def own_env(config: RunSettings, env: Any) -> Any:
    """A run whose environments the caller makes."""
    run = build_run(config, make_env=partial(GEMEnv, [Guess, Other]))
    ids = [run.trainer.collector.env.task_sampler[i].env_id for i in range(32)]
    run.close()
    return ids


def other_model(place: Path) -> str:
    model = load_tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    model.save_pretrained(place / "other")
    load_tiny_tokenizer().save_pretrained(place / "other")
    return str(place / "other")


def other_tokenizer(place: Path, *, add: str = "{{ mood or 'calm' }}", end: str = "") -> str:
    """The tiny model's tokenizer with a template that reads a variable, or rewrites history."""
    tokenizer, where = load_tiny_tokenizer(), place / f"tokenizer{len(add)}{len(end)}"
    tokenizer.chat_template = add + tokenizer.chat_template + end
    tokenizer.save_pretrained(where)
    return str(where)


def forgetful(place: Path) -> str:
    return other_tokenizer(place, add="{{ messages | length }}")


def dated(place: Path) -> str:
    """The tiny model's tokenizer with a template that shows today's date."""
    return other_tokenizer(place, add="{{ strftime_now('%d %b %Y') }} ")


def thinker(place: Path) -> str:
    """The tiny model's tokenizer with a template that opens a thought for the assistant."""
    tokenizer, where = load_tiny_tokenizer(), place / "thinker"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    assert "<think>" in tokenizer.chat_template
    tokenizer.save_pretrained(where)
    return str(where)


def remote_code(place: Path) -> str:
    """A model whose configuration comes as code."""
    where = place / "remote"
    load_tiny_model().save_pretrained(where)
    load_tiny_tokenizer().save_pretrained(where)
    text = (where / "config.json").read_text().replace('"model_type": "qwen2"', '"model_type": "own_lm"')
    auto = '{\n  "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnLM"},'
    (where / "config.json").write_text(text.replace("{", auto, 1))
    (where / "own.py").write_text(
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "class OwnConfig(Qwen2Config):\n    model_type = 'own_lm'\n"
        "class OwnLM(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    return str(where)


def checkpoint(place: Path, **settings: Any) -> Path:
    where = place / f"saved{len(settings)}"
    if not where.exists():
        more = {"save_checkpoints": True, "max_iterations": 1, "output_dir": where, **settings}
        build_run(RunSettings.from_values(**BASE | more)).trainer.train()
    return where / "checkpoints" / "last"


ADAPTERS = {"algo": "LLMPPO", "lora_r": 2, "kl_coeff": 0.1}


def adapters(place: Path) -> Path:
    return checkpoint(place, **ADAPTERS)
