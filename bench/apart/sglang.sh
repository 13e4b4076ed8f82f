#!/usr/bin/env bash
# SGLang engines on the CPU, on loopback, with the model of engines.sh (two layers of random weights).
#
#   bench/apart/engines.sh install MODELS && bench/apart/sglang.sh install DIR MODELS      from PyPI, some 6 GB; needs uv
#   bench/apart/sglang.sh start DIR [NAME]    two that publish what happens in their caches (8,192 tokens): `one` on 18801 and `two` on 18802
#   bench/apart/sglang.sh thoughts DIR        the same two, which tell thoughts and tool calls apart from the answer, as Qwen3's
#   bench/apart/sglang.sh apart DIR [more]    `prefill` on 18811 and `decode` on 18812, which hand prompts over by NIXL; `more`: and `prefill-two` on 18813
#   bench/apart/sglang.sh ranks DIR           `ranks` on 18821, of two data-parallel ranks
#   bench/apart/sglang.sh adapters DIR [N]    `lora-one` on 18831 and `lora-two` on 18832, with eight adapters and places for N of them (2)
#   bench/apart/sglang.sh priority DIR        `priority` on 18841, that goes by priorities and computes four requests at a time
#   bench/apart/sglang.sh stop DIR            those that were started
#
# Each takes half a minute to start, and 1.5 GB. PyPI has SGLang's kernels for GPUs alone: on_cpu/ stands in for what is imported of them, and PyTorch
# computes. What is seen here is what SGLang says and does, not how fast it is.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
what=${1:?install, start, thoughts, apart, ranks, adapters, priority or stop} dir=${2:?a folder for engines and logs}
models=$(realpath "${3:-.}")
mkdir -p "$dir" && cd "$dir"

install() {
    [ -d venv ] || uv venv -q --python 3.11 venv
    # What is compiled for GPUs, and a PyTorch that engines.sh has fetched already.
    printf '%s; sys_platform == "never"\n' cuda-python deepseek-recipe flash-attn-4 flashinfer_python humming-kernels nvidia-cutlass-dsl nvidia-mathdx \
        nvshmem4py-cu13 quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla sglang-kernel tilelang tml-renderers torch_memory_saver >overrides.txt
    printf '%s\n' torch==2.13.0 torchvision >>overrides.txt
    uv pip install -q --python venv/bin/python --compile-bytecode sglang==0.5.23 nixl==1.5.1 --override overrides.txt
    # What is handed over lies in the host's memory here.
    sed -i 's/for mem_kind in ("VRAM", "DRAM"):/for mem_kind in ("DRAM",):/; s/"VRAM"/"DRAM"/g; s/= \[str(kind) for kind in kinds\]/= ["DRAM" for _ in kinds]/' \
        venv/lib/python3.11/site-packages/sglang/srt/disaggregation/nixl/conn.py
    ln -sfn "$models/model" model
}

engine() { # name, port, and what else SGLang is told
    local name=$1 port=$2
    shift 2
    env -u PYTHONDONTWRITEBYTECODE PYTHONPATH="$here/on_cpu" HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES='' SGLANG_USE_CPU_ENGINE=1 \
        SGLANG_CPU_OMP_THREADS_BIND="${CORES:-0}" \
        setsid venv/bin/python -W ignore -m sglang.launch_server --model-path model --served-model-name tiny --host 127.0.0.1 --port "$port" --device cpu \
        --dtype float32 --attention-backend torch_native --sampling-backend pytorch --grammar-backend none --disable-overlap-schedule \
        --mem-fraction-static 0.1 --context-length 4096 --enable-metrics --enable-cache-report "$@" >"$name.log" 2>&1 </dev/null &
    echo $! >"$name.pid"
}

publish() { # name, port, port for events, and what else SGLang is told; the next port is for replays
    local name=$1 port=$2 events=$3
    shift 3
    engine "$name" "$port" --sleep-on-idle --max-total-tokens 8192 --page-size 16 \
        --kv-events-config "{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:$events\",\"replay_endpoint\":\"tcp://*:$((events + 1))\"}" "$@"
}

hands_over() { # name, port, and what else SGLang is told
    local name=$1 port=$2
    shift 2
    engine "$name" "$port" --max-total-tokens 32768 --disaggregation-transfer-backend nixl "$@"
}

ready() { # name, port
    for _ in $(seq 300); do
        curl -sf -m 5 -o /dev/null "http://127.0.0.1:$2/health" && return
        kill -0 "$(cat "$1.pid")" || { grep -v '^$' "$1.log" | tail -20; exit 1; }
        sleep 0.5
    done
    echo "$1 is not ready after 150 s" && exit 1
}

case $what in
install) : "${3:?the folder that engines.sh has installed to}" && install ;;
start | thoughts)
    parsers=()
    [ "$what" = thoughts ] && parsers=(--reasoning-parser qwen3 --tool-call-parser qwen25)
    [ "${3:-one}" = one ] && CORES=0 publish one 18801 15801 "${parsers[@]}"
    [ "${3:-two}" = two ] && CORES=1 publish two 18802 15811 "${parsers[@]}"
    [ "${3:-one}" = one ] && ready one 18801
    [ "${3:-two}" = two ] && ready two 18802
    ;;
apart)
    CORES=0 hands_over prefill 18811 --disaggregation-mode prefill
    # Its host memory would be registered with a GPU.
    CORES=1 hands_over decode 18812 --disaggregation-mode decode --disaggregation-decode-retraction-backup cpu_tensor
    [ "${3:-}" = more ] && CORES=1 hands_over prefill-two 18813 --disaggregation-mode prefill --disaggregation-bootstrap-port 8999
    ready prefill 18811
    ready decode 18812
    [ "${3:-}" != more ] || ready prefill-two 18813
    ;;
ranks)
    CORES='0|1' engine ranks 18821 --dp-size 2 --max-total-tokens 8192 --page-size 16 \
        --kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:15821","replay_endpoint":"tcp://*:15831"}'
    ready ranks 18821
    ;;
adapters)
    venv/bin/python "$here/lora.py" adapters 8
    for engine in lora-one:18831 lora-two:18832; do
        engine "${engine%:*}" "${engine#*:}" --sleep-on-idle --max-total-tokens 8192 --enable-lora --lora-backend torch_native --max-loras-per-batch "${3:-2}" \
            --lora-paths $(for number in $(seq 0 7); do echo "a$number=$PWD/adapters/a$number"; done)
    done
    ready lora-one 18831
    ready lora-two 18832
    ;;
priority)
    engine priority 18841 --sleep-on-idle --max-total-tokens 8192 --enable-priority-scheduling --max-running-requests 4
    ready priority 18841
    ;;
stop)
    for file in *.pid; do
        pid=$(cat "$file")
        # Engines start processes of their own, in the same session.
        kill -9 -- -"$pid" 2>/dev/null || kill -9 "$pid" 2>/dev/null || true
        rm "$file"
    done
    ;;
*) echo "install, start, thoughts, apart, ranks, adapters, priority or stop" && exit 2 ;;
esac
