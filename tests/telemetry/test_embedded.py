"""A daemon within a program reports to the provider that the program has set."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# A process of its own: providers are set once in each.
PROGRAM = """
import json, tempfile
import anyio
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvd.config import Config
from kvd.daemon import Daemon

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))


def ready():
    (resource,) = reader.get_metrics_data().resource_metrics
    found = [m for scope in resource.scope_metrics for m in scope.metrics if m.name == "kvd.ready"]
    return [point.value for metric in found for point in metric.data.data_points]


async def serve(directory):
    config = Config(endpoint=f"ipc://{directory}/kvd.sock", directory=f"{directory}/kvd",
                    data_directory=f"{directory}/data")
    for _ in range(2):
        async with Daemon(config) as daemon:
            pass
        print(json.dumps(ready()))


with tempfile.TemporaryDirectory() as directory:
    anyio.run(serve, directory)
"""


# It has a port for its health, and lacks what the port needs.
LACKING = """
import sys
sys.modules["prometheus_client"] = None
import anyio
from kvd.config import Config, HttpConfig
from kvd.daemon import Daemon
from kvd.protocol.errors import ConfigError


async def serve():
    config = Config(endpoint=f"ipc://{sys.argv[1]}/kvd.sock", directory=sys.argv[1],
                    data_directory=f"{sys.argv[1]}/data", http=HttpConfig("127.0.0.1:9464"))
    try:
        async with Daemon(config):
            pass
    except ConfigError as error:
        print(error)


anyio.run(serve)
"""


def test_a_port_for_health_needs_its_library(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LACKING, tmp_path], capture_output=True, text=True)
    assert done.stdout.endswith("install kvd[telemetry]\n"), done.stderr


def test_one_daemon_after_the_other_is_told_of() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[0], [0]]
