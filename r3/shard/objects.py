"""Files on other machines, through fsspec: object stores (S3, GCS, Azure) and any file system that fsspec knows.

Contract: what is written is there whole or not there. Where the store has a conditional put (S3 `If-None-Match`, GCS
`ifGenerationMatch`, Azure `If-None-Match`), the first of several writers of a name wins, whatever they do at once; elsewhere by
looking before writing. docs/storage.md has the table.

Who retries: the file system's own client (botocore, gcsfs, azure-core), never r3 on top of it. It knows which of its errors are
transient, honours what a server asks for, and has settings of its own (`AWS_MAX_ATTEMPTS`, `AWS_RETRY_MODE`); two layers of
retries multiply. The one exception is a conflict of two conditional puts (S3 409), which no client repeats.

An instance of fsspec does not survive a fork, and caches listings that other processes make stale: so none is held here. Each
operation asks fsspec for the instance of this process, without a cache of listings.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from r3.errors import ConfigError, NoShardError, PresentError, StoreError
from r3.shard.failures import code_of, doing
from r3.shard.files import Parts, cut_off, temporary_name

R = TypeVar("R")

# Here a put is atomic and there are no folders. Elsewhere a file gets a temporary name and a rename, and folders are made; here
# never, since fsspec would make a bucket for a typing error.
_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"}

_PART = 32 << 20  # bytes of a part; up to twice as much is one put
_BLOCK = 16 << 20  # bytes of one read of a whole shard
_GAP = 128 << 10  # bytes between two ranges that are read rather than asked for apart: what a request takes at 10 MB/s
_WRITER = "r3-writer"  # metadata of an S3 object: which put made it

# Every instance that was used: fsspec closes those that nobody holds, after a fork over an event loop that is dead.
_alive: dict[int, Any] = {}


def objects_of(url: str) -> tuple[Objects, str]:
    """This process's file system of a URL, and the URL's path on it.

    Raises:
        ConfigError: fsspec or the file system's own package is not installed, or no such protocol.
    """
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            "a URL needs fsspec, which is not installed", where=url, remedy='pip install "r3-replay[remote]"'
        ) from None
    try:
        protocol = fsspec.core.split_protocol(url)[0] or ""
        uncached = "::" not in url and fsspec.get_filesystem_class(protocol).async_impl
        fs, path = fsspec.core.url_to_fs(url, **({"use_listings_cache": False} if uncached else {}))
    except ImportError as error:  # s3fs, gcsfs, ... is missing
        raise ConfigError(
            f"no file system for this URL ({error})", where=url, remedy='pip install "r3-replay[s3]" for s3://'
        ) from None
    except ValueError as error:  # no such protocol
        raise ConfigError(f"no file system for this URL ({error})", where=url) from None
    _alive[id(fs)] = fs
    return (S3Objects if hasattr(fs, "call_s3") else Objects)(fs, protocol), str(path).rstrip("/")


class Objects:
    """What r3 asks of a file system of fsspec. Paths are the file system's own.

    FileNotFoundError, FileExistsError and PermissionError mean what they say; every other exception is the file system's own.
    """

    def __init__(self, fs: Any, protocol: str) -> None:
        self.fs, self.protocol = fs, protocol
        self.is_atomic = protocol in _STORES

    def size(self, path: str) -> int | None:
        """None where the server does not say."""
        size: int | None = self.fs.size(path)
        return size

    def exists(self, path: str) -> bool:
        return bool(self.fs.exists(path))

    def modified(self, path: str) -> float:
        """Seconds since 1970."""
        return float(self.fs.modified(path).timestamp())

    def read(self, path: str) -> bytes:
        data: bytes = self.fs.cat_file(path)
        return data

    def head(self, path: str, length: int) -> tuple[bytes, int | None]:
        """The first `length` bytes, or all if there are fewer, and the size of the file, None where the server does not say."""
        size = self.size(path)
        return self.ranges(path, [0], [length if size is None else min(length, size)])[0], size

    def ranges(self, path: str, begins: list[int], ends: list[int]) -> list[bytes]:
        """All at once: an object store answers them in parallel."""
        answers: list[bytes] = self.fs.cat_ranges([path] * len(begins), begins, ends, on_error="raise")
        return answers

    def put(self, path: str, data: bytes, *, exclusive: bool) -> None:
        """Write a file whole; FileExistsError if `exclusive` and it is there."""
        if self.is_atomic:
            self.fs.pipe_file(path, data, mode="create" if exclusive else "overwrite")
            return
        folder, _, _ = path.rpartition("/")
        temporary = f"{folder}/{temporary_name()}"
        if exclusive and self.exists(path):
            raise FileExistsError(path)
        try:
            self.fs.pipe_file(temporary, data)
            if (size := self.size(temporary)) not in (None, len(data)):
                raise OSError(f"{len(data)} bytes were written, {size} are there")
            if exclusive and self.exists(path):
                raise FileExistsError(path)
            self.fs.mv(temporary, path)
        except BaseException:
            if self.exists(temporary):
                self.fs.rm_file(temporary)
            raise

    def make_folder(self, path: str) -> None:
        if not self.is_atomic:
            self.fs.makedirs(path, exist_ok=True)

    def remove_folder(self, path: str) -> None:
        """What is left of a folder whose files are deleted."""
        if not self.is_atomic:
            self.fs.rm(path, recursive=True)

    def entries(self, folder: str, limit: int | None = None) -> Iterator[tuple[str, bool]]:  # noqa: ARG002
        """(name, whether it is a folder) of what is directly in a folder; nothing if it is not there.

        Args:
            limit: No more are needed.
        """
        self.fs.invalidate_cache(folder)
        try:
            found = self.fs.ls(folder, detail=True)
        except FileNotFoundError:
            return
        for each in found:
            name = each["name"].rstrip("/").rpartition("/")[2]
            if each["name"].strip("/") != folder.strip("/"):
                yield name, each["type"] == "directory"

    def remove(self, paths: list[str]) -> None:
        self.fs.rm(paths)

    def abort_uploads(self, folder: str, older_s: float) -> int:  # noqa: ARG002
        """Abort uploads begun so long ago and never completed; returns how many. Others than S3 forget them by themselves."""
        return 0


class S3Objects(Objects):
    """S3 and what speaks its protocol, through s3fs.

    Different from what s3fs does by itself: one request for whether a key exists (it lists the folder too), pages of a listing
    as they come, and no listing of the parent where a folder is empty.
    """

    def _key(self, path: str) -> dict[str, str]:
        bucket, key, _ = self.fs.split_path(path)
        return {"Bucket": bucket, "Key": key}

    def exists(self, path: str) -> bool:
        try:
            self.fs.call_s3("head_object", **self._key(path))
        except FileNotFoundError:
            return False
        return True

    def size(self, path: str) -> int | None:
        return int(self.fs.call_s3("head_object", **self._key(path))["ContentLength"])

    def head(self, path: str, length: int) -> tuple[bytes, int | None]:
        from fsspec.asyn import sync

        try:
            answer = self.fs.call_s3("get_object", **self._key(path), Range=f"bytes=0-{length - 1}")
        except OSError as error:
            if code_of(error) == "InvalidRange":  # empty
                return b"", 0
            raise
        try:
            data: bytes = sync(self.fs.loop, answer["Body"].read)
            return data, int(answer["ContentRange"].rpartition("/")[2])
        except Exception:  # a body that was cut, or a server without ranges: s3fs asks again
            return super().head(path, length)

    def read(self, path: str) -> bytes:
        # One request for a usual shard. s3fs asks for the size first.
        first, size = self.head(path, _BLOCK)
        begins = list(range(_BLOCK, size or 0, _BLOCK))
        ends = [min(begin + _BLOCK, size or 0) for begin in begins]
        return b"".join([first, *self.ranges(path, begins, ends)]) if begins else first

    def put(self, path: str, data: bytes, *, exclusive: bool) -> None:
        import tenacity

        writer = uuid.uuid4().hex
        options = {"chunksize": _PART, "Metadata": {_WRITER: writer}, "mode": "create" if exclusive else "overwrite"}
        conflicts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: code_of(error) == "ConditionalRequestConflict"),
            stop=tenacity.stop_after_attempt(6),
            wait=tenacity.wait_random_exponential(0.1, max=3),
            reraise=True,
        )
        try:
            conflicts(self.fs.pipe_file, path, data, **options)
        except OSError as error:
            there = isinstance(error, FileExistsError) or code_of(error) == "PreconditionFailed"
            # The answer to a put or to the end of an upload may be lost, and the client ask again: then it is we who were there.
            if (there or code_of(error) == "NoSuchUpload") and self._writer(path) == writer:
                return
            if there:
                raise FileExistsError(path) from None
            raise

    def _writer(self, path: str) -> str | None:
        try:
            metadata = self.fs.call_s3("head_object", **self._key(path)).get("Metadata", {})
        except FileNotFoundError:
            return None
        return {name.lower(): value for name, value in metadata.items()}.get(_WRITER)

    def entries(self, folder: str, limit: int | None = None) -> Iterator[tuple[str, bool]]:
        bucket, key, _ = self.fs.split_path(folder)
        prefix = f"{key}/" if key else ""
        more: dict[str, Any] = {} if limit is None else {"MaxKeys": limit}
        while True:
            page = self.fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", **more)
            for each in page.get("CommonPrefixes", []):
                yield each["Prefix"][len(prefix) :].rstrip("/"), True
            for each in page.get("Contents", []):
                if name := each["Key"][len(prefix) :]:  # a console makes a folder as an object of that name
                    yield name, False
            if not page.get("IsTruncated") or limit is not None:
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def abort_uploads(self, folder: str, older_s: float) -> int:
        bucket, key, _ = self.fs.split_path(folder)
        found = self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/" if key else "")
        old = [each for each in found.get("Uploads", []) if _age(each["Initiated"]) > older_s]
        for each in old:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                self.fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"])
        return len(old)


def _age(then: Any) -> float:
    return float((type(then).now(then.tzinfo) - then).total_seconds())


def put(url: str, data: bytes, *, exclusive: bool = False) -> None:
    """Write an object, whole or not at all.

    Raises:
        PresentError: with `exclusive`, it is there.
        StoreError: it cannot be written; docs/storage.md says what may be left of an upload (never something readable).
    """
    objects, path = objects_of(url)
    try:
        doing("written to", url, lambda: objects.put(path, data, exclusive=exclusive))
    except FileExistsError:
        raise PresentError("this object is there already", where=url) from None
    except FileNotFoundError as error:
        raise StoreError(f"cannot be written ({error})", where=url, remedy="make the folder or bucket first") from error


def remove(url: str) -> None:
    """Delete an object if it is there."""
    objects, path = objects_of(url)
    with contextlib.suppress(FileNotFoundError):
        doing("written to", url, lambda: objects.remove([path]))


class RemoteRanges:
    """An object for reading by ranges. Those of one `fill` that lie close together are one request; all go out at once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.size: int | None = None  # until the head is read
        objects_of(url)  # refuses what cannot be read before anything is asked for

    def head(self, size: int) -> bytes:
        data, self.size = self._do(lambda objects, path: objects.head(path, size))
        self._require_lengths([0], [size if self.size is None else min(size, self.size)], [data])
        return data

    def fill(self, parts: Parts) -> None:
        from fsspec.utils import merge_offset_ranges

        wanted = sorted(((begin, buffer) for begin, buffer in parts if buffer.nbytes), key=lambda part: part[0])
        begins, ends = [begin for begin, _ in wanted], [begin + buffer.nbytes for begin, buffer in wanted]
        _, begins, ends = merge_offset_ranges(
            [self._url] * len(wanted), begins, ends, max_gap=_GAP, max_block=_BLOCK, sort=False
        )
        blocks = zip(begins, ends, self._ranges(begins, ends), strict=True)
        start, end, data = next(blocks, (0, 0, b""))
        for begin, buffer in wanted:
            while begin >= end:
                start, end, data = next(blocks)
            buffer[:] = data[begin - start : begin - start + buffer.nbytes]

    def whole(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(bytearray(self._do(lambda objects, path: objects.read(path))), np.uint8)

    def close(self) -> None:
        pass

    def _ranges(self, begins: list[int], ends: list[int]) -> list[bytes]:
        answers = self._do(lambda objects, path: objects.ranges(path, begins, ends))
        self._require_lengths(begins, ends, answers)
        return answers

    def _require_lengths(self, begins: list[int], ends: list[int], answers: list[bytes]) -> None:
        for begin, end, answer in zip(begins, ends, answers, strict=True):
            if len(answer) < end - begin:
                raise cut_off(self._url, end, begin + len(answer))
            if len(answer) > end - begin:
                raise StoreError(
                    "this server sends the whole file where a range is asked for",
                    where=self._url,
                    remedy="read it whole with `load_file`, or serve it with support for byte ranges",
                )

    def _do(self, ask: Callable[[Objects, str], R]) -> R:
        try:
            return doing("read", self._url, lambda: ask(*objects_of(self._url)))
        except FileNotFoundError:
            raise NoShardError("no such shard", where=self._url) from None
        except StoreError as error:
            if error.got == "InvalidRange":  # begins behind the end
                raise cut_off(self._url, 1, 0) from None
            raise
