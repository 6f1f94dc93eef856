"""``torchrl-llm doctor``: what is installed, and whether settings would run."""

import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
from command_runs import command
from transformers import LlamaConfig

from torchrl_llm.cli import doctor
from torchrl_llm.cli._fit import fit
from torchrl_llm.cli._installation import check_extra, check_requirements
from torchrl_llm.modules import load_actor_critic
from torchrl_llm.runs import RunSettings
from torchrl_llm.runs.build import make_lora
from torchrl_llm.runs.memory import empty_model, memory_estimate
from torchrl_llm.runs.tiny import tiny_model_path
from torchrl_llm.testing.pretended_gpu import pretended_gpu
from torchrl_llm.testing.tiny import load_tiny_tokenizer, random_model
from torchrl_llm.utils.host import host_memory
from torchrl_llm.utils.sections import settings_of

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "tiny_ppo_llm.yaml"


def findings(done) -> dict[str, tuple[str, str]]:
    return {each["name"]: (each["state"], each["text"]) for each in json.loads(done.stdout)}


class TestInstallation:
    def test_versions_against_what_is_required(self):
        declared = ["packaging>=1", "numpy<1", "no-such-package", "os-of-others; sys_platform == 'cobol'"]
        states = {each.name: each.state for each in check_requirements(declared)}
        assert states == {"packaging": "ok", "numpy": "fails", "no-such-package": "fails"}

    def test_an_extra_that_is_not_there_is_no_fault(self):
        (finding,) = check_requirements(["numpy; extra == 'ray'", "no-such-package>2; extra == 'ray'"])
        assert finding.state == "note"
        assert finding.text == "not installed (no-such-package): pip install 'torchrl-llm[ray]'"

    def test_a_version_that_does_not_fit_is_named(self):
        (finding,) = check_requirements(["numpy<1; extra == 'ray'"])
        assert f"numpy<1, found {version('numpy')}" in finding.text

    def test_an_extra_of_extras_is_not_said_to_be_installed(self):
        assert [*check_requirements(["torchrl-llm[report]; extra == 'examples'"])] == []

    @pytest.mark.parametrize("error", [OSError("libcudart"), ImportError("no accelerate")])
    def test_says_why_settings_cannot_be_checked(self, monkeypatch, capsys, error):
        def fail(name):
            raise error

        monkeypatch.setattr(doctor, "import_module", fail)
        parser = doctor.ArgumentParser()
        doctor.add_arguments(parser)
        assert doctor.run(parser.read(["--config", "x"])) == 1
        assert f"{type(error).__name__}: {error}" in capsys.readouterr().out

    def test_matplotlib_is_not_needed(self):
        assert check_extra("report", "no-such-package", needed=False).state == "note"

    def test_is_said_though_nothing_can_be_imported(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "torchrl_llm.cli._fit", None)
        parser = doctor.ArgumentParser()
        doctor.add_arguments(parser)
        assert doctor.run(parser.read([])) == 1
        shown = capsys.readouterr().out
        assert "torch " in shown
        assert "fails  import" in shown


class TestDoctor:
    def test_of_settings_that_fit(self, tmp_path):
        done = command("doctor", "--config", CONFIG, "--json", folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        found = findings(done)
        assert found["device"] == ("ok", "cpu is used")
        assert found["stop ids"] == ("ok", "a response ends at '<|im_end|>' (2)")
        assert "max_model_len=256 leaves" in found["prompt"][1]
        assert found["max_tokens"] == ("ok", "16,384 of a forward and backward pass, the default for this model")
        assert "an estimate" in found["memory"][1]
        assert {"torch", "transformers", "extra ray", "cpu", "engine", "model", "template"} <= found.keys()
        assert not [*tmp_path.glob("[!.]*")]  # nothing is written

    def test_of_every_collector(self):
        games = {"self_play": {"env_name": "world:take-away", "max_model_len": 256}}
        for collector in get_args(settings_of(RunSettings)["collector"].hint):
            config = RunSettings.from_values(
                model_path="tiny", device="cpu", collector=collector, **games.get(collector, {})
            )
            found = {name: state for name, state, _ in fit(config)}
            assert (found["engine"], found["prompt"]) == ("ok", "ok")

    def test_without_settings_it_is_about_the_installation(self, tmp_path):
        done = command("doctor", folder=tmp_path)
        assert done.returncode == 0
        assert "ok     torch " in done.stdout
        assert "template" not in done.stdout

    @pytest.mark.parametrize(
        ("settings", "name", "said"),
        [
            (["--env=game:Wordl-v0"], "environment", "GEM has no environment 'game:Wordl-v0'"),
            (["--model-path=./nowhere"], "tokenizer", "there is no such folder"),
            (["--max-model-len=5000"], "model", "max_model_len is 5000, and the model 'tiny' has 4096 positions"),
            (["--teacher=larger", "--kl-coeff=0.1"], "teacher", "teacher='larger' has another tokenizer"),
            (["--max-model-len=30"], "prompt", "does not fit into max_model_len=30"),
            (["--tokenizer-path=forgetful"], "template", "append"),
            (["--tokenizer-path=larger"], "model", "but the model tiny embeds only 515 tokens"),
            (["--policy=vllm"], "vllm", "pip install 'torchrl-llm[vllm]'"),
            (["--device=cuda"], "device", "finds no GPU"),
            (["--policy=custom", "--engine-class=json:nothing"], "engine_class", "cannot be imported"),
            (["--callbacks={json:JSONDecoder: {}}"], "callbacks", "expected a subclass of Callback"),
            (["--device=gpu"], "device", "device is 'gpu': expected cpu or cuda"),
            (
                ["--lora-r=4", "--quantization=nf4"],
                "bitsandbytes",
                "quantization: nf4 needs it: pip install bitsandbytes",
            ),
        ],
    )
    def test_says_what_would_fail(self, tmp_path, settings, name, said):
        tokenizer = load_tiny_tokenizer()
        tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
        tokenizer.save_pretrained(tmp_path / "forgetful")
        larger = load_tiny_tokenizer()
        larger.add_tokens(["<more>"])
        larger.save_pretrained(tmp_path / "larger")
        random_model(larger).save_pretrained(tmp_path / "larger")
        done = command("doctor", "--config", CONFIG, "--device=null", *settings, "--json", folder=tmp_path)
        assert done.returncode == 1, done.stderr
        state, text = findings(done)[name]
        assert state == "fails"
        assert said in text


@pytest.mark.parametrize(
    ("given", "state", "said"),
    [
        ("talks.jsonl", "ok", "1 episodes in"),
        ("bad.jsonl", "fails", "line 1: its roles are"),
        ("nobody", "fails", "no file or folder, and no player"),
        ("guess_by_hints", "ok", "guess_by_hints can begin"),
        ("break_code_by_pegs", "fails", "which cannot play env_name"),
    ],
)
def test_of_demonstrations(tmp_path, monkeypatch, given, state, said):
    monkeypatch.chdir(tmp_path)
    for name, role in (("talks", "assistant"), ("bad", "narrator")):
        messages = [{"role": "user", "content": "Guess."}, {"role": role, "content": "5"}]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": messages}))
    config = RunSettings.from_values(model_path="tiny", lora_r=0, algo="SFT", demonstrations=given)
    found = {finding.name: finding for finding in fit(config)}
    assert found["demonstrations"].state == state
    assert said in found["demonstrations"].text


def test_where_the_device_fails_the_default_is_said_to_be_that_of_a_cpu():
    found = {
        finding.name: finding for finding in fit(RunSettings.from_values(model_path="tiny", lora_r=4, device="gpu"))
    }
    assert found["device"].state == "fails"
    assert found["max_tokens"].text.endswith("the default for this model on a CPU")


def test_a_bound_above_the_memory_stops_no_run():
    config = RunSettings.from_values(model_path="tiny", lora_r=4, kl_coeff=0.0, max_tokens=100_000_000)
    found = {finding.name: finding for finding in fit(config)}
    assert found["max_tokens"].text == "100,000,000 of a forward and backward pass, as given"
    assert found["memory"].state == "note"
    assert re.search(r"an estimate, at most.*: give max_tokens=\d+$", found["memory"].text)


def on_a_card(tmp_path, **settings):
    """What is found for a model of half a gigabyte on a GPU of 1 GiB."""
    tokenizer = load_tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    shape = random_model(tokenizer).config
    shape.hidden_size, shape.intermediate_size, shape.head_dim = 2_048, 8_192, 64
    shape.dtype = "bfloat16"
    shape.save_pretrained(tmp_path)
    with pretended_gpu(memory=2**30):
        found = fit(
            RunSettings.from_values(model_path=str(tmp_path), lora_r=4, policy="vllm", sleep_mode=True, **settings)
        )
        return {finding.name: finding for finding in found}


class TestEngine:
    """Beside the trainer: what it holds, and what fits while it is awake."""

    def test_that_cannot_hold_its_model(self, tmp_path):
        found = on_a_card(tmp_path, gpu_memory_utilization=0.1)["engine's memory"]
        assert found.state == "fails"
        assert "gpu_memory_utilization=0.1, is 102 MiB, and its weights take" in found.text

    def test_that_does_not_fit_beside_the_trainer(self, tmp_path):
        found = on_a_card(tmp_path, gpu_memory_utilization=0.9)
        assert found["engine's memory"].state == "ok"
        assert found["weight sync"].state == "note"
        assert "of 1 GiB: lower gpu_memory_utilization" in found["weight sync"].text


class TestHostMemory:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @pytest.mark.parametrize(
        ("listed", "files", "expected"),
        [
            ("0::/a/b", {"a/memory.max": "3000000", "a/b/memory.max": "max"}, 3_000_000),
            ("0::/outside", {"memory.max": "3000000"}, 3_000_000),
            ("0::/", {"memory.max": "max"}, machine),
            ("4:cpu,memory:/a\n1:cpu:/\n0::/", {"memory/a/memory.limit_in_bytes": "2000000"}, 2_000_000),
            ("4:memory:/outside", {"memory/memory.limit_in_bytes": "2000000"}, 2_000_000),
            ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, machine),
            (None, {}, machine),
        ],
        ids=["above", "container", "none", "version 1", "container, 1", "none, 1", "no cgroups"],
    )
    def test_is_what_the_container_allows(self, tmp_path, listed, files, expected):
        written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
        written |= {} if listed is None else {"proc/self/cgroup": listed}
        for name, text in written.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        assert host_memory(tmp_path) == expected


class TestMemoryEstimate:
    """Against ``docs/memory.md``, which measured one update of SmolLM2-135M's shapes."""

    measured = (("512", 512, False, 1_340), ("2,048", 2_048, False, 3_065), ("checkpointing", 2_048, True, 860))

    @pytest.fixture(scope="class")
    def shapes(self, tmp_path_factory):
        config = LlamaConfig(
            vocab_size=49_152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
            intermediate_size=1_536, tie_word_embeddings=True,
        )  # fmt: skip
        config.save_pretrained(folder := tmp_path_factory.mktemp("shapes"))
        return folder

    @pytest.mark.parametrize(
        ("tokens", "checkpointing", "mib"), [each[1:] for each in measured], ids=[e[0] for e in measured]
    )
    def test_is_near_what_was_measured(self, shapes, tokens, checkpointing, mib):
        settings = {"algo": "LLMREINFORCE", "kl_coeff": 0.0, "dtype": "float32", "model_path": str(shapes)}
        config = RunSettings.from_values(
            **settings, max_tokens=tokens, max_model_len=448, gradient_checkpointing=checkpointing
        )
        parts = memory_estimate(config, empty_model(config))
        update = sum(parts[name] for name in ("base weights", "trained weights", "activations", "logits"))
        assert update / 2**20 == pytest.approx(mib, rel=0.15)

    def test_weights_are_those_that_are_made(self):
        config = RunSettings.from_values(model_path="tiny", lora_r=4, kl_coeff=0.0)
        parts = memory_estimate(config, empty_model(config))
        models = load_actor_critic(tiny_model_path(), lora=make_lora(config), critic=True)
        # the head
        trained = sum(p.numel() for p in models.actor_parameters() + models.critic_parameters()) - 65
        assert parts["trained weights"] == 16 * trained
        assert parts["base weights"] == sum(4 * p.numel() for p in models.base_parameters())
