"""What docs/opentelemetry.md shows, with an exporter's own requests, as a collector of OTLP gets them."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support import publish_plain, record

PAGE = (Path(__file__).parents[2] / "docs" / "opentelemetry.md").read_text()

USE = """
from relatum_consumer import Relations
with Relations(BROKER, DATABASE) as relations:
    assert len(relations.find("order_id", "17")) == 1
spans.shutdown()
metrics.get_meter_provider().shutdown()
"""


class Receiver:
    """Takes OTLP over HTTP.

    Attributes:
        spans: Scopes and names of spans.
        metrics: Names of metrics.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []
        self.metrics: set[str] = set()

    def take(self, path: str, body: bytes) -> None:
        """One request of an exporter."""
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    self.spans += [(scope.scope.name, span.name) for span in scope.spans]
        elif path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in resource.scope_metrics:
                    self.metrics |= {metric.name for metric in scope.metrics}


@contextmanager
def receiving() -> Iterator[tuple[Receiver, str]]:
    """A receiver on this machine, and its URL."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(90)


def test_what_the_page_shows_is_exported(amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str) -> None:
    """The block of the page, then a look-up: its span and the metrics are at the other end of OTLP."""
    publish_plain(amqp_url, stream_name, [(b"", {"order_id": "17"})])
    record(amqp_url, engine, stream_name, keys=["order_id"])
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    program = f"BROKER, DATABASE = {amqp_url!r}, {database_url!r}\n{block}{USE}"
    with receiving() as (receiver, url):
        environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", program], check=True, timeout=300, env=environment)
    assert ("relatum", "relatum find") in receiver.spans
    assert {
        "relatum_lookup_seconds_bucket",
        "relatum_lookup_seconds_count",
    } <= receiver.metrics
