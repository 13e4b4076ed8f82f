"""Writes the golden tables and JSON lines from records.json, with numpy and the formulas of bench/README.md.

Independent of the Rust code on purpose: `python3 reference.py` beside records.json.
"""

import json
import pathlib

import numpy as np

HERE = pathlib.Path(__file__).parent
SLO_MS = {"ttft": 250, "tpot": 100}


def table(title):
    return ["{s:{c}^{n}}".format(s=f" {title} ", n=50, c="=")]


def row(lines, label, value, form):
    lines.append(("{:<40} {:<10" + form + "}").format(label, value))


def section(lines, title):
    lines.append("{s:{c}^{n}}".format(s=title, n=50, c="-"))


run = json.loads((HERE / "records.json").read_text())
D = run["duration_s"]
ok = [r for r in run["requests"] if "failure" not in r]
failed = len(run["requests"]) - len(ok)
for r in ok:
    r["latency_ms"] = r["ttft_ms"] + sum(r["itls_ms"])
    r["tpot_ms"] = sum(r["itls_ms"]) / (r["completion"] - 1) if r["completion"] > 1 else None

series = {
    "ttft": [r["ttft_ms"] for r in ok],
    "tpot": [r["tpot_ms"] for r in ok if r["tpot_ms"] is not None],
    "itl": [gap for r in ok for gap in r["itls_ms"]],
    "e2el": [r["latency_ms"] for r in ok],
}
total_in = sum(r["prompt"] for r in ok)
total_out = sum(r["completion"] for r in ok)
retok = sum(r["retokenized"] for r in ok)
good = sum(r["ttft_ms"] <= SLO_MS["ttft"] and (r["tpot_ms"] or 0) <= SLO_MS["tpot"] for r in ok)

first = min(r["start_ms"] for r in ok)
tokens, running = np.zeros(10), np.zeros(10, dtype=int)
for r in ok:
    at = r["start_ms"] - first
    running[int(at // 1000) : int((at + r["latency_ms"]) // 1000) + 1] += 1
    at += r["ttft_ms"]
    for gap in [0] + r["itls_ms"]:
        at += gap
        tokens[int(at // 1000)] += 1
concurrency = sum(r["latency_ms"] for r in ok) / 1000 / D


def latency(lines, name, values, percentiles):
    row(lines, f"Mean {name} (ms):", np.mean(values), ".2f")
    row(lines, f"Median {name} (ms):", np.median(values), ".2f")
    for p in percentiles:
        row(lines, f"P{p} {name} (ms):", np.percentile(values, p), ".2f")


def cache(lines):
    cached, prompt = sum(r["cached"] for r in ok), sum(r["prompt"] for r in ok)
    section(lines, "Cache Hit Details")
    row(lines, "Total cached tokens:", cached, "")
    row(lines, "Total prompt tokens (usage):", prompt, "")
    row(lines, "Cache hit rate (%):", 100 * cached / prompt, ".2f")
    row(lines, "Predicted hit tokens (router):", sum(r["predicted"] for r in ok), "")
    for worker in sorted({r["worker"] for r in ok}):
        row(lines, f"Requests on {worker}:", sum(r["worker"] == worker for r in ok), "")


def sglang():
    out = table("Serving Benchmark Result")
    row(out, "Backend:", "sglang-oai-chat", "")
    row(out, "Traffic request rate:", 20.0, "")
    row(out, "Max request concurrency:", "not set", "")
    row(out, "Successful requests:", len(ok), "")
    row(out, "Benchmark duration (s):", D, ".2f")
    row(out, "Total input tokens:", total_in, "")
    row(out, "Total input text tokens:", total_in, "")
    row(out, "Total generated tokens:", total_out, "")
    row(out, "Total generated tokens (retokenized):", retok, "")
    row(out, "Request throughput (req/s):", len(ok) / D, ".2f")
    row(out, "Input token throughput (tok/s):", total_in / D, ".2f")
    row(out, "Output token throughput (tok/s):", total_out / D, ".2f")
    row(out, "Peak output token throughput (tok/s):", tokens.max(), ".2f")
    row(out, "Peak concurrent requests:", int(running.max()), "")
    row(out, "Total token throughput (tok/s):", (total_in + total_out) / D, ".2f")
    row(out, "Concurrency:", concurrency, ".2f")
    section(out, "Goodput")
    row(out, "Good requests:", good, "")
    row(out, "Request goodput (req/s):", good / D, ".2f")
    for title, name, key in [
        ("End-to-End Latency", "E2E Latency", "e2el"),
        ("Time to First Token", "TTFT", "ttft"),
        ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
        ("Inter-Token Latency", "ITL", "itl"),
    ]:
        section(out, title)
        latency(out, name, series[key], [90, 95, 99])
    row(out, "Max ITL (ms):", np.max(series["itl"]), ".2f")
    cache(out)
    return out + ["=" * 50]


def vllm():
    out = table("Serving Benchmark Result")
    row(out, "Successful requests:", len(ok), "")
    row(out, "Failed requests:", failed, "")
    row(out, "Maximum request concurrency:", 8, "")
    row(out, "Request rate configured (RPS):", 20.0, ".2f")
    row(out, "Benchmark duration (s):", D, ".2f")
    row(out, "Total input tokens:", total_in, "")
    row(out, "Total generated tokens:", total_out, "")
    row(out, "Request throughput (req/s):", len(ok) / D, ".2f")
    row(out, "Request goodput (req/s):", good / D, ".2f")
    row(out, "Output token throughput (tok/s):", total_out / D, ".2f")
    row(out, "Peak output token throughput (tok/s):", tokens.max(), ".2f")
    row(out, "Peak concurrent requests:", float(running.max()), ".2f")
    row(out, "Total token throughput (tok/s):", (total_in + total_out) / D, ".2f")
    for title, name, key in [
        ("Time to First Token", "TTFT", "ttft"),
        ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
        ("Inter-token Latency", "ITL", "itl"),
        ("End-to-end Latency", "E2EL", "e2el"),
    ]:
        section(out, title)
        latency(out, name, series[key], [50, 99.9])
    cache(out)
    return out + ["=" * 50]


def figures():
    result = {
        "duration": D, "completed": len(ok), "total_input_tokens": total_in, "total_output_tokens": total_out,
        "total_output_tokens_retokenized": retok, "request_throughput": len(ok) / D, "input_throughput": total_in / D,
        "output_throughput": total_out / D, "total_throughput": (total_in + total_out) / D,
        "concurrency": concurrency, "max_output_tokens_per_s": float(tokens.max()),
        "max_concurrent_requests": int(running.max()), "request_goodput": good / D,
    }
    for key, name in [("e2el", "e2e_latency"), ("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl")]:
        values = series[key]
        result |= {f"mean_{name}_ms": np.mean(values), f"median_{name}_ms": np.median(values)}
        result |= {f"std_{name}_ms": np.std(values)}
        result |= {f"p{p}_{name}_ms": np.percentile(values, p) for p in (90, 95, 99)}
    return {key: float(value) for key, value in result.items()}


(HERE / "sglang.txt").write_text("\n".join(sglang()) + "\n")
(HERE / "vllm.txt").write_text("\n".join(vllm()) + "\n")
(HERE / "figures.json").write_text(json.dumps(figures(), indent=1) + "\n")
