"""What went wrong on another machine, in one language: every file system of fsspec has errors of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from r3.errors import R3Error, StoreError

R = TypeVar("R")


def doing(what: str, url: str, action: Callable[[], R]) -> R:
    """Run one operation on a file system of fsspec; FileNotFoundError and FileExistsError pass if they are of the file alone.

    Args:
        what: The participle for the message: "read", "written to", "listed".

    Raises:
        StoreError: the store refuses it or cannot be reached, after the client's own retries.
    """
    try:
        return action()
    except (R3Error, FileExistsError):
        raise
    except FileNotFoundError as error:
        if code_of(error) == "NoSuchBucket":
            raise _no_bucket(url) from error
        raise
    except Exception as error:  # each file system has errors of its own
        raise _failed(what, url, error) from error


def _no_bucket(url: str) -> StoreError:
    return StoreError(
        "no such bucket", where=url, remedy="correct the URL, or make the bucket: r3 makes folders, never buckets"
    )


def _failed(what: str, url: str, error: Exception) -> StoreError:
    name, code = type(error).__name__, code_of(error)
    told = f"{name}: {error}".strip(": ")
    if name in {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ProfileNotFound"}:
        return StoreError(
            f"no credentials ({told})",
            where=url,
            remedy="give them as the file system's own client takes them (for s3://: AWS_ACCESS_KEY_ID, AWS_PROFILE, a role); "
            "docs/storage.md has an example",
        )
    if isinstance(error, PermissionError) or code in {"403", "401"} or name == "Forbidden":
        return StoreError(
            f"not allowed: this cannot be {what} ({told})",
            where=url,
            expected="credentials that may list, read and write here",
            got=code or None,
            remedy="check which credentials this process has, and the bucket's policy; docs/storage.md lists the rights",
        )
    if isinstance(error, NotImplementedError | TypeError | AttributeError):
        return StoreError(
            f"this file system cannot be {what} ({told})",
            where=url,
            remedy="collect into a directory or an object store",
        )
    return StoreError(
        f"cannot be {what} ({told})",
        where=url,
        got=code or None,
        remedy="the client's own retries are used up: is the endpoint right, and up? What is written is complete; run the same "
        "command again",
    )


def code_of(error: BaseException) -> str:
    """The error code of an S3 server, or an HTTP status, if the exception carries one."""
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        for name in ("status", "status_code", "code"):
            if isinstance(status := getattr(each, name, None), int):
                return str(status)
    return ""
