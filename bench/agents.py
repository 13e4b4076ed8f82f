#!/usr/bin/env python3
"""Agents that talk to an OpenAI-compatible server, in a closed loop: what becomes of them when their sessions do not all fit into its KV cache.

    bench/agents.py URL --model NAME --sessions 12 --seconds 110 --seed 1

Each session asks 5 to 9 times, some seconds after each answer, with all that was said before; then another begins. Prints, of the turns after the
first quarter of the time: turns a second, time to the first token and to the last in seconds, prompt tokens, and the share of them that the server says
it found in its cache. Needs aiohttp, and a server that answers `stream_options.include_usage` with `cached_tokens` (vLLM: --enable-prompt-tokens-details).
"""

import argparse
import asyncio
import json
import random
import time

import aiohttp

WARM_UP_SHARE = 0.25
PAUSE_S = 4.0
TURN_LIMIT_S = 300


def words(rng, count):
    """So many words that nobody has said before, of about one token and a half each."""
    syllable = lambda: rng.choice("bcdfglmnprst") + rng.choice("aeiou")
    return " ".join("".join(syllable() for _ in range(rng.randint(1, 3))) for _ in range(count))


async def turn(http, args, messages):
    """Asks once. Returns seconds to the first token, to the last, prompt tokens, cached ones, and the answer."""
    body = {
        "model": args.model, "messages": messages, "max_tokens": 24, "ignore_eos": True, "temperature": 0.8,
        "stream": True, "stream_options": {"include_usage": True},
    }
    began, first, usage, answer = time.monotonic(), None, {}, ""
    async with http.post(args.url + "/v1/chat/completions", json=body) as reply:
        if reply.status != 200:
            raise SystemExit(f"{reply.status}: {(await reply.text())[:300]}")
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", []):
                first = first or time.monotonic() - began
                answer += choice["delta"].get("content") or ""
            usage = event.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return first, time.monotonic() - began, usage["prompt_tokens"], cached, answer


async def sessions(http, args, rng, begun, turns):
    """One session after the other, until time is up."""
    await asyncio.sleep(rng.random() * PAUSE_S)
    while True:
        messages = [{"role": "user", "content": words(rng, rng.randint(400, 700))}]
        for _ in range(rng.randint(5, 9)):
            at = time.monotonic() - begun
            if at > args.seconds:
                return
            *figures, answer = await turn(http, args, messages)
            turns.append((at, *figures))
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": words(rng, rng.randint(100, 250))})
            await asyncio.sleep(rng.expovariate(1 / PAUSE_S))


async def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    turns, begun = [], time.monotonic()
    limits = {"timeout": aiohttp.ClientTimeout(total=TURN_LIMIT_S), "connector": aiohttp.TCPConnector(limit=0)}
    async with aiohttp.ClientSession(**limits) as http:
        rngs = [random.Random(f"{args.seed}.{number}") for number in range(args.sessions)]
        await asyncio.gather(*(sessions(http, args, rng, begun, turns) for rng in rngs))
    counted = [one for one in turns if one[0] > WARM_UP_SHARE * args.seconds]
    if not counted:
        raise SystemExit("no turn ended after the first quarter of the time: give it more --seconds")
    firsts = sorted(one[1] for one in counted)
    mean = lambda at: sum(one[at] for one in counted) / len(counted)
    print(
        f"{len(counted) / (args.seconds * (1 - WARM_UP_SHARE)):.2f} turns/s, TTFT mean {mean(1):.2f} P50 {firsts[len(firsts) // 2]:.2f} "
        f"P99 {firsts[int(len(firsts) * 0.99)]:.2f}, E2E mean {mean(2):.2f}, prompt {mean(3):.0f}, cached {mean(4) / mean(3):.3f}"
    )


asyncio.run(main())
