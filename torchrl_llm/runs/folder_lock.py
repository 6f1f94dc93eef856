"""The lock of a folder among processes: :class:`FolderLock`."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from torchrl_llm.utils.options import ConfigError

LOCK = "torchrl_llm.lock"
"""The file that the process of a run has locked. It stays when the run ends: the lock counts, not
the file."""

_WAIT = 0.4
"""Seconds that a lock is waited for: a process that only checks a folder holds its lock for a
moment."""


class FolderLock:
    """The lock of a folder among processes. The system releases it when the process ends, however
    it ends.

    A forked process does not have it, and does not keep it: an engine may outlive a parent that has
    crashed.

    Args:
        folder: gets the file :data:`LOCK`, if it has none.

    Raises:
        ConfigError: another process has it; or the file cannot be opened, or is another user's in a
            folder where that user could replace it.
        OSError: the file system, or the system, knows no such lock.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / LOCK
        try:
            # Not by filelock alone, whose errors do not tell this from a file system without locks.
            os.close(os.open(self.file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666))
        except OSError as error:
            raise ConfigError(
                f"{self.file} cannot be opened ({error.strerror}), so that it is not known whether another run uses {folder}: "
                "remove it if none does, or choose another output_dir."
            ) from error
        # For all threads: the one that ends a run may be another. A file instead of a lock would
        # outlive a killed process.
        self._lock = FileLock(self.file, timeout=_WAIT, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise ConfigError(
                f"{folder} is in use by another run ({self._holder()}): wait until it ends, end it, or choose another output_dir."
            ) from error
        except PermissionError as error:
            # filelock refuses the file; this is not a file system without locks.
            raise ConfigError(
                f"{self.file} belongs to user {self.file.stat().st_uid}, who could replace it while it is locked ({error.strerror}): "
                "remove it if no run uses the folder, or choose another output_dir."
            ) from error
        self._locked = self.file.stat()

    def sign(self) -> None:
        """Write this process's id into the file, for the error message of others; where that fails,
        the message goes without it."""
        # A lost message must not end the run: where locks are mandatory, as on Windows, the system
        # refuses this second handle.
        with suppress(OSError):
            self.file.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))

    def _holder(self) -> str:
        try:
            holder = json.loads(self.file.read_text())
            return f"process {holder['pid']} on {holder['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "a process that has not written its number down"

    def in_place(self) -> bool:
        """Whether the locked file is still the file in the folder."""
        return self.file.exists() and os.path.samestat(self.file.stat(), self._locked)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        self._lock.release()
