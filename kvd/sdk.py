"""The SDK of OpenTelemetry, for commands: what sends their spans and metrics.

Programs that embed the daemon, or use a client, set up their own. The SDK is imported only where
something is to be sent, or asked for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvd.protocol.errors import ConfigError, needing_extra

if TYPE_CHECKING:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

# A collector that does not answer is waited for no longer at the end.
FLUSH_SECONDS = 1.0
# Of histograms, in seconds: from an answer out of memory to a disk that is slow.
BOUNDARIES = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30)


def start(service: str, *, prometheus: bool = False) -> Callable[[float], None]:
    """Send spans and metrics in the background where OTEL_EXPORTER_OTLP_ENDPOINT says, if it does.

    With `prometheus`, metrics are kept for who asks for them as well. The other variables of the
    SDK's hold; `service` is the name where they give none. What is returned sends what is left, for
    FLUSH_SECONDS and up to a time (time.monotonic) at most. Raises ConfigError where metrics cannot
    be kept; what cannot be sent is logged.
    """
    providers: list[TracerProvider | MeterProvider] = []
    readers: list[MetricReader] = [_kept_reader()(scope_info_enabled=False)] if prometheus else []
    if _is_sent("TRACES"):
        with _telling(_warn):
            providers.append(_tracer_provider(service))
    if _is_sent("METRICS"):
        with _telling(_warn):
            readers.append(_sent_again_and_again())
    if readers:
        providers.append(_meter_provider(service, readers))

    def flush(end: float) -> None:
        # The SDK waits for ten seconds and more.
        endings = [threading.Thread(target=_end, args=(each,), daemon=True) for each in providers]
        for ending in endings:
            ending.start()
        end = min(end, time.monotonic() + FLUSH_SECONDS)
        for ending in endings:
            ending.join(max(0.0, end - time.monotonic()))

    return flush


def _end(provider: TracerProvider | MeterProvider) -> None:
    try:
        provider.shutdown()
    except Exception as error:  # whatever it is, the program has stopped well
        logger.warning("reason=no_telemetry the last of it was not sent: %s", error)


def check(*, prometheus: bool = False) -> list[str]:
    """Why what is to be sent would not be; raises ConfigError as `start` does. Nothing is sent."""
    found: list[str] = []
    if prometheus:
        _kept_reader()
    for signal, exporter in (("TRACES", _span_exporter), ("METRICS", _metric_exporter)):
        if _is_sent(signal):
            with _telling(found.append):
                exporter()
    return found


@contextmanager
def _telling(tell: Callable[[str], None]) -> Iterator[None]:
    """What cannot be sent is no reason not to run."""
    try:
        with needing_extra("telemetry", "OTEL_EXPORTER_OTLP_ENDPOINT"):
            yield
    except (ConfigError, ValueError) as error:
        tell(str(error))


def _warn(why: str) -> None:
    logger.warning("reason=no_telemetry %s", why)


def _is_sent(signal: str) -> bool:
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    is_off = is_disabled or os.environ.get(f"OTEL_{signal}_EXPORTER") == "none"
    return not is_off and bool(_variable(signal, "ENDPOINT"))


def _variable(signal: str, name: str) -> str:
    """A variable of the exporter's: of this signal, or of all that is sent."""
    for prefix in (f"OTEL_EXPORTER_OTLP_{signal}", "OTEL_EXPORTER_OTLP"):
        if value := os.environ.get(f"{prefix}_{name}"):
            return value
    return ""


def _is_over_grpc(signal: str) -> bool:
    """By which of the two protocols it is sent; raises ValueError for another."""
    protocol = _variable(signal, "PROTOCOL") or "http/protobuf"
    if protocol not in ("http/protobuf", "grpc"):
        raise ValueError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}; there are http/protobuf and grpc"
        )
    return protocol == "grpc"


def _span_exporter() -> SpanExporter:
    """Raises ValueError for a variable that cannot be used, ConfigError for what is missing."""
    if _is_over_grpc("TRACES"):
        with needing_extra("telemetry-grpc", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as by_grpc

        return by_grpc.OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _metric_exporter() -> MetricExporter:
    """Raises ValueError for a variable that cannot be used, ConfigError for what is missing."""
    if _is_over_grpc("METRICS"):
        with needing_extra("telemetry-grpc", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as by_grpc

        return by_grpc.OTLPMetricExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter()


def _tracer_provider(service: str) -> TracerProvider:
    """Raises as its exporter."""
    exporter = _span_exporter()
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # At the end of the process it would wait for a dead collector.
    provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider


def _kept_reader() -> type[PrometheusMetricReader]:
    """It keeps metrics for who asks for them. Raises ConfigError where it is not installed."""
    with needing_extra("telemetry", "http.endpoint"):
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
    return PrometheusMetricReader


def _sent_again_and_again() -> MetricReader:
    """Raises as its exporter."""
    exporter = _metric_exporter()
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(exporter)


def _meter_provider(service: str, readers: Sequence[MetricReader]) -> MeterProvider:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import Histogram, MeterProvider
    from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View

    buckets = ExplicitBucketHistogramAggregation(BOUNDARIES)
    view = View(instrument_type=Histogram, instrument_unit="s", aggregation=buckets)
    provider = MeterProvider(readers, _resource(service), shutdown_on_exit=False, views=[view])
    metrics.set_meter_provider(provider)
    return provider


def _resource(service: str) -> Resource:
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource

    named = Resource({SERVICE_NAME: service}).merge(OTELResourceDetector().detect())
    return Resource.create(named.attributes)
