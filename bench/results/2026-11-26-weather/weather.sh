#!/bin/bash
# Seconds of a download, also behind small answers, on paths that lose or reorder much: through the Hooker (this build's
# vtld, and that of OLD=, if given), and plain TCP under BBR, in turns.
set -u
bin=$(cd "$(dirname "$0")/../../.." && pwd)/target/release
export VTL_TESTBED=weather$$
on() { "$bin/vtl" testbed exec "$@"; }
cat > /tmp/srv.py <<'P'
import socket, threading
s = socket.create_server(("10.73.0.2", 7003))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
b = bytes(1 << 20)
def serve(c):
    try:
        for line in c.makefile("rb"):
            n = int(line)
            while n:
                k = min(n, len(b))
                c.sendall(b[:k])
                n -= k
    except OSError:
        pass
    c.close()
while 1:
    c, _ = s.accept()
    c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=serve, args=(c,), daemon=True).start()
P
cat > /tmp/cli.py <<'P'
import socket, sys, time
answers, megabytes = int(sys.argv[1]), int(sys.argv[2])
b = bytearray(1 << 20)
def ask(c, n):
    c.sendall(b"%d\n" % n)
    while n:
        k = c.recv_into(b, min(n, len(b)))
        if not k:
            sys.exit("cut off")
        n -= k
def connect():
    c = socket.create_connection(("10.73.0.2", 7003))
    c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    c.settimeout(170)
    return c
if answers:
    c = connect()
    for _ in range(answers):
        ask(c, 2000)
t = time.time()
ask(connect(), megabytes * 1000000)
print(f"{time.time() - t:.2f}")
P
names=("20 MB behind 600 answers of 2 kB; 40 ms, 200 Mbit/s, 1 %" "20 MB alone; 40 ms, 200 Mbit/s, 1 %" "16 MB; 100 ms, 100 Mbit/s, 10 %" "16 MB; 100 ms, 100 Mbit/s, 20 %" "16 MB; 100 ms, 100 Mbit/s, 30 %" "16 MB; 100 ms, 100 Mbit/s, 10 % reordered by 50 ms" "16 MB; 100 ms, 100 Mbit/s, 90 % reordered by 20 ms, 1 %" "16 MB; 40 ms, 50 Mbit/s, queue of 20")
links=("--rtt 40 --rate 200 --loss-down 1 --queue 700" "--rtt 40 --rate 200 --loss-down 1 --queue 700" "--rtt 100 --rate 100 --loss-down 10" "--rtt 100 --rate 100 --loss-down 20" "--rtt 100 --rate 100 --loss-down 30" "--rtt 100 --rate 100 --reorder 10 --reorder-ms 50" "--rtt 80 --rate 100 --loss-down 1 --reorder 90 --reorder-ms 20" "--rtt 40 --rate 50 --queue 20")
answers=(600 0 0 0 0 0 0 0)
sizes=(20 20 16 16 16 16 16 16)
for round in $(seq ${ROUNDS:-3}); do
    for i in ${!names[@]}; do
        for vtld in new old bbr; do
            daemon=$bin/vtld
            [ $vtld = old ] && { [ -n "${OLD-}" ] || continue; daemon=$OLD; }
            "$bin/vtl" testbed up ${links[i]} >/dev/null || exit 1
            pids=()
            (exec "$bin/vtl" testbed exec server -- python3 /tmp/srv.py 2>/dev/null) & pids+=($!)
            run=()
            if [ $vtld != bbr ]; then
                (exec "$bin/vtl" testbed exec server -- $daemon 2>/dev/null) & pids+=($!)
                (exec "$bin/vtl" testbed exec client -- $daemon 2>/dev/null) & pids+=($!)
                sleep 2
                on server -- "$bin/vtl" hook add --port 7003 >/dev/null
                run=("$bin/vtl" run --)
            else
                sleep 0.5
            fi
            t=$(timeout 180 "$bin/vtl" testbed exec client -- "${run[@]}" python3 /tmp/cli.py ${answers[i]} ${sizes[i]} 2>/dev/null)
            echo "round $round; ${names[i]}; $vtld; ${t:-more than 180}"
            for p in "${pids[@]}"; do kill $p 2>/dev/null; done; wait "${pids[@]}" 2>/dev/null
            "$bin/vtl" testbed down >/dev/null
        done
    done
done
