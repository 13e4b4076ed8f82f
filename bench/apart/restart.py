#!/usr/bin/env python3
"""What a router that is replaced costs, before engines that keep their caches meanwhile.

    restart.py ROUTER ENGINE_URL,ENGINE_URL [--sessions N] [--turns N] [--rounds N]

Sessions go through a router, one request at a time; after half of their turns the router is told to end (SIGTERM) and started again, with
`--prefix-state-file` and without, in turn; the engines' caches are emptied before each run (vLLM's development mode). Counted are the prompt tokens that
the engines found cached in the turn before the restart and in the one after it. ROUTER is the program; it listens at 18400.
"""
import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
import urllib.request


def post(url, body):
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read(), reply.headers


def start(args, flags):
    command = [args.router, "--port", "18400", "--admin-listen", "127.0.0.1:18401", "--workers", ",".join(args.engines), "--drain-delay", "0s",
               "--log-level", "warn", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while True:
        try:
            workers = json.load(urllib.request.urlopen("http://127.0.0.1:18401/workers"))["workers"]
            if all(worker["up"] for worker in workers):
                time.sleep(0.5)
                return process
        except OSError:
            pass
        time.sleep(0.05)


def stop(process):
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def run(args, flags, seed):
    for engine in args.engines:
        post(engine + "/reset_prefix_cache", None)
    rng = random.Random(seed)
    words = lambda count: " ".join(f"{rng.choice('bcdfgklmn')}{rng.choice('aeiou')}{rng.randrange(1000)}" for _ in range(count))
    texts = [words(60) for _ in range(args.sessions)]
    shares = []
    process = start(args, flags)
    for turn in range(args.turns):
        if turn == args.turns // 2:
            stop(process)
            process = start(args, flags)
        tokens = cached = 0
        for session in rng.sample(range(args.sessions), args.sessions):
            body, _ = post("http://127.0.0.1:18400/v1/completions", {"model": "tiny", "prompt": texts[session], "max_tokens": 1})
            usage = json.loads(body)["usage"]
            tokens += usage["prompt_tokens"]
            cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            texts[session] += " " + words(12)
        shares.append(cached / tokens)
    stop(process)
    return shares


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("router")
    parser.add_argument("engines", type=lambda text: text.split(","))
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for name, flags in [("with", ["--prefix-state-file", os.path.join(folder, "state")]), ("without", [])]:
                shares = run(args, flags, number)
                print(f"{name}: " + " ".join(f"{100 * share:.0f}" for share in shares) + " % cached by turn", flush=True)


main()
