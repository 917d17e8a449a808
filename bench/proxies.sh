#!/bin/bash
# An echo of 64 bytes over plain TCP, through an HAProxy on each host (what proxies that only copy cost),
# and hooked, with both hosts on one core and on one each. Rows go to DIR/proxies.jsonl. Needs root,
# haproxy, and a machine that does nothing else.
#
#   bench/proxies.sh DIR ROUNDS
set -eu
dir=$1 rounds=$2
here=$(cd "$(dirname "$0")/.." && pwd)
bin=${VTL_BIN:-$here/target/release}
export VTL_TESTBED=proxies$$
mkdir -p "$dir"
scratch=$(mktemp -d)
pids=()
end() {
    for pid in "${pids[@]}"; do kill "$pid" || true; done
    wait
    pids=()
    "$bin/vtl" testbed down >/dev/null
}
trap 'end; rm -r "$scratch"' EXIT
on() { "$bin/vtl" testbed exec "$@"; }
start() {
    (exec "$bin/vtl" testbed exec "$@" 2>/dev/null) &
    pids+=($!)
}
# proxy HOST CORE ADDRESS NEXT
proxy() {
    cat >"$scratch/$1" <<EOF
defaults
    mode tcp
    timeout connect 5s
    timeout client 60s
    timeout server 60s
listen echo
    bind $3:7102
    server next $4
EOF
    start "$1" -- taskset -c "$2" haproxy -db -f "$scratch/$1"
}
row() {
    echo "{\"round\": $1, \"cores\": $cores, \"over\": \"$2\", \"outcome\": $3}" | tee -a "$dir/proxies.jsonl"
}

for cores in 1 2; do
    client="taskset -c 0" server="taskset -c $((cores - 1))"
    echo="python3 $here/bench/native.py"
    "$bin/vtl" testbed up --profile wire >/dev/null
    start server -- $server $echo serve
    start server -- $server "$bin/vtld" --near 0
    start client -- $client "$bin/vtld" --near 0
    proxy server $((cores - 1)) 10.73.0.2 10.73.0.2:7002
    proxy client 0 127.0.0.1 10.73.0.2:7102
    sleep 2
    on server -- "$bin/vtl" hook add --port 7002 >/dev/null
    for round in $(seq "$rounds"); do
        row "$round" tcp "$(on client -- $client $echo 10.73.0.2 10000 7002)"
        row "$round" haproxy "$(on client -- $client $echo 127.0.0.1 10000 7102)"
        row "$round" hook "$(on client -- "$bin/vtl" run -- $client $echo 10.73.0.2 10000 7002)"
    done
    end
done
