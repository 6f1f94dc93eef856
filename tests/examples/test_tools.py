"""examples/tools.py: GEM runs the program of a response, and its output is a message that nothing
is trained on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tools
from waiting import LIMIT

from torchrl_llm import keys
from torchrl_llm.testing.tiny import load_tiny_tokenizer

SCRIPT = Path(tools.__file__)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """GEM runs programs in folders below the working directory, with the python of the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


class TestPlayer:
    @pytest.fixture(scope="class")
    def rows(self, tmp_path_factory):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("programs"))
            return tools.collect(load_tiny_tokenizer())

    def test_the_tool_and_the_answer_are_paid(self, rows):
        assert rows[keys.TURN_REWARD].tolist() == [[pytest.approx(tools.USED), 1.0]] * 2
        assert rows[keys.TURN_SUCCESS].any(-1).all()

    def test_the_output_of_a_program_is_a_message_of_the_role_tool(self, rows):
        tokenizer = load_tiny_tokenizer()
        for row in rows:
            text = tokenizer.decode(row["tokens"][row["attention_mask"]])
            terms, result = re.search(r"<python>print\((.*)\)</python><\|im_end\|>\n(.*\n.*)\n", text).groups()
            assert result == f"<|im_start|>tool\nCode execution result: {eval(terms)}"

    def test_it_is_masked(self, rows):
        tokenizer = load_tiny_tokenizer()
        for row in rows:
            programs, answers = (tokenizer.decode(row["tokens"][row["turn_ids"] == turn]) for turn in (0, 1))
            assert re.fullmatch(r"<python>print\([-+ 0-9]+\)</python><\|im_end\|>", programs)
            assert re.fullmatch(r"\\boxed{-?\d+}<\|im_end\|>", answers)


def test_it_prints_what_is_trained_on(capsys):
    tools.main()
    shown = capsys.readouterr().out
    assert "<|im_start|>tool\nCode execution result: " in shown
    assert re.search(r"^trained on (\d+) of (\d+) tokens: <python>", shown, re.MULTILINE)


@pytest.mark.extra
@pytest.mark.slow
def test_a_model_trains_on_it(tmp_path):
    settings = (
        f"--config {SCRIPT.parent}/configs/tiny_reinforce_llm.yaml --output-dir {tmp_path}/run --max-model-len 1024"
    )
    quick = (
        "--max-output-tokens 16 --max-iterations 1 --batch-size 4 --num-envs 4 --final-episodes 4 --minibatch-size 4"
    )
    subprocess.run([sys.executable, SCRIPT, *settings.split(), *quick.split()], check=True, timeout=LIMIT)
    assert (tmp_path / "run" / "result.json").exists()
