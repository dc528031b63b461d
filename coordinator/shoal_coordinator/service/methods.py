"""Registers the Coordinator's methods on a gRPC server, with the roles that may call each method.

Sessions send bytes, so that a generation sent to ten thousand members is serialized only once. The
generated registration function serializes each message and is therefore not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pool, message_factory
from shoal_common.security.authentication import ANY_ROLE, Role
from shoal_protos.v1 import coordinator_pb2

SERVICE: Final = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name

_ROLES: Final[Mapping[str, frozenset[Role]]] = {
    "CreateJob": frozenset({Role.WORKER}),
    "GetJob": ANY_ROLE,
    "ListJobs": ANY_ROLE,
    "JoinSession": frozenset({Role.WORKER}),
    "GetRanks": frozenset({Role.WORKER}),
    "ReportExit": frozenset({Role.WORKER}),
    "ReportMachine": frozenset({Role.WORKER}),
    "DrainMember": frozenset(),
    "DrainServer": frozenset(),
    "StopJob": frozenset({Role.WORKER}),
    "ServerSession": frozenset({Role.SERVER}),
    "DeclareTensors": frozenset({Role.WORKER}),
    "GetShardMap": ANY_ROLE,
    "LeaseBatches": frozenset({Role.WORKER}),
    "WatchEvents": ANY_ROLE,
}

ALLOWED_ROLES: Final[Mapping[str, frozenset[Role]]] = {
    f"/{SERVICE}/{method}": roles for method, roles in _ROLES.items()
}
"""Full method name -> roles that may call the method, as documented in the proto. ADMIN may call
all methods."""

_SENDS_BYTES: Final = frozenset({"JoinSession", "ServerSession", "GetRanks"})


def register(servicer: Any, server: grpc.aio.Server) -> None:
    """Adds all methods of the service to a gRPC server. Raises AttributeError if the servicer lacks
    a method."""
    service = descriptor_pool.Default().FindServiceByName(SERVICE)
    handlers = {
        method.name: _handler(method, getattr(servicer, method.name)) for method in service.methods
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _handler(method: Any, behaviour: Callable[..., Any]) -> grpc.RpcMethodHandler:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    request = message_factory.GetMessageClass(method.input_type)
    response = message_factory.GetMessageClass(method.output_type)
    serializer = bytes if method.name in _SENDS_BYTES else response.SerializeToString
    return make(behaviour, request_deserializer=request.FromString, response_serializer=serializer)
