"""Folders of shards: what a ShardStore needs of the place where its files lie, on a local path or behind a URL of fsspec.

    LocalFolder    a directory: names appear by hard link, steps go by rename
    UrlFolder      a prefix of an object store, or a directory of another file system: names appear by a put, steps go by a mark

An object store has no directories and no rename. So a folder that r3 makes holds an empty object `.r3-store`, by which it is
there before its first sample; and the deletion of a step begins with an empty object `.r3-gc.<step>` beside it. While that mark
is there the step is not: it is not listed, a listing that was going on ends in an error, and what a late writer adds is taken
away again. The mark stays, and the next deletion removes what an interrupted one left. Making the step anew removes both.

Names that begin with a dot are never samples.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import quote

from r3.errors import ConfigError, PresentError, R3Warning, StoreError
from r3.shard import files, objects
from r3.shard.failures import doing

R = TypeVar("R")

_GOING = ".r3-gc."  # prefix of step directories that are being deleted, and of the marks of deleted steps
_MARK = ".r3-store"
_OLD_S = 24 * 3600.0  # uploads begun so long ago were left by a writer that died


class Folder(Protocol):
    """A place for files. `url` is its path or URL, and what comes before a file's name in its key."""

    url: str
    name: str

    def exists(self) -> bool: ...

    def make(self) -> None:
        """Make it if it is not there; StoreError if that cannot be."""
        ...

    def child(self, name: str) -> Folder: ...

    def key(self, name: str) -> str:
        """Path or URL of a file, there or not."""
        ...

    def has(self, name: str) -> bool: ...

    def files(self) -> Iterator[str]:
        """Names of the files; StoreError if the folder is deleted meanwhile."""
        ...

    def folders(self) -> Iterator[str]:
        """Names of the folders that are not being deleted; others may be among them."""
        ...

    def add(self, name: str, pieces: Sequence[memoryview], *, fsync: bool) -> None:
        """Write a file, whole or not at all; PresentError if it is there."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file if it is there."""
        ...

    def written_at(self, name: str) -> float | None:
        """When a file was written, in seconds since 1970; None if it is not there."""
        ...

    def discard(self, names: Sequence[str]) -> None:
        """Delete folders with all that is in them, and what earlier deletions left."""
        ...

    def check_writable(self) -> None: ...

    def remove_leftovers(self) -> int: ...


def folder_of(root: str | os.PathLike[str]) -> Folder:
    """The folder at a path or URL."""
    return UrlFolder(os.fspath(root)) if files.is_url(root) else LocalFolder(files.local_path(root))


class LocalFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.url, self.name = str(path), path.name

    def exists(self) -> bool:
        return self.path.is_dir()

    def make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def key(self, name: str) -> str:
        return str(self.path / name)

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def files(self) -> Iterator[str]:
        yield from self.folders()
        if not self.exists():  # deleting begins with a rename: while the name is there, the list is whole
            raise _overtaken(self.url)

    def folders(self) -> Iterator[str]:
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    yield entry.name
        except FileNotFoundError:
            raise _overtaken(self.url) from None
        except OSError as error:
            raise StoreError(f"cannot be listed ({error.strerror or error})", where=self.url) from error

    def add(self, name: str, pieces: Sequence[memoryview], *, fsync: bool) -> None:
        path = self.path / name
        if path.exists():
            raise PresentError("this file is there already", where=str(path))
        files.write_atomically(path, pieces, fsync=fsync, exclusive=True)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def written_at(self, name: str) -> float | None:
        try:
            return (self.path / name).stat().st_mtime_ns / 1e9
        except FileNotFoundError:
            return None

    def discard(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                (self.path / name).rename(self.path / f"{_GOING}{name}.{uuid.uuid4().hex[:8]}")
            except FileNotFoundError:
                pass  # another process was faster
            except OSError as error:
                raise _cannot_write(self.path, error) from error
        for name in [each for each in self.folders() if each.startswith(_GOING)]:
            path = self.path / name
            while os.path.lexists(path):
                try:
                    shutil.rmtree(path)
                except FileNotFoundError:
                    pass  # another process deletes the same
                except OSError as error:
                    raise _cannot_write(path, error) from error

    def check_writable(self) -> None:
        probe = self.path / files.temporary_name()
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def remove_leftovers(self) -> int:
        leftovers = [name for name in self.folders() if files.is_leftover(name)]
        for name in leftovers:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / name)
        return len(leftovers)


class UrlFolder:
    """Holds its URL alone: it may be pickled, and used after a fork and in any thread."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.name = self.url.rpartition("/")[2]
        if any(each in self.url for each in "*?["):
            raise ConfigError(
                "fsspec takes this URL for a pattern: what is deleted here would be that of other folders",
                where=url,
                expected="a URL without any of * ? [",
                remedy="choose another name for the folder",
            )
        # Only what r3 deletes as a whole can have a mark; for the run's own folder it is not asked for.
        self._is_step = self.name.startswith("step-")

    def _at(self, name: str = "") -> tuple[objects.Objects, str]:
        store, path = objects.objects_of(self.url)
        return store, f"{path}/{name}" if name else path

    def exists(self) -> bool:
        def ask() -> bool:
            store, path = self._at()
            if self._is_going():
                return False
            return store.exists(f"{path}/{_MARK}") or next(store.entries(path, limit=1), None) is not None

        return self._listed(ask, False)

    def make(self) -> None:
        store, path = self._at()

        def ask() -> None:
            if self._is_going():
                self._clear()
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    store.remove([self._going(path)])
            if not store.exists(f"{path}/{_MARK}"):
                store.make_folder(path)
                store.put(f"{path}/{_MARK}", b"", exclusive=False)

        try:
            doing("written to", self.url, ask)
        except FileNotFoundError as error:
            raise StoreError(f"this folder cannot be made ({error})", where=self.url) from error

    def child(self, name: str) -> UrlFolder:
        return UrlFolder(f"{self.url}/{name}")

    def key(self, name: str) -> str:
        # An HTTP server decodes the name once.
        return f"{self.url}/{quote(name) if self.url.startswith(('http://', 'https://')) else name}"

    def has(self, name: str) -> bool:
        store, path = self._at(name)
        return self._listed(lambda: store.exists(path), False)

    def files(self) -> Iterator[str]:
        store, path = self._at()
        names = store.entries(path)
        while (found := self._listed(lambda: next(names, None), None)) is not None:
            name, is_folder = found
            if not is_folder:
                yield name
        if self._listed(self._is_going, False):
            raise _overtaken(self.url)

    def folders(self) -> Iterator[str]:
        folders, going = self._steps()
        return iter([name for name in folders if name not in going])

    def _steps(self) -> tuple[list[str], set[str]]:
        """All folders, and the names of those that were deleted."""
        store, path = self._at()
        found: list[tuple[str, bool]] = self._listed(lambda: list(store.entries(path)), [])
        going = {name.removeprefix(_GOING) for name, is_folder in found if not is_folder and name.startswith(_GOING)}
        return [name for name, is_folder in found if is_folder], going

    def add(self, name: str, pieces: Sequence[memoryview], *, fsync: bool) -> None:  # noqa: ARG002 - a put is durable
        key = self.key(name)
        if self.has(name):  # before megabytes are sent; and where the store has no conditional put, the only guard
            raise PresentError("this object is there already", where=key)
        objects.put(key, b"".join(pieces), exclusive=True)
        if self._listed(self._is_going, False):
            objects.remove(key)
            raise StoreError(
                "this step was deleted",
                where=self.url,
                remedy="keep as many steps as a writer may be late (keep_steps), or make the step anew",
            )

    def remove(self, name: str) -> None:
        objects.remove(self.key(name))

    def written_at(self, name: str) -> float | None:
        store, path = self._at(name)
        return self._listed(lambda: store.modified(path), None)

    def discard(self, names: Sequence[str]) -> None:
        def ask() -> None:
            store, path = self._at()
            for name in names:
                store.put(f"{path}/{_GOING}{name}", b"", exclusive=False)
            folders, going = self._steps()
            for name in folders:
                if name in going:
                    self.child(name)._clear()

        doing("written to", self.url, ask)

    def _clear(self) -> None:
        """Delete all that this step holds, unless another process makes it anew meanwhile."""
        store, path = self._at()
        before: list[str] = []
        while found := [each for each, is_folder in store.entries(path) if not is_folder]:
            if not store.exists(self._going(path)):  # asked after the list: what it holds may be new
                return
            if found == before:  # s3fs does not report keys that a bulk deletion refused
                raise PermissionError(f"{len(found)} objects of {self.name} were not deleted")
            with contextlib.suppress(FileNotFoundError):  # another process deletes the same
                store.remove([f"{path}/{each}" for each in found])
            before = found
        if not store.is_atomic and store.exists(self._going(path)):
            with contextlib.suppress(FileNotFoundError):
                store.remove_folder(path)

    def _is_going(self) -> bool:
        if not self._is_step:
            return False
        store, path = self._at()
        return store.exists(self._going(path))

    def _going(self, path: str) -> str:
        parent, _, name = path.rpartition("/")
        return f"{parent}/{_GOING}{name}"

    def check_writable(self) -> None:
        store, path = self._at(files.temporary_name())

        def ask() -> bool:
            store.put(path, b"", exclusive=True)
            try:
                store.put(path, b"", exclusive=True)
            except FileExistsError:
                return True
            finally:
                with contextlib.suppress(PermissionError):  # who may add and not delete may collect
                    store.remove([path])
            return False

        try:
            if not doing("written to", self.url, ask):
                warnings.warn(
                    f"{self.url}: this server replaces an object that it was asked not to replace; of two writers of one sample "
                    "at the same moment the last one wins (docs/storage.md)",
                    R3Warning,
                    stacklevel=3,
                )
        except FileNotFoundError as error:
            raise StoreError(f"cannot be written to ({error})", where=self.url) from error

    def remove_leftovers(self) -> int:
        store, path = self._at()
        if store.is_atomic:
            try:
                return doing("listed", self.url, lambda: store.abort_uploads(path, _OLD_S))
            except (StoreError, FileNotFoundError):
                return 0  # a right of its own, which a writer need not have; a rule of the bucket does the same
        leftovers = [name for name in self.files() if files.is_leftover(name)]
        for name in leftovers:
            self.remove(name)
        return len(leftovers)

    def _listed(self, ask: Callable[[], R], absent: R) -> R:
        try:
            return doing("listed", self.url, ask)
        except FileNotFoundError:
            return absent


def _overtaken(url: str) -> StoreError:
    return StoreError("this folder was deleted while it was being listed", where=url)


def _cannot_write(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot write to this store ({error.strerror or error})",
        where=str(path),
        expected="a directory that this user may write to",
        remedy="choose another directory, or correct its owner and permissions",
    )
