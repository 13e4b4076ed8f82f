#!/usr/bin/env bash
# The CUDA kernels on a machine with a GPU, where nothing can be fetched and there is no Rust.
#
#   bench/gpu/run.sh build     here: builds what is carried into target/gpu (ignored by git; name it when you carry files)
#   bench/gpu/run.sh parity    there: every kernel against the CPU reference, fresh random numbers, poisoned outputs
#   bench/gpu/run.sh rates     there: rates of our kernels and, in the same run, of PyTorch
#
# parity and rates write parity.json and rates.json to $OUT (default: .), and take a few minutes each.
set -euo pipefail
cd "$(dirname "$0")/../.."
carried=target/gpu
out=${OUT:-.}

build() {
    mkdir -p $carried
    local manifest=worker/kernels/Cargo.toml
    tests=$(cargo test --release --manifest-path $manifest --test cuda --no-run --message-format=json |
        python3 -c 'import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message["target"]["name"] == "cuda" and message.get("executable"):
        print(message["executable"])')
    cp "$tests" $carried/parity
    cargo build --release --manifest-path $manifest --example rates
    cp "${CARGO_TARGET_DIR:-target}/release/examples/rates" $carried/rates
    strip $carried/parity $carried/rates
    ls -l $carried
}

parity() {
    local seed=$RANDOM status=passed
    ROUNDHOUSE_GPU=${ROUNDHOUSE_GPU:-system} ROUNDHOUSE_SEED=$seed \
        $carried/parity attention:: moe:: rowwise:: sampling:: gpu::a_ gpu::work_ gpu::uploads_ --test-threads 1 2>&1 | tee "$out/parity.log" || status=failed
    python3 - "$out" $seed $status <<'PYTHON'
import json, re, subprocess, sys
out, seed, status = sys.argv[1:]
tests = dict(re.findall(r"^test (\S+) \.\.\. (\w+)", open(f"{out}/parity.log").read(), re.M))
json.dump({"seed": int(seed), "status": status, "tests": tests}, open(f"{out}/parity.json", "w"), indent=1)
PYTHON
    [ $status = passed ]
}

rates() {
    $carried/rates "$@" | tee "$out/rates.log"
    python3 bench/gpu/beside.py | tee -a "$out/rates.log"
    python3 -c 'import json, sys
json.dump([json.loads(line) for line in open(sys.argv[1])], open(sys.argv[2], "w"), indent=1)' "$out/rates.log" "$out/rates.json"
}

case ${1:-} in
build | parity | rates) "$@" ;;
*) sed -n '2,8p' "$0"; exit 2 ;;
esac
