#!/usr/bin/env bash
# The CUDA kernels on a machine with a GPU, where nothing can be fetched and there is no Rust.
#
#   bench/gpu/run.sh build             here: builds what is carried into target/gpu (ignored by git; name it when you carry files)
#   bench/gpu/run.sh parity [NAME..]   there: every kernel against its reference, fresh random numbers, poisoned outputs; and the
#                                      answers of worker --backend cuda against the CPU's, token for token
#   bench/gpu/run.sh sanitize [NAME..] there: the same under compute-sanitizer, which sees accesses out of bounds
#   bench/gpu/run.sh rates [NAME..]    there: rates of our kernels and, in the same run, of PyTorch
#   bench/gpu/run.sh serve [SWITCH..]  there: what a worker serves of a model of 8e9 random numbers (16 GB in /dev/shm); SWITCHes are the worker's
#
# NAME is a part of a test's name or all of a rate's; none means all. Each test and each rate is a process of its own, since a kernel that
# faults leaves a process without a GPU. Each part writes a JSON of its name to $OUT (default: .) anew after every one of
# them, so that what was found is there whatever happens; each ends within eight minutes. Exit status: 0, 1 when something failed, 2 when
# it could not be begun. bench/gpu/goals.py holds rates.json against the goals.
set -euo pipefail
cd "$(dirname "$0")/../.."
carried=${CARRIED:-target/gpu}
out=${OUT:-.}
PATH=$PATH:/usr/local/cuda/bin
part_seconds=${PART_SECONDS:-470}
one_seconds=${ONE_SECONDS:-90} # of one test or rate
at_once=${AT_ONCE:-$(($(nproc) < 8 ? $(nproc) : 8))} # tests; what is timed has the GPU for itself

# What runs on a GPU; the other tests are of the host's side. In this order, with the worker's behind the first three: what tells most comes first, in
# case that the time does not suffice.
on_a_gpu=(device:: gpu::a_layers layer:: linear:: rowwise:: sampling:: attention:: moe::)

# Of the worker's tests.
answers=(answers_of_cuda_are_those_of_the_cpu_token_for_token tokens_are_drawn_on_cuda_as_the_request_says
    a_prompt_that_one_gpu_has_computed_another_goes_on_from answers_by_each_kernel_for_prompts_are_those_of_the_cpu)

# The newest glibc that a machine must have to run what is built here: that of Ubuntu 22.04 is 2.35.
newest_glibc=2.35
most_bytes=$((64 << 20)) # travel in one go, with the working tree

build() {
    mkdir -p "$carried"
    local release=${CARGO_TARGET_DIR:-target}/release
    cp "$(test_program worker/kernels/Cargo.toml)" "$carried/parity"
    cp "$(test_program worker/Cargo.toml)" "$carried/answers"
    cargo build --release --manifest-path worker/kernels/Cargo.toml --example rates
    cp "$release/examples/rates" "$release/worker" "$carried"
    strip "$carried"/{parity,rates,answers,worker}
    local changes
    changes=$(git status --porcelain)
    echo "$(git rev-parse HEAD)${changes:+, with changes}" >"$carried/commit"
    check_carried
}

# Builds a crate's tests called cuda, and says where they are.
test_program() {
    cargo test --release --manifest-path "$1" --test cuda --no-run --message-format=json | python3 -c 'import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message["target"]["name"] == "cuda" and message.get("executable"):
        print(message["executable"])'
}

check_carried() {
    local needed bytes
    needed=$(objdump -T "$carried"/{parity,rates,answers,worker} | grep -o 'GLIBC_[0-9.]*' | sed s/GLIBC_// | sort -uV | tail -1)
    if [ "$(printf '%s\n' "$needed" $newest_glibc | sort -V | tail -1)" != $newest_glibc ]; then
        refuse "what was built needs glibc $needed, and may find $newest_glibc only; build on an older system"
    fi
    bytes=$({ git ls-files -zco --exclude-standard; printf '%s\0' "$carried"/*; } | { du -cb --files0-from=- 2>/dev/null || true; } | tail -1 | cut -f1)
    [ "$bytes" -le $most_bytes ] || refuse "$carried and the working tree have $bytes bytes; $most_bytes travel"
    echo "$carried: with the working tree $bytes bytes, for glibc $needed and later"
}

refuse() {
    echo "run.sh: $1" >&2
    exit 2
}

# Where the loader does not look by itself: the driver's mount, the toolkit, PyTorch's packages. For our programs, not for PyTorch.
library_path() {
    local directory path=${LD_LIBRARY_PATH:-}
    for directory in /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/local/cuda/lib64 $(python_libraries); do
        if compgen -G "$directory/libcuda.so.1" >/dev/null || compgen -G "$directory/libcublasLt.so.13" >/dev/null; then
            path=${path:+$path:}$directory
        fi
    done
    echo "$path"
}

python_libraries() {
    python3 -c 'import nvidia, glob
for path in nvidia.__path__: print(*glob.glob(path + "/*/lib"), sep="\n")' 2>/dev/null || true
}

# Text as it stands between the quotes of a JSON string: one line of plain characters, at most 600.
json_text() {
    tr '\n\t' '  ' | LC_ALL=C tr -cd '\040-\176' | cut -c1-600 | sed 's/ *$//; s/\\/\\\\/g; s/"/\\"/g'
}

# The part's results so far; `$1` is whether these are all. Replaced whole, so that nobody finds half of it.
write_json() {
    local joined between=$',\n  '
    joined=$(printf "$between%s" ${results[@]+"${results[@]}"})
    printf '{"part": "%s", "complete": %s, %s, "results": [\n  %s\n]}\n' "$part" "$1" "$header" "${joined#"$between"}" >"$out/.$part.json"
    mv "$out/.$part.json" "$out/$part.json"
}

# The rest of what a reader of the results must know.
describe() {
    local gpu driver commit
    gpu=$(LD_LIBRARY_PATH=$libraries timeout 100 "$carried/rates" gpu 2>&1) || refuse "$gpu"
    driver=$(timeout 20 nvidia-smi --query-gpu=driver_version,clocks.sm,clocks.mem --format=csv,noheader 2>/dev/null) || driver=unknown
    commit=$(head -1 "$carried/commit" 2>/dev/null) || commit=unknown
    header="\"commit\": \"$commit\", \"gpu\": \"$(json_text <<<"$gpu")\", \"driver_and_clocks\": \"$(json_text <<<"$driver")\""
}

# Runs a command for at most the limit, and no longer than the part has left. Its output goes to $log, `verdict` says how it ended.
attempt() {
    local left=$((part_seconds - SECONDS)) status=0
    [ $left -gt 0 ] || { verdict="not run: the part's time is over"; : >"$log"; return; }
    LD_LIBRARY_PATH=$libraries RUST_BACKTRACE=0 timeout -k 5 $((left < one_seconds ? left : one_seconds)) "$@" >"$log" 2>&1 || status=$?
    case $status in
    0) verdict=ok ;;
    124 | 137) verdict="did not end within $one_seconds s" ;;
    13[0-9] | 14[0-9]) verdict="ended by signal $((status - 128))" ;;
    *) verdict=failed ;;
    esac
}

begin() {
    part=$1 results=() failures=0
    local program
    for program in parity rates answers worker; do
        [ -x "$carried/$program" ] || refuse "there is no $carried/$program; run bench/gpu/run.sh build where Rust is, and carry $carried"
    done
    mkdir -p "$out"
    scratch=$(mktemp -d) libraries=$(library_path)
    log=$scratch/log
    describe
    header+=${2:-}
    : >"$out/$part.log"
    write_json false
}

finish() {
    write_json true
    rm -r "$scratch"
    echo "$part: ${#results[@]} results, $failures failed; see $out/$part.json and $out/$part.log"
    [ $failures = 0 ] || exit 1
}

parity() { run_tests parity "" "$@"; }

sanitize() {
    command -v compute-sanitizer >/dev/null || refuse "there is no compute-sanitizer here; it is part of the CUDA toolkit"
    one_seconds=$((one_seconds > 400 ? one_seconds : 400)) # it slows all down by ten times and more
    # The worker is stopped before the tool could say anything.
    answers=()
    run_tests sanitize "compute-sanitizer --error-exitcode 9" "$@"
}

run_tests() {
    local what=$1 under=$2 seed=$((RANDOM * 32768 + RANDOM)) test first names
    shift 2
    begin "$what" ", \"seed\": $seed"
    names=$({ tests_of "${on_a_gpu[@]:0:3}" && printf '%s\n' "${answers[@]}" && tests_of "${on_a_gpu[@]:3}"; } |
        grep -F -- "$(chosen "$@")") || refuse "no test is called ${*:-so}"
    names=($names)
    for ((first = 0; first < ${#names[@]}; first += at_once)); do
        for test in "${names[@]:first:at_once}"; do
            (log=$scratch/$test && run_test "$test" $under && echo "$verdict" >"$log.verdict") &
        done
        wait
        for test in "${names[@]:first:at_once}"; do
            log=$scratch/$test verdict=$(<"$scratch/$test.verdict")
            # A test that the program does not know passes as none.
            [ "$verdict" != ok ] || grep -q '^test result: ok. 1 passed' "$log" || verdict="failed: it was not run"
            note "\"test\": \"$test\"" "$test"
        done
    done
    finish
}

# Names of the kernels' tests, of one part of their names after the other.
tests_of() {
    local part_of_name
    for part_of_name in "$@"; do
        "$carried/parity" "$part_of_name" --list --format terse 2>/dev/null | sed -n 's/: test$//p' | { grep "^$part_of_name" || true; }
    done
}

run_test() {
    local test=$1 program=$carried/parity
    shift
    [[ " ${answers[*]} " != *" $test "* ]] || program=$carried/answers
    ROUNDHOUSE_GPU=${ROUNDHOUSE_GPU:-system} ROUNDHOUSE_SEED=$seed ROUNDHOUSE_WORKER=$carried/worker CARGO_MANIFEST_DIR=$PWD/worker \
        attempt "$@" "$program" --exact "$test" --test-threads 1
}

# Patterns for grep, one a line; none are one that every line has.
chosen() { printf '%s\n' "${@:-}"; }

# Notes how an attempt ended: `$1` begins its line of JSON, `$2` names it.
note() {
    local reason=""
    echo "$2: $verdict" | tee -a "$out/$part.log"
    if [ "$verdict" != ok ]; then
        failures=$((failures + 1))
        reason=", \"reason\": \"$(grep -v -e '^$' -e '^running ' -e '^test ' -e '^failures:' -e '^---- ' "$log" | json_text || true)\""
        sed 's/^/    /' "$log" >>"$out/$part.log"
    fi
    results+=("{$1, \"verdict\": \"$verdict\"$reason}")
    write_json false
}

rates() {
    local name names all
    begin rates
    all=$("$carried/rates" list)
    names=${*:-$all}
    for name in $names; do
        attempt "$carried/rates" "$name" ${SHAPES:-}
        take_lines
        [ "$verdict" = ok ] || note "\"name\": \"$name\"" "$name"
    done
    beside_pytorch
    finish
}

# Lines of JSON that the last attempt printed.
take_lines() {
    local line
    while read -r line; do
        results+=("$line")
        echo "$line" | tee -a "$out/$part.log"
    done < <(grep '^{.*}$' "$log")
    write_json false
}

# PyTorch in the same run. Where there is none, that is said and is no failure.
beside_pytorch() {
    local libraries=${LD_LIBRARY_PATH:-} reason
    one_seconds=150 attempt python3 -c 'import torch; torch.zeros(1, device="cuda")'
    if [ "$verdict" != ok ]; then
        reason=$(tail -1 "$log")
        reason=$(json_text <<<"${reason:-$verdict}")
        results+=("{\"name\": \"pytorch\", \"verdict\": \"not here\", \"reason\": \"$reason\"}")
        echo "PyTorch was not asked: $reason" | tee -a "$out/$part.log"
        return
    fi
    one_seconds=200 attempt python3 bench/gpu/beside.py
    take_lines
    [ "$verdict" = ok ] || note '"name": "pytorch"' pytorch
}

serve() {
    begin serve
    one_seconds=240 attempt python3 bench/gpu/serve.py "$carried/worker" --backend cuda "$@"
    take_lines
    [ "$verdict" = ok ] || note '"name": "serve"' serve
    finish
}

case ${1:-} in
build | parity | sanitize | rates | serve) "$@" ;;
*) sed -n '2,14p' "$0" >&2; exit 2 ;;
esac
