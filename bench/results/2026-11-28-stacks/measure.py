#!/usr/bin/env python3
"""Flows over two paths: `multipath` beside one path alone and the kernel's MPTCP, in the same run, alternating.

    sudo python3 measure.py bulk|cold|far|slow|cut|dead|messages|trace [ROUNDS] [MIB]      # from the repository's top, after make build

Two testbeds, of which the second lends its hosts' interfaces to the first. Prints rows of CSV.
"""
import os, socket, subprocess, sys, time, tempfile, threading, shutil, statistics, json

TARGET = os.path.abspath(os.environ.get("TARGET", "target/release"))
LAB, VTL, VTLD = (os.path.join(TARGET, name) for name in ("vtl-lab", "vtl", "vtld"))
A, B = f"stk{os.getpid() % 1000}a", f"stk{os.getpid() % 1000}b"
SERVER, SECOND = "10.73.0.2", "10.99.1.2"
MIB = 1 << 20
started = []


def sh(*args, check=True, **more):
    return subprocess.run(args, check=check, stdout=subprocess.PIPE, text=True, **more).stdout


def lab(name, *args):
    return sh(LAB, "testbed", "--name", name, *args)


def link(rtt, rate, loss):
    return ["--rtt", f"{rtt}ms", "--rate", f"{rate}Mbit/s", "--loss", f"{loss}%"]


def host(side):
    return ["ip", "netns", "exec", f"{A}-{side}"]


def start(*args, **more):
    process = subprocess.Popen(args, **more)
    started.append(process)
    return process


class World:
    def __init__(self, first, second):
        self.scratch = tempfile.mkdtemp(prefix="stacks-")
        os.chmod(self.scratch, 0o755)
        lab(A, "up", *link(*first))
        lab(B, "up", *link(*second))
        for side, address in (("client", "10.99.1.1"), ("server", SECOND)):
            ns = ["ip", "-n", f"{B}-{side}", "link", "set"]
            sh(*ns, "eth0", "down")
            sh(*ns, "eth0", "name", "second")
            sh(*ns, "second", "netns", f"{A}-{side}")
            sh("ip", "-n", f"{A}-{side}", "address", "add", f"{address}/24", "dev", "second")
            sh("ip", "-n", f"{A}-{side}", "link", "set", "second", "up")
            sh("ip", "-n", f"{A}-{side}", "mptcp", "limits", "set", "subflows", "2", "add_addr_accepted", "2")
            for key in ("tcp_rmem", "tcp_wmem"):
                sh(*host(side), "sysctl", "-qw", f"net.ipv4.{key}=4096 131072 33554432")
        sh("ip", "-n", f"{A}-server", "mptcp", "endpoint", "add", SECOND, "dev", "second", "signal")
        self.env = {}
        for side in ("client", "server"):
            state = os.path.join(self.scratch, side)
            os.mkdir(state)
            env = dict(os.environ, VTL_SOCKET=f"/run/vtl/{A}-{side}.sock", VTL_STATE=state,
                       VTL_PEERS=os.path.join(state, "peers.toml"), VTL_LOG="vtld=debug,info")
            self.env[side] = env
            log = open(os.path.join(self.scratch, f"vtld-{side}.log"), "w")
            start(*host(side), VTLD, env=env, stdout=subprocess.DEVNULL, stderr=log)
        for side in ("client", "server"):
            for _ in range(200):
                if subprocess.run([VTL, "status"], env=self.env[side], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL).returncode == 0:
                    break
                time.sleep(0.1)
        sh(VTL, "hook", "add", "--port", "8000", env=self.env["server"])
        here = os.path.abspath(__file__)
        for port, mode in (("8000", "tcp"), ("8001", "mptcp")):
            start(*host("server"), sys.executable, here, "serve", mode, port)
        time.sleep(0.5)

    def client(self, carrier, *args):
        """Runs this script's client by a carrier, and returns what it prints."""
        here = [sys.executable, os.path.abspath(__file__)]
        if carrier == "mptcp-kernel":
            return sh(*host("client"), *here, "client", "mptcp", "8001", *args, env=self.env["client"])
        return sh(*host("client"), VTL, "run", "--carrier", carrier, "--", *here, "client", "tcp", "8000", *args,
                  env=self.env["client"])

    def meet(self, carrier, stacks):
        self.client(carrier, "get", "1")
        for _ in range(150):
            rows = json.loads(sh(VTL, "status", "--json", env=self.env["client"]))["carriers"]
            if len(rows) >= stacks:
                return
            time.sleep(0.1)
        print("# not all paths came up", carrier, rows, file=sys.stderr)

    def close(self):
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait()
        started.clear()
        for name in (B, A):
            lab(name, "down")
        print("# logs", self.scratch, file=sys.stderr)


def listen(mode):
    protocol = 262 if mode == "mptcp" else 0
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener


def serve(mode, port):
    listener = listen(mode)
    listener.bind(("0.0.0.0", int(port)))
    listener.listen(16)

    def one(connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = b""
        while not line.endswith(b"\n"):
            more = connection.recv(1)
            if not more:
                return
            line += more
        word, number = line.split()
        if word == b"get":
            connection.sendall(bytes(int(number)))
        else:
            while more := connection.recv(4096):
                connection.sendall(more)
        connection.close()

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=one, args=(connection,), daemon=True).start()


def client(mode, port, word, number):
    connection = listen(mode)
    began = time.monotonic()
    connection.connect((SERVER, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if word == "get":
        connection.sendall(f"get {number}\n".encode())
        size = left = int(number)
        last, longest, at = time.monotonic(), 0.0, 0
        marks = {}
        while left > 0:
            got = len(connection.recv(1 << 18))
            if not got:
                sys.exit("cut off")
            left -= got
            now = time.monotonic()
            for pct in (25, 90):
                if (size - left) * 100 >= size * pct:
                    marks.setdefault(pct, (now - began, size - left))
            # The start is not a standstill.
            if now - began > 1.0 and now - last > longest:
                longest, at = now - last, now - began
            last = now
        took = time.monotonic() - began
        # The rate between a quarter and nine tenths, and what start and end took longer than at that.
        (from_, early), (to, late) = marks[25], marks[90]
        steady = max(late - early, 1) / max(to - from_, 1e-6)
        start, tail = from_ - early / steady, took - to - (size - late) / steady
        print(f"{took:.3f},{longest * 1e3:.0f},{at:.2f},{steady * 8e-6:.1f},{start * 1e3:.0f},{tail * 1e3:.0f}")
    else:
        connection.sendall(b"echo 0\n")
        times = []
        for _ in range(int(number)):
            sent = time.monotonic()
            connection.sendall(bytes(200))
            got = 0
            while got < 200:
                got += len(connection.recv(200 - got))
            times.append((time.monotonic() - sent) * 1e3)
            time.sleep(0.01)
        times.sort()
        at = lambda share: times[min(len(times) - 1, int(len(times) * share))]
        print(f"{at(0.5):.1f},{at(0.9):.1f},{at(0.99):.1f},{times[-1]:.1f}")


def transfers(name, first, second, rounds, carriers, size=32):
    world = World(first, second)
    rates = {}
    try:
        for carrier in carriers:
            if carrier.startswith("multipath"):
                world.meet(carrier, 2)
            elif carrier != "mptcp-kernel":
                world.meet(carrier, 1)
        for round_ in range(rounds):
            for carrier in carriers:
                took, longest, _, steady, start_, tail = world.client(carrier, "get", str(size * MIB)).strip().split(",")
                rate = size * MIB * 8e-6 / float(took)
                rates.setdefault(carrier, []).append(rate)
                print(f"{name},{carrier},{round_},{took},{rate:.1f},{longest},{steady},{start_},{tail}", flush=True)
        for carrier in carriers:
            print(f"# {name} {carrier}: median {statistics.median(rates[carrier]):.1f} Mbit/s", flush=True)
    finally:
        world.close()


def cold(rounds, size):
    """The first connection between the hosts: neither knows the other, and no session is open."""
    for round_ in range(rounds):
        for first, second in (((20, 50, 1), (60, 50, 1)), ((60, 50, 1), (20, 50, 1))):
            world = World(first, second)
            try:
                got = world.client("multipath", "get", str(size * MIB)).strip()
                rate = size * MIB * 8e-6 / float(got.split(",")[0])
                print(f"cold {first[0]}+{second[0]},multipath,{round_},{rate:.1f},{got}", flush=True)
            finally:
                world.close()


def trace(rounds, size):
    """What each stack of the server delivers, in steps of some 50 ms."""
    world = World((20, 50, 1), (60, 50, 1))
    try:
        world.meet("multipath", 2)
        for round_ in range(rounds):
            done = threading.Event()
            began, before = time.monotonic(), {}

            def look():
                while not done.wait(0.05):
                    at = time.monotonic()
                    rows = json.loads(sh(VTL, "status", "--json", env=world.env["server"]))["carriers"]
                    for row in rows:
                        rtt, delivered = row.get("rtt_ms", 0), row.get("delivered", 0)
                        last_at, last = before.get(row["peer"] + row["role"] + str(rows.index(row)), (at - 0.05, delivered))
                        before[row["peer"] + row["role"] + str(rows.index(row))] = (at, delivered)
                        rate = (delivered - last) * 8e-6 / (at - last_at)
                        print(f"trace,{round_},{at - began:.3f},{rows.index(row)},{rtt:.1f},{rate:.1f},"
                              f"{row.get('sent')},{row.get('lost')},{row.get('app_limited')},{row.get('min_rtt_ms')}",
                              flush=True)

            thread = threading.Thread(target=look)
            thread.start()
            got = world.client("multipath", "get", str(size * MIB)).strip()
            done.set()
            thread.join()
            print(f"# {size} MiB: {got} {size * MIB * 8e-6 / float(got.split(',')[0]):.1f} Mbit/s", flush=True)
            time.sleep(1)
    finally:
        world.close()


def cuts(rounds):
    for which in (A, B):
        world = World((20, 50, 1), (60, 50, 1))
        try:
            for carrier in ("multipath", "mptcp-kernel"):
                if carrier == "multipath":
                    world.meet(carrier, 2)
                for round_ in range(rounds):
                    timer = threading.Timer(2.5, lambda: lab(which, "set", "--loss", "100%"))
                    timer.start()
                    took, longest, at, *_ = world.client(carrier, "get", str(40 * MIB)).strip().split(",")
                    timer.cancel()
                    lab(which, "set", "--loss", "1%")
                    path = "20 ms" if which == A else "60 ms"
                    print(f"cut {path},{carrier},{round_},{took},{longest},{at}", flush=True)
                    time.sleep(8)
        finally:
            world.close()


def dead(rounds):
    """The first path is dead for so long that the server's control connection times out in mid-transfer: sooner than
    after its four minutes, as TCP gives up after two repetitions here, and the server has an address to tell."""
    world = World((20, 50, 1), (60, 50, 1))
    try:
        server = f"{A}-server"
        sh(*host("server"), "sysctl", "-qw", "net.ipv4.tcp_retries2=2")
        sh("ip", "-n", server, "link", "add", "third", "type", "veth", "peer", "name", "fourth")
        sh("ip", "-n", server, "link", "set", "fourth", "up")
        world.meet("multipath", 2)
        for round_ in range(rounds):
            steps = [(2.5, lambda: lab(A, "set", "--loss", "100%")),
                     (4, lambda: sh("ip", "-n", server, "address", "add", "10.98.0.2/24", "dev", "third")),
                     (4, lambda: sh("ip", "-n", server, "link", "set", "third", "up"))]
            timers = [threading.Timer(*step) for step in steps]
            for timer in timers:
                timer.start()
            took, longest, at, *_ = world.client("multipath", "get", str(96 * MIB)).strip().split(",")
            left = sh(*host("server"), "ss", "-Htno", "state", "established")
            print(f"dead,multipath,{round_},{took},{longest},{at}", flush=True)
            print("# left:", " | ".join(left.splitlines()), file=sys.stderr)
            lab(A, "set", "--loss", "1%")
            sh("ip", "-n", server, "address", "del", "10.98.0.2/24", "dev", "third")
            time.sleep(10)
    finally:
        world.close()


def messages(rounds):
    world = World((20, 50, 5), (22, 50, 5))
    try:
        world.meet("graft:stream", 1)
        world.meet("multipath:redundant", 2)
        for round_ in range(rounds):
            for carrier in ("graft:stream", "multipath:redundant", "mptcp-kernel"):
                row = world.client(carrier, "echo", "1000").strip()
                print(f"messages,{carrier},{round_},{row}", flush=True)
    finally:
        world.close()


if __name__ == "__main__":
    what, rest = sys.argv[1], sys.argv[2:]
    rounds = int(rest[0]) if rest and rest[0].isdigit() else 3
    size = int(rest[1]) if len(rest) > 1 and rest[1].isdigit() else 32
    if what == "serve":
        serve(*rest)
    elif what == "client":
        client(*rest)
    elif what == "bulk":
        carriers = ["graft:stream", "multipath", "mptcp-kernel"]
        transfers("20+60", (20, 50, 1), (60, 50, 1), rounds, carriers, size)
        transfers("60+20", (60, 50, 1), (20, 50, 1), rounds, carriers, size)
    elif what == "far":
        carriers = ["graft:stream", "multipath", "mptcp-kernel"]
        transfers("20+200", (20, 50, 1), (200, 50, 1), rounds, carriers, size)
    elif what == "slow":
        others = [f"multipath:{name}" for name in ("lowest-rtt", "round-robin", "weighted")]
        carriers = ["graft:stream", "multipath", *others, "mptcp-kernel"]
        transfers("20+600", (20, 50, 1), (600, 1, 0), rounds, carriers)
    elif what == "cut":
        cuts(rounds)
    elif what == "dead":
        dead(rounds)
    elif what == "messages":
        messages(rounds)
    elif what == "cold":
        cold(rounds, size)
    elif what == "trace":
        trace(rounds, size)
    else:
        sys.exit(__doc__)
