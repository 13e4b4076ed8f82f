#!/usr/bin/env python3
"""Whether two engines behind a router say what one engine alone says, and what is lost when the one that computes prompts is killed.

    bench/apart/check.py equal ROUTER ALONE            greedy answers of each endpoint, beside those of an engine that is asked directly
    bench/apart/check.py decide ROUTER -               16 short chats, 8 long prompts while these decode, and 3 one by one: which of them are split
    bench/apart/check.py kill ROUTER PID_FILE          streams for 20 s; that process and its group are killed after 5

The model's name is `tiny`. Prints how many answers there were of each kind. Python's own library only.
"""

import collections
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request


def post(base, path, body):
    """Status, the worker that computed the prompt (if it is told), and the body."""
    request = urllib.request.Request(base + path, json.dumps({"model": "tiny", "temperature": 0, **body}).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, reply.headers.get("x-router-prefill-worker"), reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, None, error.read().decode()
    except OSError as error:
        return str(error), None, ""


def words(count, seed):
    return " ".join(f"word{(number * 7 + seed) % 97}" for number in range(count))


def chat(count, seed):
    return {"max_tokens": 12, "ignore_eos": True, "messages": [{"role": "user", "content": words(count, seed)}]}


def said(path, body):
    """What of an answer does not change from one to the next."""
    try:
        reply = json.loads(body)
    except ValueError:
        events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
        return "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", []))
    if "choices" in reply:
        return [choice.get("text") or choice["message"]["content"] for choice in reply["choices"]]
    return reply.get("content") or [part["content"][0]["text"] for part in reply.get("output", [])] or reply.get("error", {}).get("message")


CASES = [
    ("/v1/chat/completions", chat(120, 1)),
    ("/v1/chat/completions", {**chat(120, 2), "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**chat(120, 3), "max_tokens": None, "max_completion_tokens": 24, "min_tokens": 4}),
    ("/v1/chat/completions", {**chat(120, 4), "n": 2, "temperature": 1, "seed": 5}),
    ("/v1/chat/completions", chat(9_000, 5)),
    ("/v1/completions", {"prompt": words(100, 6), "max_tokens": 8, "ignore_eos": True}),
    ("/v1/completions", {"prompt": [words(50, 7), words(60, 8)], "max_tokens": 8, "ignore_eos": True}),
    ("/v1/messages", {"max_tokens": 8, "messages": [{"role": "user", "content": words(90, 9)}]}),
    ("/v1/responses", {"max_output_tokens": 8, "input": words(90, 10)}),
]


def equal(router, alone):
    for path, body in CASES:
        status, prefill, answer = post(router, path, body)
        expected = post(alone, path, body)
        same = (status, said(path, answer)) == (expected[0], said(path, expected[2]))
        print(f"{path:22} {status} split={prefill is not None} {'same' if same else 'DIFFERS: ' + answer[:200]}")
    counts = collections.Counter()

    def compare(seed):
        path, body = "/v1/chat/completions", chat(120, seed)
        (status, prefill, answer), expected = post(router, path, body), post(alone, path, body)
        counts[status, prefill is not None, said(path, answer) == said(path, expected[2])] += 1

    threads = [threading.Thread(target=lambda first=first: [compare(first + turn) for turn in range(6)]) for first in range(100, 140, 10)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print("24 chats, four at a time, by (status, split, same):", dict(counts))


def decide(router, _):
    def ask(kind, words_count, number, tokens):
        body = {**chat(words_count, number), "max_tokens": tokens, "stream": True}
        body["messages"][0]["content"] = f"{number} {time.time()} " + body["messages"][0]["content"]
        status, prefill, _ = post(router, "/v1/chat/completions", body)
        counts[kind, status, prefill is not None] += 1

    counts = collections.Counter()
    short = [threading.Thread(target=ask, args=("short", 20, number, 200)) for number in range(16)]
    long = [threading.Thread(target=ask, args=("long, while 16 decode", 900, number, 8)) for number in range(8)]
    [thread.start() for thread in short]
    time.sleep(1.5)
    [thread.start() for thread in long]
    [thread.join() for thread in short + long]
    for number in range(3):
        ask("long, one by one", 900, number, 8)
    print("by (kind, status, split):", *sorted(counts.items(), key=str), sep="\n  ")


def kill(router, pid_file):
    began, counts, longest = time.monotonic(), collections.Counter(), [0.0]
    passed = lambda: time.monotonic() - began

    def stream(number):
        while passed() < 20:
            when = "before" if passed() < 5 else "after"
            body = {**chat(100, number), "stream": True}
            body["messages"][0]["content"] += f" {number} {passed()}"
            asked = passed()
            status, prefill, answer = post(router, "/v1/chat/completions", body)
            longest[0] = max(longest[0], passed() - asked)
            whole = answer.rstrip().endswith("[DONE]") and '"error"' not in answer
            counts[when, status, prefill is not None, whole] += 1
            if status != 200:
                # A router that is not there would be asked a hundred thousand times.
                time.sleep(0.1)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    time.sleep(5)
    with open(pid_file) as file:
        # With what it has started: an engine is several processes.
        os.killpg(int(file.read()), signal.SIGKILL)
    [thread.join() for thread in threads]
    print("streams, by (before or after the kill, status, split, whole):", *sorted(counts.items(), key=str), sep="\n  ")
    print(f"the longest took {longest[0]:.1f} s")


if __name__ == "__main__":
    modes = {"equal": equal, "decide": decide, "kill": kill}
    if len(sys.argv) != 4 or sys.argv[1] not in modes:
        sys.exit(__doc__)
    modes[sys.argv[1]](*sys.argv[2:])
