"""A server without memory for a push refuses it with MEMORY_EXHAUSTED, and loses nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from shoal_common.bulk.transport import Transport
from shoal_common.errors import LimitError
from shoal_common.formats import codecs
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.shard import payload

LENGTH = 600


class Scarce:
    """The module torch, whose `empty` finds no memory for tensors of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, *, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(1 << 60 if dtype is self._dtype else size, dtype=dtype)


@pytest.mark.parametrize("transport", [Transport.GRPC, Transport.TCP, Transport.MEMORY])
@pytest.mark.parametrize(
    ("codec", "scarce"),
    [
        (pb.CODEC_RAW, torch.float32),
        (codecs.INT8, torch.uint8),
        (codecs.INT8, torch.float32),
    ],
    ids=["payload", "compressed payload", "decoded values"],
)
def test_push_without_memory_is_refused_and_can_be_repeated(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, codec: int, scarce: torch.dtype
) -> None:
    client = cluster.server(("weight", LENGTH, "float32"), partition=LENGTH, members={1: ["a"]})
    member = cluster.trainable(client)
    gradient = np.ones(LENGTH, np.float32)
    data = memoryview(gradient) if codec == pb.CODEC_RAW else codecs.encode(codec, gradient)
    upload = member.header(0, codec=codec, payload_bytes=data.nbytes), data
    with monkeypatch.context() as patch:
        patch.setattr(payload, "torch", Scarce(scarce))
        for _ in range(2):
            with pytest.raises(LimitError, match="ran out of memory") as refused:
                client.push([upload])
            assert refused.value.reason == "MEMORY_EXHAUSTED"
    (result,) = client.push([upload])
    assert result.version == 2
    (values,) = member.pull().values()
    np.testing.assert_allclose(values.view(np.float32), -1.0, rtol=2**-8)
