#!/usr/bin/env python3
"""Holds the rates that bench/gpu/run.sh measured against their goals, and against the ceilings of the same run.

    python3 bench/gpu/goals.py rates.json     prints a table in Markdown, and what sampling takes, which has no goal; exit status 1 when
                                              a goal is missed or was not measured
"""
import json
import sys

# Of the copy's rate; the kernels that memory bounds.
BY_COPY = {"decode_64": 0.8, "decode_128": 0.8, "decode_256": 0.8, "rms_norm": 0.8, "rope_store": 0.8, "silu_mul": 0.8, "embed": 0.8}
# The same of products of few rows: those of one row, by a part of what was measured.
LINEAR = {"products of 1 rows, gate and up": 0.8, "products of 1 rows, down": 0.8}
# TFLOP/s by mma.sync on an H200, head_dim 128, 8k and 16k rows; and of PyTorch's flash attention.
PREFILL = {"prefill_128": 8192, "prefill_128_long": 16384}
PREFILL_TFLOPS, PREFILL_OF_FLASH = 300, 0.9
# By wgmma, of GPUs that have it.
PREFILL_WGMMA = {"prefill_128_wgmma": 8192, "prefill_128_wgmma_long": 16384}
PREFILL_WGMMA_TFLOPS, PREFILL_WGMMA_OF_CUDNN = 540, 1.0
# Of a model of 8e9 parameters in bf16, which every step of decoding reads; at the copy's rate at best.
WEIGHTS_GBYTES = 16


def rows(results):
    """(what, measured, goal, whether it is met) of each goal; None for what was not measured."""
    rates = {}
    for result in results:
        rates.setdefault(result["what"] if result["name"] == "pytorch" and "what" in result else result["name"], result)
    rate = lambda name, unit: rates.get(name, {}).get(unit)
    copy = ceiling(results)
    for name, part in BY_COPY.items():
        yield against(f"{name}, of the copy's {show(copy)} GB/s", ratio(rate(name, "gbytes_per_second"), copy), part)
    for part_of_what, part in LINEAR.items():
        measured = next((result.get("gbytes_per_second") for result in results if part_of_what in result.get("what", "")), None)
        yield against(f"{part_of_what}, of the copy", ratio(measured, copy), part)
    for name, length in PREFILL.items():
        measured, flash = rate(name, "tflops"), rate(f"PyTorch SDPA flash head_dim 128, {length} rows", "tflops")
        yield against(f"{name}, TFLOP/s", measured, PREFILL_TFLOPS)
        yield against(f"{name}, of PyTorch's flash at {show(flash)} TFLOP/s", ratio(measured, flash), PREFILL_OF_FLASH)
    for name, length in PREFILL_WGMMA.items():
        if rate(name, "verdict") == "not here":
            continue
        measured, cudnn = rate(name, "tflops"), rate(f"PyTorch SDPA cuDNN head_dim 128, {length} rows", "tflops")
        yield against(f"{name}, TFLOP/s", measured, PREFILL_WGMMA_TFLOPS)
        yield against(f"{name}, of PyTorch's cuDNN at {show(cudnn)} TFLOP/s", ratio(measured, cudnn), PREFILL_WGMMA_OF_CUDNN)


def sampling(results):
    """A line for each rate of `sample`, for which there is no goal: its time, beside the least that a step of decoding takes."""
    copy = ceiling(results)
    for result in results:
        if result["name"] == "sample" and "microseconds" in result:
            part = ratio(result["microseconds"], WEIGHTS_GBYTES / copy * 1e6 if copy else None)
            yield f"{result['what']}: {result['microseconds']:.0f} µs, no goal; {show(part)} of the time that reading {WEIGHTS_GBYTES} GB of weights takes"


def ceiling(results):
    """The faster copy, ours by the driver or PyTorch's; None when neither was measured."""
    return max((result["gbytes_per_second"] for result in results if is_copy(result) and "gbytes_per_second" in result), default=None)


def is_copy(result):
    return result["name"] == "copy" or (result["name"] == "pytorch" and result.get("what", "").startswith("copy of"))


def ratio(a, b):
    return a / b if a is not None and b else None


def against(what, measured, goal):
    return what, measured, goal, measured is not None and measured >= goal


def show(number):
    return "not measured" if number is None else f"{number:.3g}"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    with open(sys.argv[1]) as file:
        run = json.load(file)
    print(f"{run['gpu']}, commit {run['commit']}{'' if run['complete'] else ', the run was cut off'}\n")
    print("| what | measured | goal | met |\n|---|---|---|---|")
    found = list(rows(run["results"]))
    for what, measured, goal, met in found:
        print(f"| {what} | {show(measured)} | {show(goal)} | {'yes' if met else 'no'} |")
    for line in sampling(run["results"]):
        print(f"\n{line}")
    sys.exit(0 if all(met for *_, met in found) else 1)


if __name__ == "__main__":
    main()
