#!/usr/bin/env python3
"""What it is worth that a router follows the cache events of engines, before engines that nobody here wrote.

    events.py OUT.json NAME=ROUTER_URL … --engines URL,URL [--sessions N] [--turns N] [--strangers SHARE] [--floods N] [--clients N] [--rounds N]

Sessions of several turns go through each router in turn, `--rounds` times, with the engines' caches emptied before (`/reset_prefix_cache`, which vLLM has in
its development mode); beside them strangers send prompts of their own to the engines, so many for each request of ours; with `--floods N`, in N times of one engine alone. Counted are
prompt tokens that the engines found cached, how far what the router had expected there was from that, and the times of whole answers of 4 tokens.
"""
import argparse
import concurrent.futures
import json
import random
import statistics
import threading
import time
import urllib.error
import urllib.request


def post(url, body, timeout=120):
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return reply.read(), reply.headers


def empty(url):
    """SGLang empties its cache only where nothing runs, and probes are something."""
    for _ in range(50):
        try:
            return post(url, None)
        except urllib.error.HTTPError:
            time.sleep(0.1)
    return post(url, None)


def words(rng, count, times=1):
    count *= times
    return " ".join(f"{rng.choice('bcdfgklmnprstvz')}{rng.choice('aeiou')}{rng.randrange(1000)}" for _ in range(count))


def run(router, args, seed):
    for engine in args.engines:
        empty(engine + args.reset)
    rng = random.Random(seed)
    system = words(rng, 30, args.words)
    sessions = [system + " " + words(rng, rng.randrange(20, 160), args.words) for _ in range(args.sessions)]
    turns = [(session, turn) for turn in range(args.turns) for session in range(args.sessions)]
    # Sessions come back at times of their own.
    turns.sort(key=lambda each: each[1] + rng.random() * 1.8)
    order, last = [], {}
    for session, _ in turns:
        order.append((session, last.get(session, 0)))
        last[session] = last.get(session, 0) + 1
    done = [threading.Event() for _ in order]
    index = {each: at for at, each in enumerate(order)}
    grown = [[words(rng, rng.randrange(20, 80), args.words) for _ in range(args.turns)] for _ in sessions]
    strange = [words(rng, rng.randrange(100, 400), args.words) for _ in range(int(len(order) * args.strangers))]
    anyone = [rng.randrange(len(args.engines)) for _ in strange]
    results = [None] * len(order)

    def ask(at):
        session, turn = order[at]
        if turn:
            done[index[(session, turn - 1)]].wait(120)
        prompt = " ".join([sessions[session]] + grown[session][:turn])
        began = time.monotonic()
        try:
            body, headers = post(router + "/v1/completions",
                                 {"model": args.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True})
            usage = json.loads(body)["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            results[at] = (usage["prompt_tokens"], cached, int(headers["x-router-hit-tokens"]), time.monotonic() - began)
        finally:
            done[at].set()

    def bother(at):
        # Any engine, or one after the other, a while each: what is cached there goes, and what is cached elsewhere stays.
        turn = at * args.floods // len(strange) if args.floods else anyone[at]
        engine = args.engines[turn % len(args.engines)]
        post(engine + "/v1/completions", {"model": args.model, "prompt": strange[at], "max_tokens": 1})

    with concurrent.futures.ThreadPoolExecutor(args.clients) as ours, concurrent.futures.ThreadPoolExecutor(1) as theirs:
        waiting, strangers = [], 0
        for at in range(len(order)):
            waiting.append(ours.submit(ask, at))
            while strangers < len(strange) and strangers < (at + 1) * args.strangers:
                waiting.append(theirs.submit(bother, strangers))
                strangers += 1
            while sum(not each.done() for each in waiting[-3 * args.clients:]) >= args.clients + 1:
                time.sleep(0.002)
        for each in waiting:
            each.result()
    tokens, cached, expected, times = zip(*results)
    return {
        "requests": len(results),
        "cached_share": sum(cached) / sum(tokens),
        "off_by_tokens": statistics.mean(abs(a - b) for a, b in zip(cached, expected)),
        "expected_too_much": sum(max(b - a - 64, 0) for a, b in zip(cached, expected)) / sum(tokens),
        "mean_ms": 1e3 * statistics.mean(times),
        "p99_ms": 1e3 * sorted(times)[int(len(times) * 0.99)],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("routers", nargs="+")
    parser.add_argument("--engines", required=True, type=lambda text: text.split(","))
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--reset", default="/reset_prefix_cache")
    parser.add_argument("--words", type=int, default=1, help="times as many words in every prompt")
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--strangers", type=float, default=0.5)
    parser.add_argument("--floods", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    routers = [text.split("=", 1) for text in args.routers]
    rows = []
    for round_number in range(args.rounds):
        for name, url in routers if round_number % 2 == 0 else reversed(routers):
            row = {"router": name, "round": round_number, "strangers": args.strangers, **run(url, args, round_number)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    with open(args.out, "w") as file:
        json.dump(rows, file, indent=1)
    for name, _ in routers:
        own = [row for row in rows if row["router"] == name]
        mean = lambda key: statistics.mean(row[key] for row in own)
        print(f"{name}: {100 * mean('cached_share'):.1f} % cached, off by {mean('off_by_tokens'):.0f} tokens a request, "
              f"{mean('mean_ms'):.0f} ms, P99 {mean('p99_ms'):.0f} ms")


main()
