"""Authentication: roles, bearer tokens, certificates. Contains no gRPC; the interceptors are in
rpc/.

Tokens are compared in constant time and never appear in messages, reprs or logs. An empty table is
open: it admits everyone. Unless configured otherwise, servers allow an open table only on loopback.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

from shoal_common.errors import AuthenticationError, ConfigurationError, PermissionDeniedError

BEARER: Final = "Bearer "
MEMBER_KEY: Final = "shoal-member-key"
"""gRPC metadata key of a member's secret. Services use it to distinguish members that share a
token."""
_JOB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Role(StrEnum):
    """Role of the holder of a token. ADMIN may do everything. Other roles may call the methods
    whose `allowed_roles` include them."""

    ADMIN = "admin"
    """Operates the cluster: may drain members, stop jobs, and do everything that the other roles
    may do."""
    WORKER = "worker"
    SERVER = "server"
    VIEWER = "viewer"
    """Views jobs and metrics."""
    READER = "reader"
    """May do everything that a viewer may do, and read a model's values from the servers."""


ANY_ROLE: Final = frozenset(Role)

COMPANIONS: Final = (".nodes", ".torchrun")
"""Suffixes of the auxiliary jobs that a job's launchers use to coordinate. A token for a job is
also valid for these."""


@dataclass(frozen=True)
class Holder:
    """Identity and permissions of the holder of a token."""

    role: Role
    job: str | None = None
    """The only job that the token is valid for, together with its launchers' auxiliary jobs; None:
    all jobs."""

    def may_touch(self, job_id: str) -> bool:
        """Returns whether the token is valid for this job."""
        return (
            self.job is None
            or job_id == self.job
            or job_id in [self.job + suffix for suffix in COMPANIONS]
        )

    def check_job(self, job_id: str) -> None:
        """Raises PermissionDeniedError (JOB_NOT_ALLOWED) unless the token is valid for this job."""
        if not self.may_touch(job_id):
            raise PermissionDeniedError(
                f"this token with role {self.role} is for job {self.job!r}, not {job_id!r}; use a "
                "token for that job, or for all jobs",
                reason="JOB_NOT_ALLOWED",
            )

    def __str__(self) -> str:
        return self.role if self.job is None else f"{self.role}@{self.job}"


ANYONE: Final = Holder(Role.ADMIN)
"""Identity of every caller if a service has no tokens."""


class TokenTable:
    """Accepted tokens with their roles and jobs. Immutable, so threads may share it."""

    def __init__(self, roles: Mapping[str, Role | str] | None = None) -> None:
        """`roles`: maps each token to its role, or to `role@job` if the token is valid only for one
        job.

        Raises ConfigurationError for an unknown role, an invalid job, or a token that cannot be
        sent in an HTTP header.
        """
        self._holders: dict[bytes, Holder] = {}
        for position, (token, role) in enumerate((roles or {}).items(), start=1):
            self._add(token, role, f"token {position}")

    @classmethod
    def open(cls) -> TokenTable:
        """Returns an empty table, which disables authentication."""
        return cls()

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> TokenTable:
        """Reads a table from a file with lines of the form `role: token` or `role@job: token`.
        Skips blank lines and lines that start with #. Rejects a file without tokens."""
        table = cls()
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"cannot read the token file {os.fspath(path)}: {error}"
            ) from error
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            role, separator, token = line.partition(":")
            if not separator:
                raise ConfigurationError(
                    f"{os.fspath(path)}, line {number}: found no colon; expected `role: token` or "
                    "`role@job: token`"
                )
            table._add(token.strip(), role.strip(), f"{os.fspath(path)}, line {number}")
        if table.is_open:
            raise ConfigurationError(
                f"the token file {os.fspath(path)} contains no token; add a line `admin: TOKEN`, "
                "or omit --tokens"
            )
        return table

    @property
    def is_open(self) -> bool:
        return not self._holders

    def holder_of(self, authorization: str | None) -> Holder:
        """Returns the holder of the token in an `authorization` header: `Bearer TOKEN`. Must not be
        called on an open table.

        Raises AuthenticationError: TOKEN_MISSING or TOKEN_INVALID.
        """
        if not authorization:
            raise AuthenticationError(
                "this server requires a bearer token; send `authorization: Bearer TOKEN`",
                reason="TOKEN_MISSING",
            )
        scheme, token = authorization[: len(BEARER)], authorization[len(BEARER) :].strip()
        if scheme.lower() != BEARER.lower():
            raise AuthenticationError(
                "the authorization header is malformed; expected `Bearer TOKEN`"
            )
        digest = _digest(token)
        found: Holder | None = None
        # All tokens are compared, since the time taken must not reveal which one matches.
        for known, holder in self._holders.items():
            if hmac.compare_digest(known, digest):
                found = holder
        if found is None:
            raise AuthenticationError(
                "the bearer token is unknown; use one from this cluster's token file"
            )
        return found

    def _add(self, token: str, role: Role | str, where: str) -> None:
        holder = _parse_holder(role, where)
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigurationError(
                f"{where}: invalid token; expected printable ASCII without spaces"
            )
        digest = _digest(token)
        if self._holders.get(digest, holder) != holder:
            raise ConfigurationError(
                f"{where}: this token already has the role {self._holders[digest]}; use a "
                "different token for each role"
            )
        self._holders[digest] = holder

    def __repr__(self) -> str:
        return f"TokenTable({len(self._holders)} tokens)"


def _parse_holder(text: str, where: str) -> Holder:
    role, separator, job = text.partition("@")
    try:
        parsed = Role(role)
    except ValueError:
        raise ConfigurationError(
            f"{where}: unknown role {str(role)!r}; expected one of {', '.join(Role)}"
        ) from None
    if separator and not _JOB_ID.fullmatch(job):
        raise ConfigurationError(
            f"{where}: {text!r}: expected a job id after the @, as in worker@train-1"
        )
    return Holder(parsed, job or None)


@dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """PEM files of one side of a TLS connection. A server needs a certificate and its key; a client
    needs both only for mutual TLS."""

    certificate: Path | None = None
    """Certificate chain of this side."""

    key: Path | None = None
    """Private key of `certificate`."""

    authority: Path | None = None
    """Certificate authorities that clients use to verify the server; None: the authorities of the
    system."""

    client_authority: Path | None = None
    """Certificate authorities that servers use to verify clients (mutual TLS); None: clients need
    no certificate."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            given, missing = ("certificate", "key") if self.key is None else ("key", "certificate")
            raise ConfigurationError(f"the TLS {given} is set without its {missing}; set both")

    def load(self) -> TlsMaterial:
        """Reads and checks the files, so that an invalid file causes an error that names it instead
        of a failed handshake. Raises ConfigurationError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for what, path in (
            ("authority", self.authority),
            ("client authority", self.client_authority),
        ):
            if path is not None:
                _checked(what, path, partial(context.load_verify_locations, path))
        if self.certificate is not None and self.key is not None:
            certificate, key = self.certificate, self.key
            # OpenSSL would ask for an encrypted key's passphrase on the terminal.
            _checked(
                "certificate and key",
                certificate,
                lambda: context.load_cert_chain(certificate, key, password=""),
            )
        paths = (self.certificate, self.key, self.authority, self.client_authority)
        return TlsMaterial(*(None if path is None else path.read_bytes() for path in paths))

    def server_context(self) -> ssl.SSLContext:
        """Returns an SSL context for a server's sockets that do not use gRPC. It has the same
        certificates, and the same requirements for clients, as the server's gRPC port. Raises
        ConfigurationError."""
        self.load()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # sessions are never resumed
        if self.certificate is not None and self.key is not None:
            context.load_cert_chain(self.certificate, self.key)
        if self.client_authority is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.client_authority)
        return context

    def client_context(self) -> ssl.SSLContext:
        """Returns an SSL context for a client's sockets that do not use gRPC. The context verifies
        the server's name. Raises ConfigurationError."""
        self.load()
        context = ssl.create_default_context(cafile=self.authority)
        # Python 3.13 sets this flag, which would reject some certificates that gRPC accepts
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self.certificate is not None and self.key is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context


@dataclass(frozen=True)
class TlsMaterial:
    """Contents of the files in TlsSettings."""

    certificate: bytes | None
    key: bytes | None
    authority: bytes | None
    client_authority: bytes | None

    def __repr__(self) -> str:
        return "TlsMaterial(...)"


def _checked(what: str, path: Path, load: Callable[[], object]) -> None:
    try:
        load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"cannot load TLS {what} {path}: {error}; expected matching, unencrypted PEM files"
        ) from error


def member_key_digest(key: str) -> str:
    """Returns the digest of a member's key, for verification by services: 32 hexadecimal digits;
    empty for an empty key."""
    return hashlib.sha256(b"member\0" + key.encode()).hexdigest()[:32] if key else ""


def check_member_key(member_id: str, known: str, key: str) -> None:
    """Raises PermissionDeniedError (MEMBER_KEY_WRONG) unless `known` is the digest of `key`. If
    `known` is empty, the member has no key, and any `key` is accepted."""
    if known and not hmac.compare_digest(known, member_key_digest(key)):
        raise PermissionDeniedError(
            f"the caller does not have the key of member {member_id!r}; a process may act only "
            "for its own member",
            reason="MEMBER_KEY_WRONG",
        )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
