#!/usr/bin/env python3
"""How much of its prompts an engine with data-parallel ranks finds cached: sessions of some turns, one request at a time, each turn the one before and more.

    bench/apart/ranks.py http://127.0.0.1:30000 [SESSIONS] [TURNS]

Prints tokens as the engine's usage tells them, by the worker that answered. Prompts differ from run to run, so that no run finds another's.
"""
import json
import random
import sys
import time
import urllib.request
from collections import Counter

base = sys.argv[1]
sessions, turns = (int(text) for text in (sys.argv[2:4] or ["12", "6"]))
words = "river stone lantern orchard signal copper meadow harbour winter thread".split()
run = time.time_ns()


def text(session, turn):
    draw = random.Random(f"{run} {session} {turn}")
    return f"{session} {turn} " + " ".join(draw.choice(words) for _ in range(120))


def ask(prompt):
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{base}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        usage = json.load(reply)["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return reply.headers["x-router-worker"], usage["prompt_tokens"], cached


requests, prompt_tokens, cached_tokens = Counter(), Counter(), Counter()
most = 0
histories = [""] * sessions
order = random.Random(7)
for turn in range(turns):
    for session in order.sample(range(sessions), sessions):
        before = len(histories[session])
        histories[session] += text(session, turn)
        worker, prompt, cached = ask(histories[session])
        requests[worker] += 1
        prompt_tokens[worker] += prompt
        cached_tokens[worker] += cached
        most += prompt * before / len(histories[session])
for worker in sorted(requests, key=str):
    print(f"{worker}: {requests[worker]} requests, {cached_tokens[worker]} of {prompt_tokens[worker]} prompt tokens cached")
total = sum(prompt_tokens.values())
print(f"all: {sum(cached_tokens.values()) / total:.1%} cached; {most / total:.1%} had been sent before")
