"""sharing: does this node see the directory that the driver means?

`/data/run` exists on every node of a cluster whose /data is a local disk, and a pool that did not look would leave its
shards on as many disks as it has workers. So the driver writes a file with a random word, and each worker must read the
same word before it samples."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from r3.errors import ShardError, StoreError
from r3.shard import files, objects


@dataclass(frozen=True)
class Probe:
    """Where the file is, and its word."""

    path: str
    word: str

    def require_seen(self, node: str) -> None:
        """
        Raises:
            StoreError: this node does not see the driver's file.
        """
        try:
            ranges = files.open_ranges(self.path)
            got = ranges.head(1024).decode("utf-8", "replace")
            ranges.close()
        except (ShardError, StoreError) as error:
            got = error.what
        if got != self.word:
            raise StoreError(
                "not a shared file system: this node does not see what the driver wrote",
                where=f"node {node}: {os.path.dirname(self.path)}",
                expected=self.word,
                got=got,
                remedy="give a directory that is mounted from one file server on every node, or a URL (s3://bucket/run)",
            )


@contextlib.contextmanager
def probe_in(store: str) -> Iterator[Probe]:
    """A probe in a store for the length of the block. Its name is that of a file being written: no reader lists it, and if this
    process is killed `ShardStore.remove_leftovers` deletes it."""
    probe = Probe(f"{store.rstrip('/')}/{files.temporary_name()}", secrets.token_hex(16))
    remote = files.is_url(store)
    if remote:
        objects.put(probe.path, probe.word.encode())
    else:
        files.write_atomically(Path(probe.path), probe.word.encode())
    try:
        yield probe
    finally:
        with contextlib.suppress(OSError, StoreError):  # the run is over; a leftover is removed by the next
            if remote:
                objects.remove(probe.path)
            else:
                os.unlink(probe.path)
