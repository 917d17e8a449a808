#!/bin/bash
# Between hosts on one veth pair: plain TCP, connections that go past vtld since the peer is near, and
# those that are carried all the same. Requests a second of wrk, ab and redis-benchmark, and Mbit/s of
# iperf3, in turns, a row each: WHAT HOW FIGURE. Three minutes with five rounds, as root, on a machine
# that does nothing else and has wrk, apache2-utils, redis and iperf3.
#   bench/near.sh [ROUNDS] [BINARIES]
set -u
rounds=${1:-5}
bin=$(realpath "${2:-$(dirname "$0")/../target/release}") || exit
. "$(dirname "$0")/hosts.sh"
need near wrk ab redis-benchmark redis-server iperf3 nginx curl
link near --profile wire

mkdir "$dir/www"
chmod 755 "$dir"
echo hello >"$dir/www/f"
cat >"$dir/nginx.conf" <<CONF
daemon off; user root; worker_processes 2; pid $dir/nginx.pid; error_log $dir/log;
events { worker_connections 4096; }
http { access_log off; keepalive_requests 10000000; server { listen 80; root $dir/www; } }
CONF
daemons
start server nginx -p "$dir" -c "$dir/nginx.conf" -e "$dir/log"
start server iperf3 -s
start server redis-server --bind "$to" --protected-mode no --save ''
for port in 80 5201 6379; do on server "$bin/vtl" hook add --port "$port" >&2; done
sleep 1
# What makes the peer a near one.
for _ in {1..10}; do on client "$bin/vtl" run -- curl -sS -o /dev/null "http://$to/f"; done

for ((round = 0; round < rounds; round++)); do
    for how in tcp near carried; do
        case $how in
        tcp) as=() ;;
        near) as=("$bin/vtl" run --) ;;
        carried) as=("$bin/vtl" run --carrier graft --) ;;
        esac
        run() { on client "${as[@]}" "$@" 2>>"$dir/log"; }
        echo "wrk $how $(run wrk -t2 -c50 -d3 "http://$to/f" | awk '/Requests\/sec/ { print $2 }')"
        echo "ab $how $(run ab -q -n 4000 -c 8 "http://$to/f" | awk '/Requests per second/ { print $4 }')"
        echo "redis $how $(run redis-benchmark -h "$to" -t get -n 40000 -c 50 --csv | awk -F'"' '/GET/ { print $4 }')"
        echo "iperf-up $how $(run iperf3 -c "$to" -t 3 -f m | awk '/receiver/ { print $7 }')"
        echo "iperf-down $how $(run iperf3 -c "$to" -t 3 -R -f m | awk '/receiver/ { print $7 }')"
    done
done
on client "$bin/vtl" status | grep '^near' >&2
