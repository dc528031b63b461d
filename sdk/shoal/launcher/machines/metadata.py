"""Reads a cloud provider's preemption and maintenance notices from the machine's metadata service.

The services, as their providers document them:

- AWS: "Spot Instance interruption notices" and "EC2 instance rebalance recommendations", with
  session tokens (IMDSv2).
- GCP: "Preemptible VM instances" (`instance/preempted`) and "Monitor and plan for a host
  maintenance event" (`instance/maintenance-event`).
- Azure: "Scheduled Events for Linux VMs".

Requests never go through a proxy: the address is link-local, so a proxy would return its own
machine's notices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from shoal_common.errors import ConfigurationError

DEFAULT_URL: Final = "http://169.254.169.254"
"""Address of the metadata service, the same at AWS, GCP and Azure."""
_LARGEST: Final = 1 << 20
_TOKEN_TTL_S: Final = 21_600
_AZURE_ASSET_TAG: Final = "7783-7084-3265-9085-8269-3286-77"
"""Asset tag of Azure's virtual machines. Other virtual machines under Hyper-V do not have it."""
_AWS_STOPS: Final = ("stop", "terminate", "hibernate")
_AZURE_STOPS: Final = ("Preempt", "Terminate", "Reboot", "Redeploy")


class Provider(StrEnum):
    """Cloud provider of a machine."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"

    @property
    def label(self) -> str:
        """Human-readable name of the provider."""
        return "Azure" if self is Provider.AZURE else self.upper()


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Notice from a provider about this machine."""

    text: str
    """The notice as a human-readable sentence without a full stop."""
    leaves: bool
    """True if the machine, or everything that runs on it, will stop. False if the notice is only a
    warning: the machine may pause, or is more likely than usual to be reclaimed."""


class MetadataError(Exception):
    """Raised if the metadata service does not respond, or its response differs from the
    documentation. The message contains the cause."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Response of the metadata service to one request."""

    status: int
    text: str
    headers: Mapping[str, str]


class MetadataService:
    """Client of a metadata service. Opens a new connection for each request, since requests are
    seconds apart."""

    def __init__(self, url: str, timeout: timedelta) -> None:
        """`url`: http://HOST[:PORT]; any other form raises ConfigurationError. `timeout`: maximum
        wait for each part of a response."""
        parts = urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port or parts.path.strip("/"):
            raise ConfigurationError(
                f"SHOAL_METADATA_URL={url!r}: expected http://HOST or http://HOST:PORT, without a "
                "path"
            )
        self.url = url.rstrip("/")
        self._host, self._port = parts.hostname, port
        self._timeout_s = timeout.total_seconds()

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        """Sends a request. Raises MetadataError if there is no response."""
        import http.client  # imported here, since every command imports this module

        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            text = answer.read(_LARGEST).decode(errors="replace")
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(status=answer.status, text=text, headers=found)
        except (OSError, http.client.HTTPException) as error:
            raise MetadataError(f"{self.url}{path}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def wrong(self, path: str, answer: Answer) -> MetadataError:
        """Returns the error for a response that is not in the provider's documentation."""
        return MetadataError(
            f"{self.url}{path}: unexpected status {answer.status}, {answer.text[:100]!r}"
        )


class Notices(Protocol):
    """Reads the notices of one provider."""

    def read(self) -> list[Notice]:
        """Returns the current notices about this machine. Blocks for a few seconds at most. Raises
        MetadataError if the service does not respond or belongs to a different provider."""
        ...


class AwsNotices:
    """Interruption notices and rebalance recommendations of EC2 (IMDSv2). Implements `Notices`."""

    def __init__(self, service: MetadataService) -> None:
        self._service = service
        self._token = ""

    def read(self) -> list[Notice]:
        notices = []
        if (text := self._get("/latest/meta-data/spot/instance-action")) is not None:
            action, time = _fields(text, "action", "time")
            if action in _AWS_STOPS:
                notices.append(
                    Notice(text=f"AWS will {action} this machine at {time}", leaves=True)
                )
        path = "/latest/meta-data/events/recommendations/rebalance"
        if not notices and (text := self._get(path)) is not None:
            (time,) = _fields(text, "noticeTime")
            what = (
                f"AWS has recommended since {time} to replace this machine, since it may soon "
                "take the machine away"
            )
            notices.append(Notice(text=what, leaves=False))
        return notices

    def _get(self, path: str) -> str | None:
        """Returns the text at a path; None if the path does not exist (status 404)."""
        answer = self._request(path)
        if answer.status == 401:  # the token has expired
            self._token = ""
            answer = self._request(path)
        if answer.status not in (200, 404):
            raise self._service.wrong(path, answer)
        return answer.text if answer.status == 200 else None

    def _request(self, path: str) -> Answer:
        if not self._token:
            header = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
            answer = self._service.request("PUT", "/latest/api/token", header)
            if answer.status != 200 or not answer.text:
                raise self._service.wrong("/latest/api/token", answer)
            self._token = answer.text
        return self._service.request("GET", path, {"X-aws-ec2-metadata-token": self._token})


class GcpNotices:
    """Preemption and host maintenance of Compute Engine. Implements `Notices`."""

    def __init__(self, service: MetadataService) -> None:
        self._service = service

    def read(self) -> list[Notice]:
        if self._get("preempted") == "TRUE":
            return [Notice(text="GCP will stop this machine within 30 s (preempted)", leaves=True)]
        event = self._get("maintenance-event")
        if event == "TERMINATE_ON_HOST_MAINTENANCE":
            return [Notice(text=f"GCP will stop this machine ({event})", leaves=True)]
        if event == "MIGRATE_ON_HOST_MAINTENANCE":
            text = f"GCP will move this machine to another host, which pauses it ({event})"
            return [Notice(text=text, leaves=False)]
        return []

    def _get(self, name: str) -> str:
        path = f"/computeMetadata/v1/instance/{name}"
        answer = self._service.request("GET", path, {"Metadata-Flavor": "Google"})
        if answer.status != 200 or answer.headers.get("metadata-flavor") != "Google":
            raise self._service.wrong(path, answer)
        return answer.text.strip()


class AzureNotices:
    """Scheduled events of Azure. The service lists the events of an entire scale set or
    availability set, so events of other machines are skipped. Implements `Notices`."""

    def __init__(self, service: MetadataService) -> None:
        self._service = service
        self._name = ""

    def read(self) -> list[Notice]:
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        answer = self._get(path)
        try:
            events = [
                (each["EventType"], each["Resources"], each.get("NotBefore") or "once")
                for each in json.loads(answer.text)["Events"]
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._service.wrong(path, answer) from None
        if not self._name:
            name = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = self._get(name).text.strip().lower()
        return [
            _azure_notice(kind, when)
            for kind, resources, when in events
            if self._name in [str(each).lower() for each in resources]
        ]

    def _get(self, path: str) -> Answer:
        answer = self._service.request("GET", path, {"Metadata": "true"})
        if answer.status != 200:
            raise self._service.wrong(path, answer)
        return answer


def _azure_notice(kind: str, when: str) -> Notice:
    leaves = kind in _AZURE_STOPS
    what = "stop this machine" if leaves else "pause this machine"
    moment = "at once" if when == "once" else f"not before {when}"
    return Notice(text=f"Azure will {what} {moment} ({kind})", leaves=leaves)


def _fields(text: str, *names: str) -> list[str]:
    """Returns the values of the given fields of a JSON object as strings; `unknown` for missing
    fields."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    found = found if isinstance(found, dict) else {}
    return [str(found.get(name, "unknown")) for name in names]


READERS: Final[Mapping[Provider, type[AwsNotices] | type[GcpNotices] | type[AzureNotices]]] = {
    Provider.AWS: AwsNotices,
    Provider.GCP: GcpNotices,
    Provider.AZURE: AzureNotices,
}


def provider_of_machine(directory: Path = Path("/sys/class/dmi/id")) -> Provider | None:
    """Returns the provider according to the machine's firmware, without sending a request; None if
    it is not a known provider. `directory`: directory of the kernel's DMI values."""

    def value(name: str) -> str:
        try:
            return (directory / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    if "Amazon EC2" in (value("sys_vendor"), value("bios_vendor")):
        return Provider.AWS
    if value("product_name") == "Google Compute Engine":
        return Provider.GCP
    if value("chassis_asset_tag") == _AZURE_ASSET_TAG:
        return Provider.AZURE
    return None
