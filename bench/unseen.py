#!/usr/bin/env python3
"""Traces unlike the workloads that `bench simulate` generates, to see policies on what they were not made for.

    unseen.py OUTDIR WORKERS [SEED] [NAMES,...]

Each is written as OUTDIR/NAME.jsonl, at a pace for so many workers that leaves think times about natural once --load has scaled it.
"""

import heapq
import json
import math
import os
import random
import sys

B = 512
# Requests a second and worker, at about 0.85 of what round_robin completes when everything is offered at once.
RATE = {
    "batch": 3.772,
    "blend": 1.164,
    "coding": 0.234,
    "docs": 1.035,
    "fewshot": 3.045,
    "longlived": 0.562,
    "minute": 3.671,
    "news": 1.586,
    "noreuse": 2.0,
    "onoff": 2.208,
    "rag": 1.424,
    "rank": 0.624,
    "reasoning": 0.436,
    "same": 5.844,
    "subagents": 0.733,
    "tenants": 3.041,
    "tot": 2.797,
}


class T:
    def __init__(self, name, w, seed):
        self.rng = random.Random(f"{name}-{w}-{seed}")
        self.rows, self.next, self.rate = [], 0, w * RATE[name]

    def fresh(self, n):
        self.next += n
        return list(range(self.next - n, self.next))

    def req(self, t, prefix, own, out, session=None):
        """prefix: whole blocks; own: tokens of its own after it. Returns all ids."""
        ids = list(prefix) + self.fresh(-(-own // B))
        row = dict(timestamp=t * 1e3, input_length=len(prefix) * B + own, output_length=max(1, int(out)), hash_ids=ids)
        if session is not None:
            row["session_id"] = session
        self.rows.append(row)
        return ids

    def poisson(self, rate=None):
        t, rate = 0.0, rate or self.rate
        while True:
            t += self.rng.expovariate(rate)
            yield t

    def ln(self, median, sigma, lo, hi):
        return int(min(hi, max(lo, self.rng.lognormvariate(math.log(median), sigma))))


def zipf(n, s):
    w = [1 / (i + 1) ** s for i in range(n)]
    return w


def rag(x, n):
    r = x.rng
    system = x.fresh(1)
    docs = [x.fresh(r.randint(1, 4)) for _ in range(200)]
    w = zipf(200, 1.0)
    for _, t in zip(range(n), x.poisson()):
        picked = []
        while len(picked) < 5:
            d = r.choices(range(200), w)[0]
            if d not in picked:
                picked.append(d)
        x.req(t, system + [i for d in picked for i in docs[d]], r.randint(30, 300), r.randint(80, 400))


def docs(x, n):
    r = x.rng
    # one in ten requests is about a 60k document; a document is asked about 3 to 5 times, 20 to 90 s apart
    for _, t in zip(range(n * 9 // 10), x.poisson(x.rate * 0.9)):
        x.req(t, [], r.randint(200, 1500), r.randint(50, 400))
    end = x.rows[-1]["timestamp"] / 1e3
    made = 0
    s = 0
    while made < n // 10:
        t = r.uniform(-120, end)
        doc = x.fresh(r.randint(100, 134))
        s += 1
        for _ in range(r.randint(3, 5)):
            if 0 <= t <= end:
                x.req(t, doc, r.randint(30, 500), r.randint(100, 600), s)
                made += 1
            t += r.uniform(20, 90)


def tenants(x, n):
    r = x.rng
    systems = [x.fresh(r.randint(4, 16)) for _ in range(50)]
    w = zipf(50, 0.7)
    order = list(range(50))
    r.shuffle(order)
    for _, t in zip(range(n), x.poisson()):
        hot = order[int(t // 180) % 50]
        k = hot if r.random() < 0.4 else r.choices(range(50), w)[0]
        x.req(t, systems[k], r.randint(50, 1500), r.randint(50, 500))


def talk(x, t, system, turns, asked, answered, pause, s, cap=100_000, blocks0=None):
    r = x.rng
    ids = list(system)
    tokens = len(ids) * B
    for _ in range(turns):
        tokens += r.randint(*asked)
        ids = ids + x.fresh(-(-tokens // B) - len(ids))
        out = r.randint(*answered)
        x.rows.append(dict(timestamp=t * 1e3, input_length=tokens, output_length=out, hash_ids=list(ids), session_id=s))
        tokens += out
        if tokens > cap:
            return
        t += pause() + out * 0.02


def geometric(r, mean):
    k = 1
    while r.random() > 1 / mean:
        k += 1
    return k


def onoff(x, n):
    # sessions of 4 turns begin ten times as often for 40 s of every 160 s
    r = x.rng
    systems = [x.fresh(r.randint(1, 6)) for _ in range(10)]
    mean = x.rate / 4
    low = mean / (0.25 * 10 + 0.75)
    t = -160.0
    s = 0
    while t < n / x.rate:
        t += r.expovariate(low * 10)
        if (t % 160) >= 40 and r.random() > 0.1:
            continue
        s += 1
        talk(x, t, r.choice(systems), geometric(r, 4), (50, 1500), (50, 500), lambda: r.expovariate(1 / 8), s)


def reasoning(x, n):
    r = x.rng
    systems = [x.fresh(1) for _ in range(5)]
    for _, t in zip(range(n), x.poisson()):
        x.req(t, r.choice(systems), r.randint(100, 1500), x.ln(3800, 0.4, 2000, 8000))


def batch(x, n):
    r = x.rng
    systems = [x.fresh(r.randint(1, 4)) for _ in range(8)]
    s = 0
    t = -250.0
    end = n / x.rate
    while t < end:
        t += r.expovariate(x.rate / 2 / 5)
        s += 1
        talk(x, t, r.choice(systems), geometric(r, 5), (50, 800), (100, 600), lambda: r.expovariate(1 / 25), s)
    jobs = max(1, round(n / 2 / 500))
    for j in range(jobs):
        t = (j + 0.3 + 0.4 * r.random()) * end / jobs
        prefix = x.fresh(8)
        for _ in range(500):
            x.req(t, prefix, r.randint(100, 1200), r.randint(30, 200))


def coding(x, n):
    # as many agents as the pace wants; each turn 5 to 20 s after the one before; contexts are cut in 1.5 % of turns
    r = x.rng
    systems = [x.fresh(r.randint(16, 32)) for _ in range(3)]
    agents = max(2, round(x.rate * 12.5))
    heap = []
    for a in range(agents):
        base = r.choice(systems)
        ids = base + x.fresh(r.randint(30, 160))
        heapq.heappush(heap, (r.uniform(0, 12), a, base, ids, len(ids) * B))
    while len(x.rows) < n:
        t, a, base, ids, tokens = heapq.heappop(heap)
        if r.random() < 0.015 or tokens > 110_000:
            ids = base + x.fresh(r.randint(20, 50))
            tokens = len(ids) * B
        tokens += r.randint(1000, 3000)
        ids = ids + x.fresh(-(-tokens // B) - len(ids))
        out = x.ln(150, 0.8, 20, 1500)
        x.rows.append(dict(timestamp=t * 1e3, input_length=tokens, output_length=out, hash_ids=list(ids), session_id=a))
        heapq.heappush(heap, (t + r.uniform(5, 20), a, base, ids, tokens))


def noreuse(x, n):
    for _, t in zip(range(n), x.poisson()):
        x.req(t, [], x.ln(1500, 1.3, 20, 100_000), x.ln(180, 1.0, 1, 4000))


def tot(x, n):
    r = x.rng
    t = -40.0
    systems = [x.fresh(2) for _ in range(3)]
    while t < n / x.rate:
        t += r.expovariate(x.rate / 40)
        frontier = [r.choice(systems) + x.fresh(r.randint(2, 8))]
        at = t
        for level in range(3):
            after = []
            for f in frontier:
                kids = [x.req(at, f, r.randint(100, 600), r.randint(150, 500)) for _ in range(8)]
                after.append([i for i in kids])
            at += r.uniform(8, 15)
            chosen = r.sample([k for ks in after for k in ks], 2)
            frontier = [k + x.fresh(1) for k in chosen]


def longlived(x, n):
    # 1 to 4 minutes of thought; sessions are under way when the trace begins
    r = x.rng
    systems = [x.fresh(r.randint(2, 6)) for _ in range(6)]
    sessions = round(x.rate * 150)
    heap = []
    for s in range(sessions):
        ids = r.choice(systems) + x.fresh(r.randint(1, 40))
        heapq.heappush(heap, (r.uniform(0, 150), s, ids, len(ids) * B))
    last = sessions
    while len(x.rows) < n:
        t, s, ids, tokens = heapq.heappop(heap)
        if r.random() < 0.05:
            last += 1
            s = last
            ids = r.choice(systems)
            tokens = len(ids) * B
        tokens += r.randint(50, 1500)
        ids = ids + x.fresh(-(-tokens // B) - len(ids))
        out = r.randint(100, 700)
        x.rows.append(dict(timestamp=t * 1e3, input_length=tokens, output_length=out, hash_ids=list(ids), session_id=s))
        heapq.heappush(heap, (t + r.uniform(60, 240), s, ids, tokens + out))


def same(x, n):
    r = x.rng
    prompt = x.fresh(12)
    for _, t in zip(range(n), x.poisson()):
        x.rows.append(dict(timestamp=t * 1e3, input_length=6000, output_length=r.randint(50, 300), hash_ids=prompt))


def fewshot(x, n):
    # half: one of 4 classifiers, 20k tokens of examples and 1 to 5 tokens out; half: chat
    r = x.rng
    shots = [x.fresh(40) for _ in range(4)]
    w = [8, 4, 2, 1]
    s = 0
    for _, t in zip(range(n // 2), x.poisson(x.rate / 2)):
        x.req(t, r.choices(shots, w)[0], r.randint(50, 800), r.randint(1, 5))
    end = t
    t = -200.0
    while t < end:
        t += r.expovariate(x.rate / 2 / 5)
        s += 1
        talk(x, t, [], geometric(r, 5), (50, 1200), (100, 600), lambda: r.expovariate(1 / 20), s)


def rank(x, n):
    r = x.rng
    for _, t in zip(range(n), x.poisson()):
        x.req(t, [], r.randint(4000, 32000), r.randint(1, 4))


def blend(x, n):
    # 30 % reason for 1,500 to 8,000 tokens, 70 % are short turns of sessions: nobody says which is which
    r = x.rng
    systems = [x.fresh(r.randint(1, 4)) for _ in range(8)]
    s = 0
    for _, t in zip(range(n * 3 // 10), x.poisson(x.rate * 0.3)):
        x.req(t, r.choice(systems), r.randint(100, 2000), x.ln(3000, 0.5, 1500, 8000))
    end = t
    t = -200.0
    while t < end:
        t += r.expovariate(x.rate * 0.7 / 5)
        s += 1
        talk(x, t, r.choice(systems), geometric(r, 5), (50, 1500), (30, 300), lambda: r.expovariate(1 / 20), s)


def news(x, n):
    # an article of 8 to 24k tokens every 30 s; four in five ask about one of the last five
    r = x.rng
    articles = []
    for _, t in zip(range(n), x.poisson()):
        while len(articles) <= t // 30 + 5:
            articles.append(x.fresh(r.randint(16, 48)))
        now = int(t // 30) + 5
        if r.random() < 0.8:
            x.req(t, articles[now - min(4, int(r.expovariate(0.8)))], r.randint(30, 400), r.randint(100, 400))
        else:
            x.req(t, [], r.randint(300, 12000), r.randint(100, 400))


def minute(x, n):
    # cron: half of all come at full minutes, of 30 tenants; the others any time
    r = x.rng
    systems = [x.fresh(r.randint(2, 10)) for _ in range(30)]
    for _, t in zip(range(n), x.poisson()):
        k = r.randrange(30)
        if k % 2:
            t = round(t / 60) * 60 + k * 0.01
        x.req(t, systems[k], r.randint(100, 2500), r.randint(50, 400))


def subagents(x, n):
    # an agent of 10 to 40k tokens forks five helpers with all of its context, which take four turns each
    r = x.rng
    systems = [x.fresh(r.randint(10, 20)) for _ in range(3)]
    t = -60.0
    s = 0
    while t < n / x.rate:
        t += r.expovariate(x.rate / 24)
        base = r.choice(systems) + x.fresh(r.randint(10, 60))
        x.req(t, base, r.randint(200, 800), 150, s)
        for k in range(5):
            s += 1
            talk(x, t + 5 + r.random() * 0.2, base, 4, (500, 2500), (50, 300), lambda: r.uniform(3, 10), s)
        x.req(t + 60, base, r.randint(2000, 6000), 400, s + 1)
        s += 2


SIZE = {4: 5000, 16: 8000, 64: 10000}
SMALL = dict(coding=0.8, docs=1.0, reasoning=0.8, rank=0.8, subagents=0.8)
if __name__ == "__main__":
    out, w = sys.argv[1], int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    names = sys.argv[4].split(",") if len(sys.argv) > 4 else list(RATE)
    os.makedirs(out, exist_ok=True)
    for name in names:
        n = int(SIZE[w] * SMALL.get(name, 1))
        x = T(name, w, seed)
        globals()[name](x, n)
        x.rows.sort(key=lambda r: r["timestamp"])
        x.rows = [r for r in x.rows if 0 <= r["timestamp"] <= n / x.rate * 1e3]
        t0 = x.rows[0]["timestamp"]
        with open(f"{out}/{name}.jsonl", "w") as f:
            for r in x.rows:
                r["timestamp"] = round(r["timestamp"] - t0, 3)
                f.write(json.dumps(r) + "\n")
        tin = sum(r["input_length"] for r in x.rows) / len(x.rows)
        tout = sum(r["output_length"] for r in x.rows) / len(x.rows)
        seen = set()
        hit = tot_ = 0
        for r in x.rows:
            path = 0
            full = (r["input_length"] - 1) // B
            k = 0
            h = 0
            for i in r["hash_ids"][:full]:
                h = hash((h, i))
                if h in seen:
                    k += 1
                else:
                    break
            hit += k * B
            tot_ += r["input_length"]
            h = 0
            for i in r["hash_ids"][:full]:
                h = hash((h, i))
                seen.add(h)
        d = x.rows[-1]["timestamp"] / 1e3
        print(
            f"{name:10} w{w} {len(x.rows)} requests {d:.0f} s {len(x.rows) / d:.2f}/s in {tin:.0f} out {tout:.0f} reusable {hit / tot_:.2f} longest {max(r['input_length'] + r['output_length'] for r in x.rows)}"
        )
