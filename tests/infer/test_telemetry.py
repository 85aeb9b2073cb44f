"""What an engine tells of itself, and that kvd's spans hang on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

# A process of its own: providers are set once in each. The daemon runs in it, so that both report
# to the same.
PROGRAM = """
import json, sys, tempfile, threading
import anyio
import torch
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))

from demo.models import tiny_llama
from kvd.config import Config
from kvd.daemon import Daemon
from kvd_client import Client
from kvd_infer.engine import Engine
from kvd_infer.model import Model
from kvd_infer.router import Router
from kvd_infer.sampler import SamplingParams

torch.set_num_threads(1)
greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
ready, is_over = threading.Event(), threading.Event()


async def serve(directory):
    config = Config(endpoint=f"ipc://{directory}/kvd.sock", directory=f"{directory}/kvd",
                    data_directory=f"{directory}/data")
    async with Daemon(config):
        ready.set()
        await anyio.to_thread.run_sync(is_over.wait)


with tempfile.TemporaryDirectory() as directory, Client(f"ipc://{directory}/kvd.sock") as client:
    daemon = threading.Thread(target=anyio.run, args=(serve, directory))
    daemon.start()
    ready.wait()
    assert client.wait_attached(30)
    engine = Engine(Model(tiny_llama(), "one"), client)
    with Router(engine) as router, trace.get_tracer("test").start_as_current_span("caller"):
        for _ in range(2):
            list(router.submit(list(range(40)), greedy))
    is_over.set()
    daemon.join()

told = [
    {
        "name": span.name,
        "id": span.context.span_id,
        "trace": span.context.trace_id,
        "parent": span.parent.span_id if span.parent else None,
        "links": [link.context.span_id for link in span.links],
        "attributes": dict(span.attributes),
    }
    for span in spans.get_finished_spans()
]
points = {
    metric.name: [
        [dict(point.attributes), getattr(point, "count", None) or getattr(point, "value", None)]
        for point in metric.data.data_points
    ]
    for resource in reader.get_metrics_data().resource_metrics
    for scope in resource.scope_metrics
    for metric in scope.metrics
}
print(json.dumps({"spans": told, "points": points}))
"""


@pytest.fixture(scope="module")
def told() -> Any:
    """Two requests of the same 40 tokens, each with 4 more: 4 steps each."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def named(told: Any, name: str) -> list[Any]:
    return [span for span in told["spans"] if span["name"] == name]


def test_a_request_is_under_its_callers_span_and_its_match_under_it(told: Any) -> None:
    (caller,) = named(told, "caller")
    requests = named(told, "kvd_infer.request")
    assert [request["parent"] for request in requests] == [caller["id"]] * 2
    matches = named(told, "kvd_infer.match")
    assert [match["parent"] for match in matches] == [request["id"] for request in requests]
    served = {span["parent"] for span in named(told, "kvd.request.MatchRequest")}
    assert served == {match["id"] for match in matches}
    assert [request["attributes"]["cached_tokens"] for request in requests] == [
        0,
        32,
    ]  # whole blocks
    assert {request["attributes"]["reason"] for request in requests} == {"length"}


def test_a_step_is_linked_to_its_requests_and_has_attention_and_commit_under_it(
    told: Any,
) -> None:
    requests = [request["id"] for request in named(told, "kvd_infer.request")]
    steps = named(told, "kvd_infer.step")
    assert [step["links"] for step in steps] == [
        [request] for request in requests for _ in range(4)
    ]
    of_steps = Counter(span["parent"] for span in named(told, "kvd_infer.attention"))
    assert of_steps == {step["id"]: 2 for step in steps}  # one a layer
    assert {span["parent"] for span in named(told, "kvd_infer.commit")} <= {
        step["id"] for step in steps
    }


def test_metrics_are_what_was_done(told: Any) -> None:
    points = told["points"]
    for name in ("attention_latency", "step_time", "batch_size"):
        assert points[f"kvd_infer.{name}"] == [[{}, 8]]
    by_source = {labels["source"]: count for labels, count in points["kvd_infer.tokens"]}
    assert by_source == {"computed": 40 + 3 + 8 + 3, "host": 32}
