"""ShardStore: a directory of shards, one file per sample, that many processes may read and write at once.

There is no index to go stale and no lock to be left behind: the directory is the truth. A shard appears by rename, so
whatever can be listed is complete. Files that a killed writer left (`.r3-tmp.*`) are never read, and
`remove_leftovers` deletes those whose writer is dead.

A run of many steps is a store of stores, so that a step is listed, read and deleted alone:

    run/step-000011/<sample id>.safetensors      ShardStore("run").step(11)
    run/step-000012/...                          100,000 samples in one directory are listed in 0.2 s

`keep_steps` deletes old steps. It renames a step away before it deletes the first file, so nobody lists half a step; and
what a reader has open stays readable, because on a POSIX file system a deleted file lives until the last handle closes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from r3 import shard
from r3.errors import StoreError
from r3.sample import RolloutSample
from r3.shard import files

_STEP = re.compile(r"step-(\d{6,18})")
_GOING = ".r3-gc."  # prefix of step directories that are being deleted


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
        """Ids of the samples that are there now, sorted; those of the steps below are not among them."""
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
            raise self._absent(sample_id)
        return shard.load_file(path, verify=verify)

    def open_file(self, sample_id: str) -> shard.ShardFile:
        """One sample's shard, to read some layers or tokens of it; raises as `open` does."""
        path = self.path_of(sample_id)
        if not path.is_file():
            raise self._absent(sample_id)
        return shard.open_file(path)

    def metadata(self, sample_id: str) -> dict[str, str]:
        """The shard's metadata alone: reads a few KB."""
        return shard.read_metadata(self.path_of(sample_id))

    def add(self, sample: RolloutSample, *, fsync: bool = True) -> Path:
        """Write one sample; see `r3.shard.save_file`.

        Of two writers that add the same id at the same moment both succeed, and one whole shard stays.

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

    def steps(self) -> list[int]:
        """The training steps that have a directory of their own here, ascending."""
        with os.scandir(self.root) as entries:
            found = [_STEP.fullmatch(entry.name) for entry in entries]
        return sorted(int(match[1]) for match in found if match)

    def step(self, number: int, *, create: bool = False) -> ShardStore:
        """The store of one step, `step-<number>` with at least six digits.

        Raises:
            StoreError: it is not there, or cannot be made.
        """
        if number < 0:
            raise StoreError("a step is numbered from 0", where=str(self.root), got=number)
        return ShardStore(self.root / f"step-{number:06d}", create=create)

    def stores(self) -> list[ShardStore]:
        """This store if it holds samples itself, then those of its steps: everything below `root`."""
        own = [self] if next(self._names(), None) is not None else []
        steps = (self.root / f"step-{number:06d}" for number in self.steps())
        return own + [ShardStore(step) for step in steps if step.is_dir()]  # one may be deleted meanwhile

    def keep_steps(self, count: int, *, newest: int | None = None, dry_run: bool = False) -> list[int]:
        """Delete all but the `count` newest steps; returns those deleted (with `dry_run`, that would be).

        `newest` is the step that a run is at. Steps above it, which an earlier run left that this one resumed from a checkpoint
        of, then neither count nor go: they would push out what is being written.

        Samples beside the step directories stay. Readers keep what they have open; a writer that is still at a deleted
        step gets a StoreError. Several processes may do this at once, and one that is killed is completed by the next.
        On NFS a file that another client has open goes with the next access: keep as many steps as readers may lag.

        Raises:
            StoreError: this user may not delete them.
        """
        if count < 1:
            raise StoreError(
                "the newest step is always kept", where=str(self.root), expected="to keep 1 or more", got=count
            )
        old = [number for number in self.steps() if newest is None or number <= newest][:-count]
        if dry_run:
            return old
        for number in old:
            step = self.root / f"step-{number:06d}"
            try:
                step.rename(self.root / f"{_GOING}{step.name}.{uuid.uuid4().hex[:8]}")
            except FileNotFoundError:
                pass  # another process was faster
            except OSError as error:
                raise _cannot_write(self.root, error) from error
        with os.scandir(self.root) as entries:
            going = [entry.path for entry in entries if entry.name.startswith(_GOING)]
        for path in going:
            while os.path.lexists(path):
                try:
                    shutil.rmtree(path)
                except FileNotFoundError:
                    pass  # another process deletes the same
                except OSError as error:
                    raise _cannot_write(Path(path), error) from error
        return old

    def check_writable(self) -> None:
        """Raise StoreError now rather than after an hour of sampling."""
        probe = self.root / files.temporary_name()
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise _cannot_write(self.root, error) from error

    def remove_leftovers(self) -> int:
        """Delete temporary files of writers on this host that no longer live; returns how many."""
        with os.scandir(self.root) as entries:
            leftovers = [entry.path for entry in entries if files.is_leftover(entry.name)]
        for path in leftovers:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return len(leftovers)

    def _absent(self, sample_id: str) -> StoreError:
        return StoreError(f"no sample {sample_id!r}", where=str(self.root), remedy="`r3 inspect` lists what is there")

    def _names(self) -> Iterator[str]:
        try:
            with os.scandir(self.root) as entries:
                for entry in entries:
                    if entry.name.endswith(shard.SUFFIX) and not entry.name.startswith("."):
                        yield entry.name
        except FileNotFoundError:
            pass
        if not self.root.is_dir():  # deleting begins with a rename: while the name is there, the list is whole
            raise StoreError("this step was deleted while it was being listed", where=str(self.root))


def _cannot_write(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot write to this store ({error.strerror or error})",
        where=str(path),
        expected="a directory that this user may write to",
        remedy="choose another directory, or correct its owner and permissions",
    )
