"""ShardStore: a folder of shards, one file per sample, that many processes may read and write at once.

The folder is a local directory or any URL of fsspec: `ShardStore("shards/run")`, `ShardStore("s3://bucket/run")`.

There is no index to go stale and no lock to be left behind: the folder is the truth. A shard appears whole, so whatever can be
listed is complete, and of several writers of one id the first wins. Files that a killed writer left (`.r3-tmp.*`) are never
read, and `remove_leftovers` deletes those whose writer is dead. What holds where (NFS, Lustre, S3, ...): docs/storage.md.

A run of many steps is a store of stores, so that a step is listed, read and deleted alone:

    run/step-000011/<sample id>.safetensors      ShardStore("run").step(11)
    run/step-000012/...                          100,000 samples in one directory are listed in 0.2 s

`keep_steps` deletes old steps. A step is gone before its first file is deleted, so nobody lists half a step; and what a reader
has open stays readable on a POSIX file system, because a deleted file lives there until the last handle closes.

Only keys travel: `key_of` is what another process, or machine, needs to read a sample.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

from r3 import shard
from r3.errors import NoShardError, PresentError, ShardError, StoreError
from r3.folders import Folder, LocalFolder, folder_of
from r3.sample import RolloutSample
from r3.shard.files import is_leftover, is_url, local_path

R = TypeVar("R")

_STEP = re.compile(r"step-(\d{6,18})")


class ShardStore:
    """The shards in one folder.

    Args:
        root: A directory, or a URL that fsspec knows: `s3://bucket/run`, `gs://...`, `memory://...`.
        create: Make it if it is not there. A bucket is never made.

    Attributes:
        url: The root as text: a path or a URL.
        name: Its last part.

    Raises:
        StoreError: no such folder, or it cannot be made.
        ConfigError: a URL, and fsspec or the file system's own package is not installed; one that fsspec takes for a pattern.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = False) -> None:
        self._folder: Folder = folder_of(root)
        self.url, self.name = self._folder.url, self._folder.name
        if create:
            self._folder.make()
        elif not self._folder.exists():
            raise StoreError(
                "no such store",
                where=self.url,
                expected="a directory of shards",
                remedy="check the path; `r3 collect` makes one",
            )

    @property
    def is_local(self) -> bool:
        """Whether it is a directory rather than a URL."""
        return isinstance(self._folder, LocalFolder)

    @property
    def root(self) -> Path:
        """The directory.

        Raises:
            StoreError: the store is a URL.
        """
        if not isinstance(self._folder, LocalFolder):
            raise StoreError(
                "this needs a directory, and the store is a URL", where=self.url, expected="a local path", got=self.url
            )
        return self._folder.path

    def __repr__(self) -> str:
        return f"ShardStore({self.url!r})"

    def __len__(self) -> int:
        return sum(1 for _ in self._names())

    def __contains__(self, sample_id: str) -> bool:
        return self._folder.has(_name(sample_id))

    def __iter__(self) -> Iterator[RolloutSample]:
        """Every sample, in the order of `sample_ids`, verified."""
        return (self.open(sample_id) for sample_id in self.sample_ids())

    def sample_ids(self) -> list[str]:
        """Ids of the samples that are there now, sorted; those of the steps below are not among them."""
        return sorted(unquote(name.removesuffix(shard.SUFFIX)) for name in self._names())

    def key_of(self, sample_id: str) -> str:
        """The path or URL of a sample, there or not: `shard.load_file` and `shard.open_file` take it wherever it is seen.

        Characters that a file name cannot hold are percent-encoded. A local store gives the path as it was opened: a relative
        one means nothing to another process.

        Raises:
            StoreError: not usable as a sample id.
        """
        return self._folder.key(_name(sample_id))

    def path_of(self, sample_id: str) -> Path:
        """The file of a sample in a local store, there or not.

        Raises:
            StoreError: the store is a URL, or not usable as a sample id.
        """
        return self.root / _name(sample_id)

    def open(self, sample_id: str, *, verify: bool = True) -> RolloutSample:
        """One sample.

        Raises:
            StoreError: no sample of that id.
            ShardError: its shard is damaged or of another version.
        """
        return self._read(sample_id, lambda key: shard.load_file(key, verify=verify))

    def open_file(self, sample_id: str) -> shard.ShardFile:
        """One sample's shard, to read some layers or tokens of it; raises as `open` does."""
        return self._read(sample_id, shard.open_file)

    def metadata(self, sample_id: str) -> dict[str, str]:
        """The shard's metadata alone: reads a few KB; raises as `open` does."""
        return self._read(sample_id, shard.read_metadata)

    def add(self, sample: RolloutSample, *, fsync: bool = True) -> int:
        """Write one sample; returns the shard's size in bytes.

        Of several writers that add the same id at the same moment one succeeds and its shard stays, also after it was read: the
        others get a PresentError. Where the place has neither hard links nor a conditional put, the last one may win instead
        (docs/storage.md); one whole shard stays in any case.

        Args:
            fsync: As in `r3.shard.save_file`; an object store's put is durable anyway.

        Raises:
            PresentError: the sample is there already.
            StoreError: it cannot be written.
        """
        pieces = shard.pieces(sample)
        try:
            self._folder.add(_name(sample.sample_id), pieces, fsync=fsync)
        except PresentError:
            raise PresentError(
                f"sample {sample.sample_id!r} is there already",
                where=self.url,
                remedy="choose another store, or delete the old shard",
            ) from None
        return sum(piece.nbytes for piece in pieces)

    def replace(self, sample: RolloutSample, name: str | None = None, *, fsync: bool = True) -> None:
        """Write one sample, in place of one of that id if there is one.

        Args:
            name: In place of the sample's own id.

        Raises:
            StoreError: it cannot be written.
        """
        shard.save_file(sample, self.key_of(sample.sample_id if name is None else name), fsync=fsync)

    def discard(self, sample_id: str) -> None:
        """Delete one sample if it is there."""
        self._folder.remove(_name(sample_id))

    def written_at(self, sample_id: str) -> float | None:
        """When a sample was written, in seconds since 1970, as the file system has it; None if it is not there."""
        return self._folder.written_at(_name(sample_id))

    def steps(self) -> list[int]:
        """The training steps that have a folder of their own here, ascending."""
        found = [_STEP.fullmatch(name) for name in self._folder.folders()]
        return sorted(int(match[1]) for match in found if match)

    def step(self, number: int, *, create: bool = False) -> ShardStore:
        """The store of one step, `step-<number>` with at least six digits.

        Raises:
            StoreError: it is not there, or cannot be made.
        """
        if number < 0:
            raise StoreError("a step is numbered from 0", where=self.url, got=number)
        return self.below(_step_name(number), create=create)

    def has_step(self, number: int) -> bool:
        return self._folder.child(_step_name(number)).exists()

    def below(self, name: str, *, create: bool = False) -> ShardStore:
        """The store in a folder of this one."""
        return ShardStore(self._folder.child(name).url, create=create)

    def stores(self) -> list[ShardStore]:
        """This store if it holds samples itself, then those of its steps: everything below the root."""
        found = [self] if next(self._names(), None) is not None else []
        for number in self.steps():
            try:
                found.append(self.step(number))
            except StoreError:
                if self.has_step(number):
                    raise
        return found  # one may be deleted meanwhile

    def keep_steps(self, count: int, *, newest: int | None = None, dry_run: bool = False) -> list[int]:
        """Delete all but the `count` newest steps; returns those deleted (with `dry_run`, that would be).

        `newest` is the step that a run is at. Steps above it, which an earlier run left that this one resumed from a checkpoint
        of, then neither count nor go: they would push out what is being written.

        Samples beside the step directories stay. Readers keep what they have open; a writer that is still at a deleted
        step gets a StoreError. Several processes may do this at once, and one that is killed is completed by the next.
        On NFS a file that another client has open goes with the next access, on an object store with the next read: keep as
        many steps as readers may lag.

        Raises:
            StoreError: this user may not delete them.
        """
        if count < 1:
            raise StoreError("the newest step is always kept", where=self.url, expected="to keep 1 or more", got=count)
        old = [number for number in self.steps() if newest is None or number <= newest][:-count]
        if not dry_run:
            self._folder.discard([_step_name(number) for number in old])
        return old

    def check_writable(self) -> None:
        """Raise StoreError now rather than after an hour of sampling; warn where two writers of an id cannot be told apart."""
        self._folder.check_writable()

    def remove_leftovers(self) -> int:
        """Delete what writers left that no longer live; returns how many.

        In a directory: temporary files of processes of this host. On S3: multipart uploads under this URL that were begun more
        than a day ago.
        """
        return self._folder.remove_leftovers()

    def leftovers(self) -> int:
        """How many temporary files of dead writers of this host are here."""
        return sum(is_leftover(name) for name in self._folder.files())

    def _read(self, sample_id: str, read: Callable[[str], R]) -> R:
        try:
            return read(self.key_of(sample_id))
        except NoShardError:
            raise StoreError(
                f"no sample {sample_id!r}", where=self.url, remedy="`r3 inspect` lists what is there"
            ) from None

    def _names(self) -> Iterator[str]:
        return (name for name in self._folder.files() if name.endswith(shard.SUFFIX) and not name.startswith("."))


def id_in(key: str) -> str:
    """The sample id in what `ShardStore.key_of` gave."""
    return unquote(key.rpartition("/")[2].removesuffix(shard.SUFFIX))


def require_named(key: str, sample_id: str, found: str) -> None:
    """Raise ShardError unless the shard in a store is of the sample that its name says: a copy under another name is one sample
    twice."""
    if found != sample_id:
        raise ShardError(
            "a shard under another sample's name",
            where=key,
            expected=f"sample {sample_id!r}",
            got=f"sample {found!r}",
            remedy="rename the file as ShardStore.key_of says, or delete it",
        )


def is_store(place: str | os.PathLike[str]) -> bool:
    """Whether a path or URL is a folder of shards rather than one shard; of a URL its name tells."""
    return not os.fspath(place).endswith(shard.SUFFIX) if is_url(place) else local_path(place).is_dir()


def _step_name(number: int) -> str:
    return f"step-{number:06d}"


def _name(sample_id: str) -> str:
    """The file name of a sample; characters that a file name cannot hold are percent-encoded."""
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
    return name + shard.SUFFIX
