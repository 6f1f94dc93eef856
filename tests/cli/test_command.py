"""``torchrl-llm train``, ``eval`` and ``export``, and what all commands share: help, errors, exit
codes, pipes."""

import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import fastjsonschema
import pytest
import torch
import yaml
from command_runs import SMALL, command, ended, start
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import LIMIT, wait_until

import torchrl_llm
from torchrl_llm import cli
from torchrl_llm.cli import COMMANDS, main
from torchrl_llm.runs import RunSettings
from torchrl_llm.runs.flags import resume_command
from torchrl_llm.runs.saved import find_saved_model, load_saved_model
from torchrl_llm.runs.schema import settings_schema
from torchrl_llm.runs.settings_file import Loader
from torchrl_llm.runs.tiny import tiny_model_path
from torchrl_llm.utils.options import options_of
from torchrl_llm.utils.sections import in_sections, settings_of

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments, "-c", code], capture_output=True, text=True, timeout=LIMIT)


class TestHelp:
    def test_names_every_command_without_importing_torch(self):
        code = (
            "import sys\nfrom torchrl_llm.cli import main\nassert main([]) == 0\n"
            "assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
        )
        done = python(code)
        assert done.returncode == 0, done.stderr
        assert all(f"\n    {name} " in done.stdout for name in COMMANDS)

    def test_of_train_is_grouped_by_part_with_real_defaults(self, tmp_path):
        done = command("train", "--help", folder=tmp_path)
        assert done.returncode == 0
        text = " ".join(done.stdout.split())
        assert text.index(" env The environment ") < text.index(" sampling How responses are sampled ")
        assert len(done.stdout.splitlines()) < 50  # a screen
        assert "--max_model_len VALUE" not in text
        done = command("train", "--help", "env", folder=tmp_path)
        assert "--max_model_len VALUE" in done.stdout
        assert "--temperature" not in done.stdout
        text = " ".join(command("train", "--help", "loss", folder=tmp_path).stdout.split())
        assert "default: 0.99 (LLMPPO), 0.9 (LLMREINFORCE), 1.0 (GRPO, SFT)" in text
        of_name = command("train", "--help", "max-model-len", folder=tmp_path)
        assert of_name.stdout == command("train", "--help", "env", folder=tmp_path).stdout
        done = command("train", "--help", "rollout", folder=tmp_path)
        assert "'rollout' is no section of --help. Did you mean 'rollouts'?" in done.stderr

    def test_called_from_python_it_says_how_to_go_on_from_the_command_line(self, monkeypatch):
        seen, before = [], [*sys.argv]
        monkeypatch.setattr("torchrl_llm.cli.train.run", lambda _: seen.append(resume_command(RunSettings())) or 0)
        assert main(["train", "--seed", "3"]) == 0
        assert seen == ["torchrl-llm train --seed 3 --resume"]
        assert sys.argv == before

    def test_python_m_is_the_same_command(self):
        done = subprocess.run(
            [sys.executable, "-m", "torchrl_llm", "--version"], capture_output=True, text=True, timeout=LIMIT
        )
        assert (done.returncode, done.stdout.split()) == (0, [torchrl_llm.__version__])

    def test_completion_knows_commands_and_settings(self, tmp_path):
        done = command("--print-completion", "bash", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        lists = dict(line.split("=", 1) for line in done.stdout.splitlines() if "_option_strings=" in line)
        for name in ("train", "warmup", "doctor"):
            (flags,) = (flags for key, flags in lists.items() if key.endswith(f"{name}_option_strings"))
            assert {f"--{each}" for each in settings_of(RunSettings)} <= {*re.findall(r"--\w+", flags)}, name
        assert "export" in done.stdout


class TestSeveralProcesses:
    """As ``accelerate launch`` starts them."""

    def test_one_of_them_writes_the_output(self, tmp_path):
        outputs = [
            command("train", "--print-schema", folder=tmp_path, environment={"RANK": rank, "WORLD_SIZE": "2"}).stdout
            for rank in ("0", "1")
        ]
        assert json.loads(outputs[0]) == settings_schema()
        assert outputs[1] == ""

    @pytest.mark.extra
    @pytest.mark.slow
    def test_a_launch(self, tmp_path):
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        launch += [str(CONFIGS / "accelerate_ddp.yaml"), "--module", "torchrl_llm", "eval", "tiny"]
        launch += [
            "--env=game:GuessTheNumber-v0-easy",
            "--episodes=4",
            "--max-output-tokens=16",
            "--device=cpu",
            "--json",
        ]
        done = subprocess.run(launch, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["episodes"] == 4


class TestWrongInput:
    """One sentence, and exit code 2."""

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["trian"], "'trian' is not a command. Did you mean 'train'?"),
            (["train", "--max-stepz", "3"], "--max_stepz is not a setting. Did you mean '--max_steps'?"),
            (["train", "--config", "no.yaml"], "The settings file 'no.yaml' cannot be read: No such file"),
            (["train", "--config", "."], "The settings file '.' cannot be read: Is a directory"),
            (["train", "--config", "binary.yaml"], "this is not text in UTF-8"),
            (["train", "--config", "broken.yaml"], "broken.yaml, line 3: this is not YAML"),
            (["train", "--model-path", "./nowhere"], "model_path is './nowhere': there is no such folder"),
            (["train", "--algo", "GRPO"], "group_size=1, expected at least 2"),
            (["train", "--model-path=tiny", "--env=game:GuesTheNumber"], "Did you mean one of ['game:GuessTheNumber"),
            (["eval"], "the following arguments are required: CHECKPOINT"),
            (["eval", "./nowhere"], "The checkpoint is './nowhere': there is no such folder"),
            (["eval", "empty"], "empty holds no checkpoint and no model"),
            (["eval", "tiny", "--episodes", "0"], "--episodes is 0; expected an integer, at least 1"),
            (["eval", "tiny", "--epochs", "2"], "--epochs is not a flag."),
            (["eval", "tiny", "--env", "game:Wordl-v0"], "GEM has no environment 'game:Wordl-v0'. Did you mean"),
            (["report", "nowhere"], "The run is 'nowhere': there is no such folder"),
            (["doctor", "--epochs=0"], "--epochs is 0; expected an integer, at least 1"),
            (["export", "tiny", "full"], "full is there already"),
            (["export", "tiny", "out", "--as", "adapter"], "holds a whole model (lora_r=0), and no adapter"),
        ],
    )
    def test_is_one_sentence(self, tmp_path, arguments, said):
        (tmp_path / "empty").mkdir()
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "mine.txt").write_text("mine")
        (tmp_path / "broken.yaml").write_text("epochs: 1\nalgo: [\n")
        (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
        done = command(*arguments, folder=tmp_path)
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert said in done.stderr
        assert done.stdout == ""

    def test_a_damaged_checkpoint(self, tmp_path, trained):
        copy = tmp_path / "copy"
        shutil.copytree(trained[0] / "checkpoints" / "last", copy)
        (copy / "actor" / "adapter_model.safetensors").write_bytes(b"x")
        done = command("eval", "copy", folder=tmp_path)
        assert done.returncode == 2
        assert "is not what was saved (its SHA-256 differs)" in done.stderr

    @pytest.mark.parametrize("take", [lambda: bytearray(2**60), lambda: torch.empty(2**60, dtype=torch.uint8)])
    def test_too_little_memory(self, take, monkeypatch, capsys):
        monkeypatch.setattr("torchrl_llm.cli.doctor.run", lambda arguments: take())
        assert main(["doctor"]) == 1
        said = capsys.readouterr().err
        assert said.startswith("torchrl-llm doctor: error: there is too little memory. ")
        assert len(said.splitlines()) == 1

    def test_traceback_shows_where(self, tmp_path):
        done = command("eval", "nowhere", "--traceback", folder=tmp_path)
        assert done.returncode == 2
        assert "find_saved_model" in done.stderr


class TestTrain:
    def test_prints_the_result_as_json_and_nothing_else(self, trained):
        run, done = trained
        assert json.loads(done.stdout) == json.loads((run / "result.json").read_text())
        assert "report: run/" in done.stderr
        assert "|" not in done.stderr  # no progress bar in a pipe
        # and no decision about a later start
        assert RunSettings.from_yaml(run / "config.yaml").output.progress is None

    def test_resumes(self, trained):
        run, _ = trained
        more = ("--max-iterations=3", "--accept-changes=[max_iterations]", "--resume")
        done = command("train", *SMALL, f"--output-dir={run}", *more, folder=run.parent)
        assert done.returncode == 0, done.stderr
        assert json.loads((run / "result.json").read_text())["iterations"] == 3
        assert "win rate" in done.stdout

    def test_ctrl_c_ends_it_with_the_command_that_goes_on(self, tmp_path):
        files = [tmp_path / kind for kind in ("in", "out", "err")]
        files[0].touch()
        process = start(["train", *SMALL, "--max-iterations=null"], files, tmp_path, {})

        def begun():
            assert process.is_alive(), files[2].read_text()
            return files[1].exists() and "before training" in files[1].read_text()

        wait_until(begun, "the first evaluation")
        os.kill(process.pid, signal.SIGINT)
        assert ended(process) == 130
        said = files[2].read_text()
        assert "go on with: torchrl-llm train --model-path=tiny" in said
        assert "Traceback" not in said

    @pytest.mark.parametrize(("flag", "codes"), [("--print-schema", {141}), ("--help", {0, 141})])
    def test_a_reader_that_has_gone_is_no_error(self, tmp_path, flag, codes):
        """As with ``| head``."""
        (tmp_path / "in").touch()
        os.mkfifo(tmp_path / "out")
        reader = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)  # less than what is written
        process = start(["train", flag], [tmp_path / "in", tmp_path / "out", tmp_path / "err"], tmp_path, {})
        assert select.select([reader], [], [], LIMIT)[0]
        os.close(reader)
        assert ended(process) in codes  # argparse passes over what its help meets
        assert (tmp_path / "err").read_text() == ""


class TestSchema:
    def test_is_what_train_prints(self, tmp_path):
        done = command("train", "--print-schema", folder=tmp_path)
        assert json.loads(done.stdout) == settings_schema()
        assert (
            settings_schema()["properties"].keys() == {"algo", "policy", "collector"} | options_of(RunSettings).keys()
        )

    def test_accepts_every_shipped_file_and_the_defaults(self):
        check = fastjsonschema.compile(settings_schema())
        files = [path for path in CONFIGS.glob("*.yaml") if not path.stem.startswith(("accelerate_", "tuning_"))]
        assert len(files) > 5
        for path in files:
            check(yaml.load(path.read_text(), Loader))
        check(in_sections(RunSettings, RunSettings().as_json()))

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"epoch": 1}, "epoch"),
            ({"epochs": 0}, "bigger than or equal to 1"),
            ({"gamma": 2.0}, "gamma"),
            ({"algo": "DQN"}, "one of"),
            ({"clip_epsilon": [0.1]}, "clip_epsilon"),
            ({"temperature": 0}, "bigger than 0"),
        ],
    )
    def test_refuses_what_the_settings_refuse(self, settings, said):
        with pytest.raises(fastjsonschema.JsonSchemaException, match=said):
            fastjsonschema.compile(settings_schema())(in_sections(RunSettings, settings) or settings)


class TestEval:
    def test_in_a_new_process_is_the_last_evaluation_of_the_run(self, tmp_path, trained):
        run, _ = trained
        result = json.loads((run / "result.json").read_text())
        done = command("eval", run, "--device=cpu", "--json", folder=tmp_path)
        found = json.loads(done.stdout)
        assert (found["success"], found["reward"]) == (result["success_after"], result["reward_after"])
        assert found["success_ci95"] == result["success_ci95"]
        assert found["task_overlap"] == result["evaluation_task_overlap"] > 0
        assert found["env_name"] == "game:GuessTheNumber-v0-easy"
        # Paired with both evaluations of the run, and with the evaluation of any other checkpoint.
        before = json.loads((run / "evaluation_before.json").read_text())
        assert (found["task_digest"], len(found["outcomes"])) == (before["task_digest"], found["episodes"])
        assert found["beginnings"] == before["beginnings"]

    def test_of_another_seed_and_environment_is_a_table(self, tmp_path, trained):
        more = ("--env", "game:GuessTheNumber-v0-hard", "--episodes=4", "--seed=7", "--max-model-len=512")
        done = command("eval", trained[0] / "checkpoints" / "last", *more, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "on game:GuessTheNumber-v0-hard, seed 7" in done.stdout
        assert "95 % interval" in done.stdout


class TestExport:
    @pytest.fixture(scope="class")
    def logits(self, trained):
        """Of the trained model, by this library."""
        saved = find_saved_model(trained[0])
        loaded = load_saved_model(saved, saved.config(device="cpu"))
        tokens = loaded.tokenizer("Guess 3", return_tensors="pt")["input_ids"]
        return tokens, loaded.policy.log_probs(tokens, 1.0)

    def same(self, model, logits):
        tokens, (ids, expected) = logits
        with torch.no_grad():
            found = model(tokens).logits[:, -1].log_softmax(-1).gather(1, ids)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def test_merged_loads_in_plain_transformers(self, tmp_path, trained, logits):
        done = command("export", trained[0], "out/merged", folder=tmp_path)
        place = tmp_path / "out" / "merged"
        assert (done.returncode, done.stdout.strip()) == (0, str(place)), done.stderr
        self.same(AutoModelForCausalLM.from_pretrained(place), logits)
        assert AutoTokenizer.from_pretrained(place).chat_template
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["merged"]

    def test_adapter_loads_in_peft(self, tmp_path, trained, logits):
        assert command("export", trained[0], "a", "--as=adapter", folder=tmp_path).returncode == 0
        base = AutoModelForCausalLM.from_pretrained(tiny_model_path())
        self.same(PeftModel.from_pretrained(base, tmp_path / "a"), logits)

    def test_the_card_says_what_it_was_trained_on_with_results(self, tmp_path, trained):
        assert command("export", trained[0], "a", "--as=adapter", folder=tmp_path).returncode == 0
        card = (tmp_path / "a" / "README.md").read_text()
        head = yaml.safe_load(card.split("---")[1])
        assert head["library_name"] == "peft"
        assert "LLMREINFORCE on `game:GuessTheNumber-v0-easy`" in card
        result = json.loads((trained[0] / "result.json").read_text())
        low, high = result["success_ci95"]
        assert (
            f"| after training, 16 episodes | {result['success_after']:.3f} | {low:.3f} to {high:.3f} | {result['evaluation_task_overlap']:.0%} |"
            in card
        )
        assert "| before training, 16 episodes |" in card
        assert "| during training, 8 episodes |" in card
        assert result["evaluation_task_overlap"] > 0
        assert "seeds may give the same tasks" in card
        assert "lora_r: 4" in card
        assert "output_dir" not in card

    @pytest.mark.parametrize("form", ["merged", "adapter"])
    def test_an_export_is_a_checkpoint_again(self, tmp_path, trained, form):
        assert command("export", trained[0], "out", f"--as={form}", folder=tmp_path).returncode == 0
        first, again = (
            json.loads(command("eval", path, "--episodes=8", "--device=cpu", "--json", folder=tmp_path).stdout)
            for path in (trained[0], "out")
        )
        assert again["turns"] == pytest.approx(first["turns"])
        assert again["env_name"] == first["env_name"]

    @pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_a_signal_leaves_nothing_half_written(self, tmp_path, trained, signum, code):
        (tmp_path / "out").mkdir()
        files = [tmp_path / kind for kind in ("in", "stdout", "err")]
        files[0].touch()
        process = start(
            ["export", trained[0], "out/merged"], files, tmp_path, {}, partial(_signal_behind_the_model, signum)
        )
        assert ended(process) == code, files[2].read_text()
        assert not any((tmp_path / "out").iterdir())

    def test_a_signal_that_came_out_as_another_error_is_still_one(self, tmp_path, trained, monkeypatch, capfd):
        def load(*args):  # as an extension module does whose import a signal interrupts
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(LIMIT)
            except BaseException as error:
                raise ImportError("initialization failed") from error

        monkeypatch.setattr("torchrl_llm.runs.export.load_saved_model", load)
        (tmp_path / "out").mkdir()
        with pytest.raises(SystemExit) as ended:
            cli.main(["export", str(trained[0]), str(tmp_path / "out" / "merged")])
        assert ended.value.code == 143
        assert not any((tmp_path / "out").iterdir())
        assert "interrupted by SIGTERM; start it again" in capfd.readouterr().err


def _signal_behind_the_model(signum: int) -> None:
    """Have this process get a signal when it has written the model, and not yet moved it to its
    place."""
    from torchrl_llm.runs import export

    write = export._write_model
    export._write_model = lambda *args: (write(*args), os.kill(os.getpid(), signum))


class TestReport:
    @pytest.fixture(autouse=True)
    def _there(self):
        pytest.importorskip("torchrl_llm.report")

    def test_writes_one_page_and_names_it(self, trained):
        for flags in ((), ("--full",)):
            done = command("report", trained[0], *flags, folder=trained[0].parent)
            assert done.returncode == 0, done.stderr
            page = Path(done.stdout.strip())
            assert page.parent == trained[0]
            assert "game:GuessTheNumber-v0-easy" in page.read_text()

    def test_of_a_folder_without_a_run_is_wrong_input(self, tmp_path):
        (tmp_path / "empty").mkdir()
        done = command("report", "empty", folder=tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)

    def test_of_somebody_elses_results_writes_nothing(self, tmp_path):
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "result.json").write_text('{"accuracy": 0.9}')
        (tmp_path / "theirs" / "report.html").write_text("theirs")
        done = command("report", "theirs", folder=tmp_path)
        assert done.returncode == 2
        assert "is not the folder of a run: it has no torchrl_llm.json" in done.stderr
        assert (tmp_path / "theirs" / "report.html").read_text() == "theirs"


def test_a_broken_pipe_of_a_process_that_died_is_no_reader_that_has_gone(monkeypatch):
    def died(*arguments):
        raise BrokenPipeError(32, "the engine died")

    monkeypatch.setattr(cli, "_run", died)
    with pytest.raises(BrokenPipeError, match="the engine died"):
        cli.main(["train"])
