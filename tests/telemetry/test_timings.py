"""Durations by verb: all are counted, and of very many some are recorded."""

from __future__ import annotations

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvd.telemetry import NUM_KEPT, Timings


def recorded(reader: InMemoryMetricReader) -> dict[str, int]:
    data = reader.get_metrics_data()
    assert data
    return {
        str((point.attributes or {})["verb"]): getattr(point, "count", 0)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def test_between_two_recordings_the_last_of_each_verb_are_kept() -> None:
    provider = MeterProvider([reader := InMemoryMetricReader()])
    timings = Timings(provider.get_meter("test").create_histogram("duration", "s"))
    for _ in range(3 * NUM_KEPT):
        timings.note("match", 0.001)
    timings.note("save", 0.1)
    timings.record()
    timings.record()
    assert recorded(reader) == {"match": NUM_KEPT, "save": 1}
    assert timings.counts == {"match": 3 * NUM_KEPT, "save": 1}
    provider.shutdown()
