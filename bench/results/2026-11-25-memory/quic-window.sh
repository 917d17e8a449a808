#!/bin/bash
# qwin.sh ROUNDS RTT RATE LOSS KIB CARRIER
mount --make-rprivate /
mount -t tmpfs none /run; mkdir -p /run/lock /run/vtl
export PATH=${NEW:-target/release}:$PATH
rounds=$1 kib=$5 carrier=$6
dir=$(mktemp -d); chmod 755 "$dir"; cd "$dir" || exit
head -c "${kib}K" /dev/urandom > f
cat > nginx.conf <<N
worker_processes 1; daemon off; pid $dir/pid; error_log $dir/err; events {}
http { access_log off; sendfile on; server { listen 8080; root $dir; } }
N
vtl testbed up --rtt $2 --rate $3 --loss $4 >/dev/null
on() { vtl testbed exec "$@"; }
on server nginx -c "$dir/nginx.conf" &
sleep 1
fetch() { curl -s -o /dev/null -w '%{time_total} ' "http://10.73.0.2:8080/f"; }
export -f fetch
for ((round = 0; round < rounds; round++)); do
    for which in old new; do
        d=${NEW:-target/release}/vtld; [ $which = old ] && d=${OLD:?}
        on server $d 2>/dev/null & on client $d 2>/dev/null &
        for h in client server; do until on $h vtl status >/dev/null 2>&1; do sleep 0.1; done; done
        on server vtl hook add --port 8080 >/dev/null
        echo "$2 $3 $4 $kib $carrier $which $(on client vtl run --carrier $carrier -- bash -c "fetch; fetch; sleep 8; fetch")"
        for h in client server; do
            for p in $(on $h sh -c 'ip netns pids $(ip netns identify $$)'); do
                c=$(cat "/proc/$p/comm" 2>/dev/null); [ "${c#vtld}" != "$c" ] && kill "$p"
            done
        done
        sleep 1
    done
done
kill "$(cat "$dir/pid")"
vtl testbed down >/dev/null
rm -r "$dir"
