#!/bin/bash
# One flow, new connections a second, and many flows, by gateways, HAProxy and forwarding, in turn.
# scale.sh ROUNDS; VTLD and VTL name the programs, TESTS what is measured ("bulk rate idle"), TRANSPORTS by what.
# Prints rows: tab-separated. Takes haproxy and a C compiler.
#
#   c ──veth── r1 ══veth══ r2 ──veth── s      HAProxy runs on r1, and connects to s; VTL's gateways are r1 and r2
set -eu
rounds=$1
here=$(cd "$(dirname "$0")" && pwd) root=$(cd "$(dirname "$0")/../../.." && pwd)
VTLD=${VTLD:-$root/target/release/vtld} VTL=${VTL:-$root/target/release/vtl}
TESTS=${TESTS:-bulk rate idle}
TRANSPORTS=${TRANSPORTS:-forward haproxy gateways gateways-clear gateways-near}
RATE=${RATE:-2000} SECONDS_EACH=${SECONDS_EACH:-5} FLOWS=${FLOWS:-10000}
name=gwscale dir=$(mktemp -d)
# Two a flow in vtld and in HAProxy; where root may not raise the limit, as many flows as it allows.
ulimit -n 200000 2>/dev/null || ulimit -n "$(ulimit -Hn)"
on() { ip netns exec "$name-$1" "${@:2}"; }
vtl() { on "$1" env VTL_SOCKET="$dir/$1.sock" "$VTL" "${@:2}"; }
pids=() daemons=()
end() { # PID...
    # Without one, wait would wait for all.
    [ $# -gt 0 ] || return 0
    kill "$@" 2>/dev/null || true
    wait "$@" 2>/dev/null || true
}
finish() {
    end "${daemons[@]}" "${pids[@]}"
    for host in c r1 r2 s; do ip netns del "$name-$host" 2>/dev/null || true; done
    rm -rf "$dir"
}
trap finish EXIT
trap 'exit 1' INT TERM
cc -O2 -Wall -Wextra -Werror -o "$dir/load" "$here/load.c"

for host in c r1 r2 s; do ip netns add "$name-$host"; done
wire() { # A DEVICE ADDRESS B DEVICE ADDRESS
    ip -n "$name-$1" link add "$2" type veth peer name "$5" netns "$name-$4"
    ip -n "$name-$1" addr add "$3" dev "$2"
    ip -n "$name-$4" addr add "$6" dev "$5"
    ip -n "$name-$1" link set "$2" up
    ip -n "$name-$4" link set "$5" up
    # VTL's live frames take it; TCP gains as well.
    on "$1" ethtool -K "$2" gro on 2>/dev/null || true
    on "$4" ethtool -K "$5" gro on 2>/dev/null || true
}
wire c out 10.98.1.2/24 r1 inside 10.98.1.1/24
wire r1 hop 10.98.0.1/24 r2 hop 10.98.0.2/24
wire r2 inside 10.98.2.1/24 s out 10.98.2.2/24
ip -n "$name-c" route add default via 10.98.1.1
ip -n "$name-s" route add default via 10.98.2.1
ip -n "$name-r1" route add 10.98.2.0/24 via 10.98.0.2
ip -n "$name-r2" route add 10.98.1.0/24 via 10.98.0.1
# A namespace takes only what the machine allows; the list is put back at once.
allowed=$(sysctl -n net.ipv4.tcp_allowed_congestion_control)
sysctl -qw net.ipv4.tcp_allowed_congestion_control="$allowed cubic"
for host in c r1 r2 s; do
    ip -n "$name-$host" link set lo up
    on "$host" sysctl -qw net.ipv4.ip_forward=1 net.core.somaxconn=65535 net.ipv4.tcp_max_syn_backlog=65535 \
        net.ipv4.ip_local_port_range="1024 65535" net.ipv4.tcp_tw_reuse=1 net.ipv4.tcp_congestion_control=cubic
done
sysctl -qw net.ipv4.tcp_allowed_congestion_control="$allowed"
# Routers with it forward no packet that a socket in TIME_WAIT could be for: of the same ends, a minute before.
for host in r1 r2; do on "$host" sysctl -qw net.ipv4.tcp_early_demux="${EARLY_DEMUX:-0}"; done
for host in c r1 r2 s; do [ "$(on "$host" sysctl -n net.ipv4.tcp_congestion_control)" = cubic ]; done

# Not by `on`: of a function in the background, $! is the shell's number.
ip netns exec "$name-s" "$dir/load" serve 7000 >"$dir/serve.log" &
pids+=($!)
cat >"$dir/haproxy.cfg" <<C
global
    maxconn $((($(ulimit -n) - 100) / 2))
defaults
    mode tcp
    timeout connect 20s
    timeout client 120s
    timeout server 120s
listen echo
    bind 10.98.1.1:7000
    server s 10.98.2.2:7000
listen sink
    bind 10.98.1.1:7001
    server s 10.98.2.2:7001
C

begin() { # TRANSPORT: sets `to`
    to=10.98.2.2 daemons=()
    case $1 in
    forward) ;;
    haproxy)
        to=10.98.1.1
        ip netns exec "$name-r1" haproxy -db -f "$dir/haproxy.cfg" 2>"$dir/haproxy.log" &
        daemons+=($!)
        until on c "$dir/load" rate $to 7000 1 1 >/dev/null 2>&1; do sleep 0.2; done
        ;;
    gateways*)
        local args=(--near 0)
        [ "$1" = gateways-clear ] && args+=(--no-encryption)
        [ "$1" = gateways-near ] && args=()
        for host in r1 r2; do
            ip netns exec "$name-$host" env VTL_PEERS="$dir/$host.toml" "$VTLD" --socket "$dir/$host.sock" \
                --state "$dir/$host" --rules "$dir/none.toml" "${args[@]}" 2>>"$dir/$host.log" &
            daemons+=($!)
        done
        for host in r1 r2; do
            until vtl "$host" status >/dev/null 2>&1; do sleep 0.2; done
            vtl "$host" gateway add hop
        done
        # The association is made with the first connections.
        for _ in $(seq 50); do
            on c "$dir/load" rate $to 7000 10 1 >/dev/null || true
            if [ "$1" = gateways-near ]; then break; fi
            if [ "$(carried)" -gt 0 ]; then break; fi
        done
        ;;
    esac
}
# Bytes that r1's carriers other than TCP have sent for flows.
carried() {
    vtl r1 status --json 2>/dev/null | python3 -c '
import json, sys
rows = json.load(sys.stdin)["carriers"]
print(sum(row.get("bytes_sent", 0) for row in rows if row["carrier"] != "control"))' || echo 0
}
# Connections that r1 has ended and carried.
connections() {
    vtl r1 gateway list --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["gateways"][0]["connections"])'
}
# Memory of a process, KiB; "-" without one.
memory() {
    [ $# -gt 0 ] || { echo -; return; }
    awk '/^VmRSS/ { print $2 }' "/proc/$1/status"
}
# CPU seconds so far of the processes on the routers.
cpu() {
    local sum=0 pid
    for pid in "${daemons[@]}"; do
        sum=$((sum + $(awk '{ print $14 + $15 }' "/proc/$pid/stat")))
    done
    echo $sum
}
row() { # TRANSPORT ROUND TEST OUTPUT
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$(date -u +%FT%TZ)" "$(uname -r)" "$1" "$2" "$3" "$4" \
        "$(memory ${daemons[0]:+"${daemons[0]}"})" "$((bytes_after - bytes_before))" "$((through_after - through_before))" "$(($(cpu) - cpu_before))"
}
measure() { # TRANSPORT ROUND TEST
    bytes_before=0 bytes_after=0 through_before=0 through_after=0 cpu_before=$(cpu)
    case $1 in gateways*) bytes_before=$(carried) through_before=$(connections) ;; esac
    case $3 in
    bulk) output=$(on c "$dir/load" bulk $to 7000 "$SECONDS_EACH" 2>&1) || true ;;
    rate) output=$(on c "$dir/load" rate $to 7000 "$RATE" "$SECONDS_EACH" 2>&1) || true ;;
    idle)
        # The line that has the messages sent comes when all are open, and the memory has been read.
        mkfifo "$dir/go"
        ip netns exec "$name-c" "$dir/load" idle $to 7000 "$FLOWS" <"$dir/go" >"$dir/idle" 2>&1 &
        local client=$!
        exec 3>"$dir/go"
        until grep -q ^open "$dir/idle" || ! kill -0 $client 2>/dev/null; do sleep 0.2; done
        sleep 1
        output="idle"
        for pid in "${daemons[@]}"; do
            output+=" kib $(memory "$pid") descriptors $(find "/proc/$pid/fd" -type l | wc -l)"
        done
        echo >&3
        wait $client || true
        exec 3>&-
        rm "$dir/go"
        output+=" $(tr '\n' ' ' <"$dir/idle")"
        ;;
    esac
    case $1 in gateways*) bytes_after=$(carried) through_after=$(connections) ;; esac
    row "$1" "$2" "$3" "$(echo "$output" | tr '\n' ' ')"
}
printf 'date\tkernel\ttransport\tround\ttest\tresult\tr1_kib\tcarried_bytes\tconnections\tcpu_ticks\n'
for round in $(seq "$rounds"); do
    for transport in $TRANSPORTS; do
        begin "$transport"
        for test in $TESTS; do
            # Many flows: once by each.
            if [ "$test" != idle ] || [ "$round" = 1 ]; then measure "$transport" "$round" "$test"; fi
        done
        end "${daemons[@]}"
        daemons=()
    done
done
