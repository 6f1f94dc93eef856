"""The law of the settings: whoever changes one changes what a run does, or is told why not. Over
every field.

What a run does is its trace: metrics, weights, files but for the echo of the settings, calls of
model, engine and workers. Each case changes one field in one context. A context in which the field
has nothing to act on belongs here too: there the change is refused with a sentence that names the
field, never taken without effect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from instances import usual
from setting_traces import (
    ADAPTERS,
    BASE,
    CALLS,
    Biased,
    Case,
    Failing,
    Guess,
    Half,
    Halved,
    Lighter,
    Marker,
    Other,
    Rated,
    Silent,
    Slow,
    Tempered,
    Wider,
    adapters,
    built,
    checkpoint,
    dated,
    engine,
    forgetful,
    fresh_state,
    graded,
    hanging,
    idle,
    logged,
    made,
    other_model,
    other_tokenizer,
    own_env,
    placed,
    recorded,
    remote_code,
    scripted,
    shown,
    switched,
    thinker,
    trained,
    works,
)
from torchrl.checkpoint import CheckpointError

from torchrl_llm.envs import EnvironmentFault, NotAppendOnlyError
from torchrl_llm.modules import AdapterError
from torchrl_llm.runs import ConfigError, RunSettings, build_run
from torchrl_llm.testing.take_away import TakeAway
from torchrl_llm.utils.sections import settings_of

EVALUATED = {"evaluation_interval": 1}
SAVED = {"save_checkpoints": True, "checkpoint_interval": 1}
KL = {"kl_coeff": 0.1}
OTHERS = {"baseline": "leave_one_out", "scale": "none"}
GAP = {"top_p": 0.8, "sampler_correction": "truncate", "sampler_bounds": 1.5}
MIXED = {"env": [Guess, Other]}
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
SHORT = {"max_output_tokens": 5, "batch_size": 16}
VLLM = {"policy": "vllm", "run": engine}
CUSTOM = {"policy": "custom", "engine_class": f"{Silent.__module__}:Silent", "run": made}
TEMPERED = f"{Tempered.__module__}:Tempered"
RAY = {"collector": "ray", "run": engine}
STALE = {"collector": "async", "max_staleness": 1, "run": graded}
AGAIN = {"prior": SAVED, **SAVED}


def of_vllm(value: Any) -> list[Case]:
    return [works(value, **VLLM), idle(value)]


def of_ray(value: Any) -> list[Case]:
    return [works(value, **RAY), idle(value), idle(value, collector="async")]


LAW: dict[str, list[Case]] = {
    # the loop
    "epochs": [works(1)],
    "minibatch_size": [works(2)],
    "max_tokens": [works(60)],
    "old_log_probs": [works("scorer"), works("sampler", top_p=0.8), idle("sampler", **GAP), idle("scorer", "SFT")],
    "critic_warmup": [works(1, "LLMPPO"), idle(1), idle(3, "LLMPPO"), idle(1, "LLMPPO", critic_coeff=0)],
    "dynamic_sampling": [works(2, "GRPO", env=Half, batch_size=8), idle(2, "SFT", group_size=2)],
    "overlong_filter": [works(True, **SHORT)],
    "overlong_penalty": [
        works(0.5, **SHORT),
        works(0.5, "SFT", imitate="return", min_return=0.0, **SHORT),
        idle(0.5, "SFT", **SHORT),
        idle(0.5, kl_coeff=0.1, estimator="NoCredit", **SHORT),
    ],
    "overlong_buffer": [works(2, overlong_penalty=0.5, **SHORT), idle(2), idle(6, overlong_penalty=0.5, **SHORT)],
    "max_grad_norm": [works(0.01)],
    "min_entropy_fraction": [works(1.0, entropy_coeff=0.1, entropy_target=0.1), idle(0.5)],
    "kl_decay_fraction": [works(0.5, kl_coeff=0.1), works(0.5, "GRPO", kl_coeff=0.1), idle(0.5, kl_coeff=0)],
    "target_kl": [works(1e-4), idle(1e-4, "SFT")],
    "target_kl_share": [works(1.0, target_kl=1e-4), idle(0.5)],
    "schedule": [works("constant"), idle("linear"), idle("constant", warmup_fraction=1.0)],
    "warmup_fraction": [works(0.5)],
    "min_lr_fraction": [works(0.5), idle(0.5, schedule="constant"), idle(0.5, warmup_fraction=1.0)],
    "lr_decay_fraction": [works(0.5), idle(0.5, schedule="constant"), idle(0.5, warmup_fraction=1.0)],
    "max_steps": [works(3)],
    "max_iterations": [works(1)],
    "max_seconds": [works(1e-6)],
    "stop_at_success": [works(0.01, evaluation_episodes=16, evaluation_interval=1), idle(0.01)],
    "evaluation_interval": [works(1)],
    "checkpoint_interval": [works(1, save_checkpoints=True), idle(1)],
    "seed": [works(1)],
    # the model
    "algo": [works("LLMPPO"), works("SFT", demonstrations="guess_by_hints")],
    "model_path": [works(other_model), idle("/no/such/model")],
    "tokenizer_path": [works(other_tokenizer), idle("/no/such/tokenizer")],
    "dtype": [works("bfloat16", lora_r=2)],
    "device": [idle("cuda")],
    "mixed_precision": [works("bf16", run=fresh_state), idle("fp16", run=fresh_state)],
    "float32_matmul_precision": [works("high", run=switched)],
    "deterministic": [works(True, run=switched), idle(True, collector="async", max_staleness=1)],
    "attn_implementation": [works("eager")],
    "trust_remote_code": [works(True, model_path=remote_code)],
    "gradient_checkpointing": [works(True)],
    "compile": [works(True, run=built)],
    "compile_decode": [works(True, run=built), idle(True, **VLLM)],
    "share_prefixes": [works(False, batch_size=32)],
    "chunk_logits": [works(400), idle(0)],
    "quantization": [idle("nf4", lora_r=2), idle("nf4")],
    "base_products": [
        works("bfloat16", lora_r=2),
        idle("bfloat16"),
        idle("bfloat16", lora_r=2, dtype="bfloat16"),
        idle("bfloat16", lora_r=2, mixed_precision="bf16"),
    ],
    "lora_r": [works(2)],
    "lora_alpha": [works(9, lora_r=2), idle(9)],
    "lora_targets": [works(["q_proj"], lora_r=2), idle("q_proj", lora_r=2), idle(["q_proj"])],
    "critic_trunk": [works("shared", "LLMPPO"), idle("Shared", "LLMPPO"), idle("shared")],
    "init_from": [works(checkpoint), idle("/no/such/checkpoint")],
    "init_reference": [works(True, init_from=adapters, **ADAPTERS), idle(True), idle(True, init_from=checkpoint)],
    "init_critic": [works(True, init_from=adapters, **ADAPTERS), idle(True, "LLMPPO"), idle(True, init_from=checkpoint)],
    "merge_lora_configs": [
        works(True, init_from=adapters, **ADAPTERS | {"lora_r": 4}),
        idle(True),
        idle(True, init_from=checkpoint),
    ],
    "refresh_reference": [works(2, lora_r=2, max_iterations=4, **KL), idle(1), idle(1, **KL)],
    "teacher": [works(other_model, **KL), idle(other_model)],
    # the environment
    "env_name": [works("game:GuessTheNumber-v0-hard")],
    "env_weights": [works([1.0, 9.0], **MIXED), idle([2.0]), idle([1.0, 9.0], run=own_env)],
    "env_options": [works({"max_turns": 1}), idle({"max_turn": 1}), idle({"max_turns": 1}, run=own_env)],
    "tools": [
        works(["setting_traces:look"], chat_template=CALLS),
        idle(["setting_traces:look"], run=own_env, chat_template=CALLS),
        idle(["setting_traces:Look"], chat_template=CALLS),
    ],
    "adaptive_mixture": [works(True, batch_size=16, max_iterations=3, **MIXED), idle(True)],
    "num_envs": [works(2)],
    "max_turns": [works(1)],
    "max_model_len": [works(64)],
    "overflow": [works("slide", max_model_len=64)],
    "system_prompt": [works("Be brief.")],
    "template": [works("raw", run=fresh_state)],
    "chat_template": [works(PLAIN), idle(PLAIN, template="raw")],
    "contexts": [works("append", tokenizer_path=forgetful), idle("append", template="raw")],
    "chat_template_kwargs": [works({"mood": "wild"}, tokenizer_path=other_tokenizer), idle({"mood": "x"}, template="raw")],
    "missing_thinking": [
        works("empty", "SFT", tokenizer_path=thinker, max_output_tokens=32),
        idle("empty", template="raw"),
    ],
    "template_date": [
        works("2020-01-01", tokenizer_path=dated),
        idle("2020-01-01"),
        idle("2020-01-01", template="raw"),
    ],
    # sampling
    "temperature": [works(0.7)],
    "top_k": [works(2)],
    "top_p": [works(0.8)],
    "min_p": [works(0.3)],
    "repetition_penalty": [works(1.5)],
    "min_output_tokens": [works(12), idle(12, stop_ids=[])],
    "max_output_tokens": [works(5)],
    "stop_ids": [works([*range(5, 100)])],
    # the rollout
    "policy": [works("vllm", run=engine)],
    "engine_dtype": of_vllm("bfloat16"),
    "tensor_parallel_size": of_vllm(2),
    "gpu_memory_utilization": of_vllm(0.5),
    "kv_cache_memory_bytes": of_vllm(10_000_000),
    "enforce_eager": of_vllm(True),
    "prefix_caching": of_vllm(False),
    "engine_process": of_vllm(True),
    "sleep_mode": [*of_vllm(True), idle(True, **VLLM | RAY)],
    "offload_base": [works(True, lora_r=2, **VLLM), idle(True)],
    "engine_class": [works(f"{Silent.__module__}:Loud", **CUSTOM), idle(None, **CUSTOM), idle(f"{Silent.__module__}:Halved", **CUSTOM), idle("a:b")],
    "engine_options": [works({"turns": 3}, **CUSTOM), idle({"turns": 3})],
    "weight_sync": [*of_vllm("reload"), idle("adapter", **VLLM), idle("reload", **VLLM | RAY), idle("nccl", **VLLM | RAY)],
    "collector": [works("async", run=built)],
    "opponent": [works("torchrl_llm.testing.take_away:take_well", collector="self_play", env=TakeAway, run=built), idle("tiny")],
    "max_staleness": [works(1, collector="async", run=built), idle(1)],
    "ray_workers": of_ray(3),
    "ray_worker_cpus": of_ray(0.5),
    "ray_worker_gpus": of_ray(1.0),
    "env_threads": [works(2, env=Guess)],
    "step_timeout": [works(0.05, env=Slow, batch_size=8, run=hanging), idle(0.05, env_threads=0)],
    "success_reward": [works(2.0, env=Guess)],
    "max_faults": [works(0, env=Failing, batch_size=8)],
    # the algorithm
    "batch_size": [works(8)],
    "group_size": [works(2)],
    "branches": [
        works(2, estimator="TurnVine", branches=1, env=Guess),
        works(2, "GRPO", estimator="TurnVine", branches=1, env=Guess),
        idle(2),
        idle(2, estimator="TurnVine", collector="async"),
        idle(2, estimator="TurnVine", overlong_penalty=0.1),
    ],
    "tree_branches": [
        works(1, "GRPO", group_size=4, baseline="leave_one_out", scale="none", env=Guess),
        works(1, group_size=2, num_envs=1, env=Guess),
        works(1, "LLMPPO", group_size=2, env=Guess),
        idle(1, group_size=2, collector="async"),
        idle(1),  # a group of one
        idle(1, "GRPO", group_size=4),  # the group's mean
        idle(1, "GRPO", group_size=2, baseline="leave_one_out", scale="none"),  # a single tree
        idle(1, "SFT", group_size=2),
        idle(1, group_size=2, estimator="TurnVine", branches=1),
    ],
    "tree_depth": [works(1, group_size=2, tree_branches=1, env=Guess), idle(1)],
    "branch_share": [works(0.5, estimator="TurnVine", branches=1, env=Guess), idle(0.5)],
    "demonstrations": [
        works("guess_by_hints", "SFT"),
        idle(None, "SFT"),
        idle("guess_by_hints"),
        idle("guess_by_hint", "SFT"),
        idle("guess_by_hints", "SFT", collector="ray", run=engine),
    ],
    "imitate": [works("success", "SFT"), works("return", "SFT", min_return=0.0), idle("success"), idle("wins", "SFT")],
    "min_return": [works(0.5, "SFT"), works(2.0, "SFT", imitate="return", min_return=0.0), idle(0.5)],
    "gamma": [works(0.5), works(0.5, "SFT", imitate="return", min_return=0.0), works(0.5, "SFT", min_return=0.6), idle(0.5, "SFT")],
    "discounted_objective": [works(True), idle(True, gamma=1.0), idle(True, "GRPO", credit="turn")],
    "clip_advantage": [works(0.3)],
    "kl_coeff": [works(0.1), idle(0.1, "SFT")],
    "kl_in": [works("loss", **KL), works("reward", "LLMPPO", **KL), idle("loss")],
    "kl_kind": [works("k2", "LLMPPO", **KL), idle("k2", **KL), idle("k2", kl_in="loss"), idle("k2", "LLMPPO")],
    "clipping": [works("none"), works("cispo"), idle("none", "SFT")],
    "clip_epsilon": [works(0.001), works((0.001, 0.4)), idle(0.3, clipping="none")],
    "dual_clip": [works(1.002, clip_epsilon=0.001), idle(3.0, clipping="cispo"), idle(3.0, clipping="none")],
    "ratio_level": [works("sequence"), works("turn")],
    "ratio_reduction": [works("sum", ratio_level="turn"), idle("sum")],
    "unit_weight": [works("equal", ratio_level="turn"), idle("equal")],
    "weighting": [works("sequence"), works("turn"), works("sequence", "SFT", demonstrations="guess_at_random")],
    "weight_constant": [
        works(99.0, weighting="constant", weight_constant=9.0),
        *(idle(9.0, weighting=kind) for kind in ("token", "turn", "sequence")),
    ],
    "entropy_coeff": [works(0.1), idle(-0.1), works(0.1, "SFT")],
    "entropy_target": [works(0.1, entropy_coeff=0.1), idle(0.1)],
    "sampler_correction": [works("truncate", **GAP | {"sampler_correction": None}), works("mask", top_p=0.8, sampler_correction="reject", sampler_bounds=(0.99, 1.5)),
    ],
    "sampler_bounds": [works(0.5, **GAP), works(1.01, **STALE), idle(1.5)],
    "sampler_level": [works("turn", **GAP), works("turn", **STALE), idle("turn")],
    "sampler_reduction": [works("mean", **GAP | {"sampler_level": "turn"}), idle("mean", **GAP), idle("mean")],
    "estimator": [
        works("TurnVTrace", "LLMPPO", clipping="none"),
        works("ReBN", "LLMPPO"),
        works(f"{Halved.__module__}:Halved"),
        idle("TurnVine"),
        idle("TurnVTrace", clipping="none"),
        idle("TurnVTrace", "LLMPPO"),
        works(f"{Lighter.__module__}:Lighter", "SFT"),
        idle("ReBN", "SFT"),
        idle("NoCredit", "SFT"),
        idle("ReBN", "SFT", imitate="success"),
        idle("TurnVTrace", "SFT"),
        idle("TurnVTrace", "LLMPPO", clipping="none", lmbda=0.3),
        idle("NoSuch"),
        idle("no_such.package:Name"),
        idle("LLMPPOLoss"),
    ],
    "loss_class": [
        works(TEMPERED),
        idle(TEMPERED, "LLMPPO"),
        idle(f"{Tempered.__module__}:Nothing"),
        idle(f"{Tempered.__module__}:Halved"),
    ],
    "loss_options": [works({"strength": 0.1}, loss_class=TEMPERED), idle({"strength": 0.1}), idle({"gamma": 0.1}, loss_class=TEMPERED)],
    "estimator_options": [
        works({"width": 3.0}, estimator=f"{Wider.__module__}:Wider"),
        idle({"width": 3.0}),
        idle({"wdth": 3.0}, estimator=f"{Wider.__module__}:Wider"),
    ],
    "lmbda": [works(0.3, "LLMPPO"), idle(0.3), idle(7, "LLMPPO")],
    "critic_coeff": [works(5.0, "LLMPPO", max_grad_norm=1e3), idle(0.3)],
    "clip_value": [works(1e-3, "LLMPPO"), works(0.0, "LLMPPO", clip_value=1e-3), idle(0.3)],
    "granularity": [works("token", "LLMPPO"), works("token"), idle("token", "GRPO"), idle("auto", "GRPO")],
    "value_reduction": [works("mean", "LLMPPO"), idle("mean")],
    "whiten": [
        works(False, "LLMPPO"),
        works(True, "GRPO", scale="none", max_grad_norm=1e3, env=Guess),
        idle(True, "GRPO", **OTHERS),
        idle(True),
    ],
    "normalize_over": [works("none"), idle("none", "LLMPPO"), idle("none", "SFT")],
    "credit": [works("turn", "GRPO", env=Guess), works("state", "GRPO", env=Guess, **OTHERS), idle("turn")],
    "state": [works("observation", "GRPO", env=Guess, credit="state", **OTHERS), idle("observation", "GRPO")],
    "fallback": [works("return", "GRPO", env=Guess, credit="state", **OTHERS), idle("return", "GRPO")],
    "baseline": [works("leave_one_out", "GRPO", scale="none", max_grad_norm=1e3, env=Guess), idle("leave_one_out")],
    "scale": [
        works("batch", "GRPO", batch_size=8, env=Guess),
        works("none", "GRPO", max_grad_norm=1e3, env=Guess),
        works("mean", "GRPO", max_grad_norm=1e3, env=Guess),
        idle("mean", "GRPO", credit="turn"),
        idle("none"),
    ],
    "components": [
        works({"rating": 1.0}, "GRPO", env=Rated),
        works({"rating": -1.0}, "GRPO", env=Rated, components={"rating": 1.0}),
        idle({"rating": "much"}, "GRPO", env=Rated),
        idle({"rating": 1.0}),
    ],
    "potential": [
        works("rating", env=Rated),
        works("rating", "GRPO", env=Rated, credit="turn"),
        idle("rating", "GRPO", env=Rated),
        idle("rating", "LLMPPO"),
    ],
    # the optimizer
    "lr_actor": [works(1e-3)],
    "lr_critic": [works(1e-3, "LLMPPO"), idle(1e-3)],
    "lr_loss": [works(1e-3, loss_class=f"{Biased.__module__}:Biased"), idle(1e-3)],
    "weight_decay": [works(0.5)],
    "adam_beta2": [works(0.5)],
    # the run
    "evaluation_episodes": [works(6, **EVALUATED)],
    "evaluation_greedy": [works(True, **EVALUATED), idle(True)],
    "final_episodes": [works(2, run=scripted)],
    "output_dir": [works(lambda place: place / "elsewhere", run=placed)],
    "save_checkpoints": [works(True)],
    "keep_checkpoints": [works(1, **SAVED), idle(1)],
    "export_merged": [works(True, run=scripted)],
    "resume": [works(True, **AGAIN)],
    "resume_from": [works(checkpoint, max_iterations=1, save_checkpoints=True)],
    "accept_changes": [works(["max_iterations"], prior={**SAVED, "max_iterations": 1}, resume=True, **SAVED), idle(["seed"])],
    "overwrite": [works(True, **AGAIN)],
    "callbacks": [works({f"{Marker.__module__}:Marker": {}}), idle({f"{Marker.__module__}:Other": {}})],
    "tensorboard": [works(True)],
    "wandb": [works(True, run=logged)],
    "wandb_project": [works("mine", wandb=True, run=logged), idle("mine")],
    "trackio": [works(True, run=logged)],
    "trackio_project": [works("mine", trackio=True, run=logged), idle("mine")],
    "progress": [works(True, run=built)],
    "record_interval": [works(0)],
    "record_tasks": [works(1, run=recorded, batch_size=16), idle(2, record_interval=0)],
    "record_megabytes": [works(1e-3, max_iterations=3, record_interval=1), idle(1.0, record_interval=0)],
    "log_episodes": [
        works(2, tensorboard=True, run=shown),
        works(2, tensorboard=True, log_episodes=1, run=shown),
        idle(2),
        idle(2, tensorboard=True, record_interval=0),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Traces a configuration; what was traced once is remembered."""
    place, known = tmp_path_factory.mktemp("law"), {}

    def made(settings: dict[str, Any]) -> dict[str, Any]:
        return {name: value(place) if callable(value) else value for name, value in settings.items()}

    def trace(case: Case, settings: dict[str, Any]) -> Any:
        settings = made(BASE | case.context | settings)
        key = str((settings, case.env, case.prior, case.run))
        if key not in known:
            where = {"output_dir": place / f"run{len(known)}"} | settings
            if case.prior is not None:
                anew = {"resume": False, "overwrite": False, "accept_changes": [], "output_dir": where["output_dir"]}
                build_run(RunSettings.from_values(**BASE | case.context | anew | case.prior)).trainer.train()
            try:
                known[key] = (case.run or trained)(RunSettings.from_values(**where), case.env)
            except EnvironmentFault as fault:
                known[key] = {"raised": type(fault)}
            except (AdapterError, ConfigError, CheckpointError, ImportError, NotAppendOnlyError) as error:
                known[key] = error
        return known[key]

    return trace


NAMES = [*settings_of(RunSettings)]
ON_A_CPU = {"base_products", "deterministic", "device", "dtype", "float32_matmul_precision"}


def tried(name):
    """Every eighth is in ``make test``."""
    marks = [pytest.mark.host] if name in ON_A_CPU else []
    return pytest.param(name, marks=marks if NAMES.index(name) % 8 == 0 else [*marks, pytest.mark.extra])


"""Have another default, or another condition, on a GPU."""


@pytest.mark.parametrize("name", map(tried, NAMES))
def test_every_setting_has_an_effect_or_is_refused(name, trace):
    cases = LAW.get(name, [])
    assert cases, f"{name} has no entry in LAW: say what changes with it, and where it would do nothing."
    for case in cases:
        base, changed = trace(case, {}), trace(case, {name: case.value})
        said = f"{name}={case.value!r} with {case.context}"
        if isinstance(changed, Exception):
            assert case.refused, f"{said} fails: {changed!r}"
            assert name in str(changed), f"{said} is refused without its name: {changed}"
            continue
        differs = isinstance(base, Exception) or changed != base
        assert differs, f"{said} changes nothing."


def test_a_trace_is_that_of_its_settings(trace):
    """The law would hold of anything if two runs of the same settings differed."""
    again = replace(works(0), context={"wandb_project": "torchrl_llm"})
    for first, second in (
        (works(0), again),
        (works(0, "LLMPPO"), replace(again, context=works(0, "LLMPPO").context | again.context)),
    ):
        assert trace(first, {}) == trace(second, {})


@pytest.mark.parametrize(
    ("name", "value"),
    usual(
        [
            ("weight_decay", 0.5),
            ("adam_beta2", 0.5),
            ("seed", 1),
            ("lr_actor", 1e-3),
            ("schedule", "constant"),
            ("max_grad_norm", 0.01),
            ("temperature", 0.7),
            ("gamma", 0.5),
        ]
    ),
)
def test_an_accepted_change_takes_effect(name, value, trace):
    """What a checkpoint holds of the settings (optimizer, generators, tasks) gives way to the
    accepted change."""
    context = {**SAVED, "minibatch_size": 2, "resume": True, "accept_changes": ["max_iterations", name]}
    case = Case(value, context, prior={"max_iterations": 1})
    same, changed = trace(case, {}), trace(case, {name: value})
    assert changed["weights"] != same["weights"]
    if name == "seed":
        assert changed["metrics"] != same["metrics"]


def test_there_is_no_entry_without_a_field():
    assert set(LAW) == set(NAMES)
