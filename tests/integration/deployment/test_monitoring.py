"""Prometheus's configuration and the dashboard's queries, judged by Prometheus itself; skipped where its programs are not installed."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
DASHBOARDS = runpy.run_path(str(ROOT / "docker/grafana/dashboards.py"))
DASHBOARD = json.loads((ROOT / "docker/grafana/shoal.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not on PATH (Debian: package prometheus)")
    return found


def check(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_prometheus_takes_the_configuration(promtool: str, tmp_path: Path) -> None:
    text = (ROOT / "docker/prometheus/prometheus.yml").read_text()
    for secret in set(re.findall(r"/run/secrets/(\w+)", text)):
        (tmp_path / secret).write_text("token")
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(text.replace("/run/secrets", str(tmp_path)))
    check(promtool, "check", "config", str(configuration))


def test_every_credential_is_sent_as_a_bearer_token() -> None:
    configuration = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yml").read_text())
    jobs = configuration["scrape_configs"]
    sources = [*jobs, *(discovery for job in jobs for discovery in job.get("http_sd_configs", []))]
    for source in sources:
        assert source["authorization"]["type"] == "Bearer", "without a type, Prometheus 2.42 sends the bare token"


def test_every_query_of_the_dashboard_is_valid_promql(promtool: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:query:{index}", "expr": re.sub(r"\$__rate_interval", "1m", expression).replace("$job", "digits")}
        for index, expression in enumerate(EXPRESSIONS)
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    check(promtool, "check", "rules", str(path))


def test_the_committed_dashboard_is_what_the_code_makes() -> None:
    assert (ROOT / "docker/grafana/shoal.json").read_text() == DASHBOARDS["rendered"](), "run make dashboards"


def test_panels_have_titles_of_their_own_and_say_what_they_show() -> None:
    graphs = [graph for _, graphs in DASHBOARDS["ROWS"] for graph in graphs]
    assert len({graph.title for graph in graphs}) == len(graphs)
    assert all(graph.text.endswith(".") for graph in graphs)


def test_the_dashboard_reads_the_datasource_that_is_provisioned() -> None:
    provisioned = yaml.safe_load((ROOT / "docker/grafana/datasource.yml").read_text())["datasources"]
    used = {target["datasource"]["uid"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])}
    assert used == {source["uid"] for source in provisioned}
