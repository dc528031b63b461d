"""The output of a model whose last stage is on one rank, for the other ranks: any nesting of mappings, sequences, tensors and numbers.

Mappings come as plain dicts, tuples as tuples. It knows nothing of stages. Threads: one, which is the links'.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from shoal_common.errors import ConfigurationError
from torch.distributed.tensor import DTensor

from shoal_worker.pipelining.links import Links


def plain(value: Any) -> Any:
    """Mappings of any class as dicts, and tensors whole: of layers that are split over ranks, logits may not be."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value] if isinstance(value, list) else tuple(plain(one) for one in value)
    return value


def broadcast_output(value: Any, source: int, links: Links) -> Any:
    """`value` of rank `source`, which is `plain`, on all: first what it looks like, then its tensors. All ranks call it.

    Raises:
        ConfigurationError: on `source`: it holds something that cannot be sent.
        MembershipChanged: a rank failed or is gone.
    """
    tensors: list[torch.Tensor] = []
    text = json.dumps(_described(value, tensors)).encode() if links.rank == source else b""
    length = torch.tensor([len(text)], dtype=torch.int64, device=links.device)
    links.broadcast(length, source, "sending the outputs' form")
    form = torch.zeros(int(length), dtype=torch.uint8, device=links.device)
    if links.rank == source:
        form.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    links.broadcast(form, source, "sending the outputs' form")
    return _received(json.loads(form.cpu().numpy().tobytes()), iter(tensors), source, links)


def _received(described: Any, tensors: Iterator[torch.Tensor], source: int, links: Links) -> Any:
    kind, content = described
    if kind == "tensor":
        size, dtype = content
        own = links.rank == source
        tensor = next(tensors).contiguous() if own else torch.empty(size, dtype=getattr(torch, dtype), device=links.device)
        if tensor.numel():
            links.broadcast(tensor.view(-1).view(torch.uint8), source, "sending outputs")
        if own:
            links.traffic.outputs += tensor.numel() * tensor.element_size() * (links.size - 1)
        return tensor
    if kind == "dict":
        return {key: _received(one, tensors, source, links) for key, one in content}
    if kind in {"list", "tuple"}:
        values = [_received(one, tensors, source, links) for one in content]
        return values if kind == "list" else tuple(values)
    return content


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", [list(value.shape), str(value.dtype).removeprefix("torch.")]]
    if isinstance(value, dict):
        return ["dict", [[key, _described(one, tensors)] for key, one in value.items()]]
    if isinstance(value, tuple | list):
        return ["list" if isinstance(value, list) else "tuple", [_described(one, tensors) for one in value]]
    if value is None or isinstance(value, bool | int | float | str):
        return ["plain", value]
    raise ConfigurationError(
        f"the model's output holds a {type(value).__name__}, which cannot be sent to the other ranks: use everywhere=False"
    )
