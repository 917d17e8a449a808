"""What bench/native.sh and bench/proxies.sh have their hosts run.

native.py serve          bulk on port 7001 of every address, echo on port 7002
native.py HOST [COUNT]   a row of JSON: bulk for a second, then COUNT (10,000) echoes of 64 bytes; 1: neither,
                         only to have been there
native.py HOST COUNT PORT
                         the echoes only
"""

import json
import os
import socket
import sys
import threading
import time

BULK, ECHO = 7001, 7002


def send(connection):
    file = os.memfd_create("zeros")
    os.ftruncate(file, 1 << 26)
    try:
        while True:
            os.sendfile(connection.fileno(), file, 0, 1 << 26)
    except OSError:
        connection.close()
        os.close(file)


def answer(connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(64):
        connection.sendall(data)


def serve(port, one):
    listener = socket.create_server(("", port))
    while True:
        threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()


def bulk(host, seconds):
    connection = socket.create_connection((host, BULK))
    buffer = bytearray(1 << 20)
    count, begin = 0, time.monotonic()
    while (took := time.monotonic() - begin) < seconds:
        count += connection.recv_into(buffer)
    return count * 8 / took / 1e9


def echo(host, port, count):
    connection = socket.create_connection((host, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        connection.sendall(b"x" * 64)
        connection.recv(64)
        times.append((time.perf_counter_ns() - begin) / 1000)
    times.sort()
    return times[count // 2], times[count * 99 // 100]


if sys.argv[1] == "serve":
    threading.Thread(target=serve, args=(BULK, send), daemon=True).start()
    serve(ECHO, answer)
host, count, port = sys.argv[1], 10_000, None
if len(sys.argv) > 2:
    count = int(sys.argv[2])
if len(sys.argv) > 3:
    port = int(sys.argv[3])
row = {}
if port is None:
    row["gbit_per_s"] = round(bulk(host, 1 if count > 1 else 0), 3)
p50, p99 = echo(host, port or ECHO, count)
row |= {"echo_p50_us": round(p50, 2), "echo_p99_us": round(p99, 2)}
print(json.dumps(row))
