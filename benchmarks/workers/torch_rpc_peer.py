"""Uses torch RPC as a parameter server, for T4: the functions that run on the server, and the
client that calls them."""

from __future__ import annotations

import threading

import torch
from torch.distributed import rpc

SERVER = "server"

_values: list[torch.Tensor] = []
"""On the server: one tensor."""


def serve(store: str, elements: int, over_tcp: bool) -> None:
    """Runs the server; does not return. `store`: URL of the rendezvous. `over_tcp`: as in
    `join`."""
    _values.append(torch.zeros(elements))
    rpc.init_rpc(
        SERVER, rank=0, world_size=2, rpc_backend_options=_options(store, over_tcp=over_tcp)
    )
    threading.Event().wait()


def join(store: str, *, over_tcp: bool) -> None:
    """Makes this process the client. `over_tcp`: True to use only TCP; otherwise TensorPipe chooses
    the transport, which is shared memory on a single host."""
    rpc.init_rpc(
        "worker", rank=1, world_size=2, rpc_backend_options=_options(store, over_tcp=over_tcp)
    )


def push(gradient: torch.Tensor, learning_rate: float) -> None:
    """Applies plain SGD to the values. Runs on the server."""
    _values[0].sub_(gradient, alpha=learning_rate)


def pull() -> torch.Tensor:
    """Returns the values. Runs on the server."""
    return _values[0]


def _options(store: str, *, over_tcp: bool) -> rpc.TensorPipeRpcBackendOptions:
    chosen = {"_transports": ["uv"], "_channels": ["basic"]} if over_tcp else {}
    return rpc.TensorPipeRpcBackendOptions(init_method=store, num_worker_threads=2, **chosen)
