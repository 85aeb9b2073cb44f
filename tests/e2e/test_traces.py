"""Traces: what a collector receives of kvd and of an engine that uses it, each in its process."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvd.testing.daemons import RunningDaemon, running_daemon
from kvd_client import Client
from tests.e2e.support import eventually
from tests.e2e.test_tiers import WIDE, save_all, small
from tests.otlp import Collector, Received, running_collector

# An engine, in a process of its own with an SDK of its own. Its spans are named as what it does.
PROLOGUE = """
import sys
from pathlib import Path
from opentelemetry import trace
from kvd import sdk
from kvd.testing.faults import Faults, set_faults
from kvd_client import Client, OutOfPages
from tests.e2e.support import tokens_of
from tests.e2e.test_tiers import SEQUENCES, WIDE, use

flush = sdk.start("engine")
span = trace.get_tracer("engine").start_as_current_span
client = Client(sys.argv[1], timeout=30.0)
assert client.wait_attached(30)
namespace = WIDE.open(client)
data = Path(sys.argv[2])
"""

ENGINE = """
with span("hit on disk"):
    namespace.match(SEQUENCES[0]).release()

unseen = trace.NonRecordingSpan(trace.SpanContext(1, 2, False, trace.TraceFlags(0)))
with trace.use_span(unseen):
    namespace.match(SEQUENCES[1]).release()

set_faults(data, Faults.STUCK)
for name in ("waits", "waits too"):
    with span(name):
        namespace.match(SEQUENCES[2], timeout=0.5).release()
set_faults(data, Faults.NONE)

with span("computes"):
    use(namespace, tuple(tokens_of(100, 16)))
with span("saves"):
    client.checkpoint()

other = Client(sys.argv[1], timeout=30.0)
assert other.wait_attached(30)
held = WIDE.open(other).match(tokens_of(200, 16))
held.reserve(100 * 4)
with span("wants pages"), namespace.match(tokens_of(300, 16)) as lease:
    try:
        lease.reserve(50 * 4, timeout=0.5)
    except OutOfPages:
        pass
trace.get_tracer_provider().force_flush()
"""

MANY_MATCHES = """
for _ in range(200):
    with span("match"):
        namespace.match(SEQUENCES[0]).release()
flush(0.0)
"""


def run_engine(program: str, daemon: RunningDaemon) -> None:
    command = [
        sys.executable,
        "-c",
        PROLOGUE + program,
        daemon.endpoint,
        str(daemon.data_directory),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=["http/protobuf", "grpc"])
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    """Has received all of an engine's work with a kvd whose memory has the last sequences alone."""
    with running_collector(request.param) as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", collector.protocol)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with running_daemon(small()) as daemon:
            with Client(daemon.endpoint, timeout=30.0) as client:
                save_all(client, WIDE.open(client))
            run_engine(ENGINE, daemon)
            last = of_engine(collector, "wants pages")
            eventually(lambda: collector.under(last, "kvd.request.ReserveRequest"))
            assert "Traceback" not in daemon.log
        yield collector


def of_engine(collector: Collector, name: str) -> Received:
    (span,) = collector.named(name)
    assert span.service == "engine"
    return span


def served(collector: Collector, of: str, verb: str) -> Received:
    """The one request that kvd served under a span of the engine's."""
    (span,) = collector.under(of_engine(collector, of), f"kvd.request.{verb}Request")
    assert span.service == "kvd"
    return span


def test_one_trace_goes_from_the_engine_to_what_the_disk_reads(collector: Collector) -> None:
    engine, match = of_engine(collector, "hit on disk"), served(collector, "hit on disk", "Match")
    promotes = collector.under(match, "kvd.promote")
    reads = [read for each in promotes for read in collector.under(each, "kvd.tier.read")]
    assert {span.trace for span in (match, *promotes, *reads)} == {engine.trace}
    assert match.attributes == {
        "kvd.namespace": "wide",
        "kvd.matched_tokens": 64,
        "kvd.matched_tokens.faulty": 64,
        "kvd.pages": 0,
    }
    assert {read.attributes["kvd.tier"] for read in reads} == {"faulty"}
    assert sum(read.attributes["kvd.blocks"] for read in reads) == 16
    assert sum(read.attributes["kvd.bytes"] for read in reads) == 16 * WIDE.layout.page_bytes


def test_a_request_lasts_for_as_long_as_it_waits(collector: Collector) -> None:
    match = served(collector, "hit on disk", "Match")
    for promote in collector.under(match, "kvd.promote"):
        (read,) = collector.under(promote, "kvd.tier.read")
        assert match.start <= promote.start <= read.start
        assert read.end <= promote.end <= match.end


def test_who_waits_for_what_another_began_is_linked_to_it(collector: Collector) -> None:
    first, second = (served(collector, name, "Match") for name in ("waits", "waits too"))
    promote, *_ = collector.under(first, "kvd.promote")
    assert promote.id in second.links
    assert second.end < promote.end  # it goes on behind who waited for it


def test_blocks_go_down_with_a_link_to_the_commit_that_they_come_from(collector: Collector) -> None:
    commit = served(collector, "computes", "Commit")
    demotes = [span for span in collector.named("kvd.demote") if commit.id in span.links]
    assert sum(span.attributes["kvd.blocks"] for span in demotes) == 16
    assert commit.attributes["kvd.pages"] == 16


def test_a_checkpoint_is_linked_to_the_request_that_asked_for_it(collector: Collector) -> None:
    asked = served(collector, "saves", "Checkpoint")
    (checkpoint,) = (span for span in collector.named("kvd.checkpoint") if span.links)
    assert checkpoint.links == [asked.id]
    assert asked.start <= checkpoint.start <= checkpoint.end <= asked.end


def test_a_wait_for_pages_is_told_and_how_it_ended(collector: Collector) -> None:
    asked = served(collector, "wants pages", "Reserve")
    (wait,) = collector.under(asked, "kvd.reserve")
    assert wait.is_error
    assert asked.is_error
    assert asked.attributes["error.type"] == "out_of_pages"


def test_what_the_engine_does_not_sample_is_not_sent(collector: Collector) -> None:
    assert f"{1:032x}" not in {span.trace for span in collector.spans}


# --- a collector that is of no use ---


@pytest.fixture(params=["refuses", "is silent"])
def useless(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where nobody listens, or somebody who takes what is sent and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = 1 if request.param == "refuses" else server.getsockname()[1]
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_useless_collector_costs_nothing_and_delays_no_stop(
    useless: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", useless)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    # Who waited for an answer would do so until the test is given up.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    with running_daemon(small()) as daemon:
        run_engine(MANY_MATCHES, daemon)
        assert daemon.stop() == 0
        assert daemon.log.count("Queue full") < 10


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "reason=no_telemetry"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "1", "reason=no_telemetry"),
        ("OTEL_SDK_DISABLED", "true", ""),
        ("OTEL_TRACES_EXPORTER", "none", ""),
    ],
)
def test_kvd_serves_without_spans_where_the_environment_wants_it_so_or_is_wrong(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv(name, value)
        with running_daemon(small()) as daemon:
            run_engine(MANY_MATCHES, daemon)
            assert daemon.stop() == 0
            assert told in daemon.log
        assert collector.spans == []
