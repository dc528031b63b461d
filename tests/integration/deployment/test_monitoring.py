"""Prometheus's own tools check the configuration, the alert rules and the dashboards' queries;
skipped if they are not installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from shoal_dashboards.boards import BOARDS
from shoal_dashboards.panels import rendered
from shoal_protos.v1 import coordinator_pb2 as pb

ROOT = Path(__file__).resolve().parents[3]
ALERTS = ROOT / "docker/prometheus/alerts.yml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
GENERATED = {
    path.stem: json.loads(path.read_text())
    for path in sorted((ROOT / "docker/grafana/generated").iterdir())
}
TARGETS = [
    target
    for dashboard in GENERATED.values()
    for panel in dashboard["panels"]
    for target in panel.get("targets", [])
]
MARKS = [
    mark["expr"] for dashboard in GENERATED.values() for mark in dashboard["annotations"]["list"]
]
EXPRESSIONS = [*(target["expr"] for target in TARGETS), *MARKS]


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not on PATH (Debian: package prometheus)")
    return found


def check(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_prometheus_accepts_the_configuration(promtool: str, tmp_path: Path) -> None:
    text = (ROOT / "docker/prometheus/prometheus.yml").read_text()
    for secret in set(re.findall(r"/run/secrets/(\w+)", text)):
        (tmp_path / secret).write_text("token")
    shutil.copy(ALERTS, tmp_path)
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(text.replace("/run/secrets", str(tmp_path)))
    check(promtool, "check", "config", str(configuration))


def test_alerts_fire_when_they_should_and_only_then(promtool: str) -> None:
    check(promtool, "test", "rules", str(ALERTS.with_name("alerts_test.yml")))


def test_every_dashboard_marks_each_cause_of_a_generation() -> None:
    causes = {cause.removeprefix("CAUSE_").lower() for cause in pb.Generation.Cause.keys()}  # noqa: SIM118
    for name, dashboard in GENERATED.items():
        marks = " ".join(mark["expr"] for mark in dashboard["annotations"]["list"])
        marked = set(re.findall(r'cause="(\w+)"', marks))
        assert marked == causes - {"unspecified"}, name


def test_every_alert_has_a_test_and_a_paragraph_with_a_remedy(subtests: pytest.Subtests) -> None:
    cases = ALERTS.with_name("alerts_test.yml").read_text()
    page = (ROOT / "docs/observability.md").read_text()
    for rule in RULES:
        name, labels, annotations = rule["alert"], rule["labels"], rule["annotations"]
        with subtests.test(name):
            pattern = r"Job.*Workers" if re.fullmatch(r"Job.*Workers", name) else name
            assert pattern in cases, "add a case to docker/prometheus/alerts_test.yml"
            assert f"`{name}`" in page, "add a row to docs/observability.md"
            assert labels["severity"] in ("page", "ticket")
            assert all(annotations[each].endswith(".") for each in ("summary", "description"))


def test_every_credential_is_sent_as_a_bearer_token() -> None:
    configuration = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yml").read_text())
    jobs = configuration["scrape_configs"]
    sources = [*jobs, *(discovery for job in jobs for discovery in job.get("http_sd_configs", []))]
    for source in sources:
        assert source["authorization"]["type"] == "Bearer", (
            "without a type, Prometheus 2.42 sends the bare token"
        )


def test_every_query_of_the_dashboards_is_valid_promql(promtool: str, tmp_path: Path) -> None:
    rules = [
        {
            "record": f"panel:query:{index}",
            "expr": re.sub(r"\$__(rate_)?interval", "1m", expression).replace("$job", "digits"),
        }
        for index, expression in enumerate(EXPRESSIONS)
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    check(promtool, "check", "rules", str(path))


def test_committed_dashboards_match_the_generated_ones() -> None:
    assert {board.uid for board in BOARDS} == GENERATED.keys(), "run make dashboards"
    for board in BOARDS:
        assert (ROOT / f"docker/grafana/generated/{board.uid}.json").read_text() == rendered(
            board
        ), "run make dashboards"


def test_dashboards_link_to_each_other_and_lie_where_compose_mounts_them() -> None:
    for dashboard in GENERATED.values():
        assert dashboard["tags"] == ["shoal"]
        assert dashboard["links"][0]["tags"] == ["shoal"]
    grafana = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["grafana"]
    assert "./docker/grafana/generated:/etc/grafana/dashboards:ro" in grafana["volumes"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert home == Path("/etc/grafana/dashboards/shoal.json")
    assert home.stem in GENERATED


def test_panels_have_unique_titles_and_a_description() -> None:
    for board in BOARDS:
        graphs = [graph for _, graphs in board.rows for graph in graphs]
        assert len({graph.title for graph in graphs}) == len(graphs)
        assert all(graph.text.endswith(".") for graph in (*graphs, board))


def test_dashboards_read_the_provisioned_datasource() -> None:
    provisioned = yaml.safe_load((ROOT / "docker/grafana/datasource.yml").read_text())[
        "datasources"
    ]
    used = {target["datasource"]["uid"] for target in TARGETS}
    assert used == {source["uid"] for source in provisioned}
