"""Wrapping grpc.aio method handlers, whatever their kind, with one coroutine function around the whole call.

grpc.aio tells the kinds of handlers apart by inspecting the function, so a wrapper must be of the same kind as what it wraps: a coroutine
function for one response (or for a handler that writes its stream through the context), an async generator function for a stream of them.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import grpc
import grpc.aio

Around = Callable[[grpc.aio.ServicerContext], AbstractAsyncContextManager[None]]
"""Makes what surrounds one call: entered before the handler runs, left with its exception, if any."""


def surrounded(handler: grpc.RpcMethodHandler, around: Around, *, parse_inside: bool = False) -> grpc.RpcMethodHandler:
    """The handler with `around` entered for each call.

    With `parse_inside`, a single request is decoded within it too, where errors can be given a status; by itself grpc.aio answers
    UNKNOWN to malformed ones. Streamed requests are always decoded while the handler reads them.
    """
    behaviour = behaviour_of(handler)
    raw_requests = parse_inside and not handler.request_streaming and handler.request_deserializer is not None
    parse = handler.request_deserializer if raw_requests else _unchanged

    if inspect.isasyncgenfunction(behaviour):

        async def streamed(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with around(context), aclosing(behaviour(parse(request), context)) as responses:
                async for response in responses:
                    yield response

        return with_behaviour(handler, streamed, raw_requests=raw_requests)

    async def answered(request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with around(context):
            return await behaviour(parse(request), context)

    return with_behaviour(handler, answered, raw_requests=raw_requests)


def _unchanged(request: Any) -> Any:
    return request


def behaviour_of(handler: grpc.RpcMethodHandler) -> Callable[..., Any]:
    """The servicer's method: whichever of the four is set."""
    behaviour: Callable[..., Any] = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    return behaviour


def with_behaviour(handler: grpc.RpcMethodHandler, behaviour: Callable[..., Any], *, raw_requests: bool = False) -> grpc.RpcMethodHandler:
    """A handler of the same kind; with `raw_requests` it is given bytes."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(
        behaviour,
        request_deserializer=None if raw_requests else handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
