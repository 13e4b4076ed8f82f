#!/usr/bin/env python3
"""What it is worth that a router asks engines how many requests they have, before engines that others use too.

    strangers.py OUT.json NAME=ROUTER_URL … --engines URL,URL [--clients N] [--strangers N] [--seconds N] [--rounds N]

So many clients send streams through each router in turn, `--rounds` times, one after the other without a pause; all the while so many strangers do the
same at the first engine itself. Printed are our clients' times to the first token and to the end, and how many of their requests went to each engine.
"""
import argparse
import json
import random
import statistics
import threading
import time
import urllib.request
from collections import Counter


def words(rng, count):
    return " ".join(f"{rng.choice('bcdfgklmnprstvz')}{rng.choice('aeiou')}{rng.randrange(1000)}" for _ in range(count))


def stream(url, model, prompt, tokens, headers={}):
    """Seconds to the first token and to the end, and who answered."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json", **headers})
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as reply:
        first = None
        for line in reply:
            if first is None and line.startswith(b"data: {"):
                first = time.monotonic() - began
        return first, time.monotonic() - began, reply.headers.get("x-router-worker")


def loop(until, rng, ask):
    while time.monotonic() < until:
        ask(words(rng, rng.randrange(50, 400)), rng.randrange(16, 64))


def run(router, args, seed):
    results, errors = [], []
    ends = time.monotonic() + args.lead + args.seconds

    def ours(prompt, tokens):
        counts = time.monotonic() > ends - args.seconds
        try:
            result = stream(router, args.model, prompt, tokens)
            if counts:
                results.append(result)
        except OSError as error:
            errors.append(str(error))

    def strangers(prompt, tokens):
        try:
            stream(args.engines[0], args.model, prompt, tokens)
        except OSError as error:
            errors.append(str(error))

    loops = [(ours, number) for number in range(args.clients)] + [(strangers, 1_000 + number) for number in range(args.strangers)]
    threads = [threading.Thread(target=loop, args=(ends, random.Random(seed * 10_000 + number), ask)) for ask, number in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    firsts, wholes = sorted(r[0] for r in results), [r[1] for r in results]
    return {
        "requests": len(results),
        "errors": len(errors),
        "mean_ttft_ms": round(1e3 * statistics.mean(firsts), 1),
        "p99_ttft_ms": round(1e3 * firsts[int(0.99 * (len(firsts) - 1))], 1),
        "mean_e2e_ms": round(1e3 * statistics.mean(wholes), 1),
        "workers": Counter(r[2] for r in results),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("routers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--engines", type=lambda text: text.split(","), required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--strangers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--lead", type=float, default=10, help="seconds that do not count, at the beginning of each run")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with open(args.out, "w") as out:
        for number in range(args.rounds):
            for name, url in (router.split("=", 1) for router in args.routers):
                result = {"router": name, "round": number, "strangers": args.strangers, **run(url, args, number)}
                print(json.dumps(result), flush=True)
                print(json.dumps(result), file=out, flush=True)


if __name__ == "__main__":
    main()
