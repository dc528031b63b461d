"""Code shared by the sessions of members and of parameter servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from shoal_common.errors import DeadlineError, InvalidRequestError


async def first_message(requests: AsyncIterator[Any], timeout_s: float, *, expected: str) -> Any:
    """Returns the first message of a stream. Raises InvalidRequestError if it is not of the kind
    `expected`, and DeadlineError if it does not arrive within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            message = await anext(aiter(requests), None)
    except TimeoutError:
        raise DeadlineError(
            f"the session's first message, {expected}, did not arrive within {timeout_s:g} s"
        ) from None
    if message is None:
        raise InvalidRequestError(
            f"the session ended before its first message; send {expected} first"
        )
    kind = message.WhichOneof("message")
    if kind != expected:
        raise InvalidRequestError(
            f"the session's first message is {kind or 'empty'}; send {expected} first"
        )
    return message
