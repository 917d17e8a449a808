"""Two programs that talk over TCP, of which neither knows VTL.

talk.py serve PORT SENT GOT PACE        accepts one connection after the other
talk.py call ADDRESS PORT SENT GOT PACE

Each sends the file SENT in records of 1,000 bytes and writes what comes into GOT. With a PACE, one
record every so many milliseconds, both at the same time; with 0 they take turns of 16 records.
Exits with 3 if the connection is reset."""

import socket
import sys
import threading
import time

RECORD = 1000
TURN = 16 * RECORD


def read(connection, got):
    with open(got, "wb") as file:
        while piece := connection.recv(65536):
            file.write(piece)
            file.flush()


def write(connection, sent, pace):
    start = time.monotonic()
    for at in range(0, len(sent), RECORD):
        connection.sendall(sent[at : at + RECORD])
        wait = start + (at // RECORD + 1) * pace / 1000 - time.monotonic()
        if wait > 0:
            time.sleep(wait)
    connection.shutdown(socket.SHUT_WR)


def turns(connection, sent, got, first):
    with open(got, "wb") as file:
        for at in range(0, len(sent), TURN):
            turn = sent[at : at + TURN]
            if first:
                connection.sendall(turn)
            left = len(turn)
            while left:
                piece = connection.recv(left)
                if not piece:
                    return
                file.write(piece)
                left -= len(piece)
            if not first:
                connection.sendall(turn)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


def talk(connection, sent, got, pace, first):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with open(sent, "rb") as file:
        sent = file.read()
    if pace == 0:
        turns(connection, sent, got, first)
        return
    failed = []

    def reader():
        try:
            read(connection, got)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        write(connection, sent, pace)
    except OSError as error:
        failed.append(error)
    thread.join()
    if failed:
        raise failed[0]


def main():
    role, *rest = sys.argv[1:]
    address = rest.pop(0) if role == "call" else None
    port, sent, got, pace = int(rest[0]), rest[1], rest[2], float(rest[3])
    if role == "call":
        connection = socket.create_connection((address, port))
        try:
            talk(connection, sent, got, pace, True)
        except ConnectionError:
            sys.exit(3)
        return
    server = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    while True:
        connection, _ = server.accept()
        try:
            talk(connection, sent, got, pace, False)
        except ConnectionError:
            with open(got, "ab") as file:
                file.write(b"RESET")
        connection.close()
        with open(got + ".done", "ab") as file:
            file.write(b".")


main()
