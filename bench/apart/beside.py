#!/usr/bin/env python3
"""Figures of fleets in which some workers only compute prompts, beside those of the same fleets without: geometric means over all cells.

    bench/apart/beside.py WHOLE.json SPLIT.json [WORKLOAD ...]

Both as `bench simulate --json` writes them. Of WHOLE, `prefix_aware` is what all are divided by. Python's own library only.
"""
import collections
import json
import math
import sys

KEYS = {"mean TTFT": "mean_ttft_ms", "P99 TTFT": "p99_ttft_ms", "mean E2E": "mean_e2e_ms", "P99 TPOT": "p99_tpot_ms", "goodput": "goodput_rps"}


def lines(path):
    for line in map(json.loads, open(path)):
        workload, _, prefill = line["trace"].partition("+")
        yield (workload, line["load"], line["workers"], line["blocks"], line["seed"]), prefill, line


def main(whole, split, workloads):
    beside = {cell: line for cell, _, line in lines(whole) if line["policy"] == "prefix_aware"}
    ratios = collections.defaultdict(list)
    for cell, prefill, line in lines(split):
        if not workloads or cell[0] in workloads:
            ratios[line["policy"], prefill].append([line[key] / max(beside[cell][key], 1e-9) for key in KEYS.values()] + [line.get("split", 0.0)])
    worst = ["worst TTFT", "worst E2E"]
    print(f"{'policy, prefill workers':<36}", *(f"{key:>10}" for key in [*KEYS, *worst]), f"{'split':>6}")
    for (policy, prefill), rows in sorted(ratios.items(), key=lambda item: item[0]):
        means = [math.exp(sum(math.log(max(row[at], 1e-9)) for row in rows) / len(rows)) for at in range(len(KEYS))]
        share = sum(row[-1] for row in rows) / len(rows)
        worst = [max(row[at] for row in rows) for at in (0, 2)]
        print(f"{policy + ', ' + prefill:<36}", *(f"{mean:>10.3f}" for mean in means + worst), f"{share:>6.0%}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
