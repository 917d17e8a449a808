"""The two ends of connections through gateways: plain sockets that say what each call returned.

behind.py serve ADDRESS PORT: serves one command a connection.
behind.py NAME ADDRESS PORT: does what NAME says as the client, and prints the outcome in one line.
"""

import ast
import errno
import fcntl
import hashlib
import select
import socket
import struct
import sys
import threading
import time

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a reset instead of an end
SIOCATMARK = 0x8905  # linux/sockios.h
MUCH = 96 << 20  # more than all buffers and windows on the way
MORE = threading.Event()  # stalled servers read on


def everything(stream):
    sum, count = hashlib.sha256(), 0
    while chunk := stream.recv(65536):
        sum.update(chunk)
        count += len(chunk)
    return f"{count} {sum.hexdigest()}"


def with_mark(stream):
    """All bytes up to the end, and how many there were before TCP's urgent mark (RFC 6093)."""
    got, mark = b"", None
    # Only of a byte that has arrived it is certain whether it is the urgent one.
    while stream.recv(1, socket.MSG_PEEK):
        if struct.unpack("i", fcntl.ioctl(stream, SIOCATMARK, bytes(4)))[0]:
            mark = len(got)
        got += stream.recv(1)
    return f"{got.decode()} {mark}"


def block(number):
    return hashlib.sha256(number.to_bytes(8, "big")).digest() * 2048


def serve_one(stream, address):
    with stream:
        try:
            command = stream.recv(6, socket.MSG_WAITALL).decode()
            if command == "names ":
                ends = [address[:2], stream.getsockname()[:2]]
                stream.sendall(repr(ends).encode())
            elif command == "half  ":
                stream.sendall(everything(stream).encode())
            elif command == "reset ":
                stream.sendall(b"before")
                stream.recv(5, socket.MSG_WAITALL)
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            elif command == "echo  ":
                while chunk := stream.recv(65536):
                    stream.sendall(chunk)
            elif command == "urgent":
                seen = with_mark(stream)
                stream.sendall(seen.encode())
                stream.send(b"?", socket.MSG_OOB)
                stream.sendall(b"rest")
            elif command == "stall ":
                MORE.wait()
                stream.sendall(everything(stream).encode())
            elif command == "more  ":
                MORE.set()
            elif command == "wait  ":
                stream.sendall(b"go on")
                print("end:", end_of(stream), flush=True)
        except OSError as error:
            print("server:", errno.errorcode.get(error.errno, error), flush=True)


def end_of(stream):
    try:
        while chunk := stream.recv(65536):
            pass
        return "EOF"
    except OSError as error:
        return errno.errorcode[error.errno]


def serve(address, port):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Its connections have both from their first byte on.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(1000)
        print("ready", flush=True)
        while True:
            threading.Thread(target=serve_one, args=listener.accept()).start()


def again(address, port):
    """Connections from one port, each of which the server ends first."""
    own = 0
    for _ in range(3):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as stream:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stream.settimeout(20)
            stream.bind(("", own))
            while True:
                try:
                    stream.connect((address, port))
                    break
                except OSError as error:
                    # The last one's end is not acknowledged yet.
                    if error.errno != errno.EADDRNOTAVAIL:
                        raise
                    time.sleep(0.05)
            own = stream.getsockname()[1]
            stream.sendall(b"names ")
            if everything(stream).startswith("0 "):
                return "nothing"
    return "again"


def malformed(address, port):
    """SYNs whose header says that it is shorter than any."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        ends = [socket.inet_pton(family, ip) for ip in (probe.getsockname()[0], address)]
    if family == socket.AF_INET6:
        ip = struct.pack("!IHBB", 6 << 28, 20, 6, 64)
    else:
        ip = struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0, 64, 6, 0)
    with socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        for source in range(1, 2501):
            tcp = struct.pack("!HHIIBBHHH", source, port, 1, 0, 0, 2, 1000, 0, 0)
            raw.sendto(ip + b"".join(ends) + tcp, (address, 0))
    return "sent"


def echo(stream):
    """Bytes both ways at once, and the end of one way before that of the other."""
    data = b"".join(map(block, range(32)))

    def send():
        stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    wanted = f"{len(data)} {hashlib.sha256(data).hexdigest()}"
    got = everything(stream)
    sender.join()
    return "whole" if got == wanted else "other bytes"


def urgent(stream):
    """The urgent byte in line there (SO_OOBINLINE), and beside the others here (MSG_OOB)."""
    stream.sendall(b"some")
    stream.send(b"!", socket.MSG_OOB)
    stream.sendall(b"more")
    stream.shutdown(socket.SHUT_WR)
    select.select([], [], [stream], 20)
    beside = stream.recv(1, socket.MSG_OOB).decode()
    return f"{with_mark(stream)} {beside}"


def stall(stream, address, port):
    """As much as can be written while the server does not read; then it does."""
    sum, sent, left = hashlib.sha256(), 0, b""
    # Longer than a packet that is lost takes.
    stream.settimeout(5)
    try:
        while sent < MUCH:
            left = left or block(sent // 65536)
            count = stream.send(left)
            sum.update(left[:count])
            sent, left = sent + count, left[count:]
    except socket.timeout:
        pass
    stream.settimeout(20)
    with socket.create_connection((address, port), timeout=20) as more:
        more.sendall(b"more  ")
        more.recv(1)
    stream.shutdown(socket.SHUT_WR)
    wanted = f"{sent} {sum.hexdigest()}"
    if stream.recv(1000).decode() != wanted:
        return "other bytes"
    return "never stopped" if sent >= MUCH else "stopped, whole"


def client(name, address, port):
    try:
        if name in ("again", "malformed"):
            return globals()[name](address, port)
        stream = socket.create_connection((address, port), timeout=20)
    except socket.timeout:
        return "timeout"
    except OSError as error:
        return errno.errorcode[error.errno]
    with stream:
        if name == "connect":
            return "connected"
        commands = {"abort": "wait", "flood": "wait", "many": "names"}
        stream.sendall(commands.get(name, name).ljust(6).encode())
        if name == "names":
            own, seen = [stream.getsockname()[:2], stream.getpeername()[:2]], ast.literal_eval(stream.recv(1000).decode())
            if seen == own:
                return "same"
            is_port = seen[1] == own[1] and seen[0][0] == own[0][0]
            return "another port" if is_port else "other addresses"
        if name == "half":
            data = hashlib.sha256(b"seed").digest() * (1 << 16)
            stream.sendall(data)
            stream.shutdown(socket.SHUT_WR)
            wanted = f"{len(data)} {hashlib.sha256(data).hexdigest()}"
            return "whole" if stream.recv(1000).decode() == wanted else "other bytes"
        if name == "reset":
            before = stream.recv(6, socket.MSG_WAITALL).decode()
            stream.sendall(b"go on")
            return f"{before} {end_of(stream)}"
        if name == "abort":
            stream.recv(5, socket.MSG_WAITALL)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            return "aborted"
        if name == "many":
            more = [stream]
            for _ in range(300):
                more.append(socket.create_connection((address, port), timeout=20))
                more[-1].sendall(b"names ")
            fine = [each.recv(1000).decode() for each in more]
            ends = [repr([each.getsockname()[:2], each.getpeername()[:2]]) for each in more]
            return "same" if fine == ends else "other addresses"
        if name == "flood":
            try:
                while True:
                    stream.sendall(bytes(65536))
            except OSError as error:
                return errno.errorcode[error.errno]
        if name in ("echo", "urgent"):
            return globals()[name](stream)
        if name == "stall":
            return stall(stream, address, port)
    return "?"


if __name__ == "__main__":
    what, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if what == "serve":
        serve(address, port)
    print(client(what, address, port), flush=True)
