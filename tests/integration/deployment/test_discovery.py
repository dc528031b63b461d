"""Prometheus itself, with docker/prometheus/prometheus.yml, a real coordinator and a real parameter
server."""

from __future__ import annotations

import json
import re
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2

ROOT = Path(__file__).resolve().parents[3]
TOKENS = {"admin": "a-token", "worker": "w-token", "server": "s-token", "viewer": "v-token"}


def asked(address: str, query: str) -> list[dict[str, Any]]:
    """Returns Prometheus's answer to an instant query."""
    try:
        with urllib.request.urlopen(
            f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=10
        ) as answer:
            return list(json.load(answer)["data"]["result"])
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.SERVICE_UNAVAILABLE:  # Prometheus is still starting
            return []
        raise


def alerts(address: str) -> dict[str, tuple[str, str]]:
    """Returns health and state of each alert rule."""
    with urllib.request.urlopen(f"http://{address}/api/v1/rules", timeout=10) as answer:
        groups = json.load(answer)["data"]["groups"]
    return {
        rule["name"]: (rule["health"], rule["state"]) for group in groups for rule in group["rules"]
    }


def configured(folder: Path, coordinator_http: str) -> Path:
    """Writes the committed configuration with this test's addresses and shorter intervals."""
    (folder / "viewer_token").write_text(TOKENS["viewer"])
    text = (ROOT / "docker/prometheus/prometheus.yml").read_text()
    shutil.copy(ROOT / "docker/prometheus/alerts.yml", folder)
    quicker = (("15s", "500ms"), ("5s", "500ms"), ("3s", "400ms"))
    for container, here in (
        ("coordinator:7080", coordinator_http),
        ("/run/secrets", str(folder)),
        *quicker,
    ):
        assert container in text
        text = text.replace(container, here)
    path = folder / "prometheus.yml"
    path.write_text(text)
    return path


def test_prometheus_finds_and_scrapes_the_coordinators_targets(
    processes: Any, tmp_path: Path
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not on PATH (Debian: package prometheus)")
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{role}: {token}\n" for role, token in TOKENS.items()))

    server_token = tmp_path / "server_token"
    server_token.write_text(TOKENS["server"])

    def service(name: str, module: str, *flags: str) -> list[str]:
        common = [
            "--http",
            "127.0.0.1:0",
            "--tokens",
            str(tokens),
            "--port-file",
            str(processes.port_file(name)),
        ]
        return [sys.executable, "-m", module, *common, *flags]

    processes.start("coordinator", service("coordinator", "shoal_coordinator"))
    coordinator = processes.ports("coordinator")
    with CoordinatorClient(
        ChannelSettings(address=coordinator["grpc"], token=TOKENS["admin"])
    ) as client:
        client.create_job(
            coordinator_pb2.JobSpec(
                job_id="digits", min_workers=1, max_workers=1, parameter_servers=1
            )
        )
    registration = [
        "--coordinator",
        coordinator["grpc"],
        "--job",
        "digits",
        "--server-id",
        "ps-1",
        "--token-file",
        str(server_token),
    ]
    processes.start("ps-1", service("ps-1", "shoal_ps_server", *registration))

    configuration = configured(tmp_path, coordinator["http"])
    storage = f"--storage.tsdb.path={tmp_path / 'data'}"
    processes.start(
        "prometheus",
        [
            "prometheus",
            f"--config.file={configuration}",
            storage,
            "--web.listen-address=127.0.0.1:0",
        ],
    )
    listening = processes.wait_for(
        lambda: re.search(r'"Listening on".* address=(\S+)', processes.log("prometheus")),
        "Prometheus to listen",
    )

    processes.wait_for(
        lambda: asked(listening[1], 'up{job="coordinator"} == 1'), "the coordinator to be scraped"
    )
    found = processes.wait_for(
        lambda: asked(listening[1], "shoal_ps_coordinator_connected == 1"),
        "the server to be found and scraped",
    )
    labels = found[0]["metric"]
    assert (labels["job_id"], labels["role"], labels["server_id"]) == ("digits", "server", "ps-1")

    # The job has its server and no worker yet. The alert for that fires after ten minutes, so
    # nothing fires now.
    processes.wait_for(
        lambda: {health for health, _ in alerts(listening[1]).values()} == {"ok"},
        "all alerts to be evaluated",
    )

    def not_inactive() -> set[str]:
        return {name for name, (_, state) in alerts(listening[1]).items() if state != "inactive"}

    # The coordinator was away before the first scrape; the next evaluation clears the alert.
    processes.wait_for(
        lambda: not_inactive() == {"JobWaitsForWorkers"},
        "nothing but the missing worker to be told",
    )
    assert {state for _, state in alerts(listening[1]).values()} == {"inactive", "pending"}
