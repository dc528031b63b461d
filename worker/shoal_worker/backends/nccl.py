"""NCCL: collectives between NVIDIA GPUs.

NCCL finds its interfaces by itself (NCCL_SOCKET_IFNAME), so `hostname` is not used. The group is bound to the current CUDA device: call
torch.cuda.set_device first. On machines without a GPU only its refusal is tested.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal_worker.backends.base import CommunicationBackend
from shoal_worker.backends.errors import GroupEndedError


class NCCLBackend(CommunicationBackend):
    """A `ProcessGroupNCCL` of its own, on CUDA tensors. Raises ConfigurationError where torch has no CUDA or no NCCL."""

    name: ClassVar[str] = "nccl"
    averages_natively: ClassVar[bool] = True

    def __init__(self) -> None:
        if not dist.is_nccl_available():
            raise ConfigurationError("backend='nccl': this torch is built without NCCL; install a CUDA build, or use backend='gloo'")
        if not torch.cuda.is_available():
            raise ConfigurationError("backend='nccl': no CUDA device; check the driver and CUDA_VISIBLE_DEVICES, or use backend='gloo'")
        super().__init__()
        self._backend: Any = None

    def _connect(self, store: Store, timeout: timedelta, connect_timeout: timedelta, hostname: str | None) -> dist.ProcessGroup:
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        device = torch.device("cuda", torch.cuda.current_device())
        options = ProcessGroupNCCL.Options()
        options._timeout = connect_timeout
        self._backend = ProcessGroupNCCL(PrefixStore("nccl", store), self.rank, self.world_size, options)
        if self._reason is not None:
            raise GroupEndedError(self._reason)
        # Otherwise NCCL connects with the first collective, under that one's timeout.
        self._backend.eager_connect_single_device(device)
        self._backend._set_default_timeout(timeout)
        process_group = dist.ProcessGroup(PrefixStore("group", store), self.rank, self.world_size)
        kind = dist.ProcessGroup.BackendType.NCCL
        process_group._set_default_backend(kind)
        process_group._register_backend(device, kind, self._backend)
        return process_group

    def _break(self) -> None:
        backend = self._backend
        if backend is not None:
            threading.Thread(target=backend.abort, name="shoal-nccl-abort", daemon=True).start()

    def _release(self) -> None:
        self._backend = None
        self._process_group = None

    def _is_broken(self, error: RuntimeError) -> bool:
        return isinstance(error, dist.DistError) or "NCCL" in str(error)
