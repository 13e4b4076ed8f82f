#!/usr/bin/env bash
# Two router binaries in turn before the same workers, which play a recorded engine (compute simulated), with the requests of a trace when the trace
# says: what a change is worth in real processes. A line for each run.
#
#   cargo build --release --workspace && bench/two_routers.sh OLD_ROUTER NEW_ROUTER TRACE.jsonl [ROUNDS]
#
# Environment: WORKERS (4), KV_BLOCKS of 16 tokens of each (60000), SPEED of the trace's clock (1).
set -euo pipefail
cd "$(dirname "$0")/.."
routers=("$1" "$2") trace=$3 rounds=${4:-2} workers=${WORKERS:-4}
bin=target/release
dir=$(mktemp -d)
pids=()
stop() {
    for pid in "$@"; do kill "$pid" 2>/dev/null || true; done
    for pid in "$@"; do wait "$pid" 2>/dev/null || true; done
}
trap 'stop "${pids[@]}"; rm -rf "$dir"' EXIT
wait_for() {
    for _ in $(seq 300); do curl -sf "$1" >"$dir/answer" && return; sleep 0.1; done
    echo "waited in vain for $1" >&2
    exit 1
}
list=
for n in $(seq "$workers"); do
    "$bin/worker" --backend timing:qwen3-8b --model builtin --kv-blocks "${KV_BLOCKS:-60000}" --port $((28000 + n)) >/dev/null 2>&1 &
    pids+=($!)
    list+=,127.0.0.1:$((28000 + n))
done
for n in $(seq "$workers"); do wait_for "http://127.0.0.1:$((28000 + n))/health"; done
model=$(curl -sf http://127.0.0.1:28001/v1/models | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')

run() {
    for n in $(seq "$workers"); do curl -sf -X POST "http://127.0.0.1:$((28000 + n))/flush_cache" >/dev/null; done
    "$1" --workers "${list#,}" --port 28100 --admin-listen 127.0.0.1:28200 --threads 1 --log-level warn --drain-delay 0s >/dev/null &
    router=$!
    pids+=("$router")
    wait_for http://127.0.0.1:28100/readyz
    "$bin/bench" serve --base-url http://127.0.0.1:28100 --model "$model" --tokenizer worker/models/builtin --dataset-name trace --dataset-path "$trace" \
        --use-trace-timestamps --trace-speed "${SPEED:-1}" --disable-tqdm --output-file "$dir/out.jsonl" >"$dir/table"
    stop "$router"
    python3 - "$dir/out.jsonl" "$1" <<'PY'
import json, sys
run = json.loads(open(sys.argv[1]).readlines()[-1])
print(f"{sys.argv[2]:40} completed {run['completed']:5}  TTFT mean {run['mean_ttft_ms']:6.0f}  P99 {run['p99_ttft_ms']:6.0f}"
      f"  E2E mean {run['mean_e2e_latency_ms']:6.0f} ms  cached {run['cache_hit_percent']:5.1f} %", flush=True)
PY
}
for _ in $(seq "$rounds"); do
    for router in "${routers[@]}"; do run "$router"; done
done
