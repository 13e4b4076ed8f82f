#!/usr/bin/env python3
"""Two of our own workers that hand prompts over, each on one core, really computing: what a long prompt costs those who are being answered.

    cargo build --release --workspace
    bench/apart/own_workers.py /tmp/smollm2 [ROUNDS]

A stream runs at the worker that generates, and a cold prompt of some 2,000 tokens comes: to that worker itself, and through a router that has the
other one compute it, in turn. Then answers are compared with those of one worker alone, and the other worker is killed (-9) while prompts come.
Needs two cores, taskset, and nothing but Python.
"""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request

BIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../target/release")
GENERATES, COMPUTES, ROUTER = 18701, 18702, 18703
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. "


def call(port, body, timeout=120):
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), head)
    return urllib.request.urlopen(request, timeout=timeout)


def answer(port, body):
    begun = time.monotonic()
    with call(port, body) as reply:
        return json.load(reply), time.monotonic() - begun, reply.headers.get("x-router-prefill-worker")


def cold(number, repeats=80):
    return {"prompt": f"{number} {time.time()} " + TEXT * repeats, "temperature": 0, "max_tokens": 1}


def pauses(times, over):
    """Puts the times between the pieces of a stream into `times`, until it is `over`."""
    body = {"prompt": f"{time.time()} Tell me about the sea.", "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "stream": True}
    last = None
    with call(GENERATES, body) as reply:
        for line in reply:
            if over.is_set():
                return
            if line.startswith(b"data: {"):
                now = time.monotonic()
                times.extend([now - last] if last else [])
                last = now


def beside_a_stream(port, number):
    """How long the longest pause of a stream was, and the first token of a cold prompt that came to `port` meanwhile, in seconds."""
    times, over = [], threading.Event()
    stream = threading.Thread(target=pauses, args=(times, over))
    stream.start()
    while len(times) < 20:
        time.sleep(0.005)
    reply, took, _ = answer(port, cold(number))
    time.sleep(0.2)
    over.set()
    stream.join()
    return max(times), took, reply["usage"]["prompt_tokens"]


def metric(port, name):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def start(core, *command):
    return subprocess.Popen(["taskset", "-c", core, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main():
    model, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    worker = [f"{BIN}/worker", "--model", model, "--threads", "1", "--kv-transfer", "on", "--kv-blocks", "600"]
    running = [start("0", *worker, "--port", str(COMPUTES)), start("1", *worker, "--port", str(GENERATES))]
    # Of our policies this one splits whatever it can.
    split = ["--policy", "round_robin", "--prefill", f"p=127.0.0.1:{COMPUTES}", "--workers", f"d=127.0.0.1:{GENERATES}"]
    running.append(start("0", f"{BIN}/router", "--port", str(ROUTER), *split))
    try:
        until_ready()
        for number in range(4):
            # Memory is given by the system when it is first touched.
            answer(ROUTER, cold(number))
        for name, port in (("itself", GENERATES), ("through the other", ROUTER)) * rounds:
            pause, first, tokens = beside_a_stream(port, name)
            print(f"{name}: {tokens} tokens, longest pause {pause * 1000:.0f} ms, first token {first * 1000:.0f} ms", flush=True)
        fetched, seconds = metric(GENERATES, 'worker:kv_transfer_bytes_total{way="fetched"}'), metric(GENERATES, "worker:kv_fetch_seconds_sum")
        count = metric(GENERATES, "worker:kv_fetch_seconds_count")
        print(f"fetched {fetched / 1e6:.0f} MB in {count:.0f} times, {fetched / seconds / 1e9:.2f} GB/s, waits for the engine's steps included")
        same = 0
        for number in range(10):
            body = {**cold(number, 5 + number), "max_tokens": 40}
            split, _, computed_by = answer(ROUTER, body)
            urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{GENERATES}/flush_cache", method="POST"), timeout=10).read()
            alone, _, _ = answer(GENERATES, body)
            same += computed_by == "p" and split["choices"] == alone["choices"]
        print(f"handed over, of 10 answers of 40 tokens {same} are those of one worker alone")
        killed = threading.Timer(3.0, running[0].kill)
        killed.start()
        whole, split_count = 0, 0
        for number in range(40):
            reply, _, computed_by = answer(ROUTER, {**cold(number, 3), "max_tokens": 10, "ignore_eos": True})
            whole += reply["usage"]["completion_tokens"] == 10
            split_count += computed_by == "p"
        killed.join()
        print(f"of 40 prompts, the other worker killed after 3 s, {whole} answered whole, {split_count} of them computed there")
    finally:
        for process in running:
            process.kill()
            process.wait()


def until_ready():
    for port, path in ((COMPUTES, "readyz"), (GENERATES, "readyz"), (ROUTER, "readyz")):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=1).read()
                break
            except OSError:
                time.sleep(0.1)
    # A router is ready with its first worker; this one wants both.
    time.sleep(1)


if __name__ == "__main__":
    main()
