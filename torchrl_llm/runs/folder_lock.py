"""The lock of a folder among processes: :class:`FolderLock`."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import weakref
from pathlib import Path

from torchrl_llm.utils.options import ConfigError

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK = "torchrl_llm.lock"
"""The file that the process of a run has locked. It stays when the run ends: the lock counts, not
the file."""

_ATTEMPTS, _PAUSE = 5, 0.1
"""How often a lock is tried, and the seconds between: a process that only checks a folder holds its
lock for a moment."""


class FolderLock:
    """The lock of a folder among processes. The system releases it when the process ends, however
    it ends.

    Args:
        folder: gets the file :data:`LOCK`, if it has none.

    Raises:
        ConfigError: another process has it; or the file cannot be opened.
        OSError: the file system, or the system, knows no such lock.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / LOCK
        if fcntl is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        try:
            self.descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise ConfigError(
                f"{self.file} cannot be opened ({error.strerror}), so that it is not known whether another run uses {folder}: "
                "remove it if none does, or choose another output_dir."
            ) from error
        try:
            self._acquire(folder)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._finalizer = weakref.finalize(self, _unlock, self.descriptor)

    def _acquire(self, folder: Path) -> None:
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE)
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):  # the second by SMB
                continue
        raise ConfigError(
            f"{folder} is in use by another run ({self._holder()}): wait until it ends, end it, or choose another output_dir."
        )

    def sign(self) -> None:
        """Write this process's id into the file, for the error message of others."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def _holder(self) -> str:
        try:
            holder = json.loads(os.pread(self.descriptor, 4096, 0))
            return f"process {holder['pid']} on {holder['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "a process that has not written its number down"

    def in_place(self) -> bool:
        """Whether the locked file is still the file in the folder."""
        return self.file.exists() and os.path.samestat(self.file.stat(), os.fstat(self.descriptor))

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        self._finalizer()

    def forget(self) -> None:
        """In a forked process: close its copy of the descriptor, because the lock lasts until all
        copies are closed.

        A child that outlives a crashed parent, such as an engine, would keep the folder locked.
        """
        if self._finalizer.detach():
            os.close(self.descriptor)


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
