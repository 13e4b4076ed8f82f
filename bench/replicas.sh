#!/usr/bin/env bash
# One router, several that share nothing, and several that tell each other what they do (--replicas), behind haproxy, which gives each
# request to any of them; before workers that play a recorded engine. The ways in turn, ROUNDS times; a line for each run.
#
#   cargo build --release --workspace && bench/replicas.sh [ROUTERS] [ROUNDS]        # 4 and 2; needs haproxy
#
# Environment: WORKERS (4), KV_BLOCKS of 16 tokens of each (2500), SERVE: what `bench serve` sends (shared prefixes).
set -euo pipefail
cd "$(dirname "$0")/.."
routers=${1:-4} rounds=${2:-2} workers=${WORKERS:-4}
serve=${SERVE:---dataset-name shared-prefix --gsp-num-groups 64 --gsp-prompts-per-group 8 --gsp-system-prompt-len 2048 --gsp-question-len 128 --gsp-output-len 128 --request-rate 16}
bin=target/release
dir=$(mktemp -d)
pids=()
stop() {
    for pid in "$@"; do kill "$pid" 2>/dev/null || true; done
    for pid in "$@"; do wait "$pid" 2>/dev/null || true; done
}
trap 'stop "${pids[@]}"; rm -rf "$dir"' EXIT
wait_for() {
    for _ in $(seq 300); do curl -sf "$1" >"$dir/answer" && { [ -z "${2:-}" ] || grep -q "$2" "$dir/answer"; } && return; sleep 0.1; done
    echo "waited in vain for $1" >&2
    exit 1
}
head -c 32 /dev/urandom | base64 >"$dir/seed"
list=
for n in $(seq "$workers"); do
    "$bin/worker" --backend timing:qwen3-8b --model builtin --kv-blocks "${KV_BLOCKS:-2500}" --port $((28000 + n)) >/dev/null 2>&1 &
    pids+=($!)
    list+=,127.0.0.1:$((28000 + n))
done
for n in $(seq "$workers"); do wait_for "http://127.0.0.1:$((28000 + n))/health"; done

model=$(curl -sf http://127.0.0.1:28001/v1/models | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')

# begin COUNT [--replicas …]: so many routers, and haproxy before them
begin() {
    count=$1
    front=()
    {
        echo "global"
        echo "    nbthread 1"
        echo "defaults"
        echo "    mode http"
        for side in connect client server; do echo "    timeout $side 600s"; done
        echo "listen front"
        echo "    bind 127.0.0.1:28100"
        echo "    balance random(1)"
    } >"$dir/haproxy.cfg"
    others=
    for n in $(seq "$count"); do others+=,127.0.0.1:$((28300 + n)); done
    for n in $(seq "$count"); do
        told=()
        if [ "$2" = told ]; then
            told=(--replicas "${others#,}" --replica-listen "127.0.0.1:$((28300 + n))" --prefix-seed-file "$dir/seed")
        fi
        "$bin/router" --workers "${list#,}" --port $((28100 + n)) --admin-listen "127.0.0.1:$((28200 + n))" --threads 1 --log-level warn --drain-delay 0s "${told[@]}" >/dev/null &
        front+=($!)
        echo "    server r$n 127.0.0.1:$((28100 + n))" >>"$dir/haproxy.cfg"
    done
    for n in $(seq "$count"); do
        wait_for "http://127.0.0.1:$((28100 + n))/readyz"
        [ "$2" = told ] && wait_for "http://127.0.0.1:$((28200 + n))/replicas" "\"routers\":$count"
    done
    haproxy -f "$dir/haproxy.cfg" &
    front+=($!)
    wait_for http://127.0.0.1:28100/health
}

run() {
    for n in $(seq "$workers"); do curl -sf -X POST "http://127.0.0.1:$((28000 + n))/flush_cache" >/dev/null; done
    begin "$2" "$3"
    # shellcheck disable=SC2086
    "$bin/bench" serve --base-url http://127.0.0.1:28100 --model "$model" --tokenizer worker/models/builtin $serve --disable-tqdm --output-file "$dir/out.jsonl" >"$dir/table"
    stop "${front[@]}"
    python3 - "$dir/out.jsonl" "$1" <<'PY'
import json, sys
run = json.loads(open(sys.argv[1]).readlines()[-1])
print(f"{sys.argv[2]:24} completed {run['completed']:5}  TTFT mean {run['mean_ttft_ms']:6.0f}  P99 {run['p99_ttft_ms']:6.0f}"
      f"  E2E mean {run['mean_e2e_latency_ms']:6.0f} ms  cached {run['cache_hit_percent']:5.1f} %", flush=True)
PY
}
for _ in $(seq "$rounds"); do
    run "one router" 1 alone
    run "$routers that share nothing" "$routers" alone
    run "$routers that tell" "$routers" told
done
