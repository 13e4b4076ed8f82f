#!/usr/bin/env python3
"""How soon a router does what it promises: serves again after its worker came back, cancels at the worker when a client leaves.

    python3 bench/fault_times.py [ROUTER] [ROUNDS]      (default: target/release/router, 20 rounds)

One worker, a mock of this script; one client, this script. Prints medians and maxima in milliseconds.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time

ROUTER = sys.argv[1] if len(sys.argv) > 1 else "target/release/router"
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 20
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(body):
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


class Worker:
    """Answers probes at once; what it does with a POST is `mode`: answer, hang (before headers), stream (an event, then nothing)."""

    def __init__(self):
        self.mode, self.got, self.gone_s, self.server, self.port = "answer", asyncio.Event(), None, None, 0
        self.open = set()

    async def listen(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def serve(self, reader, writer):
        self.open.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
                if head.startswith(b"GET /v1/models"):
                    writer.write(whole(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'))
                elif head.startswith(b"GET") or self.mode == "answer":
                    writer.write(whole(b"{}"))
                else:
                    if self.mode == "stream":
                        writer.write(STREAM_HEAD + b"9\r\ndata: 1\n\n\r\n")
                    self.got.set()
                    await reader.read()
                    self.gone_s = time.perf_counter()
                    self.got.clear()
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open.discard(writer)
            writer.close()


async def post(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY))
    return reader, writer


async def status(port):
    reader, writer = await post(port)
    line = await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    return int(line.split()[1])


async def until(what, port):
    limit = time.perf_counter() + 30
    while await status(port) != what:
        assert time.perf_counter() < limit, f"no {what} within 30 s"
        await asyncio.sleep(0.002)


async def back_again(worker, port):
    """From listening again, after a second of being away, to the first answer; connections that were open are closed."""
    worker.server.close()
    for writer in list(worker.open):
        writer.close()
    await until(503, port)
    await asyncio.sleep(1.0)
    await worker.listen()
    began = time.perf_counter()
    await until(200, port)
    return time.perf_counter() - began


async def client_gone(worker, port, mode):
    """From the client's closing to the worker's seeing it."""
    worker.mode, worker.gone_s = mode, None
    reader, writer = await post(port)
    await asyncio.wait_for(worker.got.wait(), 30)
    if mode == "stream":
        await asyncio.wait_for(reader.readuntil(b"data: 1"), 30)
    left = time.perf_counter()
    writer.close()
    while worker.gone_s is None:
        assert time.perf_counter() < left + 30, "the worker never saw the client leave"
        await asyncio.sleep(0.0005)
    worker.mode = "answer"
    return worker.gone_s - left


def row(what, seconds):
    print(f"| {what} | {1e3 * statistics.median(seconds):.1f} | {1e3 * max(seconds):.1f} |")


async def main():
    worker = Worker()
    await worker.listen()
    router = subprocess.Popen(
        [ROUTER, "--port", "19300", "--workers", f"127.0.0.1:{worker.port}", "--log-level", "error", "--slow-start", "off"],
        stdout=subprocess.DEVNULL,
    )
    try:
        for _ in range(1000):
            try:
                await until(200, 19300)
                break
            except ConnectionError:
                await asyncio.sleep(0.01)
        print(f"| {ROUNDS} rounds, ms | median | most |\n|---|---|---|")
        row("listening again → first answer", [await back_again(worker, 19300) for _ in range(ROUNDS)])
        for mode, what in [("hang", "client gone before headers → worker sees it"), ("stream", "client gone in a stream → worker sees it")]:
            row(what, [await client_gone(worker, 19300, mode) for _ in range(ROUNDS)])
    finally:
        router.terminate()
        router.wait(40)


asyncio.run(main())
