"""The OpenTelemetry SDK, for the `kvd` command: a program that embeds a Daemon has its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import metrics

import kvd
from kvd.protocol.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

    from kvd.config import HttpConfig

logger = logging.getLogger(__name__)

_OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
# What a collector that does not answer may delay a stop by.
FLUSH_SECONDS = 2.0
# Of histograms, in seconds: from an answer out of memory to a disk that is slow.
BOUNDARIES = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30)


@contextmanager
def exporting(config: HttpConfig) -> Iterator[None]:
    """Export metrics: to who asks `http.endpoint`, and over OTLP as the OTEL_ variables say.

    Raises ConfigError where what does that is not installed.
    """
    over_otlp = any(map(os.environ.get, _OTLP_ENDPOINTS))
    if not (config.endpoint or over_otlp):
        yield
        return
    try:
        provider = _provider(for_prometheus=bool(config.endpoint), over_otlp=over_otlp)
    except ModuleNotFoundError as error:
        raise ConfigError(f"metrics cannot be exported: {error}: install kvd[telemetry]") from error
    metrics.set_meter_provider(provider)
    try:
        yield
    finally:
        try:
            provider.shutdown(timeout_millis=FLUSH_SECONDS * 1000)
        except Exception as error:  # the SDK raises nothing else
            logger.warning("reason=telemetry the last metrics were not sent: %s", error)


def _provider(*, for_prometheus: bool, over_otlp: bool) -> MeterProvider:
    from opentelemetry.sdk.metrics import Histogram, MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
    from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
    from opentelemetry.sdk.resources import Resource

    readers: list[MetricReader] = []
    if for_prometheus:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        readers.append(PrometheusMetricReader(scope_info_enabled=False))
    if over_otlp:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    os.environ.setdefault("OTEL_SERVICE_NAME", "kvd")
    resource = Resource.create({"service.version": kvd.__version__})
    buckets = ExplicitBucketHistogramAggregation(BOUNDARIES)
    view = View(instrument_type=Histogram, instrument_name="kvd.*", aggregation=buckets)
    return MeterProvider(readers, resource, shutdown_on_exit=False, views=[view])
