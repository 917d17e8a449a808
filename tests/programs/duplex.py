"""A TCP program that sends a file and receives another at the same time on each connection.

    duplex.py serve ADDRESS PORT SEND WANT
    duplex.py call ADDRESS PORT SEND WANT GO     begins when there is a file GO

Says for each connection, as a line of JSON, how many bytes came, whether they are the beginning of WANT,
how that ended, and how sending did: "fin", "sent", the name of an error, or "timeout".
"""

import errno
import json
import os
import socket
import sys
import threading
import time

# What takes longer is called hung.
PATIENCE_S = 170


def name(error):
    if isinstance(error, TimeoutError) and error.errno is None:
        return "timeout"
    return errno.errorcode.get(error.errno, str(error))


def send(connection, data, said):
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        said["sending"] = "sent"
    except OSError as error:
        said["sending"] = name(error)


def exchange(connection, data, want):
    connection.settimeout(PATIENCE_S)
    said = {"received": 0, "right": True}
    sender = threading.Thread(target=send, args=(connection, data, said))
    sender.start()
    try:
        while piece := connection.recv(65536):
            at = said["received"]
            said["right"] &= want[at : at + len(piece)] == piece
            said["received"] += len(piece)
        said["end"] = "fin"
    except OSError as error:
        said["end"] = name(error)
    sender.join()
    connection.close()
    # In one piece: other threads write, too.
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def main():
    role, address, port, send_path, want_path, *go = sys.argv[1:]
    data, want = (open(path, "rb").read() for path in (send_path, want_path))
    if role == "call":
        while not os.path.exists(go[0]):
            time.sleep(0.01)
        try:
            connection = socket.create_connection((address, int(port)), PATIENCE_S)
        except OSError as error:
            print(json.dumps({"connect": name(error)}))
            return
        exchange(connection, data, want)
        return
    listener = socket.create_server(
        (address, int(port)), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True
    )
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=exchange, args=(connection, data, want), daemon=True).start()


main()
