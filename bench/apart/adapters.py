#!/usr/bin/env python3
"""Requests for adapters through routers in front of engines that compute few of them side by side (`engines.sh adapters`).

    adapters.py OUT.json NAME=ROUTER_URL … [--clients N] [--adapters N] [--seconds N] [--rounds N]

So many clients send streams through each router in turn, `--rounds` times, each one after the other without a pause, for the nth adapter with a weight of 1/n.
Printed are times to the first token and to the end, and how many requests went to each engine.
"""
import argparse
import json
import random
import statistics
import threading
import time
from collections import Counter

from strangers import stream, words


def run(router, args, seed):
    results, errors = [], []
    ends = time.monotonic() + args.seconds
    adapters = [f"a{number}" for number in range(args.adapters)]
    weights = [1 / (number + 1) for number in range(args.adapters)]

    def client(number):
        rng = random.Random(seed * 1_000 + number)
        while time.monotonic() < ends:
            adapter = rng.choices(adapters, weights)[0]
            try:
                results.append(stream(router, adapter, words(rng, rng.randrange(20, 150)), rng.randrange(16, 64)))
            except OSError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(args.clients)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    firsts = sorted(first for first, _, _ in results if first is not None)
    return {
        "requests": len(results),
        "errors": len(errors),
        "mean_ttft_ms": statistics.mean(firsts) * 1e3,
        "p99_ttft_ms": firsts[int(len(firsts) * 0.99)] * 1e3,
        "mean_e2e_ms": statistics.mean(end for _, end, _ in results) * 1e3,
        "workers": Counter(worker for _, _, worker in results),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("routers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for number in range(args.rounds):
        for name, url in (router.split("=", 1) for router in args.routers):
            rows.append({"router": name, "round": number, **run(url, args, number)})
            print(json.dumps(rows[-1]), flush=True)
    with open(args.out, "w") as file:
        json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
