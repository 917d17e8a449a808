#!/bin/bash
# Many TCP connections over a wire, plain and hooked: new ones at a rate, and idle ones with the
# memory that they take. Rows go to DIR. Needs root, and a machine that does nothing else.
#
#   bench/many.sh DIR rate plain|hook [options of vtl bench load connect]
#   bench/many.sh DIR idle plain|hook COUNT
set -eu
dir=$1 what=$2 over=$3
shift 3
here=$(cd "$(dirname "$0")/.." && pwd)
bin=${VTL_BIN:-$here/target/release}
export VTL_TESTBED=many$$
vtl=$bin/vtl
mkdir -p "$dir"
pids=()
end() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait
    "$vtl" testbed down >/dev/null
}
on() { "$vtl" testbed exec "$@"; }
# KiB: what the kernel could give away still, its slabs, and pages of TCP's buffers (of both hosts).
memory() {
    awk '/^MemAvailable/ { a = $2 } /^Slab/ { s = $2 } END { printf "%d %d", a, s }' /proc/meminfo
}
resident() {
    local total=0 pid
    for pid in "${daemons[@]}"; do
        pid=$(pgrep -P "$pid" -x vtld || echo "$pid")
        total=$((total + $(awk '/^VmRSS/ { print $2 }' "/proc/$pid/status")))
    done
    echo "$total"
}

"$vtl" testbed up --profile wire >/dev/null
trap end EXIT
daemons=() run=()
if [ "$over" = hook ]; then
    for host in server client; do
        on $host -- "$bin/vtld" --near 0 2>"$dir/vtld-$host.log" &
        pids+=($!) daemons+=($!)
    done
    sleep 2
    on server -- "$vtl" hook add --port 7000
    run=("$vtl" run --)
fi
on server -- "$vtl" bench load serve 7000 >/dev/null &
pids+=($!)
sleep 1
connect=("${run[@]}" "$vtl" bench load connect 10.73.0.2:7000)
# The hosts meet.
on client -- "${connect[@]}" --count 1 >/dev/null
sleep 2

if [ "$what" = rate ]; then
    row=$(on client -- "${connect[@]}" "$@")
    echo "{\"over\": \"$over\", \"options\": \"$*\", \"outcome\": $row}" | tee -a "$dir/rate.jsonl"
else
    count=$1
    coproc load { on client -- "${connect[@]}" --rate 2000 --count "$count" --hold; }
    read -r before slab <<<"$(memory)"
    resident=$(resident)
    # They are open soon; what is measured before is little.
    read -r word held <&"${load[0]}"
    sleep 5
    read -r after slab_after <<<"$(memory)"
    flows=0
    [ "$over" = plain ] || flows=$(on server -- "$vtl" status --json | grep -o '"flows":[ 0-9]*' | awk -F: '{ n += $2 } END { print n }')
    printf '{"over": "%s", "%s": %d, "carried": %d, "memory_kib": %d, "slab_kib": %d, "vtld_kib": %d, "bytes_a_flow_and_host": %d}\n' \
        "$over" "$word" "$held" "$flows" $((before - after)) $((slab_after - slab)) \
        $(($(resident) - resident)) $(((before - after) * 1024 / held / 2)) | tee -a "$dir/idle.jsonl"
    exec {load[1]}>&-
fi
