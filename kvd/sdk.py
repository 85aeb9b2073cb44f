"""The OpenTelemetry SDK, set up by the environment; where that names no collector, not imported."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

# A collector that does not answer is waited for no longer at the end.
FLUSH_SECONDS = 1.0


def start(service: str) -> Callable[[float], None]:
    """Send spans in the background where OTEL_EXPORTER_OTLP_ENDPOINT says, if it does.

    The other variables of the SDK's hold as well; `service` is the name where they give none. What
    is returned sends what is left, for FLUSH_SECONDS and up to a time (time.monotonic) at most.
    """
    provider: TracerProvider | None = None
    try:
        if _is_wanted():
            provider = _provider(service)
    except ModuleNotFoundError as error:
        logger.warning("reason=no_telemetry %s: install kvd[telemetry]", error)
    except ValueError as error:
        logger.warning("reason=no_telemetry %s", error)

    def flush(end: float) -> None:
        if provider is not None:
            # The SDK waits for ten seconds and more.
            ending = threading.Thread(target=provider.shutdown, daemon=True)
            ending.start()
            ending.join(max(0.0, min(FLUSH_SECONDS, end - time.monotonic())))

    return flush


def _is_wanted() -> bool:
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    is_off = is_disabled or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    return not is_off and bool(_variable("ENDPOINT"))


def _variable(name: str) -> str:
    """A variable of the exporter's: of traces, or of all that is sent."""
    for prefix in ("OTEL_EXPORTER_OTLP_TRACES", "OTEL_EXPORTER_OTLP"):
        if value := os.environ.get(f"{prefix}_{name}"):
            return value
    return ""


def _provider(service: str) -> TracerProvider:
    """Raises ValueError for a variable that cannot be used."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if (protocol := _variable("PROTOCOL")) not in ("", "http/protobuf"):
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}; served is http/protobuf")
    named = Resource({SERVICE_NAME: service}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(
        resource=Resource.create(named.attributes),
        shutdown_on_exit=False,  # it would wait for a dead collector
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider
