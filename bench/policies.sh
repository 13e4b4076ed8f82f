#!/usr/bin/env bash
# Policies side by side on shared-prefix prompts: four embedded workers (real compute, the built-in model), each policy in turn,
# the whole round several times, in one run.
#   cargo build --release --workspace && bench/policies.sh [REQUESTS_PER_SECOND] [ROUNDS] [POLICY…]
set -euo pipefail
cd "$(dirname "$0")/.."
rate=${1:-8}
rounds=${2:-3}
policies=("${@:3}")
[ ${#policies[@]} -gt 0 ] || policies=(prefix_aware round_robin)
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT

for round in $(seq "$rounds"); do
    for policy in "${policies[@]}"; do
        model=embedded:builtin
        target/release/router --workers $model,$model,$model,$model --policy "$policy" --port 31000 --log-level error >/dev/null &
        router=$!
        for _ in $(seq 100); do curl -fsS -m 1 http://127.0.0.1:31000/readyz >/dev/null 2>&1 && break || sleep 0.1; done
        target/release/bench serve --base-url http://127.0.0.1:31000 --model builtin --tokenizer worker/models/builtin \
            --dataset-name shared-prefix --gsp-num-groups 24 --gsp-prompts-per-group 12 --gsp-system-prompt-len 2048 \
            --gsp-question-len 64 --gsp-output-len 16 --request-rate "$rate" --seed "$round" --disable-tqdm \
            --tag "$policy" --output-file "$lines" >/dev/null
        kill "$router" && wait "$router" || true
    done
done

python3 - "$lines" "$rate" <<'PYTHON'
import json, statistics, sys
runs = {}
for line in open(sys.argv[1]):
    run = json.loads(line)
    runs.setdefault(run["tag"], []).append(run)
print(f"{sys.argv[2]} requests/s, medians of {min(map(len, runs.values()))} rounds")
print(f"{'policy':<16}{'mean TTFT ms':>13}{'P99 TTFT ms':>13}{'mean E2E ms':>13}{'cached %':>10}{'completed':>11}")
for policy, of in runs.items():
    median = lambda key: statistics.median(run[key] for run in of)
    print(f"{policy:<16}{median('mean_ttft_ms'):>13.1f}{median('p99_ttft_ms'):>13.1f}{median('mean_e2e_latency_ms'):>13.1f}"
          f"{median('cache_hit_percent'):>10.1f}{median('completed'):>11.0f}")
PYTHON
