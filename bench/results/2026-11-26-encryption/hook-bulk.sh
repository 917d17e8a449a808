#!/bin/bash
set -u
bin=$(cd "$(dirname "$0")/../../.." && pwd)/target/release
export VTL_TESTBED=bulk$$
on() { "$bin/vtl" testbed exec "$@"; }
cat > /tmp/srv.py <<'P'
import socket
s=socket.create_server(("10.73.0.2",7003)); b=bytes(1<<20)
while 1:
    c,_=s.accept()
    try:
        while 1: c.sendall(b)
    except OSError: pass
    c.close()
P
cat > /tmp/cli.py <<'P'
import socket,time
c=socket.create_connection(("10.73.0.2",7003)); b=bytearray(1<<20)
t=time.time(); n=0; s=None
while time.time()-t<3:
    k=c.recv_into(b)
    if time.time()-t>1:
        if s is None: s=time.time()
        else: n+=k
print(round(n*8/(time.time()-s)/1e9,2),"Gbit/s")
P
for round in 1 2 3; do
 for mode in "" "--no-encryption"; do
  "$bin/vtl" testbed up --profile wire >/dev/null
  pids=()
  (exec "$bin/vtl" testbed exec server -- taskset -c 1 python3 /tmp/srv.py 2>/dev/null) & pids+=($!)
  (exec "$bin/vtl" testbed exec server -- taskset -c 1 $bin/vtld $mode 2>/dev/null) & pids+=($!)
  (exec "$bin/vtl" testbed exec client -- taskset -c 0 $bin/vtld $mode 2>/dev/null) & pids+=($!)
  sleep 2
  on server -- "$bin/vtl" hook add --port 7003 >/dev/null
  echo "round $round tcp $(on client -- taskset -c 0 python3 /tmp/cli.py)"
  echo "round $round hook '$mode' $(on client -- "$bin/vtl" run -- taskset -c 0 python3 /tmp/cli.py)"
  for p in "${pids[@]}"; do kill $p 2>/dev/null; done; wait; "$bin/vtl" testbed down >/dev/null
 done
done
