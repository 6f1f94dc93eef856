"""Files that are whole at every moment: :func:`write_text`, :func:`write_bytes`; and that others may read: :func:`open_to_others`."""

from __future__ import annotations

from pathlib import Path


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

    Args:
        path: the file, in a folder that exists; an older one is replaced.
        data: the whole content.
    """
    path = Path(path)
    # Beside it, because only within a file system a rename replaces a file at once.
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


def open_to_others(folder: Path) -> None:
    """Give the weights in a folder the mode of any new file: safetensors makes them readable for their owner alone.

    Args:
        folder: a folder of one's own, that may be written to; what is below it stays as it is.
    """
    new = folder / ".mode"
    new.touch()
    mode = new.stat().st_mode
    new.unlink()
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)
