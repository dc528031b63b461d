"""Checks single fields of requests. Each check raises an InvalidRequestError that names the field,
its value and the expectation."""

from __future__ import annotations

import re
from typing import Final

from shoal_common.errors import ConfigurationError, InvalidRequestError
from shoal_common.rpc.server_interceptor import caller
from shoal_common.settings import parse_address

LARGEST_INT64: Final = (1 << 63) - 1
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_SECRET: Final = re.compile(r"[0-9a-f]{32}")
_JOB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def job_id(value: str) -> str:
    """Checks a job id, which every request contains. Raises PermissionDeniedError if the caller's
    token is for a different job."""
    if not _JOB_ID.fullmatch(value):
        raise wrong(
            "job_id",
            value,
            "1 to 64 characters of A-Z a-z 0-9 . _ -, starting with a letter or digit",
        )
    caller().check_job(value)
    return value


def identifier(field: str, value: str, *, required: bool = True) -> str:
    """Checks an id: up to 128 characters that are safe in keys, logs and labels."""
    if not value and not required:
        return value
    if len(value) > 128 or not _ID.fullmatch(value):
        raise wrong(
            field,
            value,
            "1 to 128 characters of A-Z a-z 0-9 . _ : -, starting with a letter or digit",
        )
    return value


def text(field: str, value: str, *, longest: int, required: bool = False) -> str:
    """Checks the length of a human-readable text."""
    if len(value) > longest or (required and not value):
        raise wrong(field, value, f"{'1' if required else '0'} to {longest} characters")
    return value


def host(field: str, value: str) -> str:
    """Checks a host name: printable, without spaces."""
    if not 1 <= len(value) <= 255 or not value.isprintable() or " " in value:
        raise wrong(field, value, "a host name of 1 to 255 characters")
    return value


def address(field: str, value: str, *, required: bool = False) -> str:
    """Checks an address (host:port) to which other processes connect."""
    if not value and not required:
        return value
    try:
        parsed = parse_address(value)
    except ConfigurationError:
        parsed = None
    if parsed is None or parsed.port == 0:
        raise wrong(field, value, "host:port with a port of 1 to 65535")
    return value


def secret(field: str, value: str) -> str:
    """Checks a secret: 32 hexadecimal digits, or empty. The error does not reveal the secret."""
    if value and not _SECRET.fullmatch(value):
        raise InvalidRequestError(
            f"{field} has {len(value)} characters; expected 32 hexadecimal digits (0-9, a-f), or "
            "none"
        )
    return value


def number(field: str, value: int, *, low: int = 0, high: int = LARGEST_INT64) -> int:
    """Checks that an integer lies within inclusive bounds."""
    if not low <= value <= high:
        raise wrong(field, value, f"{low} to {high}" if high < LARGEST_INT64 else f"{low} or more")
    return value


def wrong(field: str, value: object, expected: str) -> InvalidRequestError:
    """Returns the error for a field with an invalid value."""
    shown = repr(value)
    return InvalidRequestError(
        f"{field}={shown if len(shown) <= 100 else shown[:97] + '...'}: expected {expected}"
    )
