#!/bin/bash
# First contact, without the start of `vtl run`: curl's own times (connect, first byte, all), VTL and plain TCP in
# turns, with new daemons for each file. BBR at both hosts. Prints `PROFILE LOSS vtl|tcp KIB CONNECT FIRST TOTAL`.
# VTL's programs are in the PATH; run it by `unshare -m`.
#
#   first.sh ROUNDS PROFILE LOSS KIB...
mount --make-rprivate /
mount -t tmpfs none /run; mkdir -p /run/lock /run/vtl
rounds=$1 profile=$2 loss=$3; shift 3
dir=$(mktemp -d); chmod 755 "$dir"; cd "$dir" || exit
for s in "$@"; do head -c "${s}K" /dev/urandom > "f$s"; done
cat > nginx.conf <<N
worker_processes 1; daemon off; pid $dir/pid; error_log $dir/err; events {}
http { access_log off; sendfile on; server { listen 8080; root $dir; } }
N
vtl testbed up --profile "$profile" --loss "$loss" >/dev/null
on() { vtl testbed exec "$@"; }
for h in client server; do on $h sysctl -qw net.ipv4.tcp_congestion_control=bbr; done
on server nginx -c "$dir/nginx.conf" &
sleep 1
fetch() { curl -s -o /dev/null -w '%{time_connect} %{time_starttransfer} %{time_total}\n' "http://10.73.0.2:8080/f$1"; }
export -f fetch
for ((round = 0; round < rounds; round++)); do
    for s in "$@"; do
        on server vtld 2>/dev/null & on client vtld 2>/dev/null &
        for h in client server; do until on $h vtl status >/dev/null 2>&1; do sleep 0.1; done; done
        on server vtl hook add --port 8080 >/dev/null
        echo "$profile $loss vtl $s $(on client vtl run -- bash -c "fetch $s")"
        for h in client server; do
            for p in $(on $h sh -c 'ip netns pids $(ip netns identify $$)'); do
                [ "$(cat "/proc/$p/comm" 2>/dev/null)" = vtld ] && kill "$p"
            done
        done
        sleep 1
        for h in client server; do on $h ip tcp_metrics flush >/dev/null; done
        echo "$profile $loss tcp $s $(on client bash -c "fetch $s")"
    done
done
kill "$(cat "$dir/pid")"
vtl testbed down >/dev/null
rm -r "$dir"
