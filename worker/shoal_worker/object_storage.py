"""Objects under a URL (`s3://bucket/run`, `gs://`, `az://`), through fsspec.

Writing one object is atomic, but writing several objects is not, and objects cannot be renamed.
Credentials and endpoints come from the provider's own environment variables and files. Every call
blocks, and retries temporary failures for up to `patience`. A request that transfers nothing for
some time is canceled and counts as a temporary failure, because the providers' clients do not limit
every wait (aiohttp waits for "100 Continue" without a deadline). All functions and methods may be
called from any thread. Requests run in the event loop of fsspec's own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.asyn import get_loop
from fsspec.callbacks import Callback
from shoal_common.backoff import Backoff
from shoal_common.errors import ConfigurationError, PermissionDeniedError, UnavailableError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_BACKENDS: Final = {
    "s3": ("s3fs", "shoal[s3]"),
    "gs": ("gcsfs", "shoal[gcs]"),
    "az": ("adlfs", "shoal[azure]"),
}
"""Module that implements each kind of URL, and the extra that installs it."""
_MEMORY: Final = "memory"
"""fsspec's file system in this process's memory, for tests and examples."""

PATIENCE: Final = timedelta(minutes=5)
"""Default time that a call retries temporary failures, from the first failure on."""
SILENCE: Final = timedelta(seconds=60)
"""Default time after which a request that transfers no bytes has failed."""
_SLOWEST: Final = 64 << 10
"""Slowest transfer speed to expect, in bytes per second. Clients report progress only after each
part, so the limit on silence is extended by the time that one part takes at this speed."""
_SLOWEST_COPY: Final = 10 << 20
"""Slowest speed to expect of a copy within an object store, in bytes per second. Copies report
no progress."""
_CANCEL_S: Final = 5.0
"""Seconds that a canceled request may take to clean up."""
_PART: Final = 8 << 20
"""Size of one part of a large object, in bytes. A multiple of 256 KiB, as Google's storage
requires."""
_LARGEST_PART: Final = 50 << 20
"""Size of the largest part that a client transfers, in bytes."""
_MOST_PARTS: Final = 9000
"""Maximum number of parts per object; S3 accepts at most 10 000."""
_PARTS_AT_ONCE: Final = 4
"""Maximum number of parts that are transferred at the same time for one object."""
_LIMITS: Final = {"s3": {"default_block_size": _PART, "max_concurrency": _PARTS_AT_ONCE}}
"""Arguments of fsspec's file systems that limit the memory for a download."""
_LONGEST_DELAY_S: Final = 10.0
_REFUSALS: Final = (401, 403)
"""HTTP statuses that indicate a missing or wrong credential."""


def is_url(place: str | Path) -> bool:
    """Returns whether `place`, a location named by the user, is the URL of an object store.

    Raises:
        ConfigurationError: the URL has an unsupported scheme or lacks a bucket or a path, or
            `place` is a Path made from a URL.
    """
    text = str(place)
    scheme, colon, rest = text.partition(":")
    if not colon or not rest.startswith("/") or not scheme.isalnum() or len(scheme) == 1:
        return False
    if not rest.startswith("//"):
        if isinstance(place, Path) and scheme in (*_BACKENDS, "file"):
            raise ConfigurationError(
                f"{place!r}: pathlib has removed a slash from a URL; pass the URL as a str"
            )
        return False
    if scheme == "file":
        return False
    if scheme not in (*_BACKENDS, _MEMORY):
        raise ConfigurationError(
            f"{text!r}: expected a path, or a URL that begins with "
            f"{', '.join(f'{each}://' for each in _BACKENDS)} or file://"
        )
    bucket, _, path = text.partition("://")[2].partition("/")
    if not bucket or not path.strip("/"):
        raise ConfigurationError(
            f"{text!r}: expected a bucket and a path, such as {scheme}://bucket/run"
        )
    return True


def local_directory(option: str | os.PathLike[str], name: str) -> Path:
    """Returns the directory that a user has named in an option for files that grow during a run.

    `option`: value of the option. `name`: name of the option, for the error message.

    Raises:
        ConfigurationError: `option` is a URL.
    """
    text = os.fspath(option)
    scheme, colon, rest = text.partition(":")
    if colon and rest.startswith("/") and scheme in (*_BACKENDS, _MEMORY, "file"):
        raise ConfigurationError(
            f"{name} {scheme}://{rest.lstrip('/')}: expected a directory, because its files grow "
            "during the run; use a directory on a disk, and copy it to the storage afterwards"
        )
    return Path(text)


def local_path(place: str | Path) -> Path:
    """Returns the local path that the user has named, either directly or as a `file://` URL.

    Raises:
        ConfigurationError: the URL names a different machine.
    """
    if not str(place).startswith("file://"):
        return Path(place)
    parts = urlsplit(str(place))
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigurationError(
            f"{str(place)!r}: expected file:/// and an absolute path on this machine"
        )
    return Path(unquote(parts.path))


class ThreadPerCall(ThreadPoolExecutor):
    """Runs each call on a new daemon thread.

    Replaces the default executor of fsspec's event loop, on which clients of object stores look up
    host names. Python's own pools refuse calls once the interpreter begins to shut down. That is
    too early, because an `atexit` function waits for the upload of a run's last checkpoint.
    Inherits from ThreadPoolExecutor because asyncio accepts no other executors.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Implements `Executor.submit`."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # raised where the result is read
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="shoal-storage", daemon=True).start()
        return future


class _Progress(Callback):
    """Records when a transfer last reported progress. fsspec calls it on its event loop's
    thread."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_at = time.monotonic()

    def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
        """Implements `Callback.call`, which fsspec calls after each update."""
        self.moved_at = time.monotonic()


@dataclass(frozen=True)
class ObjectFolder:
    """All objects under one URL.

    Every method raises:
        ConfigurationError: the package for this kind of URL, or the bucket, does not exist.
        PermissionDeniedError (OBJECT_STORAGE_REFUSED): a credential is missing or wrong, or does
            not permit the call.
        UnavailableError (OBJECT_STORAGE_UNAVAILABLE): the object store did not complete the request
            within `patience`.
    """

    url: str
    patience: timedelta = field(default=PATIENCE, compare=False)
    silence: timedelta = field(default=SILENCE, compare=False)

    @classmethod
    def at(cls, url: str, patience: timedelta = PATIENCE) -> ObjectFolder:
        """Returns the folder at `url`, which must be a URL according to `is_url`."""
        folder = cls(url.rstrip("/"), patience)
        _ = folder._files  # imported here, so that the error comes early
        return folder

    @staticmethod
    def check(url: str) -> None:
        """Raises ConfigurationError if the package for this kind of URL is missing. Does not import
        the package."""
        scheme = url.partition(":")[0]
        module, extra = _BACKENDS.get(scheme, ("fsspec", ""))
        try:
            found = importlib.util.find_spec(module)
        except ValueError:  # an import of the package has failed before
            found = None
        if found is None:
            raise _missing(url, module, extra)

    def child(self, name: str) -> ObjectFolder:
        """Returns the folder `name` within this one."""
        folder = ObjectFolder(f"{self.url}/{name}", self.patience, self.silence)
        folder.__dict__["_files"] = self._files
        return folder

    def names(self) -> list[str]:
        """Returns the names of the objects and folders directly within this folder."""

        def names() -> list[str]:
            try:
                listed = self._request("ls", self._path(), detail=False)
            except FileNotFoundError:
                return []
            return sorted({str(each).rstrip("/").rpartition("/")[2] for each in listed})

        return self._retried("listing", "", names)

    def size(self, name: str) -> int | None:
        """Returns the size of an object in bytes; None if there is no such object."""

        def size() -> int | None:
            with contextlib.suppress(FileNotFoundError):
                return int(self._request("info", self._path(name))["size"])
            return None

        return self._retried("reading", name, size)

    def read(self, name: str, size: int = 0) -> bytes | None:
        """Returns the content of an object; None if there is no such object. `size`: the object's
        size in bytes, by which the time limit is extended; may be 0 for a small object."""

        def read() -> bytes | None:
            with contextlib.suppress(FileNotFoundError):
                return bytes(self._request("cat_file", self._path(name), _within=size / _SLOWEST))
            return None

        return self._retried("reading", name, read)

    def write(self, name: str, content: bytes) -> None:
        """Writes or replaces an object."""
        within = len(content) / _SLOWEST
        self._retried(
            "writing",
            name,
            lambda: self._request("pipe_file", self._path(name), content, _within=within),
        )

    def upload(self, file: Path, name: str) -> None:
        """Writes or replaces an object with the content of a file, in parts that are sent in
        parallel. Raises OSError if the file cannot be read."""
        size = file.stat().st_size
        parts = self._sent_parts(size)
        within = min(size, 2 * parts.get("chunksize", _LARGEST_PART)) / _SLOWEST

        def upload() -> None:
            paths, progress = (str(file), self._path(name)), _Progress()
            self._request("put_file", *paths, _within=within, callback=progress, **parts)
            stored = int(self._request("info", self._path(name))["size"])
            if stored != size:
                raise OSError(errno.EIO, f"{stored} bytes were stored of {size}")

        self._retried("uploading", name, upload)

    def download(self, name: str, file: Path, size: int) -> None:
        """Writes an object of `size` bytes to a file. The caller must verify the object's digest.

        Raises:
            FileNotFoundError: there is no such object.
        """

        within, parts = min(size, _LARGEST_PART) / _SLOWEST, self._received_parts()

        def download() -> None:
            paths, progress = (self._path(name), str(file)), _Progress()
            self._request("get_file", *paths, _within=within, callback=progress, **parts)
            found = file.stat().st_size
            if found != size:
                raise OSError(errno.EIO, f"{found} bytes were received of {size}")

        self._retried("downloading", name, download, absent_is_error=True)

    def copy(self, source: ObjectFolder, name: str, size: int) -> None:
        """Copies an object of `size` bytes from another folder of the same object store, without
        downloading it."""

        def copy() -> None:
            paths = source._path(name), self._path(name)
            self._request("cp_file", *paths, _within=size / _SLOWEST_COPY)

        self._retried("copying", name, copy, absent_is_error=True)

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects, one after another. Missing objects are ignored."""
        for name in names:

            def remove(name: str = name) -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._request("rm_file", self._path(name))

            self._retried("removing", name, remove)

    @cached_property
    def _files(self) -> Any:
        """fsspec's file system for this URL. Folders created with `child` share it."""
        scheme = self.url.partition(":")[0]
        if scheme in _BACKENDS:
            module, extra = _BACKENDS[scheme]
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise _missing(self.url, module, extra) from error
            loop = get_loop()
            loop.call_soon_threadsafe(loop.set_default_executor, ThreadPerCall())
        return fsspec.filesystem(
            scheme, use_listings_cache=False, skip_instance_cache=True, **_LIMITS.get(scheme, {})
        )

    def _path(self, name: str = "") -> str:
        path = self.url.partition("://")[2]
        return f"{path}/{name}" if name else path

    def _sent_parts(self, size: int) -> dict[str, Any]:
        """Returns arguments that limit memory use during the upload of an object of `size` bytes.
        Empty for adlfs, which has no such arguments and sends one part at a time."""
        match self.url.partition(":")[0]:
            case "s3":
                part = max(_PART, -(-size // _MOST_PARTS))
                at_once = max(1, _PARTS_AT_ONCE * _PART // part)
                return {"chunksize": part, "max_concurrency": at_once}
            case "gs":  # sends one part at a time
                return {"chunksize": _PARTS_AT_ONCE * _PART}
        return {}

    def _received_parts(self) -> dict[str, Any]:
        """Returns arguments that limit memory use during a download, in addition to `_LIMITS`."""
        if self.url.startswith("gs:") and hasattr(self._files, "_get_file_concurrent"):
            return {"concurrency": 1}  # gcsfs writes what arrives; otherwise it reads far ahead
        return {}

    def _request(self, method: str, *arguments: Any, _within: float = 0.0, **options: Any) -> Any:
        """Calls a method of fsspec's implementation. Raises TimeoutError if the request transfers
        nothing for `silence` plus `_within` seconds."""
        files = self._files
        if not files.async_impl:  # memory://
            return getattr(files, method)(*arguments, **options)
        limit_s = self.silence.total_seconds() + _within
        progress = options.get("callback") or _Progress()

        async def bounded() -> Any:
            progress.moved_at = time.monotonic()
            task = asyncio.ensure_future(getattr(files, f"_{method}")(*arguments, **options))
            while not task.done():
                rest_s = progress.moved_at + limit_s - time.monotonic()
                if rest_s <= 0:
                    task.cancel()
                    await asyncio.wait([task], timeout=_CANCEL_S)
                    raise TimeoutError(f"nothing was transferred for {limit_s:.0f} s")
                await asyncio.wait([task], timeout=rest_s)
            return task.result()

        return asyncio.run_coroutine_threadsafe(bounded(), files.loop).result()

    def _retried(
        self, doing: str, name: str, work: Callable[[], T], *, absent_is_error: bool = False
    ) -> T:
        what = f"{doing} {self.url}{'/' if name else ''}{name}"
        backoff, give_up_at = Backoff(longest_s=_LONGEST_DELAY_S, first_s=0.2), None
        while True:
            try:
                return work()
            except Exception as error:  # providers' libraries raise exceptions of any class
                if absent_is_error and isinstance(error, FileNotFoundError):
                    raise
                if _is_refusal(error):
                    raise PermissionDeniedError(
                        f"{what} was refused ({_text(error)}); check the credentials of this "
                        "process and their permissions",
                        reason="OBJECT_STORAGE_REFUSED",
                    ) from error
                if isinstance(error, FileNotFoundError):
                    raise ConfigurationError(
                        f"{what} failed ({_text(error)}); expected an existing bucket: create it, "
                        "or correct the URL"
                    ) from error
                delay_s, first = backoff.next_s(), give_up_at is None
                if give_up_at is None:
                    give_up_at = time.monotonic() + self.patience.total_seconds()
                if time.monotonic() + delay_s > give_up_at:
                    repeated = f"; it was repeated for {self.patience.total_seconds():g} s"
                    raise UnavailableError(
                        f"{what} failed ({_text(error)}){'' if first else repeated}",
                        reason="OBJECT_STORAGE_UNAVAILABLE",
                    ) from error
                if first:
                    _log.warning("%s failed and is repeated: %s", what, _text(error))
                time.sleep(delay_s)


def read_object(url: str) -> bytes:
    """Returns the content of one object. Raises FileNotFoundError, and the errors of
    `ObjectFolder`."""
    parent, _, name = url.rpartition("/")
    folder = ObjectFolder.at(parent)
    size = folder.size(name)
    content = None if size is None else folder.read(name, size)
    if content is None:
        raise FileNotFoundError(f"{url} does not exist")
    return content


def write_object(url: str, content: bytes) -> None:
    """Writes or replaces one object. Raises the errors of `ObjectFolder`."""
    parent, _, name = url.rpartition("/")
    ObjectFolder.at(parent).write(name, content)


def _missing(url: str, module: str, extra: str) -> ConfigurationError:
    return ConfigurationError(
        f"{url}: this kind of URL needs the package {module}; install it with pip install '{extra}'"
    )


def _is_refusal(error: BaseException) -> bool:
    """Returns whether an error of a provider's library indicates a missing or wrong credential."""
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return True
    if type(error) is OSError and str(error).startswith("Forbidden"):  # gcsfs, for a status 403
        return True
    return any(
        getattr(error, name, None) in _REFUSALS for name in ("status", "status_code", "code")
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
