#!/usr/bin/env python3
"""Whether an engine's own spans lie below the router's, in the trace of whoever asked.

    traces.py ROUTER_URL [--model NAME] [--port 4318] [--seconds 20]

Takes traces at 127.0.0.1:PORT while it runs, as a collector does (OTLP over HTTP), asks once, as part of a trace, and prints what comes of it. Wants opentelemetry-proto:
`DIR/venv/bin/python` of `engines.sh traces DIR` has it. Exit status 1 if the engine has no span below the router's attempt.
"""
import argparse
import http.server
import json
import secrets
import sys
import threading
import time
import urllib.request

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


def value(any_value):
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(one) for one in any_value.array_value.values]
    return getattr(any_value, kind) if kind else None


class Collector(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    spans = []

    def do_POST(self):
        told = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for resource in told.resource_spans:
            names = {one.key: value(one.value) for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans.extend((names.get("service.name"), span) for span in scope.spans)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def show(spans, parent, began, depth=0):
    for service, span in sorted(spans, key=lambda one: one[1].start_time_unix_nano):
        if span.parent_span_id != parent:
            continue
        at, took = (span.start_time_unix_nano - began) / 1e6, (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        attributes = {one.key: value(one.value) for one in span.attributes}
        print(f"{'  ' * depth}{service}: {span.name}  {at:.1f} ms + {took:.1f} ms  {json.dumps(attributes)}")
        for event in span.events:
            print(f"{'  ' * (depth + 1)}({event.name} at {(event.time_unix_nano - began) / 1e6:.1f} ms)")
        show(spans, span.span_id, began, depth + 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("router")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--port", type=int, default=4318)
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    trace, caller = secrets.token_bytes(16), secrets.token_bytes(8)
    body = {"model": args.model, "stream": True, "max_tokens": 40, "messages": [{"role": "user", "content": "a story " * 300}]}
    headers = {"content-type": "application/json", "traceparent": f"00-{trace.hex()}-{caller.hex()}-01"}
    began = time.time_ns()
    request = urllib.request.Request(f"{args.router}/v1/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=120).read()
    ours = lambda: [one for one in Collector.spans if one[1].trace_id == trace]
    ends = time.monotonic() + args.seconds
    while time.monotonic() < ends and len({service for service, _ in ours()}) < 2:
        time.sleep(0.1)
    show(ours(), caller, began)
    attempts = {span.span_id for _, span in ours() if span.name == "attempt"}
    below = [service for service, span in ours() if span.parent_span_id in attempts]
    print(f"below the attempt: {below}")
    sys.exit(0 if below else 1)


if __name__ == "__main__":
    main()
