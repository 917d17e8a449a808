"""Datagrams of UDP: `datagrams.py serve` sends back what comes to port 7000, `datagrams.py ask ADDRESS` asks it.

Datagrams go one by one, up to a length that takes fragments, and many by one call (UDP_SEGMENT), as QUIC sends them.
"""

import socket
import sys

UDP_SEGMENT = 103


def serve():
    server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    server.bind(("::", 7000))
    print("ready", flush=True)
    while True:
        server.sendto(*server.recvfrom(65535))


def ask(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    client = socket.socket(family, socket.SOCK_DGRAM)
    client.connect((address, 7000))
    client.settimeout(10)
    for length in (0, 1, 2, 1000, 1171, 1232, 5000, 20000):
        datagram = bytes(number * 7 % 251 for number in range(length))
        client.send(datagram)
        assert client.recv(65535) == datagram, length
    for size in (1200, 999, 17):
        client.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, size)
        together = bytes(number * 11 % 253 for number in range(20 * size + 5))
        client.send(together)
        # Each has a place of its own, as the path may change their order.
        wanted = sorted(together[at : at + size] for at in range(0, len(together), size))
        assert sorted(client.recv(65535) for _ in wanted) == wanted, size


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else ask(sys.argv[2])
