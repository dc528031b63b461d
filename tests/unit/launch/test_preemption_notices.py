"""Preemption notices, read over HTTP from stand-ins for the clouds' metadata services."""

from __future__ import annotations

import json
import queue
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from shoal.launcher.machines.metadata import (
    READERS,
    MetadataError,
    MetadataService,
    Notice,
    Notices,
    Provider,
    provider_of_machine,
)
from shoal.launcher.machines.notices import NoticeSource, NoticeWatch
from shoal_common.errors import ConfigurationError

from tests import metadata
from tests.metadata import Metadata, metadata_service

SOON = timedelta(milliseconds=10)


def reader(service: Metadata) -> Notices:
    client = MetadataService(service.url, timedelta(seconds=20))
    return READERS[Provider(service.provider)](client)


def test_aws_announces_an_interruption_preceded_by_an_elevated_risk() -> None:
    with metadata_service("aws") as service:
        notices = reader(service)
        assert notices.read() == []
        service.pages[metadata.AWS_REBALANCE] = json.dumps({"noticeTime": "2020-10-27T08:22:00Z"})
        (warning,) = notices.read()
        assert not warning.leaves
        assert "2020-10-27T08:22:00Z" in warning.text
        service.pages[metadata.AWS_ACTION] = json.dumps(
            {"action": "terminate", "time": "2017-09-18T08:22:00Z"}
        )
        text = "AWS will terminate this machine at 2017-09-18T08:22:00Z"
        assert notices.read() == [Notice(text=text, leaves=True)]


def test_an_expired_token_of_aws_is_renewed() -> None:
    with metadata_service("aws") as service:
        notices = reader(service)
        notices.read()
        assert service.tokens == 1
        service.tokens = 5
        assert notices.read() == []
        assert service.tokens == 6


@pytest.mark.parametrize(
    ("path", "text", "leaves"),
    [
        (metadata.GCP_PREEMPTED, "TRUE", True),
        (metadata.GCP_MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE", True),
        (metadata.GCP_MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE", False),
    ],
)
def test_gcp_announces_preemption_and_maintenance(path: str, text: str, leaves: bool) -> None:
    with metadata_service("gcp") as service:
        notices = reader(service)
        assert notices.read() == []
        service.pages[path] = text
        assert [notice.leaves for notice in notices.read()] == [leaves]


@pytest.mark.parametrize(
    ("kind", "leaves"),
    [
        ("Preempt", True),
        ("Terminate", True),
        ("Reboot", True),
        ("Redeploy", True),
        ("Freeze", False),
    ],
)
def test_azure_reports_events_of_this_machine_among_those_of_its_scale_set(
    kind: str, leaves: bool
) -> None:
    with metadata_service("azure") as service:
        notices = reader(service)
        assert notices.read() == []
        service.schedule((kind, "vmss_0"))
        assert notices.read() == []
        service.schedule((kind, "vmss_0"), (kind, "VMSS_1"))
        (notice,) = notices.read()
        assert notice.leaves is leaves
        assert f"not before Mon, 11 Apr 2022 22:26:58 GMT ({kind})" in notice.text


@pytest.mark.parametrize("provider", list(Provider))
def test_requests_for_metadata_bypass_proxies(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # accepts and never answers
        proxy = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        with metadata_service(provider) as service:
            assert reader(service).read() == []


@pytest.mark.parametrize("asked", list(Provider))
@pytest.mark.parametrize("there", list(Provider))
def test_providers_are_not_confused(asked: Provider, there: Provider) -> None:
    with metadata_service(there) as service:
        notices = READERS[asked](MetadataService(service.url, timedelta(seconds=20)))
        if asked is there:
            assert notices.read() == []
            return
        with pytest.raises(MetadataError, match=r"unexpected status 40\d"):
            notices.read()


def test_unresponsive_service_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        client = MetadataService(url, timedelta(milliseconds=50))
        with pytest.raises(MetadataError, match=rf"{url}/computeMetadata.*timed out"):
            READERS[Provider.GCP](client).read()


@pytest.mark.parametrize(
    "url", ["https://169.254.169.254", "169.254.169.254", "http://host/path", "http://host:x"]
)
def test_unusable_address_is_refused_with_the_expected_form(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"SHOAL_METADATA_URL=.*expected http://HOST"):
        MetadataService(url, timedelta(seconds=1))


@pytest.mark.parametrize(
    ("files", "provider"),
    [
        ({"sys_vendor": "Amazon EC2"}, Provider.AWS),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, Provider.GCP),
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77",
            },
            Provider.AZURE,
        ),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "0000"}, None),
        ({"sys_vendor": "LENOVO"}, None),
        ({}, None),
    ],
)
def test_the_firmware_names_the_provider(
    tmp_path: Path, files: dict[str, str], provider: Provider | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert provider_of_machine(tmp_path) is provider


class Watched:
    """A watch with its notices and lines."""

    def __init__(self, source: NoticeSource, url: str | None, dmi: Path | None = None) -> None:
        self.notices: queue.Queue[Notice] = queue.Queue()
        self.lines: queue.Queue[str] = queue.Queue()
        self.watch = NoticeWatch(
            source,
            url=url,
            on_notice=self.notices.put,
            note=self.lines.put,
            dmi=dmi,
            interval=SOON,
            patience=timedelta(milliseconds=200),
        )


def test_auto_names_the_watched_provider_once_and_reports_each_notice_once() -> None:
    with metadata_service("gcp") as service:
        watched = Watched(NoticeSource.AUTO, service.url)
        assert watched.lines.get(timeout=60) == (
            f"watching for preemption notices of GCP ({service.url})"
        )
        service.pages[metadata.GCP_MAINTENANCE] = "MIGRATE_ON_HOST_MAINTENANCE"
        assert not watched.notices.get(timeout=60).leaves
        service.pages[metadata.GCP_PREEMPTED] = "TRUE"
        assert watched.notices.get(timeout=60).leaves
        watched.watch._thread.join(60)
        assert not watched.watch._thread.is_alive()
        assert watched.notices.empty()
        assert watched.lines.empty()


def test_auto_queries_nothing_and_is_silent_on_a_machine_without_a_provider(tmp_path: Path) -> None:
    watched = Watched(NoticeSource.AUTO, None, dmi=tmp_path)
    assert not watched.watch._thread.is_alive()
    assert watched.lines.empty()


def test_silent_service_is_reported_once_as_is_its_return() -> None:
    with metadata_service("aws") as service:
        pages = service.pages
        service.provider = "azure"  # answers as somebody else
        watched = Watched(NoticeSource.AWS, service.url)
        line = watched.lines.get(timeout=60)
        assert line.startswith("preemption notices of AWS cannot be seen: no answer from its")
        assert "--preemption-notice none stops asking" in line
        service.provider = "aws"
        assert watched.lines.get(timeout=60).startswith("watching for preemption notices of AWS")
        assert pages == {}
        watched.watch.close()
