#!/bin/bash
set -u
here=$(cd "$(dirname "$0")/../../.." && pwd) bin=$here/target/release
export VTL_TESTBED=echo$$
on() { "$bin/vtl" testbed exec "$@"; }
for round in 1 2 3; do
 for mode in "" "--no-encryption"; do
  "$bin/vtl" testbed up --profile wire >/dev/null
  pids=()
  (exec "$bin/vtl" testbed exec server -- taskset -c 1 python3 $here/bench/native.py serve 2>/dev/null) & pids+=($!)
  (exec "$bin/vtl" testbed exec server -- taskset -c 1 $bin/vtld $mode 2>/dev/null) & pids+=($!)
  (exec "$bin/vtl" testbed exec client -- taskset -c 0 $bin/vtld $mode 2>/dev/null) & pids+=($!)
  sleep 2
  on server -- "$bin/vtl" hook add --port 7002 >/dev/null
  echo "round $round tcp $(on client -- taskset -c 0 python3 $here/bench/native.py 10.73.0.2 10000 7002)"
  echo "round $round hook '$mode' $(on client -- "$bin/vtl" run -- taskset -c 0 python3 $here/bench/native.py 10.73.0.2 10000 7002)"
  for p in "${pids[@]}"; do kill $p 2>/dev/null; done; wait; "$bin/vtl" testbed down >/dev/null
 done
done
