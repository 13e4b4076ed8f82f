#!/usr/bin/env bash
# What work in the background costs those who wait for their answers, in real processes: before workers that play a recorded engine (compute simulated),
# the requests of a trace when the trace says, alone, and beside clients that send documents one after the other, as `flex` or as requests like others.
# A line for each run, and the tokens of prompts and answers that the documents' clients got a second meanwhile.
#
#   cargo build --release --workspace && bench/background.sh TRACE.jsonl DOCUMENTS.jsonl [ROUNDS]
#
# Environment: WORKERS (4), KV_BLOCKS of 16 tokens of each (60000), SPEED of the trace's clock (0.5), REQUESTS of it (200), CLIENTS (64), FEW (8) in
# their place, ROUTER.
set -euo pipefail
cd "$(dirname "$0")/.."
trace=$1 documents=$2 rounds=${3:-2}
. bench/timing_workers.sh
begin_workers "${WORKERS:-4}" "${KV_BLOCKS:-60000}"

serve() {
    "$bin/bench" serve --base-url http://127.0.0.1:28100 --model "$model" --tokenizer worker/models/builtin --dataset-name trace --disable-tqdm "$@"
}

# NAME, and of those in the background how many clients and what else they send; none without.
run() {
    forget_caches
    "${ROUTER:-$bin/router}" --workers "$list" --port 28100 --admin-listen 127.0.0.1:28200 --log-level warn --drain-delay 0s >/dev/null &
    router=$!
    pids+=("$router")
    wait_for http://127.0.0.1:28100/readyz
    behind=
    if [ "${2:-0}" -gt 0 ]; then
        serve --dataset-path "$documents" --num-prompts 100000 --max-concurrency "$2" --extra-request-body "$3" >"$dir/behind" 2>&1 &
        behind=$!
        pids+=("$behind")
    fi
    before=$(tokens)
    began=$(date +%s.%N)
    serve --dataset-path "$trace" --num-prompts "${REQUESTS:-200}" --use-trace-timestamps --trace-speed "${SPEED:-0.5}" --output-file "$dir/out.jsonl" >"$dir/table"
    after=$(tokens)
    ended=$(date +%s.%N)
    [ -z "$behind" ] || stop "$behind"
    stop "$router"
    line_of "$1"
    python3 -c "
import json
own = json.loads(open('$dir/out.jsonl').readlines()[-1])
spare = $after - $before - own['total_input_tokens'] - own['total_output_tokens']
print(f'    documents: {spare / ($ended - $began):.0f} tokens/s')"
}

# Of prompts and answers of all requests that have ended.
tokens() {
    curl -s http://127.0.0.1:28200/metrics | awk '/^router_tokens_total/ { sum += $2 } END { printf "%d", sum }'
}

for _ in $(seq "$rounds"); do
    run alone
    run "flex, ${CLIENTS:-64} clients" "${CLIENTS:-64}" '{"service_tier": "flex"}'
    run "like others, ${FEW:-8} clients" "${FEW:-8}" '{}'
    run "like others, ${CLIENTS:-64} clients" "${CLIENTS:-64}" '{}'
done
