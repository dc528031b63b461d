"""Objects under a URL (`s3://bucket/run`, `gs://`, `az://`), through fsspec.

An object appears complete or not at all, but several objects do not appear together, and nothing
can be renamed. Credentials and endpoints are those of the provider's own variables and files.
Every call blocks and may be repeated: it retries failures that may pass until `patience` is over.
Objects have no thread; any thread may call.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import logging
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
"""fsspec's storage within one process, for tests and examples."""

PATIENCE: Final = timedelta(minutes=5)
"""Default time for which a call repeats what may pass."""
_PART: Final = 8 << 20
"""Bytes of one part of a large object."""
_MOST_PARTS: Final = 9000
"""S3 accepts at most 10 000 parts per object."""
_PARTS_AT_ONCE: Final = 4
"""Parts of one object that are sent at the same time."""
_LONGEST_DELAY_S: Final = 10.0
_REFUSALS: Final = (401, 403)
"""HTTP statuses of a missing or wrong credential."""


def is_url(place: str | Path) -> bool:
    """Returns whether a place named by the user is a URL of an object storage.

    Raises:
        ConfigurationError: the URL has another scheme, lacks a bucket or a path, or was made a
            Path.
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


def url_in(option: Path) -> str | None:
    """Returns the URL that a user passed as a path on the command line; None for a plain path.
    pathlib removes one of the two slashes.

    Raises:
        ConfigurationError: as in `is_url`.
    """
    scheme, colon, rest = str(option).partition(":/")
    if not colon or scheme not in (*_BACKENDS, _MEMORY) or rest.startswith("/"):
        return None
    url = f"{scheme}://{rest}"
    is_url(url)
    ObjectFolder.check(url)
    return url


def local_path(place: str | Path) -> Path:
    """Returns the path that a user named, as a path or as a `file://` URL.

    Raises:
        ConfigurationError: the URL names another machine.
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

    Python's own pools refuse calls as soon as the interpreter begins to shut down, which is before
    `atexit` functions run. The upload of a run's last checkpoint is waited for in such a function.
    The clients of object storages look up host names in their event loop's pool. asyncio accepts
    only subclasses of ThreadPoolExecutor.
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


@dataclass(frozen=True)
class ObjectFolder:
    """The objects whose names begin with one URL.

    Every method raises:
        ConfigurationError: the package for this kind of URL is missing, or the bucket is.
        PermissionDeniedError (OBJECT_STORAGE_REFUSED): a credential is missing or wrong, or does
            not permit the call.
        UnavailableError (OBJECT_STORAGE_UNAVAILABLE): the storage did not do what was asked within
            `patience`.
    """

    url: str
    patience: timedelta = field(default=PATIENCE, compare=False)

    @classmethod
    def at(cls, url: str, patience: timedelta = PATIENCE) -> ObjectFolder:
        """Returns the folder at a URL for which `is_url` is true.

        Raises:
            ConfigurationError: the package for this kind of URL is missing.
        """
        folder = cls(url.rstrip("/"), patience)
        _ = folder._files  # imported here, so that the error comes early
        return folder

    @staticmethod
    def check(url: str) -> None:
        """Raises ConfigurationError if the package for this kind of URL is missing. Imports
        nothing."""
        scheme = url.partition(":")[0]
        module, extra = _BACKENDS.get(scheme, ("fsspec", ""))
        try:
            found = importlib.util.find_spec(module)
        except ValueError:  # an import of it has failed
            found = None
        if found is None:
            raise _missing(url, module, extra)

    def child(self, name: str) -> ObjectFolder:
        """Returns the folder `name` within this one."""
        folder = ObjectFolder(f"{self.url}/{name}", self.patience)
        folder.__dict__["_files"] = self._files
        return folder

    def names(self) -> list[str]:
        """Returns the names of the objects and folders directly within this folder."""

        def names() -> list[str]:
            try:
                listed = self._files.ls(self._path(), detail=False)
            except FileNotFoundError:
                return []
            return sorted({str(each).rstrip("/").rpartition("/")[2] for each in listed})

        return self._retried("listing", "", names)

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small object; None if there is no such object."""

        def read() -> bytes | None:
            with contextlib.suppress(FileNotFoundError):
                return bytes(self._files.cat_file(self._path(name)))
            return None

        return self._retried("reading", name, read)

    def write(self, name: str, content: bytes) -> None:
        """Writes or replaces a small object."""
        self._retried("writing", name, lambda: self._files.pipe_file(self._path(name), content))

    def upload(self, file: Path, name: str) -> None:
        """Writes or replaces an object with the content of a file, in parts that are sent in
        parallel. Raises OSError if the file cannot be read."""
        size = file.stat().st_size

        def upload() -> None:
            self._files.put_file(str(file), self._path(name), **self._in_parts(size))
            stored = int(self._files.info(self._path(name))["size"])
            if stored != size:
                raise OSError(errno.EIO, f"{stored} bytes were stored of {size}")

        self._retried("uploading", name, upload)

    def download(self, name: str, file: Path, size: int) -> None:
        """Writes an object of `size` bytes to a file. The caller compares the digest.

        Raises:
            FileNotFoundError: there is no such object.
        """

        def download() -> None:
            self._files.get_file(self._path(name), str(file))
            found = file.stat().st_size
            if found != size:
                raise OSError(errno.EIO, f"{found} bytes were received of {size}")

        self._retried("downloading", name, download, absent_is_error=True)

    def copy(self, source: ObjectFolder, name: str) -> None:
        """Copies an object of another folder of the same storage, without downloading it."""
        self._retried(
            "copying",
            name,
            lambda: self._files.cp_file(source._path(name), self._path(name)),
            absent_is_error=True,
        )

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects, one after another. Absent objects are ignored."""
        for name in names:

            def remove(name: str = name) -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(self._path(name))

            self._retried("removing", name, remove)

    @cached_property
    def _files(self) -> Any:
        """fsspec's implementation. Each folder of one URL has the same."""
        scheme = self.url.partition(":")[0]
        if scheme in _BACKENDS:
            module, extra = _BACKENDS[scheme]
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise _missing(self.url, module, extra) from error
            loop = get_loop()
            loop.call_soon_threadsafe(loop.set_default_executor, ThreadPerCall())
        return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)

    def _path(self, name: str = "") -> str:
        path = self.url.partition("://")[2]
        return f"{path}/{name}" if name else path

    def _in_parts(self, size: int) -> dict[str, Any]:
        """Returns the arguments of s3fs that bound its memory. The other implementations send one
        part at a time."""
        if not self.url.startswith("s3:"):
            return {}
        return {
            "chunksize": max(_PART, -(-size // _MOST_PARTS)),
            "max_concurrency": _PARTS_AT_ONCE,
        }

    def _retried(
        self, doing: str, name: str, work: Callable[[], T], *, absent_is_error: bool = False
    ) -> T:
        what = f"{doing} {self.url}{'/' if name else ''}{name}"
        give_up_at = time.monotonic() + self.patience.total_seconds()
        backoff, said = Backoff(longest_s=_LONGEST_DELAY_S, first_s=0.2), False
        while True:
            try:
                return work()
            except Exception as error:  # of any kind: each provider's library has its own
                if absent_is_error and isinstance(error, FileNotFoundError):
                    raise
                if _is_refusal(error):
                    raise PermissionDeniedError(
                        f"{what} was refused ({_text(error)}); check the credentials of this "
                        "process and what they permit",
                        reason="OBJECT_STORAGE_REFUSED",
                    ) from error
                if isinstance(error, FileNotFoundError):
                    raise ConfigurationError(
                        f"{what} failed ({_text(error)}); expected an existing bucket: create it, "
                        "or correct the URL"
                    ) from error
                delay_s = backoff.next_s()
                if time.monotonic() + delay_s > give_up_at:
                    raise UnavailableError(
                        f"{what} failed ({_text(error)}); it was repeated for "
                        f"{self.patience.total_seconds():g} s",
                        reason="OBJECT_STORAGE_UNAVAILABLE",
                    ) from error
                if not said:
                    _log.warning("%s failed and is repeated: %s", what, _text(error))
                    said = True
                time.sleep(delay_s)


def read_object(url: str) -> bytes:
    """Returns the content of one object. Raises FileNotFoundError, and the errors of
    `ObjectFolder`."""
    parent, _, name = url.rpartition("/")
    content = ObjectFolder.at(parent).read(name)
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
    """Returns whether an error of a provider's library means a missing or wrong credential."""
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return True
    return any(
        getattr(error, name, None) in _REFUSALS for name in ("status", "status_code", "code")
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
