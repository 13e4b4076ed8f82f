#!/usr/bin/env python3
"""Traces for what priorities, tenants and the background are worth, from Mooncake's conversation trace.

    python3 bench/precedence.py conversation_trace.jsonl OUT

writes OUT/documents.jsonl: 60,000 documents, each read once, 3,100 tokens and answers of 260 on average, all there at once;
OUT/waves.jsonl: the conversations, 1.6 and 0.4 times as many as usual for five minutes each, in turn;
OUT/flood.jsonl: the conversations, every fourth request being tenant 1's, and the others tenant 2's, who sends all of his within two quarters of the hour.
"""

import json
import random
import sys
from pathlib import Path

BLOCK_TOKENS = 512
MANY, FEW, HALF_S = 1.6, 0.4, 300.0


def documents(count=60_000, seed=7):
    draw = random.Random(seed)
    first = 0
    for _ in range(count):
        length = int(min(16_000, max(200, draw.lognormvariate(7.8, 0.7))))
        answer = int(min(2_000, max(16, draw.lognormvariate(5.4, 0.6))))
        blocks = -(-length // BLOCK_TOKENS)
        yield {"timestamp": 0, "input_length": length, "output_length": answer, "hash_ids": list(range(first, first + blocks))}
        first += blocks


def waves(lines):
    """What has come by a time at the usual rate comes by another one."""
    period = (MANY + FEW) * HALF_S
    for line in lines:
        number, rest = divmod(line["timestamp"] / 1e3, period)
        high = MANY * HALF_S
        within = rest / MANY if rest < high else HALF_S + (rest - high) / FEW
        yield {**line, "timestamp": (2 * HALF_S * number + within) * 1e3}


def flood(lines):
    def at_s(number, time_s):
        if number % 4 == 0:
            return time_s
        time_s /= 2
        return 600 + time_s if time_s < 900 else 1_200 + time_s

    for number, line in enumerate(lines):
        tenant = 1 if number % 4 == 0 else 2
        yield {**line, "tenant": tenant, "timestamp": at_s(number, line["timestamp"] / 1e3) * 1e3}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    lines = [json.loads(line) for line in open(sys.argv[1])]
    out = Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    for name, made in [("documents", documents()), ("waves", waves(lines)), ("flood", flood(lines))]:
        made = sorted(made, key=lambda line: line["timestamp"])
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))


main()
