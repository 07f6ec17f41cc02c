"""Bytes of files: written whole or not at all, read by ranges, from a local disk or through fsspec.

Local ranges are read with `pread` into the caller's array, not mapped: a mapping faults in pages around what is asked
for, and keeps files that were deleted on a shared file system alive for as long as a view of it lives. A path with `://`
in it is a URL and needs fsspec (`pip install "r3-replay[remote]"`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from r3.errors import ConfigError, ShardError, StoreError
from r3.shard.container import bytes_of

TEMPORARY = ".r3-tmp."  # prefix of files that are being written; nothing ever reads them

Parts = Sequence[tuple[int, memoryview]]  # (offset in the file, where its bytes go)


def write_atomically(path: Path, data: bytes | Sequence[memoryview], *, fsync: bool = True) -> None:
    """Write `data`, or its pieces one after the other, under a temporary name in the same directory, then rename.

    Raises:
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
        os.replace(temporary, path)
        if fsync:
            _fsync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError(
            f"cannot write this file ({error.strerror or error})",
            where=str(path),
            expected="room and permission",
            remedy="free or enlarge the disk, or choose another directory; files already written are complete",
        ) from error
    except BaseException:  # Ctrl-C between write and rename
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


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
    name = os.fspath(path)
    return _Remote(name) if "://" in name else _Local(name)


class Ranges(Protocol):
    """An open file. `size` is None where nobody can say."""

    size: int | None

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
            raise ShardError("no such shard", where=name) from None
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
                    raise _short(self._name, offset + buffer.nbytes, offset + done)
                done += count

    def whole(self) -> npt.NDArray[np.uint8]:
        data = np.empty(self.size or 0, np.uint8)
        self.fill([(0, bytes_of(data))])
        return data

    def close(self) -> None:
        self._file.close()


class _Remote:
    """Through fsspec. All parts of one `fill` are asked for at once, which an object store answers in parallel."""

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            import fsspec
        except ImportError:
            raise ConfigError(
                "reading a URL needs fsspec, which is not installed",
                where=url,
                remedy='pip install "r3-replay[remote]"',
            ) from None
        try:
            self._fs, self._path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:  # s3fs, gcsfs, ... is missing; no such protocol
            raise ConfigError(f"no file system for this URL ({error})", where=url) from None
        self.size: int | None = self._do(lambda: self._fs.size(self._path))

    def head(self, size: int) -> bytes:
        return self._ranges([(0, min(size, self.size) if self.size is not None else size)])[0]

    def fill(self, parts: Parts) -> None:
        wanted = [(offset, offset + buffer.nbytes) for offset, buffer in parts if buffer.nbytes]
        for (_, buffer), data in zip([part for part in parts if part[1].nbytes], self._ranges(wanted), strict=True):
            buffer[:] = data

    def whole(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(bytearray(self._do(lambda: self._fs.cat_file(self._path))), np.uint8)

    def close(self) -> None:
        pass

    def _ranges(self, wanted: list[tuple[int, int]]) -> list[bytes]:
        begins, ends = [begin for begin, _ in wanted], [end for _, end in wanted]
        paths = [self._path] * len(wanted)
        answers: list[bytes] = self._do(lambda: self._fs.cat_ranges(paths, begins, ends, on_error="raise"))
        for begin, end, answer in zip(begins, ends, answers, strict=True):
            if len(answer) < end - begin:
                raise _short(self._url, end, begin + len(answer))
            if len(answer) > end - begin:
                raise StoreError(
                    "this server sends the whole file where a range is asked for",
                    where=self._url,
                    remedy="read it whole with `load_file`, or serve it with support for byte ranges",
                )
        return answers

    def _do(self, ask: Any) -> Any:
        try:
            return ask()
        except FileNotFoundError:
            raise ShardError("no such shard", where=self._url) from None
        except Exception as error:  # each file system has errors of its own
            raise StoreError(f"cannot be read ({type(error).__name__}: {error})", where=self._url) from error


def _short(name: str, expected: int, got: int) -> ShardError:
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
