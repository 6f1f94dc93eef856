"""Where model and tokenizer are: a wrong path is one sentence."""

import ast
import re
import traceback
from pathlib import Path

import pytest

import torchrl_llm
from torchrl_llm.runs import ConfigError, RunSettings, build, build_run
from torchrl_llm.runs.sources import check_length, load_tokenizer


class TestPaths:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"model_path": "/no/such/model"}, "model_path is '/no/such/model': there is no such folder."),
            ({"model_path": "./nosuch"}, "model_path is './nosuch': there is no such folder."),
            ({"model_path": "no-such-org/no-such-model"}, "no model of a hub or cache that can be reached"),
            (
                {"model_path": "nosuch", "lora_r": 0},
                "model_path is 'nosuch', which is not a folder that transformers can load",
            ),
            ({"model_path": "tiny", "tokenizer_path": "/nowhere"}, "tokenizer_path is '/nowhere'"),
            ({"model_path": "tiny", "init_from": "/nowhere"}, "init_from is '/nowhere': there is no such folder."),
        ],
    )
    def test_a_wrong_path_is_a_sentence(self, tmp_path, settings, message):
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            build_run(RunSettings.from_values(**settings, output_dir=tmp_path))
        assert len(traceback.format_exception(caught.value)) < 20
        assert len(str(caught.value)) < 450

    def test_a_name_of_the_package_is_proposed(self, tmp_path):
        with pytest.raises(ConfigError, match="Did you mean 'smollm2'"):
            build_run(RunSettings.from_values(model_path="smolm2", output_dir=tmp_path))

    def test_a_run_is_not_one_of_its_checkpoints(self, tmp_path):
        last = tmp_path / "run" / "checkpoints" / "last"
        last.mkdir(parents=True)
        with pytest.raises(ConfigError, match=rf"the folder of a run; expected one of its checkpoints, such as {last}"):
            build_run(
                RunSettings.from_values(model_path="tiny", init_from=tmp_path / "run", output_dir=tmp_path / "out")
            )

    @pytest.mark.parametrize("place", ["", "checkpoints/last/actor"])
    def test_a_folder_without_an_actor_is_nothing_to_start_from(self, tmp_path, place):
        folder = tmp_path / "run" / place
        folder.mkdir(parents=True)
        with pytest.raises(
            ConfigError, match=rf"init_from is '{folder}', which has no folder actor; expected a checkpoint"
        ):
            build_run(RunSettings.from_values(model_path="tiny", init_from=folder, output_dir=tmp_path / "out"))

    def test_a_tokenizer_has_the_names_of_models(self):
        own = load_tokenizer(RunSettings.from_values(model_path="tiny"))
        assert (
            load_tokenizer(RunSettings.from_values(model_path="tiny", tokenizer_path="tiny")).get_vocab()
            == own.get_vocab()
        )

    def test_contexts_longer_than_the_models_are_refused_before_it_is_loaded(self, tmp_path, monkeypatch):
        monkeypatch.setattr(build, "load_models", None)
        with pytest.raises(
            ConfigError, match="max_model_len is 4097, and the model 'tiny' has 4096 positions: lower it"
        ):
            build_run(RunSettings.from_values(model_path="tiny", max_model_len=4097, output_dir=tmp_path))
        check_length(RunSettings.from_values(model_path="tiny"), 4096)
        check_length(RunSettings.from_values(model_path="tiny", policy="vllm"), 4097)

    def test_the_folder_beside_it_is_named(self, tmp_path):
        (tmp_path / "smollm2").mkdir()
        with pytest.raises(ConfigError, match="Did you mean 'smollm2'"):
            build_run(RunSettings.from_values(model_path=str(tmp_path / "smolm2"), output_dir=tmp_path))

    def test_a_folder_without_a_model(self, tmp_path):
        with pytest.raises(ConfigError, match=r"model_path is .*not a folder that transformers can load"):
            build_run(RunSettings.from_values(model_path=str(tmp_path), output_dir=tmp_path))


def test_the_library_imports_nothing_of_testing():
    package = Path(torchrl_llm.__file__).parent
    imported = {
        f"{path.relative_to(package)}: {name}"
        for path in package.rglob("*.py")
        if package / "testing" not in path.parents
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    }
    assert not [each for each in imported if "torchrl_llm.testing" in each or each.endswith(": testing")]
