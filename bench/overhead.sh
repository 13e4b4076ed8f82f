#!/usr/bin/env bash
# Routers side by side: each in turn before the same mock workers, the whole round several times, in one run; medians, and the
# ratios that are promised. A router that is not installed is left out and named. Nothing else should run meanwhile.
#   cargo build --release -p router -p bench && bench/overhead.sh [ROUNDS] [ROUTER…]
# ROUTER: direct haproxy nginx ours-rr ours-pa vllm-rr vllm-ca sglang-rr sglang-ca (all of them by default).
# At the end ours-rr and those of ours-pa, haproxy, vllm-rr, sglang-ca that are among them live side by side and are loaded for a second each in turn,
# TURNS (20) times: what one takes beyond another can be told so to a few microseconds.
# Paths: OURS, HAPROXY, NGINX, VLLM_ROUTER, SGLANG_ROUTER. Flags for each measurement: BENCH_FLAGS. Lines are kept in LINES_FILE.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-5}
routers=("${@:2}")
[ ${#routers[@]} -gt 0 ] || routers=(direct haproxy nginx ours-rr ours-pa vllm-rr vllm-ca sglang-rr sglang-ca)
ours=${OURS:-target/release/router}
haproxy=${HAPROXY:-haproxy}
nginx=${NGINX:-nginx}
vllm=${VLLM_ROUTER:-vllm-router}       # pip install vllm-router==0.1.17
sglang=${SGLANG_ROUTER:-sglang-router} # pip install sglang-router==0.3.2
port=19100
first_port=$port
mocks=(19001 19002 19003 19004)
directory=$(mktemp -d)
beside_pids=()
trap 'kill "${beside_pids[@]}" 2>/dev/null || true; rm -rf "$directory"' EXIT
lines=${LINES_FILE:-$directory/lines}

servers() { for mock in "${mocks[@]}"; do echo "${1//PORT/$mock}"; done; }

# As many connections as the descriptors allow: 5,000 idle streams take 10,000 of them.
connections=$((($(ulimit -Hn) - 200) / 2))
[ "$connections" -le 12000 ] || connections=12000
cat >"$directory/haproxy.cfg" <<CONFIG
global
    maxconn $connections
    nbthread 1
defaults
    mode http
    http-reuse always
    option http-no-delay
    timeout connect 5s
    timeout client 10m
    timeout server 10m
frontend clients
    bind 127.0.0.1:$port
    default_backend workers
backend workers
    balance roundrobin
$(servers '    server mPORT 127.0.0.1:PORT')
CONFIG
cat >"$directory/nginx.conf" <<CONFIG
daemon off;
worker_processes 1;
pid $directory/nginx.pid;
error_log $directory/nginx.log error;
worker_rlimit_nofile $((connections * 2));
events { worker_connections $((connections * 2 - 100)); }
http {
    access_log off;
    client_body_temp_path $directory/body;
    proxy_temp_path $directory/proxy;
    fastcgi_temp_path $directory/fastcgi;
    uwsgi_temp_path $directory/uwsgi;
    scgi_temp_path $directory/scgi;
    keepalive_requests 1000000000;
    client_max_body_size 0;
    client_body_buffer_size 1m;
    upstream workers {
        keepalive 256;
        keepalive_requests 1000000000;
$(servers '        server 127.0.0.1:PORT;')
    }
    server {
        listen 127.0.0.1:$port backlog=4096;
        location / {
            proxy_pass http://workers;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 10m;
        }
    }
}
CONFIG

# What a router needs, its policy, how it starts, what it is.
program() {
    case $1 in
        haproxy) echo "$haproxy" ;;
        nginx) echo "$nginx" ;;
        ours-*) echo "$ours" ;;
        vllm-*) echo "$vllm" ;;
        sglang-*) echo "$sglang" ;;
    esac
}
policy() {
    case $1 in
        *-rr) echo round_robin ;;
        ours-pa) echo prefix_aware ;;
        *-ca) echo cache_aware ;;
    esac
}
command_of() {
    local flags="--host 127.0.0.1 --port $port --policy $(policy "$1") --log-level error"
    case $1 in
        haproxy) echo "$haproxy -db -f $directory/haproxy.cfg" ;;
        nginx) echo "$nginx -c $directory/nginx.conf" ;;
        ours-*) echo "$ours $flags --threads 1 --workers {workers}" ;;
        vllm-*) echo "$vllm $flags --prometheus-port $((port + 9)) --worker-urls {worker_list}" ;;
        sglang-*) echo "$sglang launch $flags --prometheus-port $((port + 9)) --worker-urls {worker_list}" ;;
    esac
}
version() {
    case $1 in
        haproxy) "$haproxy" -v 2>&1 | head -1 ;;
        nginx) "$nginx" -v 2>&1 | head -1 ;;
        ours-*) "$ours" --version ;;
        *) "$(dirname "$(command -v "$(program "$1")")")/pip" list 2>/dev/null | grep -E '^(vllm|sglang)-router ' | tr -s ' ' || true ;;
    esac
}

present=()
for router in "${routers[@]}"; do
    case $router in
        direct | haproxy | nginx | ours-rr | ours-pa | vllm-rr | vllm-ca | sglang-rr | sglang-ca) ;;
        *) echo "no router $router: there are direct haproxy nginx ours-{rr,pa} vllm-{rr,ca} sglang-{rr,ca}" >&2 && exit 2 ;;
    esac
    if [ "$router" = direct ] || command -v "$(program "$router")" >/dev/null; then
        present+=("$router")
    else
        echo "left out: $router ($(program "$router") is not there)"
    fi
done

for round in $(seq "$rounds"); do
    for router in "${present[@]}"; do
        echo "round $round: $router" >&2
        flags=(--mock-ports "$(IFS=, && echo "${mocks[*]}")" --name "$router" --tag "round $round" --output-file "$lines")
        [ "$router" = direct ] || flags+=(--base-url "http://127.0.0.1:$port" --router-version "$(version "$router")"
            --router-log "$directory/$router.log" --command "$(command_of "$router")")
        # shellcheck disable=SC2086
        target/release/bench overhead "${flags[@]}" ${BENCH_FLAGS:-} >"$directory/out" || {
            echo "failed: $router in round $round" && cat "$directory/out" && tail -5 "$directory/$router.log" || true
        }
        grep -E '^(error|note):' "$directory/out" | sed "s/^/$router, round $round: /" || true
    done
done

side_by_side() {
    local router command first beside=() at=$port
    for router in ours-rr ours-pa haproxy vllm-rr sglang-ca; do
        [[ " ${present[*]} " == *" $router "* ]] || continue
        # haproxy's port is in its file.
        if [ "$router" = haproxy ]; then port=$first_port; else port=$((at += 20)); fi
        command=$(command_of "$router")
        command=${command//\{workers\}/$(servers http://127.0.0.1:PORT | paste -sd,)}
        command=${command//\{worker_list\}/$(servers http://127.0.0.1:PORT | paste -sd' ')}
        taskset -c 0 sh -c "exec $command" >/dev/null 2>&1 &
        beside_pids+=($!)
        if [ "$router" = ours-rr ]; then
            first=(--name "$router" --base-url "http://127.0.0.1:$port" --pid $!)
        else
            beside+=(--beside "$router=$!=http://127.0.0.1:$port")
        fi
    done
    # shellcheck disable=SC2086
    target/release/bench overhead --mock-ports "$(IFS=, && echo "${mocks[*]}")" "${first[@]}" "${beside[@]}" ${BENCH_FLAGS:-} \
        --only beside --turns "${TURNS:-20}" | grep -A 9 '^side by side' || true
    kill "${beside_pids[@]}" 2>/dev/null || true
    wait "${beside_pids[@]}" 2>/dev/null || true
    beside_pids=()
}
if [ "${TURNS:-20}" -gt 0 ] && [[ " ${present[*]} " == *" ours-rr "* ]]; then
    side_by_side
fi

python3 - "$lines" <<'PYTHON'
import json, statistics, sys

runs = {}
for line in open(sys.argv[1]):
    run = json.loads(line)
    runs.setdefault(run["router"], {})[run["tag"]] = run

def at(run, *path):
    """A figure of one run, or nothing where it was not measured."""
    for key in path:
        if isinstance(run, dict):
            run = run.get(key)
    return run

def rate(kilobytes, key):
    def figure(run):
        found = [rate for rate in run["rates"] if rate["kilobytes"] == kilobytes]
        return found[0][key] if found else None
    return figure

def each(figure, router):
    values = {tag: figure(run) for tag, run in runs.get(router, {}).items()}
    return {tag: value for tag, value in values.items() if value is not None}

def median(figure, router):
    values = each(figure, router)
    return statistics.median(values.values()) if values else None

def text(value, digits):
    return "–" if value is None else f"{value:,.{digits}f}"

sizes = sorted({rate["kilobytes"] for of in runs.values() for run in of.values() for rate in run["rates"]})
cpu = lambda kilobytes: rate(kilobytes, "cpu_us_per_request")
paced = lambda run: at(run, "paced", "cpu_us_per_chunk")
columns = [(f"req/s {sizes[0]} KB", rate(sizes[0], "requests_per_s"), 0)] if sizes else []
columns += [(f"CPU µs {kilobytes} KB", cpu(kilobytes), 1) for kilobytes in sizes]
columns += [
    ("p50 ms", lambda run: at(run, "latency", "p50_ms"), 2),
    ("p99 ms", lambda run: at(run, "latency", "p99_ms"), 2),
    ("hit % closed loop", rate(sizes[0], "hit_percent") if sizes else lambda run: None, 0),
    ("hit % paced", lambda run: at(run, "latency", "hit_percent"), 0),
    ("CPU µs a paced chunk", paced, 1),
    ("CPU µs a flooding chunk", lambda run: at(run, "flood", "cpu_us_per_chunk"), 1),
    ("RSS MB idle", lambda run: at(run, "rss_idle_mb"), 0),
    ("RSS MB after requests", lambda run: at(run, "after_requests", "rss_mb"), 0),
    ("RSS MB end", lambda run: at(run, "rss_end_mb"), 0),
    ("KB an idle stream", lambda run: at(run, "idle_streams", "rss_kb_per_stream"), 1),
]
parts = ["after_requests", "latency", "paced", "flood", "idle_streams"]
errors = lambda run: sum(sum(part["errors"].values()) for part in run["rates"] + [run[key] for key in parts if run[key]])
some = next((run for of in runs.values() for run in of.values()), None)
if some is None:
    sys.exit("nothing was measured")
machine = some["machine"]
print(f"\n{machine['cpu_model']}, {machine['cores']} cores, Linux {machine['kernel']}, commit {some['commit']}; medians of the rounds\n")
print("| router | rounds | " + " | ".join(name for name, _, _ in columns) + " | errors |")
print("|" + "---|" * (len(columns) + 3))
for router, of in runs.items():
    cells = [text(median(figure, router), digits) for _, figure, digits in columns]
    print(f"| {router} | {len(of)} | " + " | ".join(cells) + f" | {sum(map(errors, of.values()))} |")
for router in runs:
    version = next(iter(runs[router].values()))["router_version"]
    if version:
        print(f"{router}: {version}")
print()

def compare(what, figure, ours, theirs, combine, goal):
    """The median over the rounds of what both give in the same round, with its range."""
    a, b = each(figure, ours), each(figure, theirs)
    values = [combine(a[tag], b[tag]) for tag in a if tag in b]
    if values:
        print(f"{what}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}; goal {goal})")

ratio = lambda a, b: a / b
difference = lambda a, b: a - b
compare("1 KB: ours-rr / haproxy", cpu(1), "ours-rr", "haproxy", ratio, "≤ 1.8")
for kilobytes in sizes:
    compare(f"{kilobytes} KB: ours-rr / vllm-rr", cpu(kilobytes), "ours-rr", "vllm-rr", ratio, "≤ 0.45")
compare("1 KB: ours-pa − ours-rr, µs", cpu(1), "ours-pa", "ours-rr", difference, "≤ 5")
for kilobytes in sizes:
    compare(f"{kilobytes} KB: ours-pa / sglang-ca", cpu(kilobytes), "ours-pa", "sglang-ca", ratio, "≤ 0.3")
compare("paced chunk: ours-rr / vllm-rr", paced, "ours-rr", "vllm-rr", ratio, "≤ 0.9")
compare("paced chunk: ours-rr / haproxy", paced, "ours-rr", "haproxy", ratio, "stretch 1.3")
PYTHON
