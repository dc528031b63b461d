"""Creates certificates: an authority for development, and short-lived certificates for connections
between members of a job.

A permanent cluster usually has its own authority; these certificates are for clusters without one.
`cryptography` is imported on demand, since most processes never need it.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shoal_common.errors import ConfigurationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

WARN_BEFORE_EXPIRY: Final = timedelta(days=30)
_BACKDATED: Final = timedelta(minutes=10)
"""Time by which the start of a certificate's validity is backdated. It exceeds the clock skew
between a cluster's machines."""


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A certificate and its key, both in PEM format."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Issued(...)"


def development_files(names: Sequence[str], *, lifetime: timedelta) -> Mapping[str, bytes]:
    """Creates an authority, a certificate for all services, and a certificate for all clients.
    Returns the files to write: name -> contents.

    The private key of the authority is not among the files, so it cannot issue further
    certificates. To renew any file, renew all of them.

    Args:
        names: names and addresses at which clients reach the services.
        lifetime: duration of the certificates' validity.

    Raises:
        ConfigurationError: a certificate cannot contain a name, or the lifetime is too long.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.now(UTC)
    begins = now - _BACKDATED
    try:
        ends = now + lifetime
    except OverflowError:
        raise ConfigurationError(
            f"a lifetime of {lifetime.days} days ends after the year 9999; use a shorter one"
        ) from None

    def subject(common_name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])

    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = subject("Shoal development authority")

    def signed(
        name: x509.Name, key: ec.EllipticCurvePrivateKey, extensions: Sequence[tuple[Any, bool]]
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(authority_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
                critical=False,
            )
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issued(
        common_name: str, uses: list[x509.ObjectIdentifier], more: Sequence[tuple[Any, bool]] = ()
    ) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        end_entity = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.ExtendedKeyUsage(uses), False),
        ]
        certificate = signed(
            subject(common_name), key, [*end_entity, (_usage(signs=False), True), *more]
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            encryption_algorithm=serialization.NoEncryption(),
        )
        return Issued(certificate=certificate, key=pem)

    authority = signed(
        authority_name,
        authority_key,
        [(x509.BasicConstraints(ca=True, path_length=0), True), (_usage(signs=True), True)],
    )
    # Parameter servers call the coordinator and each other with their serving certificate.
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    server = issued(
        "shoal services",
        both,
        [(x509.SubjectAlternativeName([_general_name(name) for name in names]), False)],
    )
    client = issued("shoal client", [ExtendedKeyUsageOID.CLIENT_AUTH])
    return {
        "ca.pem": authority,
        "server.pem": server.certificate,
        "server.key": server.key,
        "client.pem": client.certificate,
        "client.key": client.key,
    }


def expiry_of(certificate: bytes) -> datetime | None:
    """Returns the expiry time of a PEM certificate, or of the first certificate in a chain. Returns
    None if the `cryptography` library cannot parse the certificate, even if OpenSSL accepts it."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    except ValueError:
        return None


def expiry_warning(path: Path, ends: datetime, *, now: datetime) -> str | None:
    """Returns a warning if a certificate has expired or will expire soon; otherwise None.

    `path`: file of the certificate. `ends`: time at which it expires.
    """
    if ends > now + WARN_BEFORE_EXPIRY:
        return None
    if ends <= now:
        return (
            f"the certificate {path} expired on {ends:%Y-%m-%d %H:%M} UTC, and clients reject it; "
            "renew it and restart the service"
        )
    return (
        f"the certificate {path} expires on {ends:%Y-%m-%d %H:%M} UTC; renew it and restart the "
        "service before then"
    )


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes all files so that only their owner can read them, or writes none. Raises
    ConfigurationError if a file already exists or cannot be written."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = sorted(name for name in files if (directory / name).exists())
    if there:
        raise ConfigurationError(
            f"{directory} already contains {', '.join(there)}; remove these files, or use another "
            "directory"
        )
    written: list[Path] = []
    try:
        for name, content in files.items():
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            written.append(directory / name)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise ConfigurationError(f"cannot write the certificates: {error}") from error


def _usage(*, signs: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        pass
    if (
        not name
        or not name.isascii()
        or not all(character.isalnum() or character in "-._*" for character in name)
    ):
        raise ConfigurationError(
            f"{name!r}: expected the name or address of a machine, as in coordinator or 10.0.0.7"
        )
    return x509.DNSName(name)


# ------------------------------------------------------------------------- between members of a job


class PairContexts:
    """TLS between two processes that share a secret but have no certificates from a common
    authority.

    The listener's key is derived from the secret. Anyone who knows the secret therefore knows the
    listener's public key, and no one else can impersonate the listener. The caller then sends the
    secret, or a different secret that it has received, over the encrypted connection to
    authenticate itself.
    """

    @staticmethod
    def listener(secret: str) -> ssl.SSLContext:
        """Returns the SSL context of a listener, whose key is derived from `secret`."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.x509.oid import NameOID

        key = _key_of(secret)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal member")])
        begins = datetime(
            2000, 1, 1, tzinfo=UTC
        )  # the dates are irrelevant, since only the key is compared
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(begins)
            .not_valid_after(begins + timedelta(days=365 * 1000))
            .sign(key, None)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        with tempfile.NamedTemporaryFile(prefix="shoal-", suffix=".pem") as file:
            # readable only by this user; OpenSSL accepts keys only from files
            file.write(
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    encryption_algorithm=serialization.NoEncryption(),
                )
            )
            file.write(certificate.public_bytes(serialization.Encoding.PEM))
            file.flush()
            context.load_cert_chain(file.name)
        return context

    @staticmethod
    def caller() -> ssl.SSLContext:
        """Returns the SSL context for the side that opens the connection. It does not verify the
        listener: after the handshake, and before sending anything, the caller must call `check`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        # no authority has signed the certificate; `check` compares its key, whose possession the
        # handshake has proved
        context.verify_mode = ssl.CERT_NONE
        return context

    @staticmethod
    def check(connection: ssl.SSLSocket, secret: str) -> None:
        """Raises ssl.SSLError unless the listener at the other end knows `secret`."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        shown = x509.load_der_x509_certificate(
            connection.getpeercert(binary_form=True) or b""
        ).public_key()
        if (
            not isinstance(shown, Ed25519PublicKey)
            or shown.public_bytes_raw() != _key_of(secret).public_key().public_bytes_raw()
        ):
            raise ssl.SSLError("the peer does not have the shared secret")


def _key_of(secret: str) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(
        hashlib.sha256(b"shoal member's listener\0" + secret.encode()).digest()
    )
