#!/bin/bash
# Seconds of a download of 30 MB on a path that changes 1 s after it has begun: through the Hooker (this build's vtld, and
# that of OLD=, if given), and plain TCP under BBR, in turns.
set -u
bin=$(cd "$(dirname "$0")/../../.." && pwd)/target/release
export VTL_TESTBED=changes$$
on() { "$bin/vtl" testbed exec "$@"; }
cat > /tmp/srv.py <<'P'
import socket
s = socket.create_server(("10.73.0.2", 7003))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
b = bytes(1 << 20)
while 1:
    c, _ = s.accept()
    try:
        for _ in range(30):
            c.sendall(b)
    except OSError:
        pass
    c.close()
P
cat > /tmp/cli.py <<'P'
import socket, subprocess, sys, time
c = socket.create_connection(("10.73.0.2", 7003))
b = bytearray(1 << 20)
t = time.time()
n = 0
while 1:
    c.settimeout(120)
    k = c.recv_into(b)
    if not k:
        break
    n += k
    if n > 0 and sys.argv[1:] and time.time() - t > 1:
        open(sys.argv[1], "w").close()
        sys.argv[1:] = []
print(f"{time.time() - t:.2f}" if n == 30 << 20 else f"cut off at {n}")
P
one() { # CHANGE CLIENT...
    local change=$1; shift
    rm -f /tmp/changed$$
    (until [ -e /tmp/changed$$ ]; do sleep 0.02; done; "$bin/vtl" testbed set $change >/dev/null) & local w=$!
    "$@" python3 /tmp/cli.py /tmp/changed$$ 2>/dev/null
    kill $w 2>/dev/null; wait $w 2>/dev/null
}
names=("50 to 300 ms, 0.5 %" "50 to 500 ms, 0.5 %" "50 to 500 ms, no loss, queue 5000" "50 to 100 ms, 0.5 %" "50 to 10 ms, 0.5 %" "100 to 5 Mbit/s, 0.5 %")
firsts=("--loss-down 0.5 --queue 500" "--loss-down 0.5 --queue 500" "--loss-down 0 --queue 5000" "--loss-down 0.5 --queue 500" "--loss-down 0.5 --queue 500" "--loss-down 0.5 --queue 500")
changes=("--rtt 300" "--rtt 500" "--rtt 500" "--rtt 100" "--rtt 10" "--rate 5")
for round in 1 2 3; do
    for i in ${!names[@]}; do
        for vtld in new old bbr; do
            daemon=$bin/vtld
            [ $vtld = old ] && { [ -n "${OLD-}" ] || continue; daemon=$OLD; }
            "$bin/vtl" testbed up --rtt 50 --rate 100 ${firsts[i]} >/dev/null
            pids=()
            (exec "$bin/vtl" testbed exec server -- python3 /tmp/srv.py 2>/dev/null) & pids+=($!)
            if [ $vtld != bbr ]; then
                (exec "$bin/vtl" testbed exec server -- $daemon 2>/dev/null) & pids+=($!)
                (exec "$bin/vtl" testbed exec client -- $daemon 2>/dev/null) & pids+=($!)
                sleep 2
                on server -- "$bin/vtl" hook add --port 7003 >/dev/null
                t=$(one "${changes[i]}" on client -- "$bin/vtl" run --)
            else
                sleep 0.5
                t=$(one "${changes[i]}" on client --)
            fi
            echo "round $round; ${names[i]}; $vtld; $t"
            for p in "${pids[@]}"; do kill $p 2>/dev/null; done; wait "${pids[@]}" 2>/dev/null
            "$bin/vtl" testbed down >/dev/null
        done
    done
done
