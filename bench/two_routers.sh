#!/usr/bin/env bash
# Two router binaries in turn before the same workers, which play a recorded engine (compute simulated), with the requests of a trace when the trace
# says: what a change is worth in real processes. A line for each run.
#
#   cargo build --release --workspace && bench/two_routers.sh OLD_ROUTER NEW_ROUTER TRACE.jsonl [ROUNDS]
#
# Environment: WORKERS (4), KV_BLOCKS of 16 tokens of each (60000), SPEED of the trace's clock (1).
set -euo pipefail
cd "$(dirname "$0")/.."
routers=("$1" "$2") trace=$3 rounds=${4:-2}
. bench/timing_workers.sh
begin_workers "${WORKERS:-4}" "${KV_BLOCKS:-60000}"

run() {
    forget_caches
    "$1" --workers "$list" --port 28100 --admin-listen 127.0.0.1:28200 --threads 1 --log-level warn --drain-delay 0s >/dev/null &
    router=$!
    pids+=("$router")
    wait_for http://127.0.0.1:28100/readyz
    "$bin/bench" serve --base-url http://127.0.0.1:28100 --model "$model" --tokenizer worker/models/builtin --dataset-name trace --dataset-path "$trace" \
        --use-trace-timestamps --trace-speed "${SPEED:-1}" --disable-tqdm --output-file "$dir/out.jsonl" >"$dir/table"
    stop "$router"
    line_of "$1"
}
for _ in $(seq "$rounds"); do
    for router in "${routers[@]}"; do run "$router"; done
done
