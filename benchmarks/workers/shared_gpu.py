"""Lets several NCCL ranks share one GPU, which NCCL and Shoal refuse otherwise. For tests and
benchmarks only.

NCCL considers the GPUs of two ranks to be the same one if the hash of the host and the bus number
are equal. NCCL_HOSTID changes the hash. If each process has a different value, NCCL treats each
process as a separate machine, and connects them over the loopback interface. The ranks run NCCL's
real kernels, which wait for each other on the GPU; but measured rates say nothing about separate
GPUs.
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
    """Returns the value of CUDA_VISIBLE_DEVICES with which every process sees only the first
    GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def pass_for_a_machine() -> None:
    """Makes NCCL treat this process as a separate machine, and makes Shoal's check treat its device
    as a separate device.

    Must be called before the first communicator is created.
    """
    from shoal_worker.backends.nccl.device import CudaDevice  # imports torch; the harness does not

    host = f"{socket.gethostname()}-{os.getpid()}"
    os.environ.update({**_OVER_LOOPBACK, "NCCL_HOSTID": host})
    identity = CudaDevice.identity
    CudaDevice.identity = lambda device: f"{identity(device)} of {host}"  # type: ignore[method-assign]
