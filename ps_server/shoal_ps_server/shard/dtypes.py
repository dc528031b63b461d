"""Element types of partitions, as represented in shoal_common.formats.wire and in torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from shoal_common.formats.wire import DTYPES
from shoal_protos.v1 import parameter_server_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class ElementType:
    """An element type's name, protocol number and torch dtype."""

    name: str
    """Name in shard maps and snapshots, the same as in numpy."""

    wire: pb.Dtype
    """Value of shoal.v1.Dtype."""

    torch: torch.dtype

    itemsize: int
    """Bytes per element."""


BY_WIRE: Final[Mapping[int, ElementType]] = {
    info.dtype: ElementType(
        name=info.name,
        wire=pb.Dtype.ValueType(info.dtype),
        torch=getattr(torch, info.name),
        itemsize=info.item_bytes,
    )
    for info in DTYPES.values()
}

BY_NAME: Final[Mapping[str, ElementType]] = {element.name: element for element in BY_WIRE.values()}
