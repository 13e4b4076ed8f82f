#!/usr/bin/env bash
# One router, several that share nothing, and several that tell each other what they do (--replicas), behind haproxy, which gives each
# request to any of them; before workers that play a recorded engine. The ways in turn, ROUNDS times; a line for each run.
#
#   cargo build --release --workspace && bench/replicas.sh [ROUTERS] [ROUNDS]        # 4 and 2; needs haproxy
#
# Environment: WORKERS (4), KV_BLOCKS of 16 tokens of each (2500), SERVE: what `bench serve` sends (shared prefixes).
set -euo pipefail
cd "$(dirname "$0")/.."
routers=${1:-4} rounds=${2:-2}
serve=${SERVE:---dataset-name shared-prefix --gsp-num-groups 64 --gsp-prompts-per-group 8 --gsp-system-prompt-len 2048 --gsp-question-len 128 --gsp-output-len 128 --request-rate 16}
. bench/timing_workers.sh
head -c 32 /dev/urandom | base64 >"$dir/seed"
begin_workers "${WORKERS:-4}" "${KV_BLOCKS:-2500}"

# begin COUNT [--replicas …]: so many routers, and haproxy before them
begin() {
    count=$1
    front=()
    {
        echo "global"
        echo "    nbthread 1"
        echo "defaults"
        echo "    mode http"
        # Else it holds back what comes of a stream for up to 200 ms.
        echo "    option http-no-delay"
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
        "$bin/router" --workers "$list" --port $((28100 + n)) --admin-listen "127.0.0.1:$((28200 + n))" --threads 1 --log-level warn --drain-delay 0s "${told[@]}" >/dev/null &
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
    forget_caches
    begin "$2" "$3"
    # shellcheck disable=SC2086
    "$bin/bench" serve --base-url http://127.0.0.1:28100 --model "$model" --tokenizer worker/models/builtin $serve --disable-tqdm --output-file "$dir/out.jsonl" >"$dir/table"
    stop "${front[@]}"
    line_of "$1"
}
for _ in $(seq "$rounds"); do
    run "one router" 1 alone
    run "$routers that share nothing" "$routers" alone
    run "$routers that tell" "$routers" told
done
