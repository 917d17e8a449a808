#!/bin/bash
# Uploads, downloads, and both at once between two hosts: BBR over plain TCP, and what VTL carries, all in
# one session, in turns. A row each: HOW WHAT MBIT/S, or UP DOWN; of the receivers, startup included.
# Nine minutes with five rounds, as root, on a machine that does nothing else and has iperf3.
#   bench/both.sh [ROUNDS] [RTT_MS] [RATE_MBIT] [LOSS_PERCENT] [BINARIES]
set -u
rounds=${1:-5}
rtt=${2:-50}
rate=${3:-100}
loss=${4:-0.5}
bin=$(realpath "${5:-$(dirname "$0")/../target/release}") || exit
. "$(dirname "$0")/hosts.sh"
need both iperf3 python3
link both --rtt "$rtt" --rate "$rate" --loss "$loss"

for host in server client; do
    # Buffers that limit no path here.
    on "$host" sysctl -qw net.ipv4.tcp_wmem='4096 131072 33554432' net.ipv4.tcp_rmem='4096 131072 33554432'
done
daemons
start server iperf3 -s
on server "$bin/vtl" hook add --port 5201 >&2
sleep 1

received() {
    python3 -c '
import json, sys
end = json.load(sys.stdin)["end"]
sums = [end[name] for name in ("sum_received", "sum_received_bidir_reverse") if name in end]
print(*(format(each["bits_per_second"] / 1e6, ".1f") for each in sums))'
}
for ((round = 0; round < rounds; round++)); do
    for how in bbr vtl; do
        case $how in
        bbr) as=() control=(-C bbr) ;;
        vtl) as=("$bin/vtl" run --carrier graft --) control=() ;;
        esac
        for what in up down both; do
            case $what in
            up) way=() ;;
            down) way=(-R) ;;
            both) way=(--bidir) ;;
            esac
            echo "$how $what $(on client "${as[@]}" iperf3 -c "$to" -t 15 -J "${control[@]}" "${way[@]}" 2>>"$dir/log" | received)"
        done
    done
done
