#!/usr/bin/env bash
# Routers as they are installed, each in turn before the same workers, which play a recorded engine (compute simulated): how long requests wait behind
# each. A line for each run. A router that is not installed is left out and named.
#
#   cargo build --release --workspace && bench/head_to_head.sh [ROUNDS] [ROUTER…]
#
# ROUTER: ours, ours-events (which follows the workers' cache events), vllm-kv (which does too), vllm-ca, sglang-ca, smg-ca, litellm, haproxy (least
# connections); all of them by default. Environment: SERVE, what `bench serve` sends (shared prefixes); WORKERS (4); KV_BLOCKS of 16 tokens of each
# (64000); TIME_SCALES of the workers (1,1,2,2: two of them half as fast); ROUTERS (1): so many of each behind haproxy, which gives each request to any of
# them (ours tell each other what they do); PREFILL (0): so many of the workers do nothing but compute prompts, which they hand over as vLLM's engines do
# (ours, ours-events, vllm-kv and vllm-ca); paths in VLLM_ROUTER, SGLANG_ROUTER, SMG, LITELLM, HAPROXY. Lines are kept in LINES_FILE.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-1}
routers=("${@:2}")
prefill=${PREFILL:-0}
if [[ ! $prefill =~ ^[0-9]+$ ]] || [ "$prefill" -ge "${WORKERS:-4}" ]; then echo "PREFILL must leave somebody of ${WORKERS:-4} workers to generate" >&2 && exit 2; fi
if [ ${#routers[@]} -eq 0 ]; then
    routers=(ours ours-events vllm-kv vllm-ca sglang-ca smg-ca litellm haproxy)
    [ "$prefill" -eq 0 ] || routers=(ours ours-events vllm-kv vllm-ca)
fi
serve=${SERVE:---dataset-name shared-prefix --gsp-num-groups 64 --gsp-prompts-per-group 12 --gsp-system-prompt-len 2048 --gsp-question-len 128 --gsp-output-len 128 --request-rate 12}
port=28100
. bench/timing_workers.sh
lines=${LINES_FILE:-$dir/lines}
if [ "$prefill" -gt 0 ] && [[ " ${routers[*]} " =~ \ (sglang-ca|smg-ca|litellm|haproxy)\  ]]; then echo "${BASH_REMATCH[1]} does not speak vLLM's protocol: leave it out, or PREFILL" >&2 && exit 2; fi
hand_over=()
[ "$prefill" -eq 0 ] || hand_over=(--kv-transfer on)
begin_workers "${WORKERS:-4}" "${KV_BLOCKS:-64000}" --context-length 131072 --kv-events-endpoint tcp://127.0.0.1:2850NUMBER \
    --kv-events-replay-endpoint tcp://127.0.0.1:2860NUMBER "${hand_over[@]}"

# each TEMPLATE [FIRST [LAST]]: for every worker of these, NUMBER being its number
each() { for n in $(seq "${2:-1}" "${3:-$workers}"); do echo "${1//NUMBER/$n}"; done; }
# The flags by which ours and others are told of the workers.
if [ "$prefill" -eq 0 ]; then
    ours_workers="--workers $list"
    theirs_workers="--worker-urls $(each http://127.0.0.1:2800NUMBER | paste -sd' ')"
    events=$(each '--kv-event-source http://127.0.0.1:2800NUMBER=tcp://127.0.0.1:2850NUMBER' | paste -sd' ')
else
    ours_workers="--workers $(each 127.0.0.1:2800NUMBER $((prefill + 1)) | paste -sd,) --prefill $(each 127.0.0.1:2800NUMBER 1 "$prefill" | paste -sd,)"
    theirs_workers="--vllm-pd-disaggregation $(each '--prefill http://127.0.0.1:2800NUMBER none' 1 "$prefill" | paste -sd' ') $(each '--decode http://127.0.0.1:2800NUMBER' $((prefill + 1)) | paste -sd' ')"
    events=$(each '--pd-kv-events http://127.0.0.1:2800NUMBER=tcp://127.0.0.1:2850NUMBER' 1 "$prefill" | paste -sd' ')
fi
# haproxy_config BALANCE SERVERS: haproxy before these; without http-no-delay it holds back what comes of a stream for up to 200 ms
haproxy_config() {
    cat <<CONFIG
global
    nbthread 1
defaults
    mode http
    option http-no-delay
    timeout connect 5s
    timeout client 10m
    timeout server 10m
listen front
    bind 127.0.0.1:$port
    balance $1
$2
CONFIG
}
haproxy_config leastconn "$(each '    server wNUMBER 127.0.0.1:2800NUMBER')" >"$dir/haproxy.cfg"
several=${ROUTERS:-1}
haproxy_config 'random(1)' "$(for n in $(seq "$several"); do echo "    server r$n 127.0.0.1:2811$n"; done)" >"$dir/front.cfg"
told=()
if [ "$several" -gt 1 ]; then
    head -c 32 /dev/urandom | base64 >"$dir/seed"
    told=(--prefix-seed-file "$dir/seed" --replicas "$(for n in $(seq "$several"); do echo "127.0.0.1:2823$n"; done | paste -sd,)")
fi
cat >"$dir/litellm.yaml" <<CONFIG
model_list:
$(each "  - {model_name: $model, litellm_params: {model: text-completion-openai/$model, api_base: 'http://127.0.0.1:2800NUMBER/v1', api_key: none}}")
general_settings: {dangerously_permit_weak_or_unset_master_key: true}
litellm_settings: {request_timeout: 600}
CONFIG

# What starts a router, and what it is.
program() {
    case $1 in
        ours*) echo "$bin/router" ;;
        vllm-*) echo "${VLLM_ROUTER:-vllm-router}" ;;       # pip install vllm-router==0.1.17
        sglang-ca) echo "${SGLANG_ROUTER:-sglang-router}" ;; # pip install sglang-router==0.3.2
        smg-ca) echo "${SMG:-smg}" ;;                       # pip install smg==1.13.0
        litellm) echo "${LITELLM:-litellm}" ;;              # pip install 'litellm[proxy]==1.108.7'
        haproxy) echo "${HAPROXY:-haproxy}" ;;
        *) echo "no router $1" >&2 && exit 2 ;;
    esac
}
# flags ROUTER PORT NUMBER: of the one of that number
flags() {
    local here="--host 127.0.0.1 --port $2"
    local ours="$here --admin-listen 127.0.0.1:2820$3 $ours_workers --threads 1 --log-level warn --drain-delay 0s ${told[*]} ${told:+--replica-listen 127.0.0.1:2823$3}"
    local theirs="$here --prometheus-port 2822$3 $theirs_workers"
    case $1 in
        ours) echo "$ours --engine-events off" ;;
        ours-events) echo "$ours" ;;
        vllm-kv) echo "$theirs --policy kv_aware --kv-event-model $model $events" ;;
        vllm-ca) echo "$theirs --policy cache_aware" ;;
        sglang-ca | smg-ca) echo "launch $theirs --policy cache_aware" ;;
        litellm) echo "$here --config $dir/litellm.yaml" ;;
        haproxy) echo "-db -f $dir/haproxy.cfg" ;;
    esac
}

# begin ROUTER: it, or several with haproxy before them; their processes are in `routers_running`
begin() {
    routers_running=()
    local ports=("$port")
    [ "$several" -eq 1 ] || ports=()
    for n in $(seq "$several"); do
        # shellcheck disable=SC2046
        "$(program "$1")" $(flags "$1" "${ports[0]:-2811$n}" "$n") >"$dir/log" 2>&1 &
        routers_running+=($!)
    done
    if [ "$several" -gt 1 ]; then
        for n in $(seq "$several"); do wait_for_port "2811$n"; done
        "${HAPROXY:-haproxy}" -db -f "$dir/front.cfg" &
        routers_running+=($!)
    fi
    pids+=("${routers_running[@]}")
}
wait_for_port() {
    for _ in $(seq 600); do (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null && return; sleep 0.1; done
    echo "nobody listens at $1" >&2 && exit 1
}

# Until the router answers, of all workers: some list no models, and some are ready before they know all workers.
wait_for_answers() {
    local answered=0
    for _ in $(seq 600); do
        if curl -sf -o "$dir/answer" "http://127.0.0.1:$port/v1/completions" -H 'content-type: application/json' \
            -d "{\"model\": \"$model\", \"prompt\": \"ready $answered\", \"max_tokens\": 1}"; then
            answered=$((answered + 1))
            [ "$answered" -lt $((workers * 2 * several)) ] || return 0
        else
            sleep 0.1
        fi
    done
    echo "waited in vain for $1" >&2 && tail -5 "$dir/log" >&2 && exit 1
}

run() {
    begin "$1"
    wait_for_answers "$1"
    forget_caches
    # shellcheck disable=SC2086
    "$bin/bench" serve --base-url "http://127.0.0.1:$port" --model "$model" --tokenizer worker/models/builtin $serve --disable-tqdm --output-file "$dir/out.jsonl" >"$dir/table" &
    client=$!
    pids+=("$client") # so that it ends with the script
    # Without an answer there are no figures, and the last line of the file is another router's.
    if wait "$client"; then line_of "$1" | tee -a "$lines"; else echo "failed: $1" && tail -5 "$dir/log" "$dir/table"; fi
    stop "${routers_running[@]}"
}
for router in "${routers[@]}"; do program "$router" >/dev/null || exit 2; done
if [ "$several" -gt 1 ] && [[ " ${routers[*]} " = *" haproxy "* ]]; then echo "haproxy is one: leave it out, or ROUTERS" >&2 && exit 2; fi
for _ in $(seq "$rounds"); do
    for router in "${routers[@]}"; do
        if command -v "$(program "$router")" >/dev/null; then run "$router"; else echo "left out: $router ($(program "$router") is not there)"; fi
    done
done
