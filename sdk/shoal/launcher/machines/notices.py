"""Watches for preemption notices on a separate thread, so that an unresponsive metadata service
does not delay the launcher."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Final

from shoal.launcher.machines.metadata import (
    DEFAULT_URL,
    READERS,
    MetadataError,
    MetadataService,
    Notice,
    Notices,
    Provider,
    provider_of_machine,
)

POLL_INTERVAL: Final = timedelta(seconds=2)
"""Interval between requests. AWS announces an interruption two minutes ahead, GCP and Azure 30 s
ahead."""
REQUEST_TIMEOUT: Final = timedelta(seconds=2)
PATIENCE: Final = timedelta(seconds=10)
"""Time without a response after which the user is informed that notices cannot be received."""


class NoticeSource(StrEnum):
    """Values of the flag --preemption-notice."""

    AUTO = "auto"
    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"
    NONE = "none"


class NoticeWatch:
    """Watches for preemption notices about this machine. The thread exits after a notice that the
    machine will stop, or when `close` is called."""

    def __init__(
        self,
        source: NoticeSource,
        *,
        url: str | None,
        on_notice: Callable[[Notice], None],
        note: Callable[[str], None],
        dmi: Path | None = None,
        interval: timedelta = POLL_INTERVAL,
        patience: timedelta = PATIENCE,
    ) -> None:
        """Starts watching.

        Args:
            source: provider to query, AUTO or NONE.
            url: address of the metadata service; None: the providers' usual address. With AUTO, the
                provider is determined by the service at this address or, without an address, by the
                machine's firmware.
            on_notice: called on the watcher's thread for each new notice.
            note: callback that shows a message to the user.
            dmi: directory with the firmware's DMI values; None: /sys/class/dmi/id.
            interval: time between requests.
            patience: time without a response after which the user is informed.

        Raises:
            ConfigurationError: the address is invalid.
        """
        self._services = {
            provider: MetadataService(url or DEFAULT_URL, REQUEST_TIMEOUT)
            for provider in _candidates(source, url, dmi)
        }
        self._asks_all = source is NoticeSource.AUTO and url is not None
        self._on_notice, self._note = on_notice, note
        self._interval_s = interval.total_seconds()
        self._patience_s = patience.total_seconds()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-notices", daemon=True)
        if self._services:
            self._thread.start()

    def close(self) -> None:
        """Stops watching. Does not wait for a request in progress."""
        self._closed.set()

    def _run(self) -> None:
        readers: dict[Provider, Notices] = {
            provider: READERS[provider](service) for provider, service in self._services.items()
        }
        provider = self._find(readers) if self._asks_all else next(iter(readers))
        if provider is not None:
            self._watch(provider, readers[provider])

    def _find(self, readers: dict[Provider, Notices]) -> Provider | None:
        """Returns the provider whose metadata service responds; None if none responds in time."""
        give_up_at = time.monotonic() + self._patience_s
        while time.monotonic() < give_up_at:
            for provider, reader in readers.items():
                try:
                    reader.read()
                except MetadataError:
                    continue
                return provider
            if self._closed.wait(self._interval_s):
                break
        return None

    def _watch(self, provider: Provider, reader: Notices) -> None:
        seen: set[str] = set()
        state, heard_s = "", time.monotonic()
        while True:
            try:
                notices = reader.read()
            except MetadataError as error:
                silent_s = time.monotonic() - heard_s
                if state != "silent" and silent_s >= self._patience_s:
                    state = "silent"
                    self._note(
                        f"preemption notices of {provider.label} cannot be seen: no answer from "
                        f"its metadata service for {silent_s:.0f} s ({error}); "
                        "--preemption-notice none stops asking"
                    )
            else:
                if state != "answers":
                    state = "answers"
                    self._note(
                        f"watching for preemption notices of {provider.label} "
                        f"({self._services[provider].url})"
                    )
                heard_s = time.monotonic()
                for notice in notices:
                    if notice.text not in seen and not self._closed.is_set():
                        seen.add(notice.text)
                        self._on_notice(notice)
                    if notice.leaves:
                        return
            if self._closed.wait(self._interval_s):
                return


def _candidates(source: NoticeSource, url: str | None, dmi: Path | None) -> list[Provider]:
    if source is NoticeSource.NONE:
        return []
    if source is not NoticeSource.AUTO:
        return [Provider(source)]
    if url is not None:
        return list(Provider)
    found = provider_of_machine() if dmi is None else provider_of_machine(dmi)
    return [] if found is None else [found]
