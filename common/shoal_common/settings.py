"""Parses durations, addresses and environment variables written by users. Each mistake raises one
clear ConfigurationError.

Only a service's settings module reads the environment, through ShoalSettings; all other code
receives values. This module is independent of the services and their defaults.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BeforeValidator, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from shoal_common.errors import ConfigurationError

_UNITS: Final[Mapping[str, float]] = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_DURATION: Final = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)\s*(?P<unit>[a-z]+)", re.ASCII)
_LONGEST_DURATION: Final = timedelta(days=3650)


def parse_duration(text: str) -> timedelta:
    """Parses a duration such as `250ms`, `1.5s`, `2m`, `1h`, `1d` or `10us`: a number and a unit.
    It must not be negative or longer than ten years. Raises ConfigurationError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or match["unit"] not in _UNITS:
        raise ConfigurationError(
            f"duration {_shown(text)}: expected a number and a unit ({', '.join(_UNITS)}), as in "
            "250ms or 1.5s"
        )
    seconds = float(match["number"]) * _UNITS[match["unit"]]
    if seconds > _LONGEST_DURATION.total_seconds():
        raise ConfigurationError(
            f"duration {_shown(text)} is longer than ten years; use a shorter one"
        )
    return timedelta(seconds=seconds)


@dataclass(frozen=True)
class Address:
    """A network address (host:port) to listen on or to connect to. When listening, port 0 means any
    free port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check_free(self) -> None:
        """Raises ConfigurationError if this process cannot listen on the address at present."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            socket.create_server((self.host, self.port), family=family).close()
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {self}: {error}; free the address, or use port 0 to get a free "
                "port"
            ) from error

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parses an address such as `127.0.0.1:7000`, `coordinator:7000`, `[::1]:7000` or `0.0.0.0:0`.
    Raises ConfigurationError."""
    host, separator, port = text.strip().rpartition(":")
    if (
        not separator
        or not port.isascii()
        or not port.isdigit()
        or len(port) > 5
        or int(port) > 65535
    ):
        raise _no_address(text)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ip_address(host)
        except ValueError:
            raise _no_address(text) from None
    elif not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", host):
        raise _no_address(text)
    return Address(host, int(port))


def _no_address(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"address {_shown(text)}: expected HOST:PORT with a port of 0 to 65535, as in "
        "127.0.0.1:7000 or [::1]:0"
    )


def _duration_or_pass(value: object) -> object:
    return parse_duration(value) if isinstance(value, str) else value


def _address_or_pass(value: object) -> object:
    return parse_address(value) if isinstance(value, str) else value


def _on_this_machine(value: object) -> object:
    if re.match(r"[a-z][a-z0-9+]+:/", str(value)):  # pathlib removes a slash of s3://bucket
        raise ConfigurationError(
            "expected a directory on this machine, not a URL; its files are written and read in "
            "place"
        )
    return value


Duration = Annotated[timedelta, BeforeValidator(_duration_or_pass)]
"""Type of a settings field that users write as `250ms`."""

LocalDirectory = Annotated[Path, BeforeValidator(_on_this_machine), AfterValidator(Path.absolute)]
"""Type of a settings field that names a directory of this machine. URLs are rejected: as a path,
s3://bucket would mean the directory `s3:/bucket` in the current directory. A relative path becomes
absolute when the settings are loaded, because the process may change its working directory
later."""

AddressField = Annotated[Address, NoDecode, BeforeValidator(_address_or_pass)]
"""Type of a settings field that users write as `HOST:PORT`."""


class ShoalSettings(BaseSettings):
    """Base class of every service's settings. They are read from SHOAL_... environment variables
    and are immutable. Unknown arguments raise an error.

    A service subclasses it with `model_config =
    SettingsConfigDict(env_prefix="SHOAL_COORDINATOR_")`; pydantic merges the rest. Explicit
    arguments override the environment, which overrides the defaults. Create instances with `load`,
    which turns pydantic's errors into one ConfigurationError.
    """

    model_config = SettingsConfigDict(
        env_prefix="SHOAL_",
        frozen=True,
        extra="forbid",
        env_ignore_empty=True,
        validate_default=True,
    )

    @classmethod
    def load(cls, **given: Any) -> Self:
        """Loads the settings. `given`: values of the command-line flags, by field name. They
        override the environment; None means that the flag was not given."""
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            raise ConfigurationError(cls._explained(error)) from error
        except SettingsError as error:
            # A list or a mapping that is not valid JSON: pydantic-settings reports it before
            # validation.
            prefix = cls.model_config.get("env_prefix", "")
            raise ConfigurationError(
                f"{error}: {error.__cause__}; correct the field's variable ({prefix}...)"
            ) from error

    @classmethod
    def _explained(cls, error: ValidationError) -> str:
        prefix = cls.model_config.get("env_prefix", "")
        problems: list[str] = []
        for detail in error.errors(include_url=False):
            field = str(detail["loc"][0]) if detail["loc"] else ""
            message = detail["msg"].removeprefix("Value error, ")
            value = (
                ""
                if detail["type"] == "missing" or not field or cls._is_secret(field)
                else f"={_shown(detail['input'])}"
            )
            remedy = (
                f" (set {cls._flag(field)}{prefix}{field.upper()})"
                if field in cls.model_fields
                else ""
            )
            problems.append(f"{field}{value}: {message}{remedy}" if field else message)
        return "; ".join(problems)

    @classmethod
    def _flag(cls, field: str) -> str:
        """Returns the command-line flag of a field followed by " or ", for use in messages.
        Subclasses whose settings have no flags return an empty string."""
        return f"--{field.replace('_', '-')} or "

    @classmethod
    def _is_secret(cls, field: str) -> bool:
        known = cls.model_fields.get(field)
        return known is not None and "SecretStr" in str(known.annotation)


def secret_value(secret: SecretStr | None) -> str | None:
    """Returns the text of a secret; None if there is no secret."""
    return None if secret is None else secret.get_secret_value()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
