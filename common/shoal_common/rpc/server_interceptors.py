"""What happens around every handler of an RpcServer: authentication, and errors turned into statuses.

Both run on the server's event loop and keep no state of their own. Metrics are in metrics.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio

from shoal_common.errors import AuthenticationError, PermissionDeniedError, ShoalError
from shoal_common.rpc.handlers import surrounded, with_behaviour
from shoal_common.rpc.status import abort, as_shoal_error
from shoal_common.security import ANY_ROLE, Role, TokenTable

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


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through when its bearer token's role may make it. Health checks are open; reflection is for any known token.

    Stands inside ErrorInterceptor: it refuses by raising. With an open token table everyone may do everything.
    """

    def __init__(self, tokens: TokenTable, allowed_roles: Mapping[str, frozenset[Role]]) -> None:
        self._tokens = tokens
        self._allowed_roles = allowed_roles

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None or self._tokens.is_open:
            return handler
        refusal = self._refusal(handler_call_details)
        if refusal is None:
            return handler
        return _refusing(handler, refusal)

    def _refusal(self, details: grpc.HandlerCallDetails) -> ShoalError | None:
        method = details.method
        if method.startswith(_HEALTH):
            return None
        authorizations = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        if len(authorizations) > 1:
            return AuthenticationError(f"{len(authorizations)} authorization headers; send one")
        try:
            role = self._tokens.role_of(authorizations[0] if authorizations else None)
        except AuthenticationError as error:
            return error
        allowed = ANY_ROLE if method.startswith(_REFLECTION) else self._allowed_roles.get(method, frozenset())
        if role is Role.ADMIN or role in allowed:
            return None
        expected = ", ".join(sorted({*allowed, Role.ADMIN}))
        return PermissionDeniedError(f"a token of role {role} may not call {method}; use one of role {expected}")


def _refusing(handler: grpc.RpcMethodHandler, refusal: ShoalError) -> grpc.RpcMethodHandler:
    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise refusal

    # Strangers get no further than this: their requests are not even decoded.
    return with_behaviour(handler, refuse, raw_requests=True)
