"""ShardStore: a directory of shards, one file per sample, that many processes may read and write at once.

There is no index to go stale and no lock to be left behind: the directory is the truth. A shard appears by rename, so
whatever can be listed is complete. Files that a killed writer left (`.r3-tmp.*`) are never read, and
`remove_leftovers` deletes those whose writer is dead.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from r3 import shard
from r3.errors import StoreError
from r3.sample import RolloutSample


class ShardStore:
    """The shards under one directory.

    Args:
        root: The directory.
        create: Make it if it is not there.

    Raises:
        StoreError: no such directory, or it cannot be made.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = False) -> None:
        self.root = Path(root)
        try:
            if create:
                self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(self.root, error) from error
        if not self.root.is_dir():
            raise StoreError(
                "no such store",
                where=str(self.root),
                expected="a directory of shards",
                remedy="check the path; `r3 collect` makes one",
            )

    def __repr__(self) -> str:
        return f"ShardStore({str(self.root)!r})"

    def __len__(self) -> int:
        return sum(1 for _ in self._names())

    def __contains__(self, sample_id: str) -> bool:
        return self.path_of(sample_id).is_file()

    def __iter__(self) -> Iterator[RolloutSample]:
        """Every sample, in the order of `sample_ids`, verified."""
        return (self.open(sample_id) for sample_id in self.sample_ids())

    def sample_ids(self) -> list[str]:
        """Ids of the samples that are there now, sorted."""
        return sorted(unquote(name.removesuffix(shard.SUFFIX)) for name in self._names())

    def path_of(self, sample_id: str) -> Path:
        """The file of a sample, there or not. Characters that a file name cannot hold are percent-encoded."""
        name = quote(sample_id, safe="-_~.+=@,")
        if name.startswith("."):
            name = "%2E" + name[1:]
        if not sample_id or len(name) + len(shard.SUFFIX) > 255:
            raise StoreError(
                "not usable as a sample id",
                where=repr(sample_id[:80]),
                expected="1 to about 240 characters",
                got=len(name),
            )
        return self.root / (name + shard.SUFFIX)

    def open(self, sample_id: str, *, verify: bool = True) -> RolloutSample:
        """One sample.

        Raises:
            StoreError: no sample of that id.
            ShardError: its shard is damaged or of another version.
        """
        path = self.path_of(sample_id)
        if not path.is_file():
            raise StoreError(
                f"no sample {sample_id!r}", where=str(self.root), remedy="`r3 inspect` lists what is there"
            )
        return shard.load_file(path, verify=verify)

    def metadata(self, sample_id: str) -> dict[str, str]:
        """The shard's metadata alone: reads a few KB."""
        return shard.read_metadata(self.path_of(sample_id))

    def add(self, sample: RolloutSample, *, fsync: bool = True) -> Path:
        """Write one sample; see `r3.shard.save_file`.

        Raises:
            StoreError: the sample is there already, or cannot be written.
        """
        path = self.path_of(sample.sample_id)
        if path.exists():
            raise StoreError(
                f"sample {sample.sample_id!r} is there already",
                where=str(self.root),
                remedy="choose another store, or delete the old shard",
            )
        shard.save_file(sample, path, fsync=fsync)
        return path

    def check_writable(self) -> None:
        """Raise StoreError now rather than after an hour of sampling."""
        probe = self.root / f"{shard.TEMPORARY}{socket.gethostname()}.{os.getpid()}.probe"
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise _cannot_write(self.root, error) from error

    def remove_leftovers(self) -> int:
        """Delete temporary files of writers on this host that no longer live; returns how many."""
        removed = 0
        mine = f"{shard.TEMPORARY}{socket.gethostname()}."
        for entry in os.scandir(self.root):
            if entry.name.startswith(mine):
                pid = entry.name[len(mine) :].split(".")[0]
                if pid.isdigit() and not _alive(int(pid)):
                    Path(entry.path).unlink(missing_ok=True)
                    removed += 1
        return removed

    def _names(self) -> Iterator[str]:
        with os.scandir(self.root) as entries:
            for entry in entries:
                if entry.name.endswith(shard.SUFFIX) and not entry.name.startswith("."):
                    yield entry.name


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _cannot_write(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot write to this store ({error.strerror or error})",
        where=str(path),
        expected="a directory that this user may write to",
        remedy="choose another directory, or correct its owner and permissions",
    )
