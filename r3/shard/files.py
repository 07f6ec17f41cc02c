"""Bytes of files: written whole or not at all, read by ranges.

Local ranges are read with `pread` into the caller's array, not mapped: a mapping faults in pages around what is asked
for, and keeps files that were deleted on a shared file system alive for as long as a view of it lives. A path with `://`
in it is a URL, see `r3.shard.objects`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from r3.errors import ConfigError, NoShardError, PresentError, ShardError, StoreError
from r3.shard.container import bytes_of

TEMPORARY = ".r3-tmp."  # prefix of files that are being written; nothing ever reads them

Parts = Sequence[tuple[int, memoryview]]  # (offset in the file, where its bytes go)


# What `link` answers on file systems without hard links: FUSE and FAT, SMB and some NFS servers, a limit that is reached.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL, errno.EACCES}


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether fsspec reads it: anything with `://` in it but `file://`, which is local."""
    name = os.fspath(path)
    return "://" in name and not name.startswith("file://")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Of a path, or of a `file://` URL.

    Raises:
        ConfigError: a URL that went through pathlib, which makes one slash of two: it would become a directory `s3:`.
    """
    name = os.fspath(path)
    if re.match(r"[a-z][a-z0-9+.-]+:/(?!/)", name):
        raise ConfigError(
            "a URL that was made a path", where=name, expected="two slashes: a str", got=type(path).__name__
        )
    return Path(name.removeprefix("file://"))


def write_atomically(
    path: Path, data: bytes | Sequence[memoryview], *, fsync: bool = True, exclusive: bool = False
) -> None:
    """Write `data`, or its pieces one after the other, under a temporary name in the same directory, then rename.

    Args:
        exclusive: Never replace a file: of several writers the first wins, by a hard link in place of the rename. Where the file
            system has no hard links, by looking before renaming, which two writers in the same millisecond pass both.

    Raises:
        PresentError: with `exclusive`, the file is there.
        StoreError: the file cannot be written (no space, no permission); nothing is left behind.
    """
    temporary = path.with_name(temporary_name())
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write(descriptor, [memoryview(data)] if isinstance(data, bytes) else list(data))
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if exclusive:
            _link(temporary, path)
        else:
            os.replace(temporary, path)
        if fsync:
            _fsync_directory(path.parent)
    except FileExistsError:
        _remove(temporary)
        raise PresentError("this file is there already", where=str(path)) from None
    except OSError as error:
        _remove(temporary)
        raise StoreError(
            f"cannot write this file ({error.strerror or error})",
            where=str(path),
            expected="room and permission",
            remedy="free or enlarge the disk, or choose another directory; files already written are complete",
        ) from error
    except BaseException:  # Ctrl-C between write and rename
        _remove(temporary)
        raise


def _link(temporary: Path, path: Path) -> None:
    """Give the file its name unless another has it: FileExistsError then."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # Over NFS the answer to a link that was made may be lost, and the link asked for again.
        if os.stat(temporary).st_nlink != 2:
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        os.replace(temporary, path)
        return
    os.unlink(temporary)


def _remove(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def _write(descriptor: int, pieces: list[memoryview]) -> None:
    """All pieces in one system call, or in several where the kernel takes less at a time (2 GiB at most)."""
    while pieces:
        done = os.writev(descriptor, pieces)
        while pieces and done >= pieces[0].nbytes:
            done -= pieces.pop(0).nbytes
        if pieces:
            pieces[0] = pieces[0][done:]


def temporary_name() -> str:
    """`.r3-tmp.<host>.<process>.<process namespace>.<unique>`: a leftover says whose it was."""
    return f"{TEMPORARY}{_host()}.{os.getpid()}.{_namespace()}.{os.urandom(4).hex()}"


def is_leftover(name: str) -> bool:
    """Whether a file of this name was being written by a process of this host that no longer lives."""
    mine = f"{TEMPORARY}{_host()}."
    if not name.startswith(mine):
        return False
    process, *rest = name[len(mine) :].split(".")
    if len(rest) > 1 and rest[0] != _namespace():  # another container under the same host name: its ids are not ours
        return False
    return process.isdigit() and not _alive(int(process))


def open_ranges(path: str | os.PathLike[str]) -> Ranges:
    """A file for reading by ranges.

    Raises:
        ShardError: there is none, or it cannot be read.
        ConfigError: a URL, and fsspec or the file system's own package is not installed.
    """
    if not is_url(path):
        return _Local(str(local_path(path)))
    from r3.shard.objects import RemoteRanges

    return RemoteRanges(os.fspath(path))


class Ranges(Protocol):
    """An open file."""

    @property
    def size(self) -> int | None:
        """None where nobody can say; known when the head is read."""
        ...

    def head(self, size: int) -> bytes:
        """The first `size` bytes, or all if there are fewer."""
        ...

    def fill(self, parts: Parts) -> None:
        """Read each part; ShardError if the file ends before."""
        ...

    def whole(self) -> npt.NDArray[np.uint8]:
        """All bytes, writable."""
        ...

    def close(self) -> None: ...


class _Local:
    def __init__(self, name: str) -> None:
        self._name = name
        try:
            self._file = open(name, "rb", buffering=0)  # noqa: SIM115 - closed by `close`
        except FileNotFoundError:
            raise NoShardError("no such shard", where=name) from None
        except OSError as error:
            raise _failed(name, error) from None
        self.size: int | None = os.fstat(self._file.fileno()).st_size

    def head(self, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, 0)

    def fill(self, parts: Parts) -> None:
        for offset, buffer in parts:
            done = 0
            while done < buffer.nbytes:  # one call reads at most 2 GiB
                try:
                    count = os.preadv(self._file.fileno(), [buffer[done:]], offset + done)
                except OSError as error:
                    raise _failed(self._name, error) from None
                if count == 0:
                    raise cut_off(self._name, offset + buffer.nbytes, offset + done)
                done += count

    def whole(self) -> npt.NDArray[np.uint8]:
        data = np.empty(self.size or 0, np.uint8)
        self.fill([(0, bytes_of(data))])
        return data

    def close(self) -> None:
        self._file.close()


def cut_off(name: str, expected: int, got: int) -> ShardError:
    return ShardError("this file is cut off", where=name, expected=f"at least {expected} bytes", got=got)


def _failed(name: str, error: OSError) -> ShardError:
    return ShardError(f"cannot be read ({error.strerror or error})", where=name)


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@lru_cache(maxsize=1)
def _host() -> str:
    return socket.gethostname()


@lru_cache(maxsize=1)
def _namespace() -> str:
    """Tells containers apart that share a host name: process 17 of one is not process 17 of another."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
