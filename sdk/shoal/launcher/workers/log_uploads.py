"""Uploads the workers' log files to an object store while they grow.

Objects cannot be appended to. A long file is therefore uploaded in parts, `stdout.log`,
`stdout.log.2`, ... When the file grows, only its last part is uploaded again. A failed upload does
not change the result of the run: the thread retries it, and the files remain on the local disk
until all of them are uploaded.

The thread owns the connection to the object store and `_sent`. It is a daemon, so a request that
hangs does not keep the launcher alive.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Final

from shoal_common.backoff import Backoff
from shoal_common.errors import ConfigurationError, PermissionDeniedError
from shoal_worker.object_storage import ObjectFolder

PART: Final = 4 << 20
"""Size of one part of a file, in bytes. A file's last part is uploaded repeatedly."""
ABOUT_LOGS: Final = ("logs: ", "the logs ", "uploading the logs ")
"""Beginnings of the messages of `LogUploads.finish`."""
_INTERVAL: Final = timedelta(minutes=1)
"""Time between two uploads."""
_FIRST: Final = timedelta(seconds=1)
"""Time between the first attempts, until there is output."""
_SILENT_S: Final = 5.0
"""Seconds that the end of the run waits for uploads before it says so."""
_LONGEST_DELAY_S: Final = 10.0


class LogUploads:
    """The uploads of one launcher's log files."""

    def __init__(
        self,
        url: str,
        directory: Path,
        *,
        patience: timedelta,
        note: Callable[[str], None],
        interval: timedelta = _INTERVAL,
    ) -> None:
        """Starts uploading.

        Args:
            url: URL of the folder for the files.
            directory: directory of the files, which only this launcher uses. Created with the
                first file, and removed once everything is uploaded.
            patience: maximum time that `finish` waits.
            note: callback that shows a message to the user during the run.
            interval: time between two uploads.
        """
        self._url, self._directory = url, directory
        self._folder = ObjectFolder(url, patience=timedelta(0))
        self._patience_s = patience.total_seconds()
        self._interval_s = interval.total_seconds()
        self._note: Callable[[str], None] | None = note
        self._noted_failure = False
        """True if the last message during the run was about a failure."""
        self._noting = threading.Lock()
        self._sent: dict[Path, int] = {}
        """Number of uploaded bytes of each file."""
        self._failure: Exception | None = None
        """Error of the last attempt; None after a success."""
        self._ending = threading.Event()
        self._give_up_at = float("inf")
        """Time at which `finish` stops waiting."""
        self._thread = threading.Thread(target=self._run, name=f"uploading to {url}", daemon=True)
        self._thread.start()

    def end_notes(self) -> None:
        """Stops showing messages. Must be called before the terminal output that `note` writes to
        is closed."""
        with self._noting:
            self._note = None

    def finish(self, tell: Callable[[str], None]) -> None:
        """Uploads the rest of the files. Waits for up to `patience` or until Ctrl-C, then tells the
        user where the files are. Must be called after the last write to a file."""
        self._give_up_at = time.monotonic() + self._patience_s
        self._ending.set()
        silent = f"the storage did not respond within {self._patience_s:g} s"
        try:
            self._thread.join(min(_SILENT_S, self._patience_s))
            if self._thread.is_alive():
                tell(
                    f"uploading the logs to {self._url}, for up to {self._patience_s:g} s; Ctrl-C "
                    f"leaves them in {self._directory}"
                )
                self._thread.join(max(0.0, self._give_up_at - time.monotonic()))
        except KeyboardInterrupt:
            silent = "interrupted"
        if self._thread.is_alive() or self._failure is not None:
            tell(
                f"the logs were not all uploaded to {self._url}: {self._failure or silent}; they "
                f"remain in {self._directory}, copy them with the storage's own tool"
            )
            return
        runs = sorted({file.relative_to(self._directory).parts[0] for file in self._sent})
        if runs:
            tell(f"logs: {', '.join(f'{self._url}/{run}' for run in runs)}")
        shutil.rmtree(self._directory, ignore_errors=True)

    # -------------------------------------------------------------------------- the upload's thread

    def _run(self) -> None:
        first_s = min(_FIRST.total_seconds(), self._interval_s)
        while not self._ending.wait(self._interval_s if self._sent or self._failure else first_s):
            self._upload_all()
        backoff = Backoff(longest_s=_LONGEST_DELAY_S, first_s=0.2)
        while not self._upload_all():
            delay_s = backoff.next_s()
            refused = isinstance(self._failure, ConfigurationError | PermissionDeniedError)
            if refused or time.monotonic() + delay_s > self._give_up_at:
                return
            time.sleep(delay_s)

    def _upload_all(self) -> bool:
        """Uploads what has been written since the last call. Returns False if that failed."""
        failure: Exception | None = None
        for file in sorted(self._directory.rglob("*.log")):
            try:
                self._upload(file)
            except Exception as error:  # of any kind, because it must not end the thread
                failure = failure or error
                if not isinstance(error, OSError):  # an OSError concerns this local file alone
                    break
        self._failure = failure
        if (failure is not None) is not self._noted_failure:
            self._noted_failure = failure is not None
            self._show(
                f"the logs are uploaded to {self._url} again"
                if failure is None
                else f"the logs cannot be uploaded to {self._url} at present: {failure}; they are "
                f"kept in {self._directory}, and the upload is retried"
            )
        return failure is None

    def _upload(self, file: Path) -> None:
        """Uploads the current contents of a file. Data written during the upload is left for the
        next call, so that a fast-growing file does not keep the others from being uploaded."""
        name = file.relative_to(self._directory).as_posix()
        size = file.stat().st_size
        while self._sent.get(file, 0) < size:
            number = self._sent.get(file, 0) // PART
            with file.open("rb") as opened:
                opened.seek(number * PART)
                content = opened.read(PART)
            if number * PART + len(content) <= self._sent.get(file, 0):
                return  # the file has been truncated
            self._folder.write(f"{name}.{number + 1}" if number else name, content)
            self._sent[file] = number * PART + len(content)

    def _show(self, text: str) -> None:
        """Shows a message during the run."""
        with self._noting:
            if self._note is not None:
                self._note(text)
