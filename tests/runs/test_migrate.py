"""Files of settings of version 0.2, put into sections."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from torchrl_llm.cli import main
from torchrl_llm.runs import ConfigError, RunSettings
from torchrl_llm.runs.migrate import migrated, settings_of_now
from torchrl_llm.runs.settings_file import as_yaml
from torchrl_llm.utils.sections import sections_of

OLD = """\
# For a GPU.
# It takes an hour.
algo: GRPO
model_path: tiny   # the small one

# Groups of four,
# as in the paper.
batch_size: 8
group_size: 4
alone: turn
env_options:
  max_turns: 4
  names: [a,
    b]
system_prompt: |
  One line.

    Another, indented.
kl_coeff: 0.0
"""
NEW = """\
# For a GPU.
# It takes an hour.
algo: GRPO
model:
  model_path: tiny   # the small one
chat:
  system_prompt: |
    One line.

      Another, indented.
env:
  env_options:
    max_turns: 4
    names: [a,
      b]
rollouts:
  # Groups of four,
  # as in the paper.
  batch_size: 8
  group_size: 4
loss:
  fallback: turn
  kl_coeff: 0.0
"""


def test_settings_keep_their_values_and_comments(tmp_path, capsys):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(OLD)
    text = migrated(old)
    assert [line for line in text.splitlines() if line] == [line for line in NEW.splitlines() if line]
    assert main(["migrate", str(old)]) == 0
    assert capsys.readouterr().out == text
    new.write_text(text.replace("  fallback: turn\n", ""))  # which needs credit="state"
    config = RunSettings.from_yaml(new)
    assert config.env.env_options == {"max_turns": 4, "names": ["a", "b"]}
    assert config.chat.system_prompt == "One line.\n\n  Another, indented.\n"
    assert (config.rollouts.batch_size, config.rollouts.group_size, config.loss.kl_coeff) == (8, 4, 0.0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("batch_size: 8\nalgo: GRPO\n...\n", "algo: GRPO\nrollouts:\n  batch_size: 8\n...\n"),
        ("---\nbatch_size: 8\nalgo: GRPO\n", "---\nalgo: GRPO\nrollouts:\n  batch_size: 8\n"),
        ("  batch_size: 8\n  # c\n  algo: GRPO\n", "# c\nalgo: GRPO\nrollouts:\n  batch_size: 8\n"),
        ("\ufeffbatch_size: 8\nalgo: GRPO\n", "algo: GRPO\nrollouts:\n  batch_size: 8\n"),
        ("batch_size: 8\r\nalgo: GRPO\r\n", "algo: GRPO\nrollouts:\n  batch_size: 8\n"),
        ("system_prompt: |\n  Hello\n  # in text\nbatch_size: 8\n", "chat:\n  system_prompt: |\n    Hello\n    # in text\nrollouts:\n  batch_size: 8\n"),
        ("system_prompt: |\n  a \n   \n  b\nalgo: GRPO\n", "algo: GRPO\nchat:\n  system_prompt: |\n    a \n     \n    b\n"),
        ("seed: 1\nbatch_size:\n  8\n# the end\n", "rollouts:\n  batch_size:\n    8\ntrainer:\n  seed: 1\n# the end\n"),
        ("'batch_size': 8\nepochs: 2 # two\n", "rollouts:\n  'batch_size': 8\ntrainer:\n  epochs: 2 # two\n"),
    ],
)  # fmt: skip
def test_odd_files(tmp_path, old, new):
    (tmp_path / "old.yaml").write_text(old, newline="")
    assert migrated(tmp_path / "old.yaml") == new


def test_in_place(tmp_path, capsys):
    path = tmp_path / "run_config.yaml"
    path.write_text("seed: 3\nsystem_prompt: Größe\n", encoding="utf-8")
    assert main(["migrate", "--in-place", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == "chat:\n  system_prompt: Größe\ntrainer:\n  seed: 3\n"
    assert not capsys.readouterr().out
    assert main(["migrate", "--in-place", str(path)]) == 2
    assert path.read_text(encoding="utf-8").startswith("chat:")


TEXTS = st.text(st.characters(blacklist_categories=["Cs", "Cc"], whitelist_characters="\n\t"), max_size=30)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "algo": st.just("LLMPPO"),
        "system_prompt": TEXTS,
        "env_name": st.lists(TEXTS, min_size=1, max_size=3),
        "env_options": st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(), st.none()), max_size=3),
        "lr_actor": st.floats(0, 1),
        "wandb_project": TEXTS,
        "lora_targets": st.lists(TEXTS, max_size=2),
        "seed": st.integers(0, 9),
    },
)


@given(VALUES)
def test_any_file_that_was_saved_reads_as_the_same(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("old")
    assume(values)
    (folder / "old.yaml").write_text(as_yaml(values), encoding="utf-8")
    (folder / "new.yaml").write_text(migrated(folder / "old.yaml"), encoding="utf-8")
    text = (folder / "new.yaml").read_text(encoding="utf-8")
    assert not [
        line
        for line in text.splitlines()
        if line[:1].isalpha() and line.split(":")[0] not in ("algo", *sections_of(RunSettings))
    ]
    given = {name: value for name, value in values.items() if name not in ("wandb_project", "lora_targets")}
    if given == values:  # those have an effect beside others only
        assert RunSettings.from_yaml(folder / "new.yaml") == RunSettings.from_values(**values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("algo: GRPO\nmodel:\n  model_path: tiny\n", "line 2: model is a section: the file has them already."),
        ("seed: 1\nlr_actr: 1\n", "line 2: 'lr_actr' is not a setting. Did you mean 'lr_actor'?"),
        ("{seed: 1, epochs: 2}\n", "expected settings, in lines of the form 'field: value'."),
        ("- seed\n", "expected settings, in lines of the form 'field: value'."),
        ("", "expected settings, in lines of the form 'field: value'."),
        ("# seed: 1\n", "expected settings, in lines of the form 'field: value'."),
        ("seed: 1\n? [a]\n: 2\n", "line 2: expected 'field: value', and the field is not text."),
        ("seed: 1\n'': 2\n", "line 2: '' is not a setting."),
        ("batch_size: 8\nseed: 1\nbatch_size: 9\n", "line 3: batch_size is given twice."),
        ("adaptive_tasks: true\nadaptive_mixture: false\n", "line 2: adaptive_mixture is given twice."),
        ("system_prompt: |+\n  a\n\nalgo: GRPO\nseed: 1\nmodel_path: |+\n  b\n\n\n", "by hand"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, capsys, text, said):
    (tmp_path / "old.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        migrated(tmp_path / "old.yaml")
    assert said in str(raised.value)
    assert main(["migrate", str(tmp_path / "old.yaml")]) == 2
    assert said in capsys.readouterr().err


def test_a_file_of_0_2_is_told_the_command(tmp_path):
    (tmp_path / "old.yaml").write_text("batch_size: 8\n")
    with pytest.raises(
        ConfigError,
        match=r"line 1: batch_size stands in the section rollouts: torchrl-llm migrate translates",
    ):
        RunSettings.from_yaml(tmp_path / "old.yaml")


def test_what_0_2_saved_is_read_as_what_it_was():
    """It saved the options of all algorithms, and None for a default."""
    none = dict.fromkeys(("estimator", "critic_coeff", "imitate", "credit", "gamma", "clip_value", "lmbda"))
    assert settings_of_now({"algo": "LLMPPO", **none, "clip_value": 0.0, "seed": 3}) == {
        **RunSettings.from_values(clip_value=0.0, seed=3).as_json()
    }
    saved = settings_of_now({"algo": "SFT", **none, "imitate": "success"})
    assert RunSettings.from_values(**saved) == RunSettings.from_values(algo="SFT", imitate="success")
    assert settings_of_now(saved) == saved
    assert settings_of_now({}) == RunSettings().as_json()
    assert settings_of_now({"lmbda": None, "clip_epsilon": None}) == RunSettings().as_json()


def test_what_is_saved_now_may_be_none():
    saved = RunSettings.from_values(clip_value=None).as_json()
    assert settings_of_now(saved) == saved
    assert saved["clip_value"] is None


def test_null_for_a_default_and_options_of_other_algorithms_are_left_out(tmp_path):
    """A run of 0.2 wrote them into its config.yaml."""
    path = tmp_path / "old.yaml"
    path.write_text(
        "algo: GRPO\nseed: 3\n# Of the loss.\nbaseline: null\nscale: none  # Dr. GRPO\ncritic_coeff: 0\nclip_value: null\n"
        "group_size: 4\nlr_critic: null\n"
    )
    assert migrated(path) == (
        "algo: GRPO\nrollouts:\n  group_size: 4\nloss:\n  scale: none  # Dr. GRPO\noptim:\n  lr_critic: null\ntrainer:\n  seed: 3\n"
    )


def test_a_folder_does_not_have_its_estimator_imported():
    saved = settings_of_now({"algo": "GRPO", "estimator": "strange_module:Estimator", "gamma": None, "scale": "none"})
    assert (saved["estimator"], saved["scale"], "gamma" in saved) == ("strange_module:Estimator", "none", False)


@pytest.mark.parametrize(("history", "contexts"), [("append", "append"), ("refuse", "template")])
def test_what_became_of_history(tmp_path, history, contexts):
    """What 0.2 refused is followed now."""
    file = tmp_path / "old.yaml"
    file.write_text(f"batch_size: 8\nhistory: {history}\n")
    (tmp_path / "new.yaml").write_text(migrated(file))
    assert RunSettings.from_yaml(tmp_path / "new.yaml").chat.contexts == contexts
    assert settings_of_now({"algo": "GRPO", "history": history})["contexts"] == contexts
