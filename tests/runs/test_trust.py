"""What folders of strangers ask for, and what commands do then."""

import json
import shutil
import sys
from io import StringIO

import pytest
from peft import LoraConfig

from torchrl_llm.cli import main
from torchrl_llm.envs import ChatFormatter, EnvSpec, register_env_family
from torchrl_llm.modules import load_actor_critic
from torchrl_llm.modules.weights import WeightsError, read_adapter
from torchrl_llm.runs import RunSettings
from torchrl_llm.runs.opponents import make_opponent
from torchrl_llm.runs.saved import SETTINGS, find_saved_model
from torchrl_llm.runs.sources import load_tokenizer
from torchrl_llm.runs.teacher import find_teacher
from torchrl_llm.runs.tiny import tiny_model_path
from torchrl_llm.testing.environments import StopOrGo
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.utils.sections import in_sections

GAME = {"collector": "self_play", "env_name": "world:take-away", "group_size": 2, "batch_size": 4, "num_envs": 4}
SMALL = {"max_model_len": 256, "max_output_tokens": 8}


@pytest.fixture
def folder(tmp_path):
    """A model of a stranger's; its settings are written by :func:`say`."""
    return shutil.copytree(tiny_model_path(), tmp_path / "stranger")


@pytest.fixture
def strange(tmp_path, monkeypatch):
    """The name of a module that leaves a mark when it is imported, and the mark."""
    mark = tmp_path / "mark"
    (tmp_path / "strange_code.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n\ndef play(context, rng):\n    return '1'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strange_code", raising=False)
    return "strange_code", mark


def say(folder, **settings):
    (folder / SETTINGS).write_text(json.dumps(in_sections(RunSettings, {**SMALL, **settings})))


COMMANDS = (["eval", "--episodes=2"], ["eval", "--episodes=2", "--json"], ["play"], ["play", "--as=environment"])


def test_options_of_an_environment_are_kept_where_its_user_names_it_again(folder):
    say(folder, env_name="game:GuessTheNumber-v0-easy", env_options={"max_turns": 2})
    saved = find_saved_model(folder)
    for given in ({}, {"env_name": "game:GuessTheNumber-v0-easy"}):
        assert saved.config(**given).env.env_options == {"max_turns": 2}
    assert saved.config(env_name="game:Wordle-v0").env.env_options == {}
    # What they may make an environment do that is more than computing is the user's to say.
    rows = {"dataset": "rows.jsonl", "reward_fn": "strange_code:play"}
    say(folder, env_name="torchrl_llm.envs:PromptDatasetEnv", env_options=rows)
    for given in ({}, {"env_name": "torchrl_llm.envs:PromptDatasetEnv"}):
        with pytest.raises(ConfigError, match=r"--env-options '\{.*strange_code:play"):
            find_saved_model(folder).config(**given)


class TestFolders:
    @pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            ({"env_name": "openenv:strange_code:World"}, "--env-name openenv:strange_code:World"),
            ({"env_name": "openenv:http://127.0.0.1:9"}, "--env-name openenv:http://127.0.0.1:9"),
            ({"env_name": "code:Taco8k"}, "--env-name code:Taco8k"),
            ({"env_name": "gem:code:Taco8k"}, "--env-name gem:code:Taco8k"),
            # evaluates answers as Python
            ({"env_name": "rg:string_insertion"}, "--env-name rg:string_insertion"),
            ({"env_name": "eval:AMC"}, "--env-name eval:AMC"),
            ({"env_name": "textarena:Debate-v0"}, "--env-name textarena:Debate-v0"),
            (
                {"env_name": ["game:GuessTheNumber-v0-easy", "math:GSM8K"], "env_weights": [1.0, 2.0]},
                """--env-name '["game:GuessTheNumber-v0-easy", "math:GSM8K"]' --env-weights '[1.0, 2.0]'""",
            ),
            (
                {"env_name": "unheard:of", "env_options": {"command": "id"}},
                """--env-name unheard:of --env-options '{"command": "id"}'""",
            ),
            ({"tools": ["strange_code:play"]}, """--tools '["strange_code:play"]'"""),
            ({"chat_template": "/etc/hostname"}, "--chat-template /etc/hostname"),
            ({"max_model_len": 10**12}, "--max-model-len 1000000000000"),
        ],
        ids=lambda given: str(given)[:40],
    )
    def test_what_they_ask_for_is_not_done(self, folder, strange, capsys, command, asked, said):
        say(folder, **asked)
        assert main([command[0], str(folder), *command[1:]]) == 2
        err = capsys.readouterr().err
        assert f"{folder} asks for" in err
        assert said in err
        assert "strange_code" not in sys.modules

    def test_sizes_that_no_machine_has_are_not_begun(self, folder, capsys):
        say(folder, num_envs=10**9)
        assert main(["eval", str(folder), "--episodes=2"]) == 2
        assert "asks for num_envs=1000000000" in capsys.readouterr().err
        say(folder, num_envs=2, final_episodes=10**12)
        assert main(["eval", str(folder)]) == 2
        assert "asks for an evaluation of final_episodes=1000000000000" in capsys.readouterr().err
        assert main(["eval", str(folder), "--episodes=2"]) == 0

    def test_an_opponent_is_imported_for_who_names_it(self, folder, strange, capsys):
        name, mark = strange
        say(folder, opponent=f"{name}:play", **GAME)
        assert main(["eval", str(folder), "--episodes=2"]) == 2
        assert f"add --opponent {name}:play" in capsys.readouterr().err
        assert not mark.exists()
        assert main(["eval", str(folder), "--episodes=2", f"--opponent={name}:play"]) == 0
        assert mark.exists()

    def test_an_environment_is_made_for_who_names_it(self, folder, capsys):
        made = []
        register_env_family("strangely", lambda env_id: made.append(env_id) or EnvSpec(env_id, StopOrGo))
        say(folder, env_name="strangely:go", max_turns=2)
        assert main(["eval", str(folder), "--episodes=2"]) == 2
        assert made == []
        assert main(["eval", str(folder), "--episodes=2", "--env=strangely:go"]) == 0
        assert set(made) == {"strangely:go"}

    def test_what_is_not_used_is_not_asked_for(self, folder, strange, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(sys, "stdin", StringIO())
        say(folder, opponent="strange_code:play", **GAME | {"env_name": "openenv:strange_code:World"})
        assert main(["chat", str(folder)]) == 0
        assert main(["export", str(folder), str(tmp_path / "out")]) == 0
        assert find_teacher(RunSettings.from_values(teacher=str(folder)))[1].env.env_name == RunSettings().env.env_name
        config = RunSettings.from_values(**SMALL, **GAME, model_path="tiny", opponent=str(folder), device="cpu")
        assert make_opponent(config, ChatFormatter(load_tokenizer(config)), config.sampling) is not None
        assert "strange_code" not in sys.modules

    @pytest.mark.parametrize(
        "kept",
        [
            {"env_name": "game:Wordle-v0-easy", "env_options": {"max_turns": 3}},
            {"env_name": ["world:coins", "game:GuessTheNumber-v0-easy"]},
            {**GAME, "opponent": "tiny"},
            {**GAME, "opponent": "guess_by_hints"},
            {"attn_implementation": "eager"},
            {"chat_template": "{{ messages }}"},
        ],
    )
    def test_what_only_computes_is_kept(self, folder, kept):
        say(folder, **kept)
        config = find_saved_model(folder).config()
        assert {name: config.values()[name] for name in kept} == kept


class TestModels:
    @pytest.mark.parametrize("asked", ["kernels-community/flash-attn2", "flash_attention_2"])
    def test_code_for_their_attention_is_fetched_for_who_names_it(self, folder, capsys, asked):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": asked}))
        assert main(["eval", str(folder), "--episodes=2"]) == 2
        assert f"whose files ask for the attention {asked!r}" in capsys.readouterr().err
        say(folder, attn_implementation="sdpa")
        assert main(["eval", str(folder), "--episodes=2"]) == 0

    def test_an_attention_that_takes_no_mask_is_left_out(self, folder):
        say(folder, attn_implementation="kernels-community/flash-attn2", policy="vllm")
        assert find_saved_model(folder).config().model.attn_implementation is None
        assert main(["eval", str(folder), "--episodes=2"]) == 0

    def test_a_base_is_fetched_for_who_names_it(self, tmp_path):
        models = load_actor_critic(tiny_model_path(), lora=LoraConfig(r=2, target_modules=["q_proj"]))
        models.model.save_pretrained(tmp_path, selected_adapters=["actor"])
        file = tmp_path / "actor" / "adapter_config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps(settings | {"base_model_name_or_path": "somebody/else"}))
        saved = find_saved_model(tmp_path / "actor")
        with pytest.raises(ConfigError, match=r"'somebody/else', which is not on this machine.*--model-path"):
            saved.config()
        assert saved.config(model_path="somebody/else").model.model_path == "somebody/else"

    def test_an_adapter_imports_nothing(self, tmp_path, strange):
        models = load_actor_critic(tiny_model_path(), lora=LoraConfig(r=2, target_modules=["q_proj"]))
        models.model.save_pretrained(tmp_path, selected_adapters=["actor"])
        file = tmp_path / "actor" / "adapter_config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps(settings | {"megatron_config": {"x": 1}, "megatron_core": "strange_code"}))
        with pytest.raises(WeightsError, match="has a megatron_config"):
            read_adapter(tmp_path / "actor")
