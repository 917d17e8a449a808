#!/bin/bash
# What a hooked program pays towards a host without VTL: in each round the same program without vtld
# on its host, beside one, and hooked by one. Rows go to DIR/native.jsonl. Needs root, and a machine
# that does nothing else.
#
#   bench/native.sh DIR ROUNDS
set -eu
dir=$1 rounds=$2
here=$(cd "$(dirname "$0")/.." && pwd)
bin=${VTL_BIN:-$here/target/release}
export VTL_TESTBED=native$$
mkdir -p "$dir"
server='' daemon=''
end() {
    for pid in $server $daemon; do kill "$pid" || true; done
    wait
    "$bin/vtl" testbed down >/dev/null
}
on() { "$bin/vtl" testbed exec "$@"; }
# Each end on a core of its own: else the scheduler's choice decides about an echo's time.
client() { on client -- "$@" taskset -c 0 python3 "$here/bench/native.py" 10.73.0.2; }
row() { echo "{\"round\": $1, \"over\": \"$2\", \"outcome\": $3}" | tee -a "$dir/native.jsonl"; }

"$bin/vtl" testbed up --profile wire >/dev/null
trap end EXIT
(exec "$bin/vtl" testbed exec server -- taskset -c 1 python3 "$here/bench/native.py" serve) &
server=$!
sleep 1
for round in $(seq "$rounds"); do
    row "$round" "no vtld" "$(client)"
    (exec "$bin/vtl" testbed exec client -- "$bin/vtld" 2>/dev/null) &
    daemon=$!
    sleep 1.5
    # First contact.
    on client -- "$bin/vtl" run -- python3 "$here/bench/native.py" 10.73.0.2 1 >/dev/null
    # In turns, so that neither is always the later one.
    if ((round % 2)); then
        row "$round" "not hooked" "$(client)"
        row "$round" hooked "$(client "$bin/vtl" run --)"
    else
        row "$round" hooked "$(client "$bin/vtl" run --)"
        row "$round" "not hooked" "$(client)"
    fi
    kill "$daemon"
    wait "$daemon" || true
    daemon=''
done
