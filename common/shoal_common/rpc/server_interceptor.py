"""Wraps every handler of an RpcServer: counts calls, authenticates callers, and converts errors to
statuses.

Ten thousand sessions may open or close at the same time, and each layer costs time for each session
and each message. A single interceptor therefore does all this, and creates the wrapper of a method
only once. Everything runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from prometheus_client import Counter

from shoal_common.errors import AuthenticationError, PermissionDeniedError
from shoal_common.rpc.handlers import behaviour_of, with_behaviour
from shoal_common.rpc.metrics import ServerMetrics, go_code
from shoal_common.rpc.status import abort, as_shoal_error
from shoal_common.security.authentication import (
    ANY_ROLE,
    ANYONE,
    MEMBER_KEY,
    Holder,
    Role,
    TokenTable,
)

_HEALTH: Final = "/grpc.health.v1.Health/"
_REFLECTION: Final = "/grpc.reflection."

_caller: ContextVar[Holder] = ContextVar("caller", default=ANYONE)
_member_key: ContextVar[str] = ContextVar("member_key", default="")


def caller() -> Holder:
    """Returns the identity of the current RPC's caller. May be called only within a handler."""
    return _caller.get()


def member_key() -> str:
    """Returns the member key sent with the current RPC; empty if none was sent. May be called only
    within a handler."""
    return _member_key.get()


class Admission:
    """Admits a call if its bearer token's role may call the method. Health checks need no token;
    reflection needs any known token. With an open token table, every caller may do everything."""

    def __init__(
        self,
        tokens: TokenTable,
        allowed_roles: Mapping[str, frozenset[Role]],
        *,
        job: str | None = None,
    ) -> None:
        """`job`: the only job of the service; None: the service is for many jobs."""
        self._tokens = tokens
        self._allowed_roles = allowed_roles
        self._job = job

    def admit(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Authenticates a call, and sets what `caller` and `member_key` return in its task. Raises
        AuthenticationError, PermissionDeniedError."""
        if method.startswith(_HEALTH):
            return
        metadata = context.invocation_metadata() or ()
        if not self._tokens.is_open:
            _caller.set(
                self._holder(method, [value for key, value in metadata if key == "authorization"])
            )
        for key, value in metadata:
            if key == MEMBER_KEY:
                _member_key.set(str(value))
                break

    def _holder(self, method: str, authorizations: list[Any]) -> Holder:
        if len(authorizations) > 1:
            raise AuthenticationError(
                f"the call has {len(authorizations)} authorization headers; send one"
            )
        holder = self._tokens.holder_of(authorizations[0] if authorizations else None)
        allowed = (
            ANY_ROLE
            if method.startswith(_REFLECTION)
            else self._allowed_roles.get(method, frozenset())
        )
        if holder.role is not Role.ADMIN and holder.role not in allowed:
            expected = ", ".join(sorted({*allowed, Role.ADMIN}))
            raise PermissionDeniedError(
                f"a token with role {holder.role} may not call {method}; use one with role "
                f"{expected}"
            )
        if self._job is not None:
            holder.check_job(self._job)
        return holder


class ServerInterceptor(grpc.aio.ServerInterceptor):
    """The server's only interceptor: counts calls, authenticates callers and converts errors."""

    def __init__(self, metrics: ServerMetrics, admission: Admission) -> None:
        self._metrics = metrics
        self._admission = admission
        self._served: dict[str, grpc.RpcMethodHandler] = {}
        """Full name of a method of the service -> its wrapped handler."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        served = self._served.get(method)
        if served is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            served = self._served[method] = self._serve(method, handler)
        return served

    def _serve(self, method: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Wraps the handler of a method, and returns the wrapped handler.

        Requests are decoded only after the call is admitted. A single request is decoded here, so
        that a malformed request gets a meaningful status (grpc.aio itself would respond with
        UNKNOWN). Streamed requests are decoded while the handler reads them.
        """
        behaviour, metrics, admission = (
            behaviour_of(handler),
            self._metrics.of(method, handler),
            self._admission,
        )
        decode = _counting(handler.request_deserializer, metrics.received)
        decode_here = decode if not handler.request_streaming else _unchanged

        async def failed(error: Exception, context: grpc.aio.ServicerContext) -> NoReturn:
            if isinstance(error, NotImplementedError):
                # Generated servicers raise NotImplementedError in methods that are not overridden.
                await context.abort(
                    grpc.StatusCode.UNIMPLEMENTED, f"this server does not implement {method}"
                )
            await abort(context, as_shoal_error(error, method))

        def ended(started_s: float, context: grpc.aio.ServicerContext, *, cancelled: bool) -> None:
            metrics.handled(
                go_code(
                    grpc.StatusCode.CANCELLED if cancelled else context.code() or grpc.StatusCode.OK
                )
            ).inc()
            metrics.seconds.observe(time.perf_counter() - started_s)

        async def answered(request: Any, context: grpc.aio.ServicerContext) -> Any:
            metrics.started.inc()
            started_s, cancelled = time.perf_counter(), False
            try:
                admission.admit(method, context)
                response = await behaviour(decode_here(request), context)
                if not handler.response_streaming:
                    metrics.sent.inc()
                return response
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await failed(error, context)
            except asyncio.CancelledError:
                cancelled = True
                raise
            finally:
                ended(started_s, context, cancelled=cancelled)

        async def streamed(request: Any, context: grpc.aio.ServicerContext) -> Any:
            metrics.started.inc()
            started_s, cancelled = time.perf_counter(), False
            try:
                admission.admit(method, context)
                async with aclosing(behaviour(decode_here(request), context)) as responses:
                    async for response in responses:
                        metrics.sent.inc()
                        yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await failed(error, context)
            except (asyncio.CancelledError, GeneratorExit):
                cancelled = True
                raise
            finally:
                ended(started_s, context, cancelled=cancelled)

        # Coroutine functions return one response, or write responses through the context.
        around = (
            streamed
            if handler.response_streaming and not inspect.iscoroutinefunction(behaviour)
            else answered
        )
        return with_behaviour(
            handler, around, request_deserializer=decode if handler.request_streaming else None
        )


def _counting(decode: Callable[[bytes], Any] | None, received: Counter) -> Callable[[bytes], Any]:
    def counted(data: bytes) -> Any:
        received.inc()
        return data if decode is None else decode(data)

    return counted


def _unchanged(requests: Any) -> Any:
    return requests
