"""Writes the chunks of a Pull into the caller's buffers, and checks that every partition is
complete."""

from __future__ import annotations

from collections.abc import Callable

from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_common.errors import ConfigurationError, CorruptDataError
from shoal_common.formats.wire import as_bytes, checksum


class PullReceiver:
    """State of one Pull. Belongs to the thread that reads the stream.

    Call `receive` for each chunk, or call `begin` for each partition and write its payload into
    `room`. At the end, call `finish`.
    """

    def __init__(self, into: Callable[[pb.PullHeader], memoryview | None]) -> None:
        self._into = into
        self._headers: list[pb.PullHeader] = []
        self._target: memoryview | None = None
        self._received = 0

    def receive(self, header: pb.PullHeader | None, payload: memoryview) -> None:
        """Adds one chunk. A chunk with a header starts a partition; a chunk without one continues
        it."""
        if header is not None:
            self.begin(header)
        room = self.room(payload.nbytes)
        if room:  # an empty buffer need not be writable
            room[:] = payload
        self.came(payload.nbytes)

    def room(self, nbytes: int) -> memoryview | None:
        """Returns the memory for the next `nbytes` of the payload; None if the payload is
        discarded. Call `came` once the memory is filled."""
        if not self._headers:
            raise CorruptDataError(
                "the first chunk of the server's stream has no header", reason="STREAM_MALFORMED"
            )
        end = self._received + nbytes
        expected = self._headers[-1].payload_bytes
        if end > expected:
            raise CorruptDataError(
                f"partition {self._headers[-1].partition_id}: received more than the {expected} "
                "bytes declared in its header",
                reason="STREAM_MALFORMED",
            )
        return None if self._target is None else self._target[self._received : end]

    def came(self, nbytes: int) -> None:
        """Records that the next `nbytes` of the payload have been received."""
        self._received += nbytes

    def finish(self) -> list[pb.PullHeader]:
        """Returns all headers. Must be called at the end of the stream. Raises CorruptDataError if
        the last partition is incomplete."""
        self._check_complete()
        return self._headers

    def begin(self, header: pb.PullHeader) -> None:
        """Starts the next partition. Raises CorruptDataError if the previous partition is
        incomplete."""
        self._check_complete()
        if header.payload_bytes < 0 or (header.unchanged and header.payload_bytes):
            raise CorruptDataError(
                f"partition {header.partition_id}: payload_bytes={header.payload_bytes} with "
                f"unchanged={header.unchanged}; expected 0 or more, and 0 for an unchanged "
                "partition",
                reason="STREAM_MALFORMED",
            )
        target = None if header.unchanged else self._into(header)
        if target is not None:
            if target.readonly or target.nbytes != header.payload_bytes:
                raise ConfigurationError(
                    f"partition {header.partition_id}: the buffer has {target.nbytes} "
                    f"bytes{' and is read-only' * target.readonly}; expected a writable buffer of "
                    f"{header.payload_bytes} bytes",
                    reason="BUFFER_MISMATCH",
                )
            target = as_bytes(target)
        self._headers.append(header)
        self._target = target
        self._received = 0

    def _check_complete(self) -> None:
        if not self._headers:
            return
        header = self._headers[-1]
        if self._received != header.payload_bytes:
            raise CorruptDataError(
                f"partition {header.partition_id} is truncated: received {self._received} of "
                f"{header.payload_bytes} bytes; pull it again",
                reason="PAYLOAD_TRUNCATED",
            )
        if (
            self._target is not None
            and header.checksum
            and checksum(self._target) != header.checksum
        ):
            raise CorruptDataError(
                f"partition {header.partition_id} does not match its checksum; pull it again",
                reason="CHECKSUM_MISMATCH",
            )
