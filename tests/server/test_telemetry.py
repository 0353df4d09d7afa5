"""Traces: a span for each request, sent to a collector on loopback."""

import contextlib
import gzip
import http.server
import threading

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

from server import telemetry
from server.planning.workers import WorkerPool
from server.settings import ServerSettings
from server.storage.location import DATABASE_VARIABLE
from server.storage.storage import open_storage
from server.web.app import create_app

TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SENT = {"X-Request-ID": "mine", "traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}


@pytest.fixture
def spans(monkeypatch):
    """Those that are made, by a provider of this test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", provider.get_tracer("test"))
    yield exporter.get_finished_spans
    provider.shutdown()


@pytest.fixture
def requests(tmp_path, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{tmp_path}/service.sqlite")
    settings = ServerSettings(allowed_hosts=["testserver"])
    pool = WorkerPool(settings, on_ready=lambda: None, on_failure=lambda _: None)
    with contextlib.closing(open_storage()) as storage:
        yield TestClient(create_app(settings, pool, storage))


def test_a_request_is_a_span_with_its_id_in_the_client_s_trace(requests, spans):
    assert requests.get("/v1/plans/nothing", headers=SENT).status_code == 400
    assert requests.get("/readyz").status_code == 503
    (span,) = spans()
    assert (span.name, span.kind) == ("GET /v1/plans/{plan_id}", trace.SpanKind.SERVER)
    assert format(span.context.trace_id, "032x") == TRACE_ID
    assert dict(span.attributes) == {
        "http.request.method": "GET",
        "url.path": "/v1/plans/nothing",
        "autoshard.request_id": "mine",
        "http.response.status_code": 400,
        "http.route": "/v1/plans/{plan_id}",
    }
    assert span.status.status_code is trace.StatusCode.UNSET


def test_a_request_that_the_service_cannot_answer_is_marked(requests, spans):
    answer = requests.post("/v1/plans", json=TASK)  # without planning processes
    assert answer.status_code == 503
    (span,) = spans()
    assert span.attributes["autoshard.request_id"] == answer.headers["x-request-id"]
    assert span.status.status_code is trace.StatusCode.ERROR


def test_nothing_is_sent_unless_a_collector_is_named(monkeypatch):
    for variable in telemetry.ENDPOINT_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    provider = trace.get_tracer_provider()
    with telemetry.sent_traces():
        assert trace.get_tracer_provider() is provider
        assert not provider.get_tracer("any").start_span("any").is_recording()


@pytest.fixture
def collector():
    """Address of a collector that speaks OTLP, and spans with the names of who made them."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                assert names["service.name"] == "autoshard"
                received.extend((scope.scope.name, span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_a_service_sends_its_spans_before_it_ends(collector, own_service, monkeypatch):
    url, received = collector
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    service = own_service("--workers", "1")
    with service.client() as client:
        assert client.post("/v1/plans", json=TASK, headers=SENT).status_code == 200
    assert service.stop() == 0
    work, request = (span for name, span in received if name == "autoshard.server")
    assert {span.trace_id.hex() for _, span in received} == {TRACE_ID}
    assert (work.name, request.name) == ("work plan", "POST /v1/plans")
    assert work.parent_span_id == request.span_id
    attributes = {item.key: item.value for item in work.attributes}
    assert attributes["autoshard.planner"].string_value == "cost-greedy"
    (line,) = [line for line in service.log() if line.get("request_id") == "mine" and line["event"] == "request"]
    assert line["trace_id"] == TRACE_ID
