#!/bin/bash
# A file by curl between two hosts behind two routers, in turn: over the routers as gateways, by VTL on the hosts
# themselves, or forwarded only, with the server's TCP under BBR or CUBIC.
# run.sh PROFILE LOSS SIZE RUNS; VTLD, VTL and LAB name the programs, TRANSPORTS some of the four, LIMIT seconds.
# Prints rows: tab-separated.
set -eu
profile=$1 loss=$2 size=$3 runs=$4
root=$(cd "$(dirname "$0")/../../.." && pwd)
VTLD=${VTLD:-$root/target/release/vtld} VTL=${VTL:-$root/target/release/vtl} LAB=${LAB:-$root/target/release/vtl-lab}
transports=${TRANSPORTS:-gateways hosts bbr cubic} limit=${LIMIT:-20}
name=gwbench dir=$(mktemp -d)
on() { ip netns exec "$name-$1" "${@:2}"; }
vtl() { on "$1" env VTL_SOCKET="$dir/$1.sock" "$VTL" "${@:2}"; }
pids=()
finish() {
    kill "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    for host in c s; do ip netns del "$name-$host" 2>/dev/null || true; done
    "$LAB" testbed down --name "$name" >/dev/null || true
    rm -rf "$dir"
}
trap finish EXIT
"$LAB" testbed up --name "$name" --profile "$profile" --loss "$loss" >&2
behind() { # HOST ROUTER NUMBER: a host behind a router
    ip netns add "$name-$1"
    ip -n "$name-$2" link add inside type veth peer name out netns "$name-$1"
    ip -n "$name-$2" addr add "10.98.$3.1/24" dev inside
    ip -n "$name-$2" link set inside up
    ip -n "$name-$1" addr add "10.98.$3.2/24" dev out
    ip -n "$name-$1" link set lo up
    ip -n "$name-$1" link set out up
    ip -n "$name-$1" route add default via "10.98.$3.1"
    on "$2" sysctl -qw net.ipv4.ip_forward=1
    # As the testbed's hosts are tuned: buffers of at least twice the bandwidth-delay product, no memory.
    on "$1" sysctl -qw net.ipv4.tcp_rmem="4096 131072 33554432" net.ipv4.tcp_wmem="4096 131072 33554432" \
        net.ipv4.tcp_no_metrics_save=1
}
behind c client 1
behind s server 2
ip -n "$name-client" route add 10.98.2.0/24 via 10.73.0.2
ip -n "$name-server" route add 10.98.1.0/24 via 10.73.0.1
mkdir "$dir/www"
head -c "$size" /dev/urandom >"$dir/www/file"
sum=$(sha256sum <"$dir/www/file")
cat >"$dir/nginx.conf" <<C
daemon off; user root; worker_processes 1; pid $dir/nginx.pid; error_log $dir/error.log;
events { worker_connections 64; }
http { access_log off; server { listen 80; root $dir/www; } }
C
for host in client server c s; do
    ip netns exec "$name-$host" env VTL_PEERS="$dir/$host.toml" "$VTLD" --socket "$dir/$host.sock" \
        --state "$dir/$host" --rules "$dir/none.toml" 2>"$dir/$host.log" &
    pids+=($!)
done
ip netns exec "$name-s" nginx -p "$dir" -c "$dir/nginx.conf" -e "$dir/error.log" &
pids+=($!)
for host in client server c s; do
    until vtl "$host" status >/dev/null 2>&1; do sleep 0.2; done
done
printf 'date\tkernel\tprofile\tloss_pct\tbytes\ttransport\trun\tseconds\tmbit\texact\tby\n'
for run in $(seq "$runs"); do
    for transport in $transports; do
        of=client curl=(on c curl)
        case $transport in
        gateways) for host in client server; do vtl "$host" gateway add eth0; done ;;
        hosts)
            of=c curl=(vtl c run -- curl)
            vtl s hook add --port 80 >&2
            ;;
        *)
            # A namespace takes only what the machine allows; the list is put back at once.
            allowed=$(sysctl -n net.ipv4.tcp_allowed_congestion_control)
            sysctl -qw net.ipv4.tcp_allowed_congestion_control="$allowed $transport"
            on s sysctl -qw net.ipv4.tcp_congestion_control="$transport"
            sysctl -qw net.ipv4.tcp_allowed_congestion_control="$allowed"
            [ "$(on s sysctl -n net.ipv4.tcp_congestion_control)" = "$transport" ]
            ;;
        esac
        seconds=$("${curl[@]}" --noproxy '*' -sSf --max-time "$limit" -o "$dir/got" -w '%{time_total}' http://10.98.2.2/file) || true
        exact=no
        [ "$(sha256sum <"$dir/got")" = "$sum" ] && exact=yes
        got=$(stat -c %s "$dir/got")
        by=tcp
        case $transport in
        gateways | hosts)
            by=$(vtl "$of" status --json | python3 -c 'import json,sys; print(sum(r.get("bytes_received",0) for r in json.load(sys.stdin)["carriers"]))')
            ;;
        esac
        case $transport in
        gateways) for host in client server; do vtl "$host" gateway remove eth0; done ;;
        hosts) vtl s hook remove --port 80 >&2 ;;
        esac
        printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$(date -u +%FT%TZ)" "$(uname -r)" "$profile" "$loss" "$got" \
            "$transport" "$run" "$seconds" "$(python3 -c "print(round($got*8/$seconds/1e6,1))")" "$exact" "$by"
    done
done
