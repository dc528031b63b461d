"""What happens around every handler of an RpcServer: authentication, and errors turned into statuses.

Both run on the server's event loop and keep no state of their own. Metrics are in metrics.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final

import grpc
import grpc.aio

from shoal_common.errors import AuthenticationError, PermissionDeniedError, ShoalError
from shoal_common.rpc.handlers import surrounded, with_behaviour
from shoal_common.rpc.status import abort, as_shoal_error
from shoal_common.security import ANY_ROLE, ANYONE, MEMBER_KEY, Holder, Role, TokenTable

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]

_HEALTH: Final = "/grpc.health.v1.Health/"
_REFLECTION: Final = "/grpc.reflection."


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Errors raised by handlers become statuses: ShoalErrors their own, undecodable requests INVALID_ARGUMENT, all else INTERNAL.

    What is not a ShoalError is a bug here: it is logged with its traceback, and the caller is told no more than the method.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        @asynccontextmanager
        async def errors_to_statuses(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
            try:
                yield
            except grpc.aio.AbortError:
                raise
            except NotImplementedError:
                # What generated servicers raise for methods that nobody has overridden.
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented here")
            except Exception as error:
                await abort(context, as_shoal_error(error, method))

        return surrounded(handler, errors_to_statuses, parse_inside=True)


_caller: ContextVar[Holder] = ContextVar("caller", default=ANYONE)


_member_key: ContextVar[str] = ContextVar("member_key", default="")


def caller() -> Holder:
    """Who makes the call that is being handled. Only within a handler."""
    return _caller.get()


def member_key() -> str:
    """The member's key that the call being handled has shown; empty: none. Only within a handler."""
    return _member_key.get()


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through when its bearer token's role may make it. Health checks are open; reflection is for any known token.

    Stands inside ErrorInterceptor: it refuses by raising. With an open token table everyone may do everything.
    """

    def __init__(self, tokens: TokenTable, allowed_roles: Mapping[str, frozenset[Role]], *, job: str | None = None) -> None:
        """`job`: see RpcServer."""
        self._tokens = tokens
        self._allowed_roles = allowed_roles
        self._job = job

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH):
            return handler
        try:
            holder = ANYONE if self._tokens.is_open else self._admitted(handler_call_details)
        except ShoalError as refusal:
            return _refusing(handler, refusal)
        key = next((str(value) for name, value in handler_call_details.invocation_metadata or () if name == MEMBER_KEY), "")
        if holder is ANYONE and not key:
            return handler

        @asynccontextmanager
        async def named(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
            _caller.set(holder)  # in the call's own task
            _member_key.set(key)
            yield

        return surrounded(handler, named)

    def _admitted(self, details: grpc.HandlerCallDetails) -> Holder:
        method = details.method
        authorizations = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        if len(authorizations) > 1:
            raise AuthenticationError(f"{len(authorizations)} authorization headers; send one")
        holder = self._tokens.holder_of(authorizations[0] if authorizations else None)
        allowed = ANY_ROLE if method.startswith(_REFLECTION) else self._allowed_roles.get(method, frozenset())
        if holder.role is not Role.ADMIN and holder.role not in allowed:
            expected = ", ".join(sorted({*allowed, Role.ADMIN}))
            raise PermissionDeniedError(f"a token of role {holder.role} may not call {method}; use one of role {expected}")
        if self._job is not None:
            holder.check_job(self._job)
        return holder


def _refusing(handler: grpc.RpcMethodHandler, refusal: ShoalError) -> grpc.RpcMethodHandler:
    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise refusal

    # Strangers get no further than this: their requests are not even decoded.
    return with_behaviour(handler, refuse, raw_requests=True)
