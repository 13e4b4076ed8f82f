#!/usr/bin/env python3
"""Workers that fail one after another while requests are on their way through a router: what becomes of each request.

    bench/killed.py [--router COMMAND] [--how kill|freeze|hang] [--whole] [--workers 2] [--failing N] [--apart 6] [--lasts SECONDS] [--seed 1]

Starts timing workers (they play a recorded engine: compute simulated; `cargo build --release -p worker -p router` makes them) and the router, and sends
bursts of eight requests with one prompt. After each --apart seconds another worker fails, until --failing of them have, all by default. One that is
killed gets SIGKILL, and is started again a second later. One that freezes gets SIGSTOP. Of one that hangs the engine's thread is held (ptrace), so that
its HTTP server goes on as if nothing were: it answers probes, and no request. Those two stay so until the end. {urls} in COMMAND becomes the workers'
URLs with spaces between them, {list} their addresses with commas; it is to serve at 127.0.0.1:28100. Prints how many requests were answered whole, with
as many tokens as they asked for, what became of the others, and how long those took that were answered last. Needs nothing but Python.
"""

import argparse
import asyncio
import collections
import ctypes
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import urllib.request

OURS = "target/release/router --workers {list} --port 28100 --admin-listen 127.0.0.1:28200 --threads 1 --log-level error --drain-delay 0s"
PORT = 28100
LIMIT_S = 90
WORDS = "some words that say little and are said often by nobody in particular".split()


def worker(number):
    command = ["target/release/worker", "--backend", "timing:qwen3-8b", "--model", "builtin", "--kv-blocks", "20000", "--port", str(28001 + number)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for(url):
    for _ in range(300):
        try:
            return urllib.request.urlopen(url, timeout=1).read()
        except OSError:
            time.sleep(0.1)
    sys.exit(f"waited in vain for {url}")


class Held:
    """The thread of an engine, held while the rest of its process runs."""

    ATTACH, DETACH, ANY_THREAD = 16, 17, 0x40000000  # PTRACE_ATTACH, PTRACE_DETACH, __WALL
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long] * 4

    def __init__(self, process):
        threads = os.listdir(f"/proc/{process.pid}/task")
        names = {int(thread): open(f"/proc/{process.pid}/task/{thread}/comm").read().strip() for thread in threads}
        self.thread = next((thread for thread, name in names.items() if name == "engine"), None)
        if self.thread is None:
            sys.exit("the worker has no thread of an engine")
        if self.ptrace(self.ATTACH, self.thread, 0, 0) != 0:
            sys.exit(f"the engine's thread cannot be held: {os.strerror(ctypes.get_errno())}")
        os.waitpid(self.thread, self.ANY_THREAD)

    def let_go(self):
        """A process that is held so cannot be waited for."""
        self.ptrace(self.DETACH, self.thread, 0, 0)


async def fail(how, processes, number, held):
    if how == "hang":
        held.append(Held(processes[number]))
    elif how == "freeze":
        processes[number].send_signal(signal.SIGSTOP)
    else:
        processes[number].kill()
        processes[number].wait()
        await asyncio.sleep(1)
        processes[number] = worker(number)


def outcome(reply, args, tokens):
    """What became of a request, of the bytes that answer it."""
    head, _, body = reply.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return "status " + (head.split(b" ")[1].decode() if b" " in head else "none")
    if not args.whole and b"data: [DONE]" not in body:
        return "broken, and said so" if b'"error"' in body else "broken"
    at = body.rfind(b'"completion_tokens":')
    told = body[at:].split(b":")[1].split(b",")[0].split(b"}")[0] if at >= 0 else b"0"
    return "whole" if int(told) == tokens else "whole, but of another length"


async def one(args, model, prompt, tokens, counts, took):
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": not args.whole}
    if not args.whole:
        body["stream_options"] = {"include_usage": True}
    body = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"

    async def exchange():
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        writer.write(head.encode() + body)
        reply = b""
        try:
            while piece := await reader.read(1 << 16):
                reply += piece
        except ConnectionError:
            pass
        writer.close()
        return outcome(reply, args, tokens)

    began = time.monotonic()
    try:
        counts[await asyncio.wait_for(exchange(), LIMIT_S)] += 1
        took.append(time.monotonic() - began)
    except (OSError, asyncio.TimeoutError) as error:
        counts[type(error).__name__] += 1


async def trial(args, model, processes, held):
    rng = random.Random(args.seed)
    counts, took, began, requests = collections.Counter(), [], time.monotonic(), []
    failing = args.workers if args.failing is None else args.failing

    async def failures():
        for number in range(failing):
            await asyncio.sleep(args.apart)
            await fail(args.how, processes, number, held)

    failures = asyncio.create_task(failures())
    while time.monotonic() - began < (args.lasts or args.apart * (failing + 1)):
        prompt = f"{len(requests)} " + " ".join(rng.choice(WORDS) for _ in range(rng.randint(50, 3000)))
        requests += [asyncio.create_task(one(args, model, prompt, rng.choice([20, 200]), counts, took)) for _ in range(8)]
        await asyncio.sleep(rng.expovariate(3))
    await failures
    await asyncio.gather(*requests)
    took = sorted(took, reverse=True) or [0.0]
    print(f"{len(requests)} requests: " + ", ".join(f"{count} {what}" for what, count in counts.most_common()))
    print(f"answered after {took[0]:.1f} s at most, {took[len(took) // 20]:.1f} s in 95 of 100, {took[len(took) // 2]:.2f} s in half")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default=OURS, help="command that starts it")
    parser.add_argument("--whole", action="store_true", help="answers in one piece, not as streams")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--how", choices=["kill", "freeze", "hang"], default="kill", help="in what way workers fail")
    parser.add_argument("--failing", type=int, help="how many of the workers fail; all by default")
    parser.add_argument("--apart", type=float, default=6, help="seconds from one failure to the next")
    parser.add_argument("--lasts", type=float, help="seconds in which bursts are sent; until --apart after the last failure by default")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    addresses = [f"127.0.0.1:{28001 + number}" for number in range(args.workers)]
    processes = [worker(number) for number in range(args.workers)]
    router, held = None, []
    try:
        for address in addresses:
            wait_for(f"http://{address}/health")
        model = json.loads(wait_for(f"http://{addresses[0]}/v1/models"))["data"][0]["id"]
        command = args.router.format(list=",".join(addresses), urls=" ".join(f"http://{address}" for address in addresses))
        router = subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(f"http://127.0.0.1:{PORT}/v1/models")
        asyncio.run(trial(args, model, processes, held))
    finally:
        for one in held:
            one.let_go()
        for process in filter(None, [router, *processes]):
            process.terminate()
            process.send_signal(signal.SIGCONT)
        for process in filter(None, [router, *processes]):
            process.wait()


if __name__ == "__main__":
    main()
