"""Access to the function inside a grpc.aio method handler of any kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc


def behaviour_of(handler: grpc.RpcMethodHandler) -> Callable[..., Any]:
    """Returns the servicer's method inside a handler of any of the four kinds."""
    behaviour: Callable[..., Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return behaviour


def with_behaviour(
    handler: grpc.RpcMethodHandler,
    behaviour: Callable[..., Any],
    *,
    request_deserializer: Callable[[bytes], Any] | None,
) -> grpc.RpcMethodHandler:
    """Returns a handler of the same kind that calls `behaviour` instead. If `request_deserializer`
    is None, `behaviour` receives requests as bytes.

    grpc.aio determines the kind by inspecting the function. A coroutine function returns one
    response, or writes a stream of them through the context. An async generator function yields a
    stream.
    """
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(
        behaviour,
        request_deserializer=request_deserializer,
        response_serializer=handler.response_serializer,
    )
