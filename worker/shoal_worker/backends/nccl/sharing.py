"""Refuses two ranks on one device, before NCCL is asked: it would fail on some ranks, and leave others waiting."""

from __future__ import annotations

import json
import socket

from shoal_common.errors import ConfigurationError
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal_worker.backends.nccl.device import Device


def check_own_device(device: Device, store: Store, rank: int, size: int) -> None:
    """Tells the other ranks which device this one has, and raises on all ranks if two have the same. Waits for all ranks.

    Raises:
        ConfigurationError: two ranks use one device.
    """
    told = PrefixStore("device", store)
    told.set(str(rank), json.dumps([device.identity(), device.where, socket.gethostname()]))
    first: dict[str, int] = {}
    for other, said in enumerate(told.multi_get([str(each) for each in range(size)])):
        identity, where, host = json.loads(said)
        if identity in first:
            raise ConfigurationError(
                f"ranks {first[identity]} and {other} are both on {where} ({identity}) of host {host}, and NCCL takes one rank for each "
                "device: start no more workers than there are devices (`--nproc-per-node gpu`), or use backend='gloo'",
                reason="DEVICE_SHARED",
            )
        first[identity] = other
