"""The names of other systems: each stands for what there is here, and errors say it wherever a name
can be given."""

import re
from pathlib import Path

import pytest
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_llm import keys
from torchrl_llm.envs import GEMEnv, PromptDatasetEnv
from torchrl_llm.objectives import GroupRelative, LLMGRPOLoss, TurnGAE
from torchrl_llm.runs import ConfigError, RunSettings, parse_settings
from torchrl_llm.runs.settings_file import read_settings
from torchrl_llm.testing.tokenizers import byte_tokenizer
from torchrl_llm.tuning import TuningConfig
from torchrl_llm.utils.arguments import ArgumentParser
from torchrl_llm.utils.hints import nearest, system_of
from torchrl_llm.utils.options import options_of
from torchrl_llm.utils.other_systems import MARKS, SYSTEMS
from torchrl_llm.utils.sections import settings_of

SETTINGS = settings_of(RunSettings)
OPTIONS = {*SETTINGS, *options_of(PromptDatasetEnv), *options_of(GEMEnv)}

ROOT = Path(__file__).parents[2]


def said(text: str) -> str:
    """The begin of what an error says for a text of the table."""
    alone = re.match(r"`(\w+)`(: |$)", text)
    return f" Did you mean {alone[1]!r}?" if alone else " " + text.replace("`", "")


class TestTable:
    @pytest.mark.parametrize("system", SYSTEMS)
    def test_it_names_settings_that_there_are_and_the_error_says_it(self, system):
        for name, text in SYSTEMS[system].items():
            named = re.findall(r"`(\w+)`", text)
            assert named, f"{name}: settings are named in backticks"
            assert {*named} <= OPTIONS, name
            assert name.lower() not in SETTINGS, f"{name} is a setting here: nobody is told that it is none"
            assert text.endswith(("`", ".")), name
            assert nearest(name, [*named], system=system).startswith(said(text)), name

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("--save-every", "--checkpoint_interval"),
            ("--eval_interval", "--evaluation_interval"),
            ("--checkpoint-every", "--checkpoint_interval"),
            ("--max-iters", "--max_iterations"),
        ],
    )
    def test_how_often_something_is_done_has_many_names(self, name, meant):
        """No system has all of them; the nearest name was another setting's (--sampler_level)."""
        assert nearest(name, [f"--{each}" for each in SETTINGS]).startswith(f" Did you mean {meant!r}?")

    def test_the_words_of_agilerl_are_those_of_its_page(self):
        page = (ROOT / "docs" / "migrating_from_agilerl.md").read_text()
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
        for name, text in SYSTEMS["AgileRL"].items():
            cells = [" ".join(row[1:]) for row in rows if re.search(rf"`{name}\b", row[0])]
            first = re.match(r"`(\w+)`", text)
            if cells and first and first[1] in SETTINGS:
                assert any(re.search(rf"\b{first[1]}\b", cell) for cell in cells), name

    def test_a_system_is_known_by_its_marks(self):
        assert {*MARKS} <= {*SYSTEMS}
        assert {system: {system_of([mark]) for mark in marks} for system, marks in MARKS.items()} == {
            system: {system} for system in MARKS
        }

    @pytest.mark.parametrize("system", SYSTEMS)
    def test_a_system_is_known_by_its_names(self, system):
        own = {
            name for name in SYSTEMS[system] if not any(name in SYSTEMS[other] for other in SYSTEMS if other != system)
        }
        assert system_of(sorted(own)[:5]) == system

    def test_a_wrong_name_or_two_are_no_other_system(self):
        assert system_of(["lr_actr", "num_generations"]) is None


WORDS = [
    ("num_generations", "group_size"),
    ("clip_coef", "clip_epsilon"),
    ("scale_rewards", "scale"),
    ("beta", "kl_coeff"),
    ("epsilon", "clip_epsilon"),
    ("BETA", "kl_coeff"),
    ("GROUP_SIZE", "group_size"),
]


class TestEveryPlace:
    @pytest.mark.parametrize(("theirs", "ours"), [*WORDS, ("learning_rate", "lr_actor"), ("LR", "lr_actor")])
    def test_settings(self, theirs, ours, tmp_path, capsys):
        hint = f" Did you mean {ours!r}?"
        with pytest.raises(TypeError, match=re.escape(f"RunSettings has no option {theirs!r}.{hint}")):
            RunSettings.from_values(**{theirs: 1})
        path = tmp_path / "run.yaml"
        path.write_text(f"algo: GRPO\ntrainer:\n  seed: 1\n{theirs}: 1\n")
        with pytest.raises(ConfigError, match=re.escape(f"run.yaml, line 4: {theirs} is not a setting.{hint}")):
            list(read_settings(path, RunSettings))
        with pytest.raises(SystemExit):
            parse_settings([f"--{theirs.replace('_', '-')}", "1"])
        assert f"--{theirs} is not a setting. Did you mean '--{ours}'?" in capsys.readouterr().err

    @pytest.mark.parametrize(("theirs", "ours"), WORDS)
    def test_losses(self, theirs, ours):
        actor = TensorDictModule(nn.Identity(), in_keys=[keys.TOKENS], out_keys=[keys.LOG_PROB, keys.ENTROPY])
        with pytest.raises(TypeError, match=rf"LLMGRPOLoss has no option '{theirs}'\. Did you mean '{ours}'\?"):
            LLMGRPOLoss(actor, **{theirs: 1})

    @pytest.mark.parametrize(
        ("theirs", "ours"), [("num_generations", "group_size"), ("max_completion_length", "max_output_tokens")]
    )
    def test_environments(self, theirs, ours):
        with pytest.raises(TypeError, match=rf"GEMEnv has no option '{theirs}'\. Did you mean '{ours}'\?"):
            GEMEnv("game:GuessTheNumber-v0-easy", tokenizer=byte_tokenizer(), **{theirs: 2})
        with pytest.raises(TypeError, match=rf"PromptDatasetEnv has no option '{theirs}'\. Did you mean '{ours}'\?"):
            PromptDatasetEnv([], len, tokenizer=byte_tokenizer(), **{theirs: 2})

    def test_the_arguments_of_trainers_that_environments_have_here(self):
        with pytest.raises(TypeError, match=r"no option 'reward_funcs'\. Did you mean 'reward_fn'\?"):
            PromptDatasetEnv(reward_funcs=len, processing_class=byte_tokenizer(), train_dataset=[])

    def test_estimators_and_searches(self):
        with pytest.raises(TypeError, match=r"GroupRelative has no option 'adv_norm'\. Did you mean 'scale'\?"):
            GroupRelative(adv_norm="mean_std")
        with pytest.raises(TypeError, match=r"TurnGAE has no option 'lam'\. Did you mean 'lmbda'\?"):
            TurnGAE(lam=0.9)
        with pytest.raises(ConfigError, match=r"no such setting\. Did you mean 'lr_actor'\?"):
            TuningConfig(base="tiny.yaml", space={"learning_rate": {"choice": [1e-3]}})
        with pytest.raises(ConfigError, match=r"no such setting\. Did you mean 'kl_coeff'\?"):
            RunSettings.from_values(accept_changes=["beta"], resume=True)

    def test_a_rule_stands_where_one_setting_does_not(self, capsys):
        with pytest.raises(SystemExit):
            parse_settings(["--report-to", "wandb"])
        assert "--report_to is not a setting. Set tensorboard, wandb or trackio to true." in capsys.readouterr().err
        with pytest.raises(TypeError, match=r"Did you mean 'batch_size'\? It counts the episodes of an iteration"):
            RunSettings(per_device_train_batch_size=4)

    @pytest.mark.parametrize("theirs", ["scale_rewards", "report_to", "clip_coef"])
    def test_nothing_is_guessed_where_the_setting_is_not(self, theirs):
        with pytest.raises(TypeError, match=rf"TurnGAE has no option '{theirs}'\.$"):
            TurnGAE(**{theirs: True})

    @pytest.mark.parametrize(
        "word", ["actor_rollout_ref.rollout.n=8", "+actor_rollout_ref.rollout.n=8", "group-size=8"]
    )
    def test_settings_as_others_write_them_on_a_command_line(self, word, capsys):
        with pytest.raises(SystemExit):
            parse_settings([word])
        assert "is one argument too many. Did you mean '--group_size'?" in capsys.readouterr().err

    def test_commands_without_the_setting_say_nothing_of_it(self, capsys):
        parser = ArgumentParser(prog="count")
        parser.add_argument("--number")
        with pytest.raises(SystemExit):
            parser.read(["--beta=1"])
        assert "--beta is not a flag. (" in capsys.readouterr().err


FILES = {
    "AgileRL": "INIT_HP:\n    ALGO: GRPO\n    BETA: 0.001\nMUTATION_PARAMS:\n    NO_MUT: 0.1\nNET_CONFIG:\n    null\n",
    "verl": "defaults:\n  - ppo_trainer\ndata:\n  train_files: train.parquet\nactor_rollout_ref:\n  model: {path: some/model}\n",
    "TRL": "model_name_or_path: some/model\nnum_generations: 8\nmax_completion_length: 512\ntemperature: 1.0\nbeta: 0.04\n",
    "LLaMA-Factory": "model_name_or_path: some/model\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 8\n",
    "OpenRLHF": "pretrain: some/model\nn_samples_per_prompt: 8\ninit_kl_coef: 0.01\nrollout_batch_size: 128\n",
    "axolotl": "base_model: some/model\nrl: grpo\ntrl:\n  beta: 0.001\nmicro_batch_size: 1\n",
}


class TestFiles:
    def test_a_manifest_of_agilerl_is_one_too(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text(
            "algorithm:\n  name: GRPO\nenvironment:\n  name: x\ntraining:\n  max_steps: 3\nmutation:\n  rand_seed: 1\n"
        )
        with pytest.raises(
            ConfigError, match=r"algorithm is not a setting\..* The file looks like one for AgileRL; docs/migrating"
        ):
            list(read_settings(path, RunSettings))

    @pytest.mark.parametrize("system", FILES)
    def test_a_file_for_another_system_is_said_to_be_one(self, system, tmp_path, capsys):
        path = tmp_path / "run.yaml"
        path.write_text(FILES[system])
        with pytest.raises(SystemExit):
            parse_settings([f"--config={path}"])
        error = capsys.readouterr().err
        page = "migrating_from_agilerl" if system == "AgileRL" else "other_systems"
        assert f"The file looks like one for {system}; docs/{page}.md says what its names are here." in error
        assert len(error.splitlines()) == 1

    def test_one_wrong_name_does_not_make_it_one(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text(
            "algo: GRPO\nmodel: {model_path: tiny}\nrollouts:\n  group_size: 8\n  batch_size: 8\n  num_generations: 8\noptim: {learning_rate: 1e-5}\n"
        )
        with pytest.raises(
            ConfigError, match=r"line 6: num_generations is not a setting of rollouts\. Did you mean 'group_size'\?"
        ):
            list(read_settings(path, RunSettings))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("training:\n  epochs: 2\n", "training is not a setting. Did you mean 'trainer'?"),
            ("trainer:\n  epochs: '[1'\n", "epochs is '[1'; expected an integer, at least 1."),
            ('optim:\n  lr_actor: "1e-5"\n', "lr_actor is '1e-5'; expected a number, at least 0. Leave out the quotes."),
            ("optim: {}\nseed: 1\n", "line 2: seed stands in the section trainer."),
            ("seed: 1\n", "seed stands in the section trainer: torchrl-llm migrate translates a file without sections, as they were before 0.3.0."),
            ("trainer:\n  algo: GRPO\n", "line 2: algo stands in no section, but beside them."),
            ("trainer:\n  optim: {}\n", "line 2: optim is a section of its own, and stands in no other."),
            ("optim:\n  lr_actr: 1\n", "line 2: lr_actr is not a setting of optim. Did you mean 'lr_actor'?"),
            ("optim:\n  batch_sise: 1\n", "batch_sise is not a setting of optim. Did you mean 'batch_size'? It stands in the section rollouts."),
            ("xyzzy: 1\n", "The sections are model, weights, chat, env, sampling, rollouts, engine, loss, optim, trainer, evaluation, output."),
            ("env: game:x\n", "run.yaml, line 1: expected lines of the form 'field: value' below env:."),
            ("optim:\nenv: {}\noptim: {}\n", "line 3: optim is given twice."),
            ("[run]\nalgo = 'GRPO'\n", "found '<scalar>'; expected lines of the form 'field: value'."),
            ("algo: 'grpo'\n", "algo is 'grpo'; expected one of 'LLMPPO', 'LLMREINFORCE', 'GRPO', 'SFT'."),
        ],
    )  # fmt: skip
    def test_other_wrong_files(self, text, message, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(message) + "$"):
            list(read_settings(path, RunSettings))

    @pytest.mark.parametrize("text", ["optim:\n  # lr_actor: 1\n", "optim:\n", "optim: null\nenv: {}\n", ""])
    def test_a_section_may_be_empty(self, text, tmp_path):
        (tmp_path / "run.yaml").write_text(text)
        assert list(read_settings(tmp_path / "run.yaml", RunSettings)) == []
