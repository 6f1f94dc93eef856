"""Folders of strangers, given to every command: what is planted in their files never acts, and
nothing ends in a traceback."""

from __future__ import annotations

import json
import shutil
import sys
from io import StringIO

import pytest
from instances import usual
from markdown_it import MarkdownIt
from planted import PAYLOAD, everywhere, in_values, one_by_one, plant

from torchrl_llm.cli import main
from torchrl_llm.utils.terminal import UNSEEN

# Nothing that is not Unicode can be sent to the process that reports, and PEFT warns of what it
# does not know, as it is spelled.
pytestmark = pytest.mark.filterwarnings("ignore")

FINAL = "checkpoints/checkpoint-000000000002"
USE = (["eval", "--episodes=2"], ["play"], ["chat", "--max-output-tokens=4"], ["export", "OUT"])
READ = (["compare", "RUN"], ["report"], ["export", "OUT"])
OF_RUNS = {
    "run.json": READ,
    "result.json": READ,
    "evaluation_before.json": READ,
    "evaluation_after.json": READ,
    "metrics.csv": READ,
    "rollouts/before.safetensors": (["report"],),
    "rollouts/iteration-000000000001.safetensors": (["report"], ["doctor", "--algo=SFT", "--demonstrations=FOLDER"]),
    "config.yaml": (["doctor", "--config=FILE"], ["train", "--config=FILE", "--output-dir=FOLDER", "--resume"]),
    "torchrl_llm.json": READ,
    f"{FINAL}/manifest.json": USE,
    f"{FINAL}/README.md": USE,
    f"{FINAL}/actor/adapter_config.json": USE,
    f"{FINAL}/tokenizer/chat_template.jinja": USE,
    f"{FINAL}/tokenizer/tokenizer_config.json": USE,
    f"{FINAL}/tokenizer/tokenizer.json": USE,
}
OF_EXPORTS = dict.fromkeys(
    (
        *("README.md", "chat_template.jinja", "config.json", "generation_config.json", "run_config.yaml"),
        *("tokenizer_config.json", "tokenizer.json"),
    ),
    USE,
)
CASES = [("run", *case) for case in OF_RUNS.items()] + [("export", *case) for case in OF_EXPORTS.items()]


@pytest.fixture(scope="module")
def sources(trained, tmp_path_factory):
    """A run, and an export of it."""
    export = tmp_path_factory.mktemp("sources") / "export"
    assert main(["export", str(trained[0]), str(export)]) == 0
    return {"run": trained[0], "export": export}


@pytest.fixture
def strange(sources, tmp_path, monkeypatch, capsys):
    """Gives commands a copy of a folder of which a file was changed; returns what they showed."""

    monkeypatch.chdir(tmp_path)

    def shown(source, name, change, commands):
        folder, texts = tmp_path / "strange", []
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sources[source], folder, symlinks=True)
        plant(folder / name, change)
        for command, *more in commands:
            out = tmp_path / "out"
            shutil.rmtree(out, ignore_errors=True)
            places = {"OUT": out, "RUN": sources["run"], "FILE": folder / name, "FOLDER": folder}
            more = [
                next((each.replace(at, str(place)) for at, place in places.items() if at in each), each)
                for each in more
            ]
            given = [] if command in ("doctor", "train") else [str(folder)]
            monkeypatch.setattr(sys, "stdin", StringIO("hi\n"))
            try:
                code = main([command, *given, *more])
            except SystemExit as ended:  # of argparse
                code = ended.code
            text = "".join(capsys.readouterr())
            assert code in (0, 1, 2)
            assert not UNSEEN.search(text), f"{command}: {text!a}"
            assert not [line for line in text.splitlines() if line.startswith("# all runs passed")]
            texts.append(text)
            if (out / "README.md").exists() and source == "run":
                check_card((out / "README.md").read_text())
        return texts

    return shown


def check_card(card: str) -> None:
    assert not UNSEEN.search(card)
    tokens = MarkdownIt().parse(card.partition("---\n\n")[2])
    kinds = {each.type for token in tokens for each in (token, *(token.children or []))}
    assert not kinds & {"html_inline", "html_block", "image", "link_open"}


@pytest.mark.parametrize("change", usual([everywhere, in_values]))
@pytest.mark.parametrize(("source", "name", "commands"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_what_is_planted_never_acts(strange, source, name, commands, change):
    strange(source, name, change, commands)


def test_the_payload_is_shown_where_it_is_read(strange):
    """So that the test above tests something."""
    texts = strange("run", "run.json", everywhere, [["compare", "RUN"]])
    assert r"\x1b[2J" in texts[0]
    texts = strange("run", "config.yaml", everywhere, [["doctor", "--config=FILE"]])
    assert r"\x1b]0;owned\x07" in texts[0]


def test_transcripts(tmp_path, capsys):
    for number, line in enumerate(
        (
            {"messages": [{"role": PAYLOAD, "content": "x"}]},
            {"messages": [{"role": "user", "content": PAYLOAD}, {"role": "assistant", "content": PAYLOAD}]},
            {PAYLOAD: PAYLOAD},
            PAYLOAD,
        )
    ):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps(line) + "\n")
        assert main(["doctor", "--model-path=tiny", "--device=cpu", "--algo=SFT", f"--demonstrations={file}"]) in (0, 1)
        assert not UNSEEN.search("".join(capsys.readouterr()))


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "name", "depth"),
    [
        ("run", "run.json", 2),
        ("run", "result.json", 2),
        ("run", "evaluation_before.json", 2),
        ("run", f"{FINAL}/manifest.json", 3),
        ("run", f"{FINAL}/actor/adapter_config.json", 1),
        ("export", "config.json", 1),
        ("export", "generation_config.json", 1),
    ],
)
def test_entries_of_another_kind(strange, sources, source, name, depth):
    content = json.loads((sources[source] / name).read_text())
    commands = [["eval", "--episodes=1"]] if name not in OF_RUNS or FINAL in name else [["compare", "RUN"]]
    for changed in one_by_one(content, depth):
        strange(source, name, lambda _, changed=changed: changed, commands)
