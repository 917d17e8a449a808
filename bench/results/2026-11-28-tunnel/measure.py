#!/usr/bin/env python3
"""`vtl tun up` beside WireGuard in user space, alternating: two namespaces, one veth pair, unmodified iperf3.

    sudo python3 measure.py ROUNDS [SECONDS] >rows.csv      # from anywhere, after make build

TRANSPORTS ("vtl vtl-clear wireguard-go boringtun plain") and TESTS ("up down both udp up6") choose; a program whose
file is missing is left out. WIREGUARD_GO and BORINGTUN name those programs; `wg` is of wireguard-tools. The link is
`wire`: segments of 1,500 bytes with complete checksums, as the testbed makes it; OFFLOADS=1 leaves a veth's own, by
which UDP in segments of 64 KiB crosses it whole.
"""
import csv, json, os, shutil, signal, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
TARGET = os.path.abspath(os.environ.get("TARGET", os.path.join(HERE, "../../../target/release")))
VTL, VTLD = (os.path.join(TARGET, name) for name in ("vtl", "vtld"))
PROGRAMS = {
    "vtl": VTL,
    "vtl-clear": VTL,
    "wireguard-go": shutil.which(os.environ.get("WIREGUARD_GO", "wireguard")),
    "boringtun": shutil.which(os.environ.get("BORINGTUN", "boringtun-cli")),
    "plain": VTL,
}
NAME = f"tunm{os.getpid() % 10000}"
SIDES = ("c", "s")
WIRE = {"c": "10.73.0.1", "s": "10.73.0.2"}
INSIDE = {"c": ("10.9.0.1", "fd00:9::1"), "s": ("10.9.0.2", "fd00:9::2")}
UDP_RATES = os.environ.get("UDP_RATES", "500M 1G 2G").split()


def sh(*args, check=True, **more):
    return subprocess.run(args, check=check, stdout=subprocess.PIPE, text=True, **more).stdout


def on(side):
    return ["ip", "netns", "exec", f"{NAME}-{side}"]


def other(side):
    return "s" if side == "c" else "c"


class World:
    def __init__(self):
        self.scratch = tempfile.mkdtemp(prefix="tunnel-")
        self.started = []
        for side in SIDES:
            sh("ip", "netns", "add", f"{NAME}-{side}")
        sh("ip", "-n", f"{NAME}-c", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", f"{NAME}-s")
        for side in SIDES:
            ns = ["ip", "-n", f"{NAME}-{side}"]
            sh(*ns, "link", "set", "lo", "up")
            sh(*ns, "address", "add", f"{WIRE[side]}/24", "dev", "eth0")
            sh(*ns, "link", "set", "eth0", "up")
        for side in SIDES:
            if "OFFLOADS" not in os.environ:
                sh(*on(side), "ethtool", "-K", "eth0", "tx", "off")
            sh(*on(side), "ethtool", "-K", "eth0", "gro", "on")

    def start(self, side, *args, env=None):
        log = open(os.path.join(self.scratch, "log"), "a")
        process = subprocess.Popen([*on(side), *args], env=dict(os.environ, **(env or {})), stdout=log, stderr=log)
        self.started.append(process)
        return process

    def vtl(self, side):
        return {"VTL_SOCKET": f"{self.scratch}/{side}.sock", "VTL_STATE": f"{self.scratch}/{side}",
                "VTL_PEERS": f"{self.scratch}/{side}/peers.toml"}

    def vtl_up(self, *more):
        for side in SIDES:
            os.makedirs(f"{self.scratch}/{side}", exist_ok=True)
            self.start(side, VTLD, "--socket", f"{self.scratch}/{side}.sock", env=self.vtl(side))
        for side in SIDES:
            until(lambda: subprocess.run([VTL, "status"], env=dict(os.environ, **self.vtl(side)),
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0)
        for side in reversed(SIDES):
            v4, v6 = INSIDE[side]
            listen = ["--listen"] if side == "s" else []
            self.start(side, VTL, "tun", "up", "tun0", "--peer", WIRE[other(side)], "--address", f"{v4}/24",
                       "--address", f"{v6}/64", *listen, *more, env=self.vtl(side))

    def wireguard_up(self, program, *flags):
        keys = {side: sh("wg", "genkey").strip() for side in SIDES}
        public = {side: sh("wg", "pubkey", input=keys[side]).strip() for side in SIDES}
        for side in SIDES:
            interface = f"wg{side}{os.getpid() % 10000}"
            self.start(side, program, *flags, interface, env={"LOG_LEVEL": "error"})
            until(lambda: os.path.exists(f"/var/run/wireguard/{interface}.sock"))
            conf = f"{self.scratch}/{side}.conf"
            with open(conf, "w") as file:
                file.write(f"[Interface]\nPrivateKey={keys[side]}\nListenPort=51820\n[Peer]\nPublicKey={public[other(side)]}\n"
                           f"AllowedIPs=0.0.0.0/0,::/0\nEndpoint={WIRE[other(side)]}:51820\n")
            sh(*on(side), "wg", "setconf", interface, conf)
            ns = ["ip", "-n", f"{NAME}-{side}"]
            for address, bits in zip(INSIDE[side], (24, 64)):
                sh(*ns, "address", "add", f"{address}/{bits}", "dev", interface)
            sh(*ns, "link", "set", interface, "mtu", "1420", "up")

    def up(self, transport):
        if transport == "vtl":
            self.vtl_up()
        elif transport == "vtl-clear":
            self.vtl_up("--no-encryption")
        elif transport == "wireguard-go":
            self.wireguard_up(PROGRAMS[transport], "-f")
        elif transport == "boringtun":
            self.wireguard_up(PROGRAMS[transport], "-f", "--disable-drop-privileges")
        target = WIRE["s"] if transport == "plain" else INSIDE["s"][0]
        until(lambda: subprocess.run([*on("c"), "ping", "-c1", "-W1", target], stdout=subprocess.DEVNULL,
                                     stderr=subprocess.DEVNULL).returncode == 0)

    def down(self):
        for process in reversed(self.started):
            process.send_signal(signal.SIGTERM)
        for process in self.started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        self.started.clear()

    def close(self):
        self.down()
        for side in SIDES:
            sh("ip", "netns", "del", f"{NAME}-{side}", check=False)
        shutil.rmtree(self.scratch)


def until(is_done):
    for _ in range(200):
        if is_done():
            return
        time.sleep(0.05)
    raise SystemExit("it did not come up")


def iperf(world, target, seconds, *args):
    server = world.start("s", "iperf3", "-s", "-1", "-p", "5201")
    until(lambda: ":5201" in sh(*on("s"), "ss", "-ltn"))
    out = sh(*on("c"), "iperf3", "-J", "-c", target, "-p", "5201", "-t", str(seconds), "-O", "1", *args, check=False)
    server.kill()
    server.wait()
    world.started.remove(server)
    found = json.loads(out)
    if "error" in found:
        print(found["error"], file=sys.stderr)
    return found.get("end", {})


def measure(world, transport, test, seconds):
    """Yields (test, Mbit/s, what was lost or sent again)."""
    plain = transport == "plain"
    target = WIRE["s"] if plain else INSIDE["s"][test.endswith("6")]
    mbit = lambda part: round(part.get("bits_per_second", 0) / 1e6)
    if test == "udp":
        for rate in UDP_RATES:
            end = iperf(world, target, seconds, "-u", "-b", rate, "-l", "1300")
            total = end.get("sum", {})
            # Of all, also those of the second that is left out of the rate.
            lost = min(total.get("lost_packets", 1) / (total.get("packets") or 1), 1)
            yield f"udp-{rate}", round(total.get("bits_per_second", 0) * (1 - lost) / 1e6), f"{lost:.2%}"
        return
    flags = {"up": [], "down": ["-R"], "both": ["--bidir"], "up6": [], "down6": ["-R"]}[test]
    end = iperf(world, target, seconds, "-C", "cubic", *flags)
    again = end.get("sum_sent", {}).get("retransmits")
    yield (f"{test}" if test != "both" else "both-up"), mbit(end.get("sum_received", {})), again
    if test == "both":
        again = end.get("sum_sent_bidir_reverse", {}).get("retransmits")
        yield "both-down", mbit(end.get("sum_received_bidir_reverse", {})), again


def main():
    rounds, seconds = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5
    transports = os.environ.get("TRANSPORTS", "vtl vtl-clear wireguard-go boringtun plain").split()
    tests = os.environ.get("TESTS", "up down both udp up6").split()
    rows = csv.writer(sys.stdout)
    rows.writerow(["round", "transport", "test", "mbit", "again_or_lost"])
    world = World()
    try:
        for round_ in range(1, rounds + 1):
            for transport in transports:
                if not PROGRAMS[transport] or not os.path.exists(PROGRAMS[transport]):
                    continue
                world.up(transport)
                for test in tests:
                    if transport == "plain" and test == "up6":
                        continue
                    for name, mbit, again in measure(world, transport, test, seconds):
                        rows.writerow([round_, transport, name, mbit, again])
                        sys.stdout.flush()
                world.down()
    finally:
        if "KEEP_LOG" in os.environ:
            shutil.copy(os.path.join(world.scratch, "log"), os.environ["KEEP_LOG"])
        world.close()


if __name__ == "__main__":
    main()
