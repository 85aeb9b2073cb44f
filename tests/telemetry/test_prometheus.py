"""A real Prometheus scrapes a real kvd: what the dashboard and the alerts name is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvd_client import Client
from tests.e2e.support import eventually, free_port
from tests.telemetry import workload
from tests.telemetry.support import watched_daemon

ROOT = Path(__file__).parent.parent.parent
ALERTS = ROOT / "config/alerts.yml"
DASHBOARD = json.loads((ROOT / "config/grafana.json").read_text())

pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="prometheus is not installed (Debian: prometheus)"
)

Ask: TypeAlias = Callable[..., Any]

CONFIG = """
global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}
rule_files: [{alerts}]
scrape_configs:
  - job_name: kvd
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def expressions() -> list[str]:
    """All of the dashboard's, as for all instances."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [e.replace("$instance", ".*").replace("$__rate_interval", "1m") for e in found]


def selectors() -> list[str]:
    """All of the alerts'."""
    lines = [line for line in ALERTS.read_text().splitlines() if "summary" not in line]
    return sorted(set(re.findall(r"\b(?:kvd_\w+|up)\b(?:\{.*?\})?", "\n".join(lines))))


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Asks a Prometheus that saw the workload: `ask("query", query=...)`."""
    folder, own_port = tmp_path_factory.mktemp("prometheus"), free_port()

    def ask(what: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{own_port}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url) as response:
            return json.load(response)["data"]

    def has_scraped(num_commits: int) -> bool:
        try:
            return bool(
                ask("query", query=f"kvd_blocks_committed_total >= {num_commits}")["result"]
            )
        except OSError:  # it does not listen yet
            return False

    with watched_daemon(workload.document()) as (daemon, port), Client(daemon.endpoint) as client:
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(alerts=ALERTS, port=port))
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{own_port}",
            "--log.level=warn",
        ]
        with subprocess.Popen(command) as prometheus:
            try:
                eventually(lambda: has_scraped(0))
                with workload.run(client):
                    eventually(lambda: has_scraped(workload.NUM_COMMITTED))
                    yield ask
            finally:
                prometheus.terminate()


@pytest.mark.parametrize("expression", expressions())
def test_the_dashboard_shows_something(ask: Ask, expression: str) -> None:
    eventually(lambda: ask("query", query=expression)["result"])


@pytest.mark.parametrize("selector", selectors())
def test_what_alerts_look_at_is_there(ask: Ask, selector: str) -> None:
    eventually(lambda: ask("query", query=selector)["result"])


def test_every_alert_can_be_evaluated_and_none_of_a_healthy_kvd_fires(ask: Ask) -> None:
    def evaluated() -> list[Any]:
        (group,) = ask("rules")["groups"]
        rules: list[Any] = group["rules"]
        return rules if all(rule["health"] != "unknown" for rule in rules) else []

    rules = eventually(evaluated)
    assert {rule["health"] for rule in rules} == {"ok"}
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    assert firing == set()


@pytest.mark.parametrize(
    ("what", "path"), [("check", ALERTS), ("test", Path(__file__).with_name("alerts_test.yml"))]
)
def test_the_rules_are_well_formed_and_fire_when_they_should(what: str, path: Path) -> None:
    done = subprocess.run(["promtool", what, "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
