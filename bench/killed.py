#!/usr/bin/env python3
"""Workers that are killed one after another while requests are on their way through a router: what becomes of each request.

    bench/killed.py [--router COMMAND] [--whole] [--workers 2] [--apart 6] [--seed 1]

Starts timing workers (they play a recorded engine: compute simulated; `cargo build --release -p worker -p router` makes them) and the router, and sends
bursts of eight requests with one prompt. After each --apart seconds another worker gets SIGKILL, and is started again a second later, until each has been
killed once. {urls} in COMMAND becomes the workers' URLs with spaces between them, {list} their addresses with commas; it is to serve at
127.0.0.1:28100. Prints how many requests were answered whole, with as many tokens as they asked for, and what became of the others. Needs nothing
but Python.
"""

import argparse
import asyncio
import collections
import json
import random
import shlex
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


async def one(args, model, prompt, tokens, counts):
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

    try:
        counts[await asyncio.wait_for(exchange(), LIMIT_S)] += 1
    except (OSError, asyncio.TimeoutError) as error:
        counts[type(error).__name__] += 1


async def trial(args, model, processes):
    rng = random.Random(args.seed)
    counts, began, requests = collections.Counter(), time.monotonic(), []

    async def kill():
        for number in range(args.workers):
            await asyncio.sleep(args.apart)
            processes[number].kill()
            processes[number].wait()
            await asyncio.sleep(1)
            processes[number] = worker(number)

    killing = asyncio.create_task(kill())
    while time.monotonic() - began < args.apart * (args.workers + 1):
        prompt = f"{len(requests)} " + " ".join(rng.choice(WORDS) for _ in range(rng.randint(50, 3000)))
        requests += [asyncio.create_task(one(args, model, prompt, rng.choice([20, 200]), counts)) for _ in range(8)]
        await asyncio.sleep(rng.expovariate(3))
    await killing
    await asyncio.gather(*requests)
    print(f"{len(requests)} requests: " + ", ".join(f"{count} {what}" for what, count in counts.most_common()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default=OURS, help="command that starts it")
    parser.add_argument("--whole", action="store_true", help="answers in one piece, not as streams")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--apart", type=float, default=6, help="seconds from one kill to the next")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    addresses = [f"127.0.0.1:{28001 + number}" for number in range(args.workers)]
    processes = [worker(number) for number in range(args.workers)]
    router = None
    try:
        for address in addresses:
            wait_for(f"http://{address}/health")
        model = json.loads(wait_for(f"http://{addresses[0]}/v1/models"))["data"][0]["id"]
        command = args.router.format(list=",".join(addresses), urls=" ".join(f"http://{address}" for address in addresses))
        router = subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(f"http://127.0.0.1:{PORT}/v1/models")
        asyncio.run(trial(args, model, processes))
    finally:
        for process in filter(None, [router, *processes]):
            process.terminate()
        for process in filter(None, [router, *processes]):
            process.wait()


if __name__ == "__main__":
    main()
