"""The OpenTelemetry SDK, for the `kvd` command: a program that embeds a Daemon has its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import metrics

from kvd.protocol.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

    from kvd.config import HttpConfig

logger = logging.getLogger(__name__)

# A collector that does not answer is waited for no longer at the end.
FLUSH_SECONDS = 1.0
# Of histograms, in seconds: from an answer out of memory to a disk that is slow.
BOUNDARIES = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30)


@contextmanager
def exporting_metrics(config: HttpConfig) -> Iterator[None]:
    """Have metrics for who asks `http.endpoint`, and send them to OTEL_EXPORTER_OTLP_ENDPOINT.

    The other variables of the SDK's hold as well. At the end the last ones are sent, for
    FLUSH_SECONDS at most. Raises ConfigError for what is not installed or cannot be used.
    """
    if not (config.endpoint or _is_sending()):
        yield
        return
    try:
        provider = _meter_provider(is_asked=bool(config.endpoint))
    except ModuleNotFoundError as error:
        raise ConfigError(f"metrics cannot be exported: {error}: install kvd[telemetry]") from error
    except ValueError as error:
        raise ConfigError(f"metrics cannot be exported: {error}") from error
    metrics.set_meter_provider(provider)
    try:
        yield
    finally:
        try:
            provider.shutdown(timeout_millis=1000 * FLUSH_SECONDS)
        except Exception as error:  # whatever it is, the daemon has stopped well
            logger.warning("reason=telemetry the last metrics were not sent: %s", error)


def _is_sending() -> bool:
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    is_on = os.environ.get("OTEL_METRICS_EXPORTER") != "none"
    return is_on and any(map(os.environ.get, names))


def _meter_provider(*, is_asked: bool) -> MeterProvider:
    from opentelemetry.sdk.metrics import Histogram, MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
    from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource

    readers: list[MetricReader] = []
    if is_asked:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        readers.append(PrometheusMetricReader(scope_info_enabled=False))
    if _is_sending():
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    named = Resource({SERVICE_NAME: "kvd"}).merge(OTELResourceDetector().detect())
    buckets = ExplicitBucketHistogramAggregation(BOUNDARIES)
    view = View(instrument_type=Histogram, instrument_name="kvd.*", aggregation=buckets)
    return MeterProvider(
        readers,
        Resource.create(named.attributes),
        shutdown_on_exit=False,  # it would wait for a dead collector
        views=[view],
    )
