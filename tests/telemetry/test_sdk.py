"""What exports: over OTLP to a real receiver, whom nobody waits for at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.testing.daemons import running_daemon
from kvd_client import Client
from tests.e2e.support import IDENTITY, LAYOUT, PATIENCE_SECONDS, settings, store, tokens_of
from tests.otlp import running_collector

if TYPE_CHECKING:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Without what exports; the daemon's own arguments follow.
WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None
from kvd.__main__ import main
main()
"""


# What is left is never taken, by whoever was to take it.
NEVER_TAKEN = """
import threading, time
from opentelemetry.sdk.trace import TracerProvider
from kvd import sdk
flush = sdk.start("test")
TracerProvider.shutdown = lambda self: threading.Event().wait()
flush(time.monotonic() + 3600)
"""


def committed(request: ExportMetricsServiceRequest) -> list[int]:
    return [
        point.as_int
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "kvd.blocks.committed"
        for point in metric.sum.data_points
    ]


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_metrics_go_to_a_collector_the_last_ones_at_the_stop(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_collector(protocol) as collector:
        monkeypatch.setenv(ENDPOINT, collector.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        with running_daemon(settings()) as daemon, Client(daemon.endpoint) as client:
            assert client.wait_attached(PATIENCE_SECONDS)
            store(client.open(IDENTITY, LAYOUT), tokens_of(1, 4))
            daemon.stop()
    request = collector.metrics[-1]
    (resource,) = request.resource_metrics
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert names["service.name"] == "kvd"
    assert committed(request) == [4]


def test_not_each_time_that_something_is_sent_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_collector() as collector:
        monkeypatch.setenv(ENDPOINT, collector.endpoint)
        with running_daemon(settings(log={"level": "debug"})) as daemon:
            daemon.stop()
            assert collector.metrics
            assert "/v1/metrics" not in daemon.log


def test_what_is_never_taken_holds_no_end_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    subprocess.run([sys.executable, "-c", NEVER_TAKEN], check=True, timeout=PATIENCE_SECONDS)


def complaint(missing: str, tmp_path: Path, text: str) -> str:
    """The one line of a kvd that lacks a package and did not start."""
    config = tmp_path / "kvd.toml"
    config.write_text(f'endpoint = "ipc://{tmp_path}/kvd.sock"\n{text}\n')
    command = [sys.executable, "-c", WITHOUT, missing, "--config", config]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == os.EX_CONFIG
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("missing", ["prometheus_client", "opentelemetry.exporter.prometheus"])
def test_what_is_not_installed_is_one_line(missing: str, tmp_path: Path) -> None:
    line = complaint(missing, tmp_path, 'http = {endpoint = "127.0.0.1:9464"}')
    assert line.startswith("kvd: ")
    assert line.endswith(": install kvd[telemetry]")


def test_where_nothing_is_exported_nothing_need_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    assert "the first one" in complaint("opentelemetry.sdk", tmp_path, 'tiers = [{type = "lmdb"}]')


def test_where_what_speaks_grpc_is_not_installed_that_is_told_and_nothing_else_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    start = "import sys; sys.modules['grpc'] = None; from kvd import sdk; sdk.start('test')"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("install kvd[telemetry-grpc]") == 2  # spans, metrics
