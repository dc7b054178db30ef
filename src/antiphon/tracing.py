"""OpenTelemetry spans for runs, model steps, tool calls and requests.

Without a collector a span costs one comparison. `configure_export` is called once, by a process that exports
spans; it needs the extra `antiphon[otel]`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from antiphon.errors import ConfigError, format_install_hint

if TYPE_CHECKING:
    from opentelemetry.trace import Span

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_NO_SPAN = nullcontext(None)


def start_span(
    name: str, parent: str | None = None, **attributes: str | int | None
) -> AbstractContextManager[Span | None]:
    """Starts a span. `parent` is the `traceparent` of a request."""
    trace = sys.modules.get("opentelemetry.trace")  # nothing is collected unless the process has imported it
    get_provider = getattr(trace, "get_tracer_provider", None)  # None while another thread imports it
    if trace is None or get_provider is None or isinstance(get_provider(), trace.ProxyTracerProvider):
        return _NO_SPAN
    from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

    propagator = tracecontext.TraceContextTextMapPropagator()
    context = propagator.extract({"traceparent": parent}) if parent else None
    prefixed = {f"antiphon.{key}": value for key, value in attributes.items() if value is not None}
    return trace.get_tracer("antiphon").start_as_current_span(
        f"antiphon.{name}", context=context, attributes=prefixed
    )


def configure_export(environ: Mapping[str, str]) -> bool:
    """Exports spans to the endpoint in the environment; returns False if none is set."""
    if not environ.get(ENDPOINT_VARIABLE):
        return False
    try:
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - an extra
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"{ENDPOINT_VARIABLE} is set, but the OpenTelemetry exporter is not installed.",
            format_install_hint("otel"),
            path=ENDPOINT_VARIABLE,
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "antiphon"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True
