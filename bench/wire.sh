#!/usr/bin/env bash
# Data-plane limit on the `wire` profile: the aware transfer, read in place, over each driver and
# hook, against kernel TCP cubic in 1,500-byte segments on the same veth; all in each run, in turn.
# Then what attached programs cost TCP that has nothing to do with VTL.
#
#   bench/wire.sh [RUNS] [SECONDS] >rows.jsonl        (as root, nothing else running)
#
# One JSON object a line; the figures are goodput in Gbit/s at the receiver.
set -euo pipefail
runs=${1:-5} seconds=${2:-4}
top=$(cd "$(dirname "$0")/.." && pwd)
bin=$top/target/release
export VTL_TESTBED=bench-$$
work=$(mktemp -d)
daemons=()

cleanup() {
    for pid in "${daemons[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    "$bin/vtl" testbed down 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

at() { local host=$1; shift; exec "$bin/vtl" testbed exec "$host" -- "$@"; }

start() { # vtld arguments
    daemons=()
    for host in client server; do
        (at $host "$bin/vtld" --socket "$work/$host.sock" --log warn "$@") &
        daemons+=($!)
        for _ in $(seq 100); do
            "$bin/vtl" --socket "$work/$host.sock" status >/dev/null 2>&1 && break
            sleep 0.05
        done
    done
}

stop() {
    for pid in "${daemons[@]}"; do kill "$pid"; wait "$pid" || true; done
    daemons=()
}

row() { echo "{\"date\":\"$(date -u +%FT%TZ)\",\"kernel\":\"$(uname -r)\",\"run\":$1,\"what\":\"$2\",\"gbit\":$3}"; }

vtl() { # run name
    (at server env VTL_SOCKET="$work/server.sock" "$bin/examples/goodput" recv) >"$work/out" &
    local receiver=$!
    sleep 0.3
    (at client env VTL_SOCKET="$work/client.sock" "$bin/examples/goodput" send 10.73.0.2 "$seconds")
    wait $receiver
    grep -q '"wrong":0' "$work/out" || { echo "wrong bytes: $(cat "$work/out")" >&2; exit 1; }
    row "$1" "$2" "$(sed 's/.*"gbit":\([0-9.]*\).*/\1/' "$work/out")"
}

tcp() { # run name
    (at server iperf3 -s -1) >/dev/null &
    local server=$!
    sleep 0.3
    (at client iperf3 -c 10.73.0.2 -t "$seconds" -C cubic -J) >"$work/iperf"
    wait $server
    row "$1" "$2" "$(python3 -c "import json; print(round(json.load(open('$work/iperf'))['end']['sum_received']['bits_per_second']/1e9, 3))")"
}

"$bin/vtl" testbed up --profile wire >&2
for run in $(seq "$runs"); do
    tcp "$run" tcp-cubic
    for driver in live tc; do
        for hook in tcx xdp; do
            start --driver $driver --ingress $hook --ring-slots 1024
            vtl "$run" "vtl-$driver-$hook"
            [ $driver = live ] && tcp "$run" "tcp-cubic beside vtld on $hook"
            stop
        done
    done
done
