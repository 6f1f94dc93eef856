"""Saved models of every kind, found, loaded and exported, in process."""

import shutil
import sys
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from markdown_it import MarkdownIt
from peft import LoraConfig

from torchrl_llm.envs import GEMEnv, UnknownEnvironmentError
from torchrl_llm.modules import load_actor_critic
from torchrl_llm.report.run_report import run_and_report
from torchrl_llm.runs import RunSettings, build_run
from torchrl_llm.runs.export import export_model, model_card
from torchrl_llm.runs.run_folder import MARK
from torchrl_llm.runs.saved import SETTINGS, environment_of, find_saved_model, load_saved_model
from torchrl_llm.runs.settings_file import as_yaml
from torchrl_llm.runs.tiny import tiny_model_path
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.trainers import evaluate
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.utils.sections import in_sections
from torchrl_llm.utils.terminal import UNSEEN, one_line


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A folder with an adapter on the small model, as PEFT writes it: no tokenizer, no settings."""
    folder = tmp_path_factory.mktemp("adapter")
    models = load_actor_critic(tiny_model_path(), lora=LoraConfig(r=2, target_modules=["q_proj"]))
    models.model.save_pretrained(folder, selected_adapters=["actor"])
    for path in (folder / "actor").iterdir():
        path.rename(folder / path.name)
    return folder


@pytest.fixture
def whole(tmp_path):
    """A folder with a whole model in bfloat16."""
    folder = tmp_path / "whole"
    shutil.copytree(tiny_model_path(), folder)
    models = load_actor_critic(folder, dtype="bfloat16", master_weights=False)
    models.model.save_pretrained(folder)
    return folder


class TestFind:
    def test_settings_beside_a_model_import_nothing(self, whole, monkeypatch):
        (whole / "strange_module.py").write_text("raise RuntimeError('imported')\n")
        (whole / SETTINGS).write_text("loss:\n  estimator: strange_module:Estimator\nsampling:\n  temperature: 0.7\n")
        monkeypatch.syspath_prepend(whole)
        assert find_saved_model(whole).config().sampling.temperature == 0.7
        assert "strange_module" not in sys.modules

    def test_settings_of_version_0_2_have_no_sections(self, whole):
        (whole / SETTINGS).write_text("env_name: game:Wordle-v0\ntemperature: 0.7\nlr_actor: 1e-5\n")
        config = find_saved_model(whole).config()
        assert (config.env.env_name, config.sampling.temperature) == ("game:Wordle-v0", 0.7)
        (whole / SETTINGS).write_text("env: {env_name: game:Wordle-v0}\ntemperature: 0.7\n")
        assert find_saved_model(whole).config() == config

    def test_null_stood_for_the_default_of_an_algorithm(self, whole):
        (whole / SETTINGS).write_text(
            "algo: GRPO\ngranularity: null\ncritic_coeff: null\nbaseline: null\nscale: none\n"
        )
        settings = find_saved_model(whole).settings
        assert (settings["baseline"], settings["scale"], "critic_coeff" in settings) == ("mean", "none", False)
        (whole / SETTINGS).write_text("loss: {lmbda: null}\nsampling: {temperature: null}\n")
        with pytest.raises(ConfigError, match="temperature is None; expected a number"):
            find_saved_model(whole)

    def test_another_environment_has_no_weights_of_the_runs_mixture(self, whole):
        (whole / SETTINGS).write_text(
            "env:\n  env_name: [game:Wordle-v0, game:Hangman-v0]\n  env_weights: [1.0, 2.0]\n"
        )
        saved = find_saved_model(whole)
        assert saved.config().env.env_weights == [1.0, 2.0]
        assert saved.config(env_name="game:Wordle-v0").env.env_weights is None

    def test_the_working_directory_is_a_folder_like_others(self, whole, monkeypatch):
        (whole / SETTINGS).write_text("sampling: {temperature: 0.7}\n")
        monkeypatch.chdir(whole)
        assert find_saved_model(".").settings["temperature"] == 0.7

    def test_an_environment_from_python_is_no_other_of_its_label(self, tmp_path):
        small = {"model_path": "tiny", "dtype": "float32", "device": "cpu", "lora_r": 0, "kl_coeff": 0.0}
        small |= {"max_model_len": 256, "max_output_tokens": 16, "batch_size": 2, "num_envs": 2, "progress": False}
        small |= {
            "algo": "LLMREINFORCE",
            "max_iterations": 1,
            "evaluation_interval": 0,
            "max_turns": 2,
            "final_episodes": 8,
        }
        config = RunSettings.from_values(**small, export_merged=True, output_dir=tmp_path / "run")
        run_and_report(config, partial(build_run, config, env=StopOrGo))
        (tmp_path / "run" / "merged").rename(tmp_path / "elsewhere")
        for saved in map(find_saved_model, (tmp_path / "run", tmp_path / "elsewhere")):
            assert saved.settings["env_name"] == "python:game:GuessTheNumber-v0-easy"
            # It was evaluated in the default environment, without a word.
            with pytest.raises(UnknownEnvironmentError, match="was given to its run as an object"):
                environment_of(saved.config(device="cpu"))
            assert environment_of(saved.config(device="cpu", env_name="game:GuessTheNumber-v0-easy")).close() is None

    def test_an_environment_from_python_is_given_again(self, tmp_path):
        small = {"model_path": "tiny", "dtype": "float32", "device": "cpu", "lora_r": 0, "kl_coeff": 0.0}
        small |= {"max_model_len": 256, "max_output_tokens": 16, "batch_size": 2, "num_envs": 2, "progress": False}
        small |= {"max_turns": 2, "final_episodes": 8}
        config = RunSettings.from_values(
            **small, algo="LLMREINFORCE", max_iterations=1, evaluation_interval=0, output_dir=tmp_path
        )
        run = build_run(config, env=StopOrGo)
        run.trainer.train()
        own = run.final_evaluation()
        run.close()
        saved = find_saved_model(tmp_path)
        loaded = load_saved_model(saved, saved.config(device="cpu"))
        for given in ({"env": StopOrGo}, {"make_env": partial(GEMEnv, StopOrGo)}):
            again = evaluate(loaded.make_env(**given), loaded.policy, own.episodes)
            assert again.success == own.success
            assert torch.equal(again.rows["tokens"], own.rows["tokens"])
        with pytest.raises(ConfigError, match="Both env and make_env are given"):
            loaded.make_env(StopOrGo, make_env=GEMEnv)

    def test_an_adapter_without_a_tokenizer_has_that_of_its_base(self, adapter):
        saved = find_saved_model(adapter)
        loaded = load_saved_model(saved, saved.config(device="cpu"))
        assert len(loaded.tokenizer) > 256

    def test_a_whole_model_keeps_the_dtype_of_its_files(self, whole):
        Accelerator(mixed_precision="no")  # as of an earlier run, whose precision the process keeps
        (whole / SETTINGS).write_text("model: {dtype: float32}\n")
        saved = find_saved_model(whole)
        loaded = load_saved_model(saved, saved.config(device="cpu"))
        assert {p.dtype for p in loaded.models.model.parameters()} == {torch.bfloat16}


class TestExport:
    def test_only_a_checkpoint_has_the_results_of_its_run(self, whole):
        (whole.parent / MARK).touch()
        (whole.parent / "result.json").write_text('{"success_after": 0.5, "success_ci95": [0.4, 0.6], "iterations": 2}')
        assert "Results" not in model_card(find_saved_model(whole), "x", format="merged")

    def test_names_of_a_stranger_stay_in_their_code(self, whole):
        bad = "x` <img src=x onerror=alert(1)> ``b``\n\n# heading\x1b[2J\u202e"
        settings = {"env_name": [bad, "`", "game:Wordle-v0"], "system_prompt": f"```\n{bad}", "model_path": bad}
        (whole / SETTINGS).write_text(as_yaml(in_sections(RunSettings, settings)))
        card = model_card(find_saved_model(whole), f"name\n{bad}", format="merged")
        assert not UNSEEN.search(card)
        tokens = MarkdownIt().parse(card.partition("---\n\n")[2])
        parts = [part for token in tokens for part in token.children or []]
        code = [part.content for part in parts if part.type == "code_inline"]
        assert code[:4] == [one_line(f"name\n{bad}"), one_line(bad), one_line(bad), "`"]
        assert not [
            part for part in (*tokens, *parts) if part.type in ("html_inline", "html_block", "image", "link_open")
        ]
        assert [token.tag for token in tokens if token.type == "heading_open"] == ["h1", "h2", "h2"]

    def test_the_card_of_an_adapter_on_a_named_model_can_be_run(self, adapter):
        (adapter / SETTINGS).write_text("model:\n  model_path: tiny\n")
        card = model_card(find_saved_model(adapter), "x", format="adapter")
        (adapter / SETTINGS).unlink()
        code = card.split("```python\n")[1].split("```")[0].replace("THIS FOLDER", str(adapter))
        names = {}
        exec(code.replace("tokenizer = ", "# "), names)  # this adapter has none of its own
        assert names["model"].peft_config["default"].r == 2

    def test_an_adapter_of_a_quantized_base_is_merged_into_the_unrounded_one(self, adapter, tmp_path):
        shutil.copytree(adapter, tmp_path / "nf4")
        settings = {"model_path": "tiny", "lora_r": 2, "quantization": "nf4", "device": "cpu"}
        (tmp_path / "nf4" / SETTINGS).write_text(as_yaml(in_sections(RunSettings, settings)))
        place = export_model(find_saved_model(tmp_path / "nf4"), tmp_path / "out", format="merged", device="cpu")
        assert (place / "model.safetensors").is_file()

    def test_takes_what_belongs_to_the_model(self, whole, tmp_path):
        for name in ("optimizer.pt", "training_args.bin", ".secret", "state.pkl", ".git/config", "logs/a.txt"):
            (whole / name).parent.mkdir(exist_ok=True)
            (whole / name).write_text("x")
        (whole / "README.md").write_text("what its makers say")
        place = export_model(find_saved_model(whole), tmp_path / "out", format="merged")
        assert (place / "README.md").read_text() == "what its makers say"
        names = {path.name for path in place.iterdir()}
        assert names == {path.name for path in tiny_model_path().iterdir() if path.is_file()} | {"README.md"}

    def test_onto_a_link_is_refused_before_anything_is_written(self, whole, tmp_path):
        (tmp_path / "place").mkdir()
        (tmp_path / "link").symlink_to("place")
        with pytest.raises(ConfigError, match="is a link or a mount point"):
            export_model(find_saved_model(whole), tmp_path / "link", format="merged")

    @pytest.mark.parametrize("change", [{"dtype": "float32"}, {"device": "cpu"}, {"model_path": "tiny"}])
    def test_settings_of_a_merge_are_refused_without_one(self, adapter, tmp_path, change):
        with pytest.raises(ConfigError, match=f"{next(iter(change))}: nothing is merged"):
            export_model(find_saved_model(adapter), tmp_path / "out", format="adapter", **change)
