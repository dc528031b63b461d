"""Checks for devices and settings that would make NCCL fail on some ranks and leave others
waiting."""

from __future__ import annotations

import json
import socket

from shoal_common.errors import ConfigurationError
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal_worker.backends.nccl.device import Device


def check_own_device(device: Device, store: Store, rank: int, size: int) -> None:
    """Publishes this rank's device and waits for all ranks. All ranks raise an error if two of them
    use the same device, or if only some would split groups.

    Raises:
        ConfigurationError: two ranks use one device (DEVICE_SHARED), or ranks differ in
            `Device.splits` (NCCL_SPLIT_DIFFERS).
    """
    devices = PrefixStore("device", store)
    devices.set(
        str(rank),
        json.dumps([device.identity(), device.where, socket.gethostname(), device.splits]),
    )
    first: dict[str, int] = {}
    splitting: dict[bool, list[int]] = {True: [], False: []}
    for other, said in enumerate(devices.multi_get([str(each) for each in range(size)])):
        identity, where, host, splits = json.loads(said)
        splitting[splits].append(other)
        if identity in first:
            raise ConfigurationError(
                f"ranks {first[identity]} and {other} are both on {where} ({identity}) of host "
                f"{host}, but NCCL allows only one rank per device: start no more workers than "
                "there are devices (`--nproc-per-node gpu`), or use backend='gloo'",
                reason="DEVICE_SHARED",
            )
        first[identity] = other
    if splitting[True] and splitting[False]:
        raise ConfigurationError(
            f"{_named(splitting[True])} would split subgroups off the communicator of all ranks, "
            f"but {_named(splitting[False])} would not: set SHOAL_NCCL_SPLIT to the same value in "
            "all workers, and install NCCL 2.18 or newer on all of them or set it to 0",
            reason="NCCL_SPLIT_DIFFERS",
        )


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
