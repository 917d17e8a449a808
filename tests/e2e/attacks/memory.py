"""Many connections, of one end of which nobody reads for a while: `memory.py serve PORT`, `memory.py send HOST PORT`.

The server accepts, and reads once it is told to by a line. Both say what they have, by lines.
"""

import random
import selectors
import socket
import struct
import sys

CONNECTIONS = 60
SIZE = 4 << 20


def payload(number):
    return struct.pack("!I", number) + random.Random(number).randbytes(SIZE)


def say(word):
    print(word, flush=True)


def serve(port):
    listener = socket.create_server(("", port), backlog=CONNECTIONS)
    say("ready")
    accepted = [listener.accept()[0] for _ in range(CONNECTIONS)]
    say("accepted")
    sys.stdin.readline()
    good = 0
    for connection in accepted:
        got = b"".join(iter(lambda: connection.recv(1 << 20), b""))
        good += got == payload(*struct.unpack_from("!I", got))
    say(f"good {good}")


def send(host, port):
    polled = selectors.DefaultSelector()
    for number in range(CONNECTIONS):
        connection = socket.create_connection((host, port))
        connection.setblocking(False)
        polled.register(connection, selectors.EVENT_WRITE, memoryview(payload(number)))
    is_stuck = False
    while polled.get_map():
        ready = polled.select(3)
        if not ready and not is_stuck:
            is_stuck = True
            say("stuck")
        for key, _ in ready:
            rest = key.data[key.fileobj.send(key.data[: 64 << 10]) :]
            if rest:
                polled.modify(key.fileobj, selectors.EVENT_WRITE, rest)
            else:
                polled.unregister(key.fileobj)
                key.fileobj.shutdown(socket.SHUT_WR)
                key.fileobj.close()
    say("sent")


if sys.argv[1] == "serve":
    serve(int(sys.argv[2]))
else:
    send(sys.argv[2], int(sys.argv[3]))
