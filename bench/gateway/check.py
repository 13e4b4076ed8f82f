#!/usr/bin/env python3
"""A real Envoy that asks a router where requests go (deploy/envoy.yaml), in front of real workers with the built-in model.

    check.py ENVOY [--seconds N]

Starts three workers, a router and Envoy on the ports of deploy/envoy.yaml, and says whether
  equal  greedy answers by way of Envoy are those of the router's own port, in eight kinds of requests, errors among them;
  home   the turns of a conversation go to one worker, and find there what came before;
  kill   no whole answer is lost while workers are killed and come back (16 clients; streams that have begun are lost with their worker).
Ends with 1 if one of these is not so. cargo build --release -p router -p worker before.
"""
import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WORKERS = (8001, 8002, 8003)
ROUTER, GATEWAY = "http://127.0.0.1:8090", "http://127.0.0.1:8080"
# Differ from one answer to the next.
OF_THE_MOMENT = ("id", "created", "system_fingerprint", "usage")


def start(*command):
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def start_worker(port):
    return start(f"{ROOT}/target/release/worker", "--port", str(port), "--grace-period", "1")


def ask(base, path, body, timeout=60):
    """Status, headers and text of an answer."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.status, reply.headers, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def until(what, holds, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if holds():
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit(f"not within {seconds} s: {what}")


def constant(text):
    """What of an answer is the same each time."""
    def strip(value):
        return {name: each for name, each in value.items() if name not in OF_THE_MOMENT} if isinstance(value, dict) else value

    if text.startswith("data: "):
        return [strip(json.loads(line[6:])) if line != "data: [DONE]" else line for line in text.split("\n\n") if line]
    try:
        return strip(json.loads(text))
    except ValueError:
        return text


def equal():
    chat = {"model": "builtin", "messages": [{"role": "user", "content": "Who is Mr. Darcy?"}], "max_tokens": 24, "temperature": 0}
    kinds = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/chat/completions", chat | {"n": 2}),
        ("/v1/completions", {"model": "builtin", "prompt": "It is a truth " * 200, "max_tokens": 8, "temperature": 0}),
        ("/v1/completions", {"model": "nobody", "prompt": ""}),
        ("/v1/completions", b"{bad"),
        ("/tokenize", {"model": "builtin", "prompt": "Mr. Darcy"}),
        ("/v1/models", None),
    ]
    same = 0
    for path, body in kinds:
        answers = [ask(base, path, body) for base in (ROUTER, GATEWAY)]
        (status, _, text), (by_gateway, _, other) = answers
        is_same = status == by_gateway and constant(text) == constant(other)
        same += is_same
        if not is_same:
            print(f"  differ: {path} {body!r:.80}\n    {status} {text[:200]}\n    {by_gateway} {other[:200]}")
    print(f"equal: {same} of {len(kinds)} kinds of requests")
    return same == len(kinds)


def home():
    prompt, workers, cached = "Of all that was said that evening. " * 30, set(), 0
    for turn in range(6):
        _, headers, text = ask(GATEWAY, "/v1/completions", {"model": "builtin", "prompt": prompt, "max_tokens": 4})
        workers.add(headers["x-router-worker"])
        cached += json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        prompt += f"And then, {turn}. "
    print(f"home: 6 turns at {len(workers)} worker(s), {cached} of 5 found what came before")
    return len(workers) == 1 and cached == 5


def kill(processes, seconds, stream):
    end, outcomes, lock = time.monotonic() + seconds, collections.Counter(), threading.Lock()

    def outcome(rng):
        prompt = f"{rng.randrange(40)} is the number. " * 40
        body = {"model": "builtin", "prompt": prompt, "max_tokens": 16, "stream": stream}
        try:
            status, _, text = ask(GATEWAY, "/v1/completions", body)
        except OSError as error:
            return type(error).__name__
        except Exception as error:  # http.client.IncompleteRead is none of these
            return f"broken off ({type(error).__name__})"
        if status != 200:
            return f"{status} {text[:80]}"
        return "whole" if ("[DONE]" in text if stream else "choices" in text) else "cut short"

    def client(seed):
        rng = random.Random(seed)
        while time.monotonic() < end:
            each = outcome(rng)
            with lock:
                outcomes[each] += 1

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(16)]
    [thread.start() for thread in threads]
    at = 0
    while time.monotonic() < end - 4:
        time.sleep(2)
        port = WORKERS[at % len(WORKERS)]
        processes[port].send_signal(signal.SIGKILL)
        processes[port].wait()
        time.sleep(2)
        processes[port] = start_worker(port)
        at += 1
    [thread.join() for thread in threads]
    until("all workers are back", lambda: all(ask(f"http://127.0.0.1:{port}", "/health", None)[0] == 200 for port in WORKERS))
    print(f"kill: {at} workers killed, {'streams' if stream else 'whole answers'}: {dict(outcomes)}")
    return stream or set(outcomes) == {"whole"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envoy")
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    workers = ",".join(f"http://127.0.0.1:{port}" for port in WORKERS)
    processes = {port: start_worker(port) for port in WORKERS}
    processes["router"] = start(f"{ROOT}/target/release/router", "--port", "8090", "--workers", workers,
                                "--gateway-listen", "127.0.0.1:9002", "--gateway-fallbacks", "2", "--drain-delay", "0s")
    processes["envoy"] = start(args.envoy, "-c", f"{ROOT}/deploy/envoy.yaml", "--log-level", "error", "--disable-hot-restart")
    try:
        up = lambda: len(json.loads(ask("http://127.0.0.1:8091", "/workers", None)[2])["workers"]) == 3
        until("the router is up", up)
        until("requests pass", lambda: ask(GATEWAY, "/v1/models", None)[0] == 200)
        usable = lambda: all(each["usable"] for each in json.loads(ask("http://127.0.0.1:8091", "/workers", None)[2])["workers"])
        until("all workers are usable", usable)
        good = [equal(), home(), kill(processes, args.seconds, False), kill(processes, args.seconds, True)]
        metrics = ask("http://127.0.0.1:8091", "/metrics", None)[2]
        print(*(line for line in metrics.splitlines() if line.startswith(("router_requests_in_flight ", "router_retries_total "))), sep="\n")
    finally:
        for process in processes.values():
            process.kill()
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
