"""Settings: what is accepted, what is an error, and what the error says."""

import copy
import pickle
import re
from pathlib import Path

import pytest

from torchrl_llm.modules import SamplingConfig
from torchrl_llm.modules.sampling import decide_stop_ids
from torchrl_llm.runs import (
    GRPO,
    LLMPPO,
    ConfigError,
    RunSettings,
    TurnRollouts,
    parse_settings,
    resume_command,
)
from torchrl_llm.runs.effective_settings import changed_settings, effective_settings
from torchrl_llm.trainers import TrainerConfig
from torchrl_llm.utils.options import IdleError, options_of
from torchrl_llm.utils.sections import choices_of, sections_of, settings_of

SHIPPED = Path(__file__).parents[2] / "examples" / "configs"
CONFIGS = sorted(path for path in SHIPPED.glob("*.yaml") if not path.stem.startswith(("accelerate_", "tuning_")))


REFRESHED = {"refresh_reference": 1, "kl_coeff": 0.1, "batch_size": 64}


class TestRunConfig:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"algo": "GRPO"}, "group_size=1, expected at least 2"),
            ({"algo": "GRPO", "group_size": 4, "batch_size": 30}, "batch_size=30 is not a multiple of group_size=4"),
            ({"algo": "GRPO", "group_size": 4, "num_envs": 6, "batch_size": 32}, "num_envs=6 is not a multiple"),
            ({"minibatch_size": 12}, "does not divide batch_size=32"),
            ({"algo": "LLMREINFORCE", "lmbda": 0.9}, "lmbda=0.9 does nothing with algo='LLMREINFORCE'"),
            ({"algo": "GRPO", "group_size": 4, "critic_coeff": 0.5}, "critic_coeff=0.5 does nothing with algo='GRPO'"),
            ({"algo": "PPO"}, "expected one of 'LLMPPO'"),
            ({"temperature": 0.0}, "ExplorationType.DETERMINISTIC"),
            ({"max_output_tokens": 1024}, "leaves no room for a prompt"),
            ({"stop_at_success": 0.9, "evaluation_interval": 0}, "set evaluation_interval"),
            ({"stop_at_success": 1.1}, r"is 1.1; expected a number, in \(0, 1\], or None"),
            ({"warmup_fraction": 2.0}, "expected a number, between 0 and 1"),
            ({"epochs": 0}, "at least 1"),
            ({"max_iterations": 0}, "at least 1, or None"),
            ({"lora_r": -1}, "0 trains all weights"),
            ({"algo": "LLMPPO", "scale": "none"}, "scale='none' does nothing with algo='LLMPPO'"),
            ({"algo": "LLMREINFORCE", "credit": "turn"}, "credit='turn' does nothing with algo='LLMREINFORCE'"),
            (
                {"algo": "GRPO", "group_size": 4, "normalize_over": "none"},
                "normalize_over='none' does nothing with algo='GRPO'",
            ),
            ({"algo": "LLMREINFORCE", "critic_warmup": 2}, "which has a critic"),
            ({"critic_warmup": 2, "critic_coeff": 0}, "critic_warmup=2 does nothing with critic_coeff=0"),
            ({"critic_warmup": 2, "lr_critic": 0.0}, "critic_warmup=2 does nothing with lr_critic=0.0"),
            ({"critic_warmup": 2, "lr_actor": 0.0}, "does nothing with lr_critic=None and lr_actor=0.0"),
            ({"algo": "LLMREINFORCE", "whiten": True}, "whiten=True does nothing with algo='LLMREINFORCE'"),
            ({"dynamic_sampling": 2}, "group_size=1, expected at least 2"),
            ({"dynamic_sampling": -1}, "dynamic_sampling is -1; expected an integer, at least 0"),
            ({"overlong_buffer": 4}, "overlong_buffer=4 does nothing with overlong_penalty=0.0"),
            ({"overlong_buffer": 0, "overlong_penalty": 1.0}, "at least 1, or None"),
            ({"resume": True, "overwrite": True}, "give one of them"),
            (
                {"overwrite": True, "output_dir": "a", "init_from": "a/checkpoints/last"},
                "init_from='a/checkpoints/last' lies in",
            ),
            (
                {"overwrite": True, "output_dir": "a", "algo": "SFT", "demonstrations": "a"},
                "demonstrations='a' lies in",
            ),
            ({"accept_changes": ["gama"], "resume": True}, "accept_changes names gama.*Did you mean 'gamma'"),
            ({"init_reference": True}, "init_reference=True does nothing with init_from=None"),
            (
                {"init_from": "x", "init_reference": True, "kl_coeff": 0.0},
                "init_reference=True does nothing with kl_coeff=0.0",
            ),
            ({"algo": "LLMREINFORCE", "critic_trunk": "shared"}, "which has a critic"),
            ({"compile": True, "gradient_checkpointing": True}, "exclude each other"),
            ({"quantization": "nf4", "lora_r": 0}, "is for LoRA"),
            (
                {"attn_implementation": "flash_attention_2"},
                "takes no mask, and policy='hf' samples with one: leave it out",
            ),
            ({"attn_implementation": "kernels-community/flash-attn2", "collector": "ray"}, "takes no mask"),
            ({"policy": "vllm", "offload_base": True, "lora_r": 0}, "offload_base moves the frozen base of LoRA"),
            ({"policy": "vllm", "offload_base": True, "quantization": "nf4"}, "choose one"),
            ({"offload_base": True}, "offload_base=True does nothing with policy='hf'"),
            ({"checkpoint_interval": -1}, "at least 0"),
            ({"keep_checkpoints": 0}, "at least 1"),
            ({"old_log_probs": "engine"}, "'auto', 'sampler', 'scorer'"),
            ({"policy": "sglang"}, "'hf', 'vllm'"),
            ({"collector": "dask"}, "'turn', 'async', 'ray'"),
            ({"ray_workers": 2}, "ray_workers=2 does nothing with collector='turn'"),
            ({"collector": "ray", "ray_workers": 0}, "ray_workers is 0"),
            ({"collector": "ray", "ray_worker_gpus": -1}, "ray_worker_gpus is -1"),
            ({"collector": "ray", "policy": "vllm", "sleep_mode": True}, "sleep_mode shares a GPU"),
            ({"collector": "ray", "policy": "vllm", "offload_base": True}, "collector='ray' has it on others"),
            ({"weight_sync": "nccl", "policy": "vllm", "offload_base": True}, "weight_sync='nccl' has it on others"),
            (
                {"collector": "ray", "policy": "vllm", "tensor_parallel_size": 2, "ray_worker_gpus": 1},
                "set ray_worker_gpus to 2",
            ),
            ({"collector": "ray", "policy": "vllm", "weight_sync": "nccl"}, "needs the engine here"),
            ({"policy": "vllm", "weight_sync": "ipc", "engine_process": False}, "engine_process=False: leave it out"),
            ({"policy": "vllm", "weight_sync": "nccl", "sleep_mode": True}, "engine on other GPUs.* choose one"),
            ({"sleep_mode": True}, "sleep_mode=True does nothing with policy='hf'"),
            ({"max_staleness": 1}, "max_staleness=1 does nothing with collector='turn'"),
            ({"collector": "async", "max_staleness": -1}, "at least 0"),
            ({"step_timeout": 1.0, "env_threads": 0}, "cannot be left"),
            ({"collector": "async", "max_staleness": 1, "old_log_probs": "sampler"}, "may have had older weights"),
            ({"policy": "vllm", "collector": "async", "max_staleness": 1, "sleep_mode": True}, "choose one"),
            (
                {"collector": "async", "max_staleness": 1, "adaptive_mixture": True},
                "leaves none between them: choose one",
            ),
        ],
    )
    def test_wrong_settings_are_errors_that_say_what_to_do(self, settings, message):
        with pytest.raises(ValueError, match=message):
            RunSettings.from_values(**settings)

    @pytest.mark.parametrize(
        "settings", [{"stop_ids": [*range(100_000), "x"]}, {"lora_r": 0, "lora_targets": ["q_proj"] * 10_000}]
    )
    def test_long_values_are_cut_in_errors(self, settings):
        with pytest.raises(ConfigError, match=r" \.\.\. .*(expected a list|give LoRA a rank)") as raised:
            RunSettings.from_values(model_path="tiny", **settings)
        assert len(str(raised.value)) < 400

    def test_many_ids_that_the_model_has_not_are_cut_too(self):
        with pytest.raises(
            ConfigError, match=r"stop_ids \[515, .* \.\.\. .*99999\] are not ids of the model"
        ) as raised:
            decide_stop_ids(SamplingConfig(stop_ids=tuple(range(100_000))), None, None, vocabulary=515)
        assert len(str(raised.value)) < 400

    def test_a_vllm_policy_leaves_the_attention_of_updates_open(self):
        RunSettings.from_values(attn_implementation="flash_attention_2", policy="vllm")

    def test_a_minibatch_may_hold_part_of_a_group(self):
        assert RunSettings.from_values(algo="GRPO", group_size=4, minibatch_size=2).trainer.minibatch_size == 2

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("gamma", 99), ("lmbda", 7), ("kl_coeff", -0.1), ("critic_coeff", -1.0), ("entropy_coeff", float("nan")),
            ("lr_actor", "1e-3"), ("lr_actor", float("inf")), ("num_envs", 3.5), ("epochs", True), ("whiten", 1),
            ("schedule", "linear"), ("critic_trunk", "Shared"), ("env_name", 3), ("env_weights", [1.0, 0.0]),
            ("adam_beta2", 1.0), ("clip_epsilon", [0.1, 0.2, 0.3]), ("clip_epsilon", -0.1), ("chat_template_kwargs", []), ("env_options", []),
            ("output_dir", None), ("lora_targets", [1]), ("seed", -1), ("max_steps", "9"), ("sampler_bounds", (0.1, -2.0)),
        ],
    )  # fmt: skip
    def test_types_and_ranges_are_those_of_the_command_line(self, name, value, capsys):
        with pytest.raises(ConfigError, match=rf"{name} is .*; expected "):
            RunSettings.from_values(**{name: value})
        # any text is one of these
        if not isinstance(value, str | None) and name not in ("env_name", "lora_targets"):
            as_text = str(value).replace("(", "[").replace(")", "]")
            with pytest.raises(SystemExit):
                parse_settings([f"--{name}={as_text}"])
            assert f"--{name} is " in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"critic_warmup": 3, "max_iterations": 2}, "critic_warmup=3 is more than max_iterations=2"),
            ({"overlong_penalty": 1.0, "overlong_buffer": 65}, "more than a response has, max_output_tokens=64"),
            (
                {"overlong_penalty": 0.5, "algo": "GRPO", "group_size": 4, "scale": "mean"},
                r'^overlong_penalty=0\.5 makes returns negative, which scale="mean" does not take: leave one of them out\.$',
            ),
            (
                {"overlong_penalty": 0.5, "algo": "SFT", "imitate": "return", "min_return": -1.0},
                'makes returns negative, which imitate="return" does not take: .* set min_return=0',
            ),
            ({"overlong_penalty": 0.5, "algo": "SFT", "imitate": "success"}, "does nothing with ImitationWeights"),
            ({"lora_targets": "q_proj"}, r"expected a list of names, \[q_proj\]"),
            ({"weight_sync": "adapter", "lora_r": 0, "policy": "vllm"}, "lora_r=0 has none"),
            ({"weight_sync": "reload", "collector": "ray", "policy": "vllm"}, "weight_sync='reload' needs the engine"),
            (
                REFRESHED | {"algo": "LLMREINFORCE", "epochs": 2},
                'with kl_in="reward" reads the KL there, where it is 0',
            ),
            (REFRESHED | {"algo": "GRPO", "group_size": 4}, "does nothing in an update of one optimizer step"),
            (REFRESHED | {"algo": "LLMPPO", "minibatch_size": 64}, "does nothing in an update of one optimizer step"),
            (
                {"accept_changes": ["lora_r"], "resume": True},
                "accept_changes names lora_r, but a resumed run has the weights",
            ),
        ],
    )
    def test_settings_that_exclude_each_other(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            RunSettings.from_values(**settings)

    @pytest.mark.parametrize(
        "settings",
        [
            {"algo": "GRPO", "group_size": 4, "epochs": 2},
            {"algo": "LLMPPO", "minibatch_size": 32},
            {"algo": "LLMREINFORCE", "refresh_reference": 2},
            {"algo": "LLMREINFORCE", "kl_in": "loss", "minibatch_size": 32},
        ],
    )
    def test_a_reference_may_be_refreshed_where_its_kl_is_read_later(self, settings):
        RunSettings.from_values(**REFRESHED | settings)

    @pytest.mark.parametrize(
        ("algo", "settings", "message"),
        [
            ("GRPO", {"baseline": "leave_one_out"}, "leave_one_out"),
            ("GRPO", {"discounted_objective": True, "gamma": 0.9}, 'is for credit="turn"'),
            ("LLMPPO", {"weighting": "constant"}, "set weight_constant"),
            ("LLMPPO", {"dual_clip": 1.1}, "dual_clip"),
            ("LLMPPO", {"sampler_correction": "truncate"}, "without sampler_bounds: give a cap, such as 2.0"),
            ("LLMPPO", {"sampler_correction": "mask", "sampler_bounds": 2}, r"takes \(low, high\)"),
            (
                "LLMREINFORCE",
                {"unit_weight": "equal", "ratio_level": "turn", "weighting": "sequence"},
                "leave weighting='sequence' out",
            ),
            ("LLMPPO", {"estimator": "TurnVTrace"}, 'Use clipping="none"'),
            ("LLMREINFORCE", {"estimator": "TurnVTrace", "clipping": "none"}, "needs a critic"),
        ],
    )
    def test_what_loss_and_estimator_refuse_is_refused_before_models_are_loaded(self, algo, settings, message):
        group = {"group_size": 4} if algo == "GRPO" else {}
        with pytest.raises(ConfigError, match=message):
            RunSettings.from_values(algo=algo, **group, **settings)

    def test_a_misspelt_field_names_the_nearest(self):
        with pytest.raises(TypeError, match=r"RunSettings has no option 'lr_actr'\. Did you mean 'lr_actor'\?"):
            RunSettings(lr_actr=1.0)

    def test_a_value_equal_to_the_default_is_no_error_where_it_does_nothing(self):
        config = RunSettings.from_values(
            clipping="none", clip_epsilon=0.2, ratio_reduction="mean", sampler_level="token", schedule="constant",
            min_lr_fraction=0.0, kl_in="reward", kl_kind="k3", lora_r=0, lora_targets="all-linear",
        )  # fmt: skip
        assert config.loss.clip_epsilon == 0.2

    @pytest.mark.parametrize(
        "settings",
        [
            {"max_staleness": 0},
            {"algo": "SFT", "imitate": "success", "kl_coeff": 0.0},
            {"sleep_mode": False, "engine_process": False, "offload_base": False},
            {"ray_worker_gpus": 0},
            {"critic_warmup": 2, "lr_critic": 1e-3, "lr_actor": 0.0},
        ],
        ids=["max_staleness", "kl_coeff", "engine", "ray", "critic_warmup"],
    )
    def test_a_value_that_says_what_is_so_anyway_is_no_error(self, settings):
        config = RunSettings.from_values(**settings)
        kept = {name: value for name, value in settings.items() if name in config.options()}
        assert config.values().items() >= kept.items()

    def test_an_option_is_declared_once(self):
        """What a field and the class that it configures say of it is the same."""

        settings = settings_of(RunSettings)
        for cls in (SamplingConfig, TrainerConfig):
            assert {name: option.hint for name, option in options_of(cls).items()}.items() <= {
                name: option.hint for name, option in settings.items()
            }.items()
        for kind in sections_of(RunSettings)["loss"]:
            for cls in (kind.stock, kind.stock.default_value_estimator):
                for name in (options_of(cls).keys() & options_of(kind).keys()) - {"estimator"}:
                    assert options_of(cls)[name].hint == options_of(kind)[name].hint, name
                    # the estimator's weight of the KL is the loss's
                    same = options_of(cls)[name].default == options_of(kind)[name].default
                    assert same or (cls, name) == (kind.stock.default_value_estimator, "kl_coeff"), name

    def test_an_estimator_decides_the_defaults_of_what_it_has(self):
        """What the settings show is what is trained with."""
        chosen = {"algo": "GRPO", "group_size": 4, "estimator": "ReBN"}
        for given, gamma in (({}, 0.9), ({"gamma": 1.0}, 1.0), ({"gamma": 0.5}, 0.5)):
            config = RunSettings.from_values(**chosen, **given)
            saved = RunSettings.from_values(**config.as_json())
            assert saved == config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
            assert config.replace(seed=1).replace(seed=config.trainer.seed) == config
            assert (
                config.loss.gamma
                == config.loss_options()["estimator"].gamma
                == effective_settings(config)["gamma"]
                == gamma
            )
            assert ("gamma" in changed_settings(config)) == (gamma != 0.9)
        assert RunSettings(loss=GRPO(), rollouts=TurnRollouts(group_size=4)).replace(estimator="ReBN").loss.gamma == 0.9
        assert RunSettings.from_values(**chosen).replace(estimator=None).loss == GRPO()
        ppo = RunSettings.from_values(estimator="GroupRelative", group_size=4)
        assert (LLMPPO().whiten, ppo.loss.whiten, ppo.loss_options()["estimator"].whiten) == (True, False, False)
        assert ppo.loss.kl_coeff == LLMPPO().kl_coeff  # the loss's, not the estimator's

    def test_none_for_an_option_of_another_algorithm_is_an_error(self):
        with pytest.raises(IdleError, match="critic_coeff=None does nothing with algo='GRPO'"):
            RunSettings.from_values(algo="GRPO", group_size=4, critic_coeff=None)

    @pytest.mark.parametrize("none", [None, 0.0])
    def test_no_bound_of_the_value(self, none):
        config = RunSettings.from_values(clip_value=none)
        assert config.loss_options()["clip_value"] == none
        assert effective_settings(config)["clip_value"] is None
        assert "clip_value" not in RunSettings().loss_options()

    def test_error_is_named(self):
        with pytest.raises(ConfigError):
            RunSettings(loss=GRPO())


class TestParseRunConfig:
    @pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
    def test_every_shipped_file_is_valid(self, path):
        config = parse_settings([f"--config={path}"])
        assert config.algo in ("LLMPPO", "LLMREINFORCE", "GRPO", "SFT")

    def test_starting_points(self):
        ppo, reinforce, grpo = (
            parse_settings([f"--config={CONFIGS[0].parent / name}.yaml"]).values()
            for name in ("ppo_llm", "reinforce_llm", "grpo_multiturn")
        )
        assert (ppo["batch_size"], ppo["lr_actor"], ppo["lr_critic"], ppo["kl_coeff"]) == (32, 5e-6, 5e-5, 0.01)
        assert (ppo["gamma"], ppo["lmbda"], ppo["critic_coeff"], ppo["epochs"]) == (0.99, 0.95, 0.5, 2)
        assert (reinforce["batch_size"], reinforce["lr_actor"], reinforce["gamma"], reinforce["epochs"]) == (
            32,
            5e-6,
            0.9,
            2,
        )
        assert (grpo["batch_size"] // grpo["group_size"], grpo["group_size"], grpo["lr_actor"]) == (16, 4, 3e-4)
        assert (grpo["kl_coeff"], grpo["temperature"], grpo["max_model_len"]) == (5e-4, 0.85, 2048)
        assert {c["model_path"] for c in (ppo, reinforce, grpo)} == {"Qwen/Qwen2.5-0.5B-Instruct"}

    def test_flags_override_the_file(self):
        config = parse_settings([f"--config={CONFIGS[0]}", "--max-steps", "77", "--seed=5", "--wandb", "--progress"])
        assert (config.trainer.max_steps, config.trainer.seed, config.output.wandb, config.output.progress) == (
            77,
            5,
            True,
            True,
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--no-such-field", "1"], "no_such_field"),
            (["--algo", "DQN"], "DQN"),
            (["--algo", "GRPO", "--batch-size", "30", "--group-size", "4"], "not a multiple of group_size=4"),
            (["--epochs", "two"], "epochs"),
        ],
    )
    def test_unknown_and_contradictory_fields_exit_with_a_message(self, arguments, message, capsys):
        with pytest.raises(SystemExit) as stopped:
            parse_settings(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "algo: GRPO\nlr_actr: 1e-3\n",
                "line 2: lr_actr is not a setting. Did you mean 'lr_actor'? It stands in the section optim.",
            ),
            ("keep_discount: true\n", "keep_discount is not a setting. It is discounted_objective since 0.2.0."),
            ("alone: turn\n", "alone is not a setting. It is fallback since 0.3.0."),
            ("\ntrainer:\n  epochs: two\n", "line 3: epochs is 'two'; expected an integer, at least 1."),
            ("loss:\n  gamma: 99\n", "line 2: gamma is 99; expected a number, between 0 and 1, or None."),
            ("trainer:\n  epochs: 1\n  epochs: 2\n", "line 3: epochs is given twice."),
            ("epochs: [1\n", "this is not YAML"),
            ("- epochs\n", "expected lines of the form 'field: value'"),
            ("weights:\n  lora_targets: q_proj\n", "expected a list of names, [q_proj]"),
            (
                "seed: 1\nsystem_prompt: !!python/object/apply:os.system [id]\n",
                "line 2: found a tag (!...): settings have none",
            ),
            ("!!python/object:x.Y {seed: 1}\n", "line 1: found a tag (!...)"),
            ("!!python/name:os.system seed: 1\n", "line 1: found a tag (!...)"),
            ("seed: 1\nepochs: !!int one\n", "line 2: found a tag (!...)"),
            ("env_options: &a {again: *a}\n", "line 1: found an alias (*...)"),
            ("algo: GRPO\n? [epochs]\n: 1\n", "line 2: expected 'field: value', and the field is not text."),
            ("env:\n  env_options: {[1]: 2}\n", "line 2: env_options cannot be read: found unhashable key."),
            ("env:\n  env_options: {<<: 3}\n", "line 2: env_options cannot be read: expected a mapping"),
            pytest.param(
                f"env_options: {'[' * 5000}\n",
                "run.yaml: this is not a file of settings, it has brackets without end.",
                id="brackets",
            ),
            pytest.param(
                f"trainer:\n  epochs: {'9' * 5000}\n",
                "line 2: epochs cannot be read: an integer of 5000 digits.",
                id="digits",
            ),
        ],
    )
    def test_a_wrong_file_is_one_line_that_names_the_place(self, tmp_path, capsys, text, message):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        with pytest.raises(SystemExit):
            parse_settings([f"--config={path}"])
        said = capsys.readouterr().err
        assert message in said
        assert len(said.splitlines()) == 1

    def test_scalars_are_what_they_look_like(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text(
            "optim: {lr_actor: 1e-3}\nmodel:\n  mixed_precision: no\nloss: {clip_epsilon: [0.2, 0.28]}\noutput: {wandb: true}\n"
            "env: {env_name: [a, b]}\n"
        )
        config = parse_settings(
            [
                f"--config={path}",
                "--system-prompt",
                "# You are: x",
                "--wandb-project=123",
                "--gamma=null",
                "--resume=false",
            ]
        )
        assert (config.optim.lr_actor, config.model.mixed_precision, config.loss.clip_epsilon) == (
            1e-3,
            "no",
            (0.2, 0.28),
        )
        assert (config.chat.system_prompt, config.output.wandb_project, config.loss.gamma) == (
            "# You are: x",
            "123",
            None,
        )
        assert config.env.env_name == ["a", "b"]

    @pytest.mark.parametrize("in_file", [False, True])
    @pytest.mark.parametrize(
        ("text", "value"),
        [("010", 10), ("1e5", 100_000), ("1.5e3", 1500), ("20.0", 20), ("+7", 7)]
        + [(text, None) for text in ("1:30", "0x10", "0b1", "1_000", "1.5", "1e-1", "1e999", "0o10", "2026-01-01")],
    )
    def test_integers_are_decimal(self, tmp_path, capsys, text, value, in_file):
        path = tmp_path / "run.yaml"
        path.write_text(f"trainer:\n  max_steps: {text}\n")
        arguments = [f"--config={path}"] if in_file else ["--max_steps", text]
        if value is not None:
            found = parse_settings(arguments).trainer.max_steps
            assert (found, type(found)) == (value, int)
            return
        with pytest.raises(SystemExit):
            parse_settings(arguments)
        assert "expected an integer, at least 1" in capsys.readouterr().err

    def test_scalars_of_a_mapping_are_those_of_yaml_1_2(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text(
            "chat:\n  chat_template_kwargs: {date: 2024-07-26, time: 1:30, n: 010, yes: no, x: 1e3, name: '7'}\n"
        )
        read = parse_settings([f"--config={path}"]).chat.chat_template_kwargs
        assert read == {"date": "2024-07-26", "time": "1:30", "n": 10, "yes": "no", "x": 1000.0, "name": "7"}

    @pytest.mark.parametrize(
        ("text", "flags", "expected"),
        [
            (
                "trainer: {checkpoint_interval: 5}\noutput: {keep_checkpoints: 3}",
                ["--save_checkpoints=false"],
                {"checkpoint_interval": 10, "keep_checkpoints": 2},
            ),
            ("policy: vllm\nengine: {enforce_eager: true}", ["--policy=hf"], {"enforce_eager": None}),
            (
                "collector: ray\nrollouts: {max_staleness: 1, ray_workers: 4}",
                ["--collector=turn"],
                {"max_staleness": None},
            ),
            (
                "loss: {clip_epsilon: 0.1, dual_clip: 3.0}",
                ["--clipping=none"],
                {"clip_epsilon": 0.2, "dual_clip": None},
            ),
            ("trainer: {critic_warmup: 2}", ["--critic_coeff=0"], {"critic_warmup": 0}),
        ],
        ids=["checkpoints", "policy", "collector", "clipping", "critic"],
    )
    def test_a_flag_may_leave_settings_of_a_file_without_effect(self, tmp_path, text, flags, expected):
        """They are for the other case, and become what they are without the file."""
        path = tmp_path / "run.yaml"
        path.write_text(text + "\n")
        config = parse_settings([f"--config={path}", *flags])
        assert {name: config.values().get(name) for name in expected} == expected

    @pytest.mark.parametrize("flags", [["--clipping=none", "--dual_clip=3.0"], ["--save_checkpoints=false"]])
    def test_a_flag_or_a_file_that_contradicts_itself_is_an_error(self, tmp_path, flags, capsys):
        path = tmp_path / "run.yaml"
        path.write_text("loss: {clip_epsilon: 0.1}\nrollouts: {ray_workers: 2}\n")
        with pytest.raises(SystemExit):
            parse_settings([f"--config={path}", *flags])
        assert re.search("(dual_clip=3.0|ray_workers=2) does nothing", capsys.readouterr().err)

    def test_a_file_for_another_algorithm_is_refused(self, capsys):
        path = SHIPPED / "ppo_llm.yaml"
        with pytest.raises(SystemExit):
            parse_settings([f"--config={path}", "--algo=GRPO", "--group_size=4"])
        said = capsys.readouterr().err
        assert re.search(rf"lmbda=.* do nothing with algo='GRPO'.*set algo to \"LLMPPO\"\. They are from {path}", said)

    def test_later_settings_win(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text("trainer:\n  seed: 1\n")
        assert parse_settings(["--seed=2", f"--config={path}"]).trainer.seed == 1

    def test_help_documents_every_field(self, capsys):
        for section in sections_of(RunSettings):
            with pytest.raises(SystemExit):
                parse_settings(["--help", section])
        text = " ".join(capsys.readouterr().out.split())
        for name in [name for name in settings_of(RunSettings) if name not in choices_of(RunSettings)]:
            start = text.find(f" --{name} ")
            assert start >= 0, name
            # More than the type and the default: the sentence of the docstring.
            assert len(text[start : start + 200].split("(type")[0]) > len(name) + 17, name


class TestSave:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"algo": "GRPO", "group_size": 4, "baseline": "leave_one_out", "scale": "none", "clip_epsilon": (0.1, 0.3)},
            {"algo": "LLMREINFORCE", "env_name": ["a", "b"], "env_weights": [1.0, 2.5], "lora_targets": ["q_proj"]},
            {"lr_actor": 5e-6, "max_grad_norm": float("inf"), "max_steps": 10**9, "mixed_precision": "no"},
            {"wandb": True, "wandb_project": "1e5", "system_prompt": "yes: no\n# 'a' \"b\"\n ü \U0001f600 \t", "device": "null"},
            {"chat_template_kwargs": {"date": "2024-07-26", "n": "010", "x": "1e3", "y": 1e-5, "z": None, "on": ["1:30", 7]}},
        ],
    )  # fmt: skip
    def test_what_is_saved_is_read_again(self, tmp_path, settings):
        config = RunSettings.from_values(**settings)
        config.save(tmp_path / "config.yaml")
        again = parse_settings([f"--config={tmp_path / 'config.yaml'}"])
        assert again.as_json() == config.as_json() == RunSettings.from_yaml(tmp_path / "config.yaml").as_json()
        assert repr(again.chat.chat_template_kwargs) == repr(config.chat.chat_template_kwargs)

    def test_how_a_run_starts_is_left_out(self, tmp_path):
        RunSettings.from_values(resume=True, accept_changes=["seed"]).save(tmp_path / "config.yaml")
        assert parse_settings([f"--config={tmp_path / 'config.yaml'}", "--overwrite"]).output.resume is False


class TestResumeCommand:
    @pytest.mark.parametrize(
        ("given", "settings", "expected"),
        [
            (["x.py", "--algo", "GRPO"], {}, "x.py --algo GRPO --resume"),
            (["x.py", "--resume", "true", "--seed", "1"], {}, "x.py --seed 1 --resume"),
            (["x.py", "--overwrite", "--seed", "1"], {"overwrite": True}, "x.py --seed 1 --resume"),
            (
                ["x.py", "--config", "overwrites.yaml"],
                {"overwrite": True},
                "x.py --config overwrites.yaml --overwrite=false --resume",
            ),
            (["x.py", "--resume_from=a"], {"resume_from": "a"}, "x.py --resume_from=a --resume_from=null --resume"),
        ],
    )
    def test_it_goes_on_with_what_was_begun(self, monkeypatch, given, settings, expected):
        monkeypatch.setattr("sys.argv", given)
        python, _, rest = resume_command(RunSettings.from_values(**settings)).partition(" ")
        assert Path(python).name.startswith("python")
        assert rest == expected

    @pytest.mark.parametrize(
        ("program", "expected"),
        [
            ("/somewhere/bin/torchrl-llm", "torchrl-llm train --resume"),
            ("/somewhere/torchrl_llm/__main__.py", "-m torchrl_llm train --resume"),
        ],
    )
    def test_it_names_the_program_as_it_is_called(self, monkeypatch, program, expected):
        monkeypatch.setattr("sys.argv", [program, "train"])
        found = resume_command(RunSettings())
        assert found == expected or found.partition(" ")[2] == expected
