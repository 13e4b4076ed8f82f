#!/usr/bin/env python3
"""What it is worth that an engine is told who goes first, beside that the router lets them go in order.

    priority.py OUT.json NAME=ROUTER_URL … [--clients N] [--seconds N] [--rounds N] [--every S]

So many clients send one stream after another through each router in turn, `--rounds` times; beside them one sends a short prompt with
`x-request-priority: 5` every so many seconds. Printed are its times to the first token and to the end, and those of the others.
"""
import argparse
import json
import random
import statistics
import threading
import time

from strangers import stream, words


def run(url, args, seed):
    ends = time.monotonic() + args.seconds
    usual, important, errors = [], [], []

    def send(results, *request):
        try:
            results.append(stream(url, "tiny", *request)[:2])
        except OSError as error:
            errors.append(str(error))

    def client(number):
        rng = random.Random(seed * 1_000 + number)
        while time.monotonic() < ends:
            send(usual, words(rng, rng.randrange(50, 400)), rng.randrange(32, 96), {})

    threads = [threading.Thread(target=client, args=(number,)) for number in range(args.clients)]
    for thread in threads:
        thread.start()
    rng = random.Random(seed)
    while time.monotonic() < ends - args.every:
        time.sleep(args.every)
        send(important, words(rng, 50), 8, {"x-request-priority": "5"})
    for thread in threads:
        thread.join()
    mean = lambda values: round(1e3 * statistics.mean(values), 1) if values else None
    figures = lambda results: {
        "requests": len(results),
        "mean_ttft_ms": mean([first for first, _ in results]),
        "worst_ttft_ms": round(1e3 * max((first for first, _ in results), default=0), 1),
        "mean_e2e_ms": mean([whole for _, whole in results]),
    }
    return {"important": figures(important), "usual": figures(usual), "errors": len(errors)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("routers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=float, default=1)
    args = parser.parse_args()
    with open(args.out, "w") as out:
        for number in range(args.rounds):
            for name, url in (router.split("=", 1) for router in args.routers):
                row = {"router": name, "round": number, **run(url, args, number)}
                print(json.dumps(row), file=out, flush=True)
                print(row, flush=True)


if __name__ == "__main__":
    main()
