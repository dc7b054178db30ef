"""Spans for whoever collects them: runs, model steps, tool calls and requests, by OpenTelemetry's API.

Without a collector a span costs one comparison. `export` is called once, by the process that wants to be seen; it
needs the extra `antiphon[otel]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from opentelemetry import trace
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from antiphon.errors import ConfigError, install

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_tracer = trace.get_tracer("antiphon")
_propagator = TraceContextTextMapPropagator()
_NOBODY = nullcontext(None)


def span(
    name: str, parent: str | None = None, **attributes: str | int | None
) -> AbstractContextManager[Span | None]:
    """Something that takes time. `parent` is a `traceparent` that came with a request."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return _NOBODY
    above = _propagator.extract({"traceparent": parent}) if parent else None
    given = {f"antiphon.{key}": value for key, value in attributes.items() if value is not None}
    return _tracer.start_as_current_span(f"antiphon.{name}", context=above, attributes=given)


def export(environ: Mapping[str, str]) -> bool:
    """Send spans where the environment says; False when it says nothing."""
    if not environ.get(ENDPOINT):
        return False
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - an extra
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"{ENDPOINT} is set, but nothing that could send spans is installed.",
            install("otel"),
            path=ENDPOINT,
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "antiphon"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True
