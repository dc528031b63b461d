"""Lets several NCCL ranks share one GPU, which NCCL and Shoal refuse otherwise. For tests and
benchmarks only.

NCCL takes two ranks for one and the same GPU if the host's hash and the bus number are equal, and
NCCL_HOSTID sets the former. With a host name of its own, each process is a machine to NCCL, and
they connect over the loopback interface. The kernels are NCCL's own and spin for each other; only
rates say nothing about GPUs.
"""

from __future__ import annotations

import os
import socket
from typing import Final

SWITCH: Final = "GPU_SHARED"
"""Environment variable of tests/gpu; 1 lets ranks share the first GPU."""
_OVER_LOOPBACK: Final = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}


def first_visible() -> str:
    """Returns the value of CUDA_VISIBLE_DEVICES that makes every process see the same first GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def pass_for_a_machine() -> None:
    """Makes this process appear as a separate machine to NCCL, and its device as a separate device
    to Shoal's check.

    Call it before the first communicator is created.
    """
    from shoal_worker.backends.nccl.device import CudaDevice  # imports torch; the harness does not

    host = f"{socket.gethostname()}-{os.getpid()}"
    os.environ.update({**_OVER_LOOPBACK, "NCCL_HOSTID": host})
    identity = CudaDevice.identity
    CudaDevice.identity = lambda device: f"{identity(device)} of {host}"  # type: ignore[method-assign]
