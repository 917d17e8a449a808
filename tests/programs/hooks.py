"""A TCP program that does what its standard input says, a line at a time, and answers each with "ok".

    hooks.py serve ADDRESS PORT     says "ok" once it listens, and sends back what it gets
    hooks.py call ADDRESS PORT      open N, talk N (64 KiB there and back), end N

What is open is never idle meanwhile: each connection talks by itself all the time.
"""

import os
import socket
import sys
import threading

SIZE = 64 * 1024
# What takes longer is called hung.
PATIENCE_S = 170


def echo(connection):
    with connection:
        while piece := connection.recv(SIZE):
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)


def serve(address):
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listener = socket.create_server(address, family=family)
    print("ok", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=echo, args=(connection,), daemon=True).start()


class Talk:
    """A connection that has the echo of each piece before it sends the next."""

    def __init__(self, address):
        self.connection = socket.create_connection(address, PATIENCE_S)
        self.turns = 0
        self.turn = threading.Condition()
        self.over = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.over:
            piece = os.urandom(SIZE)
            self.connection.sendall(piece)
            got = b""
            while len(got) < SIZE:
                more = self.connection.recv(SIZE)
                assert more, "an end"
                got += more
            assert got == piece, "other bytes"
            with self.turn:
                self.turns += 1
                self.turn.notify()
        self.connection.shutdown(socket.SHUT_WR)
        assert self.connection.recv(1) == b"", "more bytes"

    def talk(self):
        """Two turns from now on: one may have been under way."""
        with self.turn:
            wanted = self.turns + 2
            assert self.turn.wait_for(lambda: self.turns >= wanted, PATIENCE_S), "no echo"

    def end(self):
        self.over = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "no end"


def call(address):
    threading.excepthook = lambda what: (sys.excepthook(*what[:3]), os._exit(1))
    talks = {}
    for line in sys.stdin:
        verb, name = line.split()
        if verb == "open":
            talks[name] = Talk(address)
        elif verb == "talk":
            talks[name].talk()
        else:
            talks.pop(name).end()
        print("ok", flush=True)


what, host, port = sys.argv[1:]
{"serve": serve, "call": call}[what]((host, int(port)))
