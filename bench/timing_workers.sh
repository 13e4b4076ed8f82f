# Timing workers for the scripts beside this one, which source it: they play a recorded engine, on 28001 and so on, until the script ends.
#
# Sets `dir`, a folder of its own; `pids`, what ends with the script; `list`, the workers for --workers; `model`.
bin=target/release
dir=$(mktemp -d)
pids=()
stop() {
    for pid in "$@"; do kill "$pid" 2>/dev/null || true; done
    for pid in "$@"; do wait "$pid" 2>/dev/null || true; done
}
trap 'stop "${pids[@]}"; rm -rf "$dir"' EXIT

# wait_for URL [TEXT]: until it answers, and with that text
wait_for() {
    for _ in $(seq 300); do curl -sf "$1" >"$dir/answer" && { [ -z "${2:-}" ] || grep -q "$2" "$dir/answer"; } && return; sleep 0.1; done
    echo "waited in vain for $1" >&2
    exit 1
}

# begin_workers COUNT BLOCKS [FLAG…]: so many, each with a KV cache of so many blocks of 16 tokens; NUMBER in a flag becomes the worker's. TIME_SCALES=1,1,2,2
# has the third and the fourth take twice as long for everything.
begin_workers() {
    workers=$1
    local flags=("${@:3}") scales
    IFS=, read -ra scales <<<"${TIME_SCALES:-}"
    list=
    for n in $(seq "$workers"); do
        "$bin/worker" --backend timing:qwen3-8b --model builtin --kv-blocks "$2" --port $((28000 + n)) --time-scale "${scales[n - 1]:-1}" "${flags[@]//NUMBER/$n}" >/dev/null 2>&1 &
        pids+=($!)
        list+=,127.0.0.1:$((28000 + n))
    done
    for n in $(seq "$workers"); do wait_for "http://127.0.0.1:$((28000 + n))/health"; done
    list=${list#,}
    model=$(curl -sf http://127.0.0.1:28001/v1/models | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
}

forget_caches() {
    for n in $(seq "$workers"); do curl -sf -X POST "http://127.0.0.1:$((28000 + n))/flush_cache" >/dev/null; done
}

# line_of NAME: of the last run in out.jsonl
line_of() {
    python3 - "$dir/out.jsonl" "$1" <<'PY'
import json, sys
run = json.loads(open(sys.argv[1]).readlines()[-1])
print(f"{sys.argv[2]:40} completed {run['completed']:5}  TTFT mean {run['mean_ttft_ms']:6.0f}  P99 {run['p99_ttft_ms']:6.0f}"
      f"  TPOT mean {run['mean_tpot_ms']:5.1f}  P99 {run['p99_tpot_ms']:6.1f}  E2E mean {run['mean_e2e_latency_ms']:6.0f} ms  cached {run['cache_hit_percent']:5.1f} %", flush=True)
PY
}
