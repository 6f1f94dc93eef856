"""Files that are whole at every moment: :func:`write_text`, :func:`write_bytes`; and that others
may read: :func:`open_to_others`."""

from __future__ import annotations

import glob
import hashlib
import os
import uuid
from contextlib import suppress
from pathlib import Path

_ABANDONED = 3600.0
"""Seconds after which a temporary file has no writer any more: it was killed."""


def write_text(path: str | Path, text: str) -> None:
    """Write a file in UTF-8, whole or not at all: after a crash it has the old text or the new one.

    Args:
        path: the file, in a folder that exists; an older one is replaced.
        text: the whole text.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_text(f"{folder}/id", "7")
        ...     [(file.name, file.read_text()) for file in Path(folder).iterdir()]
        [('id', '7')]
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file as :func:`write_text` does.

    The data are on the disk before the name points to them, so that a crash of the machine leaves
    no empty file either. Several processes may write the same file: each has a temporary file of
    its own, and the last one wins.

    Args:
        path: the file, in a folder that exists; an older one is replaced.
        data: the whole content.
    """
    path = Path(path)
    # Beside it, because only within a file system a rename replaces a file at once.
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    try:
        with new.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _sync(path.parent)
    _clean(path)


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    with suppress(OSError):  # some file systems sync no folders
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _clean(path: Path) -> None:
    """Delete what writers of ``path`` left that were killed."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*new"):
        with suppress(OSError):  # another process cleans too, or has replaced the file by now
            if left.stat().st_mtime < path.stat().st_mtime - _ABANDONED:
                left.unlink()


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits; it is read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_to_others(folder: Path) -> None:
    """Give the weights in a folder the mode of any new file: safetensors makes them readable for
    their owner alone.

    Args:
        folder: a folder of one's own, that may be written to; what is below it stays as it is.
    """
    new = folder / f".mode.{uuid.uuid4().hex}"
    new.touch()
    mode = new.stat().st_mode
    new.unlink()
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)
