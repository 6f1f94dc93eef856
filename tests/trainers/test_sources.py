"""Where model and tokenizer are: a wrong path is one sentence."""

import re
import traceback

import pytest

from torchrl_llm.trainers import ConfigError, RunConfig, build_run


class TestPaths:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"model_path": "/no/such/model"}, "model_path is '/no/such/model': there is no such folder."),
            ({"model_path": "./nosuch"}, "model_path is './nosuch': there is no such folder."),
            ({"model_path": "no-such-org/no-such-model"}, "no model of a hub or cache that can be reached"),
            ({"model_path": "tiny", "tokenizer_path": "/nowhere"}, "tokenizer_path is '/nowhere'"),
            ({"model_path": "tiny", "init_from": "/nowhere"}, "init_from is '/nowhere': there is no such folder."),
        ],
    )
    def test_a_wrong_path_is_a_sentence(self, tmp_path, settings, message):
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            build_run(RunConfig(**settings, output_dir=tmp_path))
        assert len(traceback.format_exception(caught.value)) < 20
        assert len(str(caught.value)) < 450

    def test_the_folder_beside_it_is_named(self, tmp_path):
        (tmp_path / "smollm2").mkdir()
        with pytest.raises(ConfigError, match="Did you mean 'smollm2'"):
            build_run(RunConfig(model_path=str(tmp_path / "smolm2"), output_dir=tmp_path))

    def test_a_folder_without_a_model(self, tmp_path):
        with pytest.raises(ConfigError, match=r"model_path is .*no folder that transformers can load"):
            build_run(RunConfig(model_path=str(tmp_path), output_dir=tmp_path))
