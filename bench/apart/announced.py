#!/usr/bin/env python3
"""Requests at OpenAI's responses API that a real engine has announced and not computed when it is killed: what becomes of them.

    bench/apart/engines.sh events DIR
    router --port 30710 --workers 127.0.0.1:18201,127.0.0.1:18202 &
    bench/apart/announced.py http://127.0.0.1:30710 DIR [REQUESTS]

So many (24) prompts of 3,000 words are sent at once; after 0.7 s the second engine gets SIGKILL. An engine says that a response is created and in
progress as soon as it has read the request. Prints how many answers were whole, and how the others ended. Start the engines anew before the next one.
Needs nothing but Python.
"""

import collections
import concurrent.futures
import json
import os
import random
import signal
import sys
import time
import urllib.error
import urllib.request

WORDS = "alpha beta gamma delta river stone cloud train wheel light paper green".split()
ANNOUNCED = ["response.created", "response.in_progress"]
KILL_AFTER_S = 0.7


def ask(url, number):
    drawn = random.Random(number)
    prompt = " ".join(drawn.choice(WORDS) for _ in range(3_000))
    body = {"model": "tiny", "input": prompt, "stream": True, "max_output_tokens": 4, "temperature": 0}
    call = urllib.request.Request(url + "/v1/responses", json.dumps(body).encode(), {"content-type": "application/json"})
    events = []
    try:
        with urllib.request.urlopen(call, timeout=120) as reply:
            events = [line[7:].strip().decode() for line in reply if line.startswith(b"event: ")]
    except urllib.error.HTTPError as error:
        return f"status {error.code}"
    except OSError as error:
        events.append(type(error).__name__)
    if events and events[-1] == "response.completed":
        return "whole"
    has_begun = any(event.startswith("response.") and event not in ANNOUNCED for event in events)
    return f"broken off {'after it had begun' if has_begun else 'having been announced'}"


def main():
    url, folder, *rest = sys.argv[1:]
    requests = int(rest[0]) if rest else 24
    with concurrent.futures.ThreadPoolExecutor(requests) as pool:
        answers = [pool.submit(ask, url, number) for number in range(requests)]
        time.sleep(KILL_AFTER_S)
        os.killpg(int(open(f"{folder}/two.pid").read()), signal.SIGKILL)
        for ended, count in collections.Counter(answer.result() for answer in answers).most_common():
            print(f"{count} of {requests} {ended}")


if __name__ == "__main__":
    main()
