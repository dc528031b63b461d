"""Memory for shards and their optimizer state: on the parameters' device, in host memory, or in
files.

Shards in host memory or in files use no device memory. Gathered parameters and gradients are on the
device while they are used, and updates run where the shards are. (Ren et al., "ZeRO-Offload",
USENIX ATC 2021, section 3.)
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

import torch
from shoal_common.errors import ConfigurationError, LimitError
from typing_extensions import override


class ShardPlacement:
    """Memory for shards on the same device as the parameters."""

    apart = False
    """True if shards are never part of the parameters' own memory."""
    keeps_files = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized flat tensor in this memory."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a flat tensor in this memory."""
        kept = self.empty(tensor.numel(), tensor.dtype)
        return kept.copy_(tensor)

    def bring(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Moves a flat tensor from the device to this memory, converts it to `dtype`, and returns
        it. Returns the tensor itself if it is already there and has this dtype. Used for updates.
        The values are available after the next call to `arrived`; one call suffices for many
        tensors."""
        return tensor.to(self.device, dtype)

    def arrived(self) -> None:
        """Waits for all values requested with `bring`."""


class HostPlacement(ShardPlacement):
    """Pinned host memory, which allows transfers at full speed."""

    apart = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._comes_from: torch.device | None = None
        """Device of a pending copy; None if there is none."""

    @override
    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=torch.cuda.is_available())

    @override
    def bring(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.device == self.device:
            return super().bring(tensor, dtype)
        self._comes_from = tensor.device
        return self.empty(tensor.numel(), dtype).copy_(tensor, non_blocking=True)

    @override
    def arrived(self) -> None:
        device, self._comes_from = self._comes_from, None
        if device is not None:
            torch.accelerator.current_stream(device).synchronize()


class FilePlacement(ShardPlacement):
    """Files that are mapped into memory. The operating system writes them to disk when memory is
    short. The files have no names, and a file is deleted when its last tensor is freed."""

    apart = True
    keeps_files = True

    def __init__(self, directory: Path) -> None:
        """Creates the placement. Raises ConfigurationError if `directory` is not writable."""
        super().__init__(torch.device("cpu"))
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._mapped(1, torch.uint8)
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(
                f"offload={str(directory)!r}: expected a writable directory; {error}"
            ) from error

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a flat tensor of zeros in a mapped file.

        Raises:
            LimitError (OFFLOAD_FULL): the disk is full or failing. This rank cannot continue, not
                even in a new group.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        try:
            return self._mapped(numel, dtype)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch could not map the file
            raise LimitError(
                f"offload={str(self._directory)!r}: could not create a file of "
                f"{numel * dtype.itemsize} bytes there: {error}; free space on that disk or pass "
                "another directory, and restart from the newest checkpoint",
                reason="OFFLOAD_FULL",
            ) from error

    def _mapped(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        handle, name = tempfile.mkstemp(prefix="shoal-", dir=self._directory)
        try:
            # otherwise a full disk would cause a bus error later
            os.posix_fallocate(handle, 0, numel * dtype.itemsize)
            return torch.from_file(name, shared=True, size=numel, dtype=dtype)
        finally:
            os.close(handle)
            Path(name).unlink()


def placement_of(offload: Literal["cpu"] | Path | None, device: torch.device) -> ShardPlacement:
    """Returns the memory in which `offload` places the shards of parameters on `device`. "cpu" has
    no effect if the parameters are on the CPU."""
    if isinstance(offload, Path):
        return FilePlacement(offload)
    return HostPlacement() if offload == "cpu" and device.type != "cpu" else ShardPlacement(device)
