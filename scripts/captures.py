#!/usr/bin/env python3
"""Records how real programs begin their connections, for crates/vtl-core/tests/profiles.rs.

    scripts/captures.py [NAME...]      records these, or all, into crates/vtl-core/tests/captures/PART/NAME.cap

Clients and servers run on the loopback, through a relay that writes down the first reads of each side with their times. On
Debian 12 the programs are in: nginx openssh-server postgresql redis dnsmasq-base bind9-dnsutils telnet inetutils-telnetd
rsync git vsftpd swaks dovecot-imapd dovecot-pop3d isync mosquitto mosquitto-clients iperf3 socat ffmpeg icecast2 sip-tester
x11vnc xvfb vncsnapshot slapd ldap-utils mariadb-server memcached samba smbclient aria2 ngircd nats-server subversion
hylafax-server hylafax-client wget openssl; from PyPI come aiosmtpd pyftpdlib websockets paho-mqtt psycopg2-binary redis
requests asyncssh. Run it as root in a container that may be thrown away: it starts servers with configurations of its own, and
ends those that it started. What a machine lacks is said and left out.

A capture's lines after its head: who sends (> the opener of the connection), when (ns from the first), how many bytes, and
in hex those of them that are among the first 2,048 from the opener or 1,024 to it.

CASES says on which captures rules may be tuned, and which are held out. That was decided before any was made, except for
nats, which was held out until what it showed was mended.
"""

import asyncio, os, shutil, signal, socket, subprocess, sys, tempfile, textwrap, threading, time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
OUT = HERE / "crates/vtl-core/tests/captures"
READS, KEPT = 16, {">": 2048, "<": 1024}
TS, TLS, LS, INS = "time-sensitive", "time-and-loss-sensitive", "loss-sensitive", "insensitive"
TMP = Path(tempfile.mkdtemp(prefix="captures-"))
TMP.chmod(0o755)
RELAY, SERVER = 19000, 19001
CASES = []


def case(part, name, protocol, profile, port, executable):
    """Declares a case: a function that gets the running servers and starts a client at 127.0.0.1:RELAY."""
    def declare(function):
        CASES.append((part, name, protocol, profile, port, executable, function))
        return function
    return declare


class Recorder:
    """A relay that records the connection with the given number; the others it only relays."""

    def __init__(self, wanted=0, port=None):
        self.wanted, self.port, self.seen, self.reads = wanted, port or SERVER, 0, []

    def start(self):
        self.listener = socket.create_server(("127.0.0.1", RELAY), backlog=16)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            record = self.seen == self.wanted
            self.seen += 1
            try:
                server = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                client.close()
                continue
            for by, one, other in ((">", client, server), ("<", server, client)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self.carry, args=(by, one, other, record), daemon=True).start()

    def carry(self, by, one, other, record):
        try:
            while data := one.recv(65536):
                if record:
                    self.reads.append((by, time.monotonic_ns(), data))
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def stop(self):
        if hasattr(self, "listener"):
            # Ends the thread's accept, which else keeps the port.
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()


def run(*command, seconds=6, stdin=None, env=None, cwd=None):
    """A client, to its end or for so many seconds."""
    try:
        subprocess.run([str(c) for c in command], input=stdin, timeout=seconds, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL if not os.environ.get("VERBOSE") else None,
                       env={**os.environ, **(env or {})}, cwd=cwd or TMP)
    except subprocess.TimeoutExpired:
        pass


class Servers(list):
    def start(self, *command, port=SERVER, wait=10, **more):
        log = open(TMP / "log", "ab")
        self.append(subprocess.Popen([str(c) for c in command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                     start_new_session=True, cwd=TMP, **more))
        end = time.time() + wait
        while port and time.time() < end:
            hexport = f":{port:04X} "
            tcp = open("/proc/net/tcp").read() + open("/proc/net/tcp6").read()
            if any(hexport in line and " 0A " in line for line in tcp.splitlines()):
                return
            time.sleep(0.05)
        if port:
            raise RuntimeError(f"{command[0]} does not listen: see {TMP}/log")

    def python(self, code, **more):
        self.start(sys.executable, "-c", textwrap.dedent(code), **more)

    def stop(self):
        for server in self:
            try:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(5)
            except ProcessLookupError:
                pass
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def python(code, **more):
    run(sys.executable, "-c", textwrap.dedent(code), **more)


def write(name, text):
    (TMP / name).parent.mkdir(parents=True, exist_ok=True)
    (TMP / name).write_text(textwrap.dedent(text))
    return TMP / name


def certificate():
    if not (TMP / "key.pem").exists():
        run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", TMP / "key.pem", "-out",
            TMP / "cert.pem", "-days", "2", "-subj", "/CN=server.example.org")


def media():
    if not (TMP / "www/movie.mp4").exists():
        (TMP / "www").mkdir(exist_ok=True)
        source = ["-f", "lavfi", "-i", "testsrc=size=320x240:rate=25", "-f", "lavfi", "-i", "sine"]
        run("ffmpeg", "-y", *source, "-t", "12", "-c:v", "libx264", "-preset", "ultrafast", "-g", "25", "-c:a", "aac",
            "-movflags", "faststart", TMP / "www/movie.mp4", seconds=60)
        run("ffmpeg", "-y", "-i", TMP / "www/movie.mp4", "-c", "copy", "-hls_time", "2", TMP / "www/live.m3u8", seconds=60)
    return TMP / "www/movie.mp4"


def website():
    write("www/index.html", "<html><title>x</title><img src=a.png>" + "<p>words</p>" * 300 + "</html>")
    for name, size in (("big.bin", 5 << 20), ("big.zip", 3 << 20)):
        (TMP / "www" / name).write_bytes(os.urandom(size))


def nginx(servers, listen=f"{SERVER}"):
    website()
    certificate()
    write("nginx.conf", f"""
        daemon off; pid {TMP}/nginx.pid; error_log {TMP}/nginx.log; worker_processes 1; user root;
        events {{}}
        http {{ include /etc/nginx/mime.types; default_type application/octet-stream; access_log off;
          client_body_temp_path {TMP}/body; client_max_body_size 100m; dav_methods PUT;
          server {{ listen 127.0.0.1:{listen}; root {TMP}/www; ssl_certificate {TMP}/cert.pem;
            ssl_certificate_key {TMP}/key.pem; }} }}""")
    servers.start("nginx", "-c", TMP / "nginx.conf")


WEB = f"http://127.0.0.1:{RELAY}"

# ---- tuned


@case("tuned", "ssh-openssh", "SSH", TLS, 22, "/usr/bin/ssh")
def _(servers):
    for key in ("host", "user"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", TMP / key)
    shutil.copy(TMP / "user.pub", TMP / "authorized")
    os.makedirs("/run/sshd", exist_ok=True)
    servers.start("/usr/sbin/sshd", "-D", "-p", SERVER, "-h", TMP / "host", "-o", f"AuthorizedKeysFile={TMP}/authorized",
                  "-o", "StrictModes=no", "-f", "/dev/null")
    run("ssh", "-p", RELAY, "-i", TMP / "user", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
        "127.0.0.1", "uptime")


@case("tuned", "http-page-curl", "HTTP", TLS, 80, "/usr/bin/curl")
def _(servers):
    nginx(servers)
    run("curl", "-s", f"{WEB}/index.html")


@case("tuned", "http-file-curl", "HTTP", LS, 80, "/usr/bin/curl")
def _(servers):
    nginx(servers)
    run("curl", "-s", f"{WEB}/big.bin", "-o", "/dev/null")


@case("tuned", "https-curl", "HTTPS", TLS, 443, "/usr/bin/curl")
def _(servers):
    nginx(servers, f"{SERVER} ssl http2")
    run("curl", "-sk", "--connect-to", f"server.example.org:443:127.0.0.1:{RELAY}", "https://server.example.org/index.html")


def postgres(servers):
    # Debian's own programs: its servers refuse to run as root.
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]
    data = TMP / "pg"
    data.mkdir()
    shutil.chown(data, "postgres")
    run("runuser", "-u", "postgres", "--", binaries / "initdb", "-D", data, "-A", "trust", seconds=60)
    servers.start("runuser", "-u", "postgres", "--", binaries / "postgres", "-D", data, "-p", SERVER, "-k", data)


@case("tuned", "postgresql-psql", "PostgreSQL", TLS, 5432, "/usr/bin/psql")
def _(servers):
    postgres(servers)
    run("psql", "-h", "127.0.0.1", "-p", RELAY, "-U", "postgres", "-c", "select now()")


@case("tuned", "redis-cli", "Redis", TLS, 6379, "/usr/bin/redis-cli")
def _(servers):
    servers.start("redis-server", "--port", SERVER, "--dir", TMP)
    run("redis-cli", "-p", RELAY, stdin=b"SET a 1\nGET a\nINFO\n")


@case("tuned", "dns-dig", "DNS", TLS, 53, "/usr/bin/dig")
def _(servers):
    servers.start("dnsmasq", "-k", "-p", SERVER, "--no-resolv", "--no-hosts", "--listen-address=127.0.0.1", "--bind-interfaces",
                  "-A", "/example.org/192.0.2.1", "--pid-file=")
    run("dig", "+tcp", "-p", RELAY, "@127.0.0.1", "www.example.org")


@case("tuned", "telnet", "Telnet", TLS, 23, "/usr/bin/telnet")
def _(servers):
    servers.start("socat", f"TCP-LISTEN:{SERVER},reuseaddr", "EXEC:/usr/sbin/telnetd -h -E /bin/cat")
    run("sh", "-c", f"(sleep 1; echo ls; sleep 1; echo date; sleep 1) | telnet 127.0.0.1 {RELAY}")


@case("tuned", "rsync", "rsync", LS, 873, "/usr/bin/rsync")
def _(servers):
    website()
    write("rsyncd.conf", f"use chroot = no\nuid = root\n[files]\npath = {TMP}/www\n")
    servers.start("rsync", "--daemon", "--no-detach", f"--port={SERVER}", "--address=127.0.0.1", f"--config={TMP}/rsyncd.conf")
    run("rsync", "-r", f"rsync://127.0.0.1:{RELAY}/files/", TMP / "copy")


def repository():
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", TMP / "r"]
    (TMP / "r").mkdir(exist_ok=True)
    run("git", "init", "-q", TMP / "r")
    write("r/file", "words\n" * 9000)
    run(*git, "add", ".")
    run(*git, "commit", "-qm", "x")


@case("tuned", "git-daemon", "git", LS, 9418, "/usr/bin/git")
def _(servers):
    repository()
    servers.start("git", "daemon", "--reuseaddr", f"--port={SERVER}", "--listen=127.0.0.1", "--export-all", f"--base-path={TMP}", TMP)
    run("git", "clone", "-q", f"git://127.0.0.1:{RELAY}/r", TMP / "clone")


@case("tuned", "ftp-vsftpd", "FTP", LS, 21, "/usr/bin/curl")
def _(servers):
    website()
    (TMP / "ftp").mkdir()
    write("vsftpd.conf", f"listen=YES\nlisten_port={SERVER}\nlisten_address=127.0.0.1\nanonymous_enable=YES\n"
          f"anon_root={TMP}/ftp\nsecure_chroot_dir={TMP}/ftp\nbackground=NO\nlocal_enable=NO\nseccomp_sandbox=NO\n")
    (TMP / "ftp").chmod(0o555)
    servers.start("vsftpd", TMP / "vsftpd.conf")
    run("curl", "-s", f"ftp://127.0.0.1:{RELAY}/")


@case("tuned", "smtp-swaks", "SMTP", LS, 25, "/usr/bin/swaks")
def _(servers):
    servers.start(sys.executable, "-m", "aiosmtpd", "-n", "-l", f"127.0.0.1:{SERVER}")
    run("swaks", "--server", f"127.0.0.1:{RELAY}", "--to", "a@example.org", "--from", "b@example.org")


def dovecot(servers, protocol):
    write("passwd", f"reader:{{PLAIN}}x:0:0::{TMP}/home::\n")
    (TMP / "home/mail").mkdir(parents=True, exist_ok=True)
    write("dovecot.conf", f"""
        protocols = {protocol}
        base_dir = {TMP}/dovecot
        state_dir = {TMP}/dovecot
        log_path = {TMP}/dovecot.log
        ssl = no
        disable_plaintext_auth = no
        first_valid_uid = 0
        mail_location = maildir:{TMP}/home/mail
        passdb {{
          driver = passwd-file
          args = {TMP}/passwd
        }}
        userdb {{
          driver = passwd-file
          args = {TMP}/passwd
        }}
        service {protocol}-login {{
          inet_listener {protocol} {{
            address = 127.0.0.1
            port = {SERVER}
          }}
        }}
        """)
    servers.start("dovecot", "-F", "-c", TMP / "dovecot.conf")


@case("tuned", "imap-imaplib", "IMAP", LS, 143, "/usr/bin/python3")
def _(servers):
    dovecot(servers, "imap")
    python(f"import imaplib; m = imaplib.IMAP4('127.0.0.1', {RELAY}); m.login('reader', 'x'); m.select(); m.logout()")


@case("tuned", "mqtt-mosquitto", "MQTT", LS, 1883, "/usr/bin/mosquitto_pub")
def _(servers):
    servers.start("mosquitto", "-p", SERVER)
    run("mosquitto_pub", "-p", RELAY, "-t", "t", "-m", "words")


@case("tuned", "iperf3", "", LS, 5201, "/usr/bin/iperf3")
def _(servers):
    servers.start("iperf3", "-s", "-p", SERVER)
    run("iperf3", "-c", "127.0.0.1", "-p", RELAY, "-n", "4M")



@case("tuned", "rtsp-ffmpeg", "RTSP", TS, 554, "/usr/bin/ffmpeg")
def _(servers):
    movie = media()
    servers.start("ffmpeg", "-rtsp_flags", "listen", "-i", f"rtsp://127.0.0.1:{SERVER}/live", "-f", "null", "-")
    run("ffmpeg", "-re", "-i", movie, "-c", "copy", "-f", "rtsp", "-rtsp_transport", "tcp", f"rtsp://127.0.0.1:{RELAY}/live")


@case("tuned", "hls-ffmpeg", "HTTP", TS, 80, "/usr/bin/ffmpeg")
def _(servers):
    media()
    nginx(servers)
    run("ffmpeg", "-re", "-i", f"{WEB}/live.m3u8", "-f", "null", "-")


@case("tuned", "mpegts-ffmpeg", "", TS, 9000, "/usr/bin/ffmpeg")
def _(servers):
    movie = media()
    servers.start("ffmpeg", "-i", f"tcp://127.0.0.1:{SERVER}?listen=1", "-f", "null", "-")
    run("ffmpeg", "-re", "-i", movie, "-c:v", "copy", "-an", "-f", "mpegts", f"tcp://127.0.0.1:{RELAY}")


def hylafax(servers):
    for daemon in ("hfaxd",):
        servers.start("/usr/sbin/hfaxd", "-d", "-i", SERVER)


@case("tuned", "hylafax-faxstat", "HylaFAX", INS, 4559, "/usr/bin/faxstat")
def _(servers):
    hylafax(servers)
    run("faxstat", "-h", f"127.0.0.1:{RELAY}", "-s", env={"FAXUSER": "x"})


# ---- held out


@case("held-out", "ssh-asyncssh", "SSH", TLS, 22, "/usr/bin/python3")
def _(servers):
    servers.python(f"""
        import asyncio, asyncssh
        async def main():
            key = asyncssh.generate_private_key('ssh-ed25519')
            class Server(asyncssh.SSHServer):
                def begin_auth(self, user): return False
            await asyncssh.create_server(Server, '127.0.0.1', {SERVER}, server_host_keys=[key],
                process_factory=lambda p: (p.stdout.write('x'), p.exit(0)))
            await asyncio.sleep(60)
        asyncio.run(main())""")
    python(f"""
        import asyncio, asyncssh
        async def main():
            async with asyncssh.connect('127.0.0.1', {RELAY}, known_hosts=None, username='x') as c:
                await c.run('x')
        asyncio.run(main())""")


@case("held-out", "http-page-requests", "HTTP", TLS, 8080, "/usr/bin/python3")
def _(servers):
    website()
    servers.start(sys.executable, "-m", "http.server", SERVER, "-d", TMP / "www", "-b", "127.0.0.1")
    python(f"import requests; requests.get('{WEB}/index.html')")


@case("held-out", "http-file-wget", "HTTP", LS, 8080, "")
def _(servers):
    website()
    servers.start(sys.executable, "-m", "http.server", SERVER, "-d", TMP / "www", "-b", "127.0.0.1")
    run("wget", "-q", f"{WEB}/big.zip", "-O", "/dev/null")


@case("held-out", "http-put-curl", "HTTP", LS, 80, "/usr/bin/curl")
def _(servers):
    nginx(servers)
    run("curl", "-s", "-T", TMP / "www/big.bin", f"{WEB}/put.bin")


@case("held-out", "http2-curl", "HTTP/2", TLS, 80, "/usr/bin/curl")
def _(servers):
    nginx(servers, f"{SERVER} http2")
    run("curl", "-s", "--http2-prior-knowledge", f"{WEB}/index.html")


@case("held-out", "https-urllib", "TLS", TLS, 8443, "/usr/bin/python3")
def _(servers):
    certificate()
    servers.start("openssl", "s_server", "-accept", SERVER, "-cert", TMP / "cert.pem", "-key", TMP / "key.pem", "-www")
    python(f"import ssl, urllib.request as u; u.urlopen('https://localhost:{RELAY}', context=ssl._create_unverified_context())")


@case("held-out", "https-file-wget", "TLS", LS, 443, "/usr/bin/wget")
def _(servers):
    nginx(servers, f"{SERVER} ssl")
    run("wget", "-q", "--no-check-certificate", f"https://localhost:{RELAY}/big.bin", "-O", "/dev/null")


@case("held-out", "https-file-curl", "HTTPS", LS, 443, "/usr/bin/curl")
def _(servers):
    nginx(servers, f"{SERVER} ssl http2")
    run("curl", "-sk", f"https://localhost:{RELAY}/big.bin", "-o", "/dev/null")


@case("held-out", "imaps-openssl", "TLS", LS, 993, "/usr/bin/openssl")
def _(servers):
    certificate()
    servers.start("openssl", "s_server", "-accept", SERVER, "-cert", TMP / "cert.pem", "-key", TMP / "key.pem", "-quiet")
    run("openssl", "s_client", "-connect", f"127.0.0.1:{RELAY}", "-servername", "mail.example.org", "-quiet", stdin=b"a1 NOOP\r\n", seconds=2)


@case("held-out", "websocket", "WebSocket", TLS, 80, "/usr/bin/python3")
def _(servers):
    servers.python(f"""
        import asyncio, websockets
        async def echo(ws, *_):
            async for m in ws: await ws.send(m)
        async def main():
            async with websockets.serve(echo, '127.0.0.1', {SERVER}): await asyncio.sleep(60)
        asyncio.run(main())""")
    python(f"""
        import asyncio, websockets
        async def main():
            async with websockets.connect('ws://127.0.0.1:{RELAY}/chat') as ws:
                for i in range(5): await ws.send('x'); await ws.recv()
        asyncio.run(main())""")


@case("held-out", "postgresql-psycopg2", "PostgreSQL", TLS, 5432, "/usr/bin/python3")
def _(servers):
    postgres(servers)
    python(f"import psycopg2; c = psycopg2.connect(host='127.0.0.1', port={RELAY}, user='postgres', sslmode='disable'); c.cursor().execute('select 1')")


@case("held-out", "redis-python", "Redis", TLS, 6379, "/usr/bin/python3")
def _(servers):
    servers.start("redis-server", "--port", SERVER, "--dir", TMP)
    python(f"import redis; r = redis.Redis(port={RELAY}); r.set('a', 1); r.get('a')")


@case("held-out", "mysql-mariadb", "MySQL", TLS, 3306, "/usr/bin/mariadb")
def _(servers):
    run("mariadb-install-db", f"--datadir={TMP}/my", "--user=root", "--auth-root-authentication-method=normal", seconds=60)
    servers.start("mariadbd", f"--datadir={TMP}/my", "--user=root", f"--port={SERVER}", f"--socket={TMP}/my.sock",
                  "--bind-address=127.0.0.1", f"--pid-file={TMP}/my.pid", wait=30)
    run("mariadb", "-h", "127.0.0.1", "-P", RELAY, "-u", "root", "-e", "select 1")


@case("held-out", "memcached", "memcached", TLS, 11211, "/usr/bin/socat")
def _(servers):
    servers.start("memcached", "-p", SERVER, "-l", "127.0.0.1", "-u", "root")
    run("socat", "-t1", "-", f"TCP:127.0.0.1:{RELAY}", stdin=b"set k 0 60 3\r\nabc\r\nget k\r\nquit\r\n")


@case("held-out", "vnc", "VNC", TLS, 5900, "/usr/bin/vncsnapshot")
def _(servers):
    servers.start("Xvfb", ":77", "-screen", "0", "640x480x24", port=None)
    time.sleep(2)
    servers.start("x11vnc", "-display", ":77", "-rfbport", SERVER, "-listen", "127.0.0.1", "-nopw", "-forever", "-quiet", wait=15)
    run("vncsnapshot", "-quiet", f"127.0.0.1:{RELAY - 5900}", TMP / "shot.jpg", seconds=8)


@case("held-out", "ldap", "LDAP", TLS, 389, "/usr/bin/ldapsearch")
def _(servers):
    (TMP / "ldap").mkdir()
    write("slapd.conf", f"include /etc/ldap/schema/core.schema\nmodulepath /usr/lib/ldap\nmoduleload back_mdb\n"
          f"database mdb\nsuffix dc=example,dc=org\ndirectory {TMP}/ldap\n")
    servers.start("/usr/sbin/slapd", "-d", "0", "-f", TMP / "slapd.conf", "-h", f"ldap://127.0.0.1:{SERVER}")
    run("ldapsearch", "-x", "-H", f"ldap://127.0.0.1:{RELAY}", "-b", "dc=example,dc=org")


@case("held-out", "ftp-pyftpdlib", "FTP", LS, 21, "/usr/bin/python3")
def _(servers):
    servers.start(sys.executable, "-m", "pyftpdlib", "-i", "127.0.0.1", "-p", SERVER, "-d", TMP)
    python(f"import ftplib; f = ftplib.FTP(); f.connect('127.0.0.1', {RELAY}); f.login(); f.nlst(); f.quit()")


@case("held-out", "smtp-smtplib", "SMTP", LS, 587, "/usr/bin/python3")
def _(servers):
    servers.start(sys.executable, "-m", "aiosmtpd", "-n", "-l", f"127.0.0.1:{SERVER}")
    python(f"import smtplib; s = smtplib.SMTP('127.0.0.1', {RELAY}); s.sendmail('a@example.org', 'b@example.org', 'words'); s.quit()")


@case("held-out", "imap-mbsync", "IMAP", LS, 143, "")
def _(servers):
    dovecot(servers, "imap")
    write("mbsyncrc", f"""
        IMAPAccount a
        Host 127.0.0.1
        Port {RELAY}
        User reader
        Pass x
        SSLType None
        AuthMechs LOGIN

        IMAPStore far
        Account a

        MaildirStore near
        Path {TMP}/near/
        Inbox {TMP}/near/INBOX

        Channel c
        Far :far:
        Near :near:
        Patterns *
        Create Near
        """)
    (TMP / "near").mkdir()
    run("mbsync", "-c", TMP / "mbsyncrc", "-a")


@case("held-out", "pop3-poplib", "POP3", LS, 110, "/usr/bin/python3")
def _(servers):
    dovecot(servers, "pop3")
    python(f"import poplib; p = poplib.POP3('127.0.0.1', {RELAY}); p.user('reader'); p.pass_('x'); p.stat(); p.quit()")


@case("held-out", "smb-smbclient", "SMB", LS, 445, "/usr/bin/smbclient")
def _(servers):
    website()
    write("smb.conf", f"""
        [global]
        map to guest = bad user
        guest account = root
        private dir = {TMP}
        lock directory = {TMP}
        state directory = {TMP}
        cache directory = {TMP}
        pid directory = {TMP}
        ncalrpc dir = {TMP}/ncalrpc
        smb ports = {SERVER}
        [files]
        path = {TMP}/www
        guest ok = yes
        """)
    servers.start("smbd", "-F", "--no-process-group", "-s", TMP / "smb.conf", "-l", TMP)
    run("smbclient", "-N", "-p", RELAY, "-s", TMP / "smb.conf", "//127.0.0.1/files", "-c", "ls; get big.bin")


@case("held-out", "bittorrent-aria2", "BitTorrent", LS, 51413, "")
def _(servers):
    website()
    servers.python(f"""
        import hashlib, http.server
        data = open('{TMP}/www/big.bin', 'rb').read()
        piece = 65536
        pieces = b''.join(hashlib.sha1(data[i:i + piece]).digest() for i in range(0, len(data), piece))
        b = lambda s: str(len(s)).encode() + b':' + s
        info = b'd' + b(b'length') + b'i%de' % len(data) + b(b'name') + b(b'big.bin') + b(b'piece length') + b'i%de' % piece + b(b'pieces') + b(pieces) + b'e'
        open('{TMP}/t.torrent', 'wb').write(b'd' + b(b'announce') + b(b'http://127.0.0.1:19002/a') + b(b'info') + info + b'e')
        class Tracker(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                peers = bytes([127, 0, 0, 1]) + ({RELAY}).to_bytes(2, 'big') if 'port=19003' in self.path else b''
                self.send_response(200); self.end_headers()
                self.wfile.write(b'd' + b(b'interval') + b'i60e' + b(b'peers') + b(peers) + b'e')
        http.server.HTTPServer(('127.0.0.1', 19002), Tracker).serve_forever()""", port=19002)
    common = ["--enable-dht=false", "--bt-enable-lpd=false", "--enable-dht6=false", "--no-conf"]
    servers.start("aria2c", *common, f"--listen-port={SERVER}", "-d", TMP / "www", "--check-integrity", "--seed-ratio=0", TMP / "t.torrent")
    time.sleep(1)
    run("aria2c", *common, "--listen-port=19003", "-d", TMP / "leech", "--seed-time=0", TMP / "t.torrent", seconds=12)


@case("held-out", "irc-ngircd", "IRC", LS, 6667, "/usr/bin/socat")
def _(servers):
    write("ngircd.conf", f"[Global]\nName = irc.example.org\nInfo = x\nListen = 127.0.0.1\nPorts = {SERVER}\n"
          "ServerUID = root\nServerGID = root\n[Options]\nIdent = no\nPAM = no\nDNS = no\n")
    servers.start("ngircd", "-n", "-f", TMP / "ngircd.conf")
    run("sh", "-c", f"(printf 'NICK a\\r\\nUSER a 0 * :a\\r\\n'; sleep 1; printf 'JOIN #x\\r\\nPRIVMSG #x :hello\\r\\n'; sleep 1) | socat - TCP:127.0.0.1:{RELAY}")


@case("tuned", "nats", "NATS", LS, 4222, "/usr/bin/socat")
def _(servers):
    servers.start("nats-server", "-a", "127.0.0.1", "-p", SERVER)
    run("socat", "-t1", "-", f"TCP:127.0.0.1:{RELAY}", stdin=b"CONNECT {}\r\nPUB t 2\r\nhi\r\nPING\r\n")


@case("held-out", "svn", "Subversion", LS, 3690, "/usr/bin/svn")
def _(servers):
    run("svnadmin", "create", TMP / "svn")
    servers.start("svnserve", "-d", "--foreground", "--listen-port", SERVER, "--listen-host", "127.0.0.1", "-r", TMP)
    run("svn", "checkout", "--non-interactive", f"svn://127.0.0.1:{RELAY}/svn", TMP / "co")


@case("held-out", "mqtt-paho", "MQTT", LS, 1883, "/usr/bin/python3")
def _(servers):
    servers.start("mosquitto", "-p", SERVER)
    python(f"import paho.mqtt.publish as p; p.single('t', 'words', hostname='127.0.0.1', port={RELAY})")


@case("held-out", "socat-file", "", LS, 9999, "/usr/bin/socat")
def _(servers):
    website()
    servers.start("socat", "-u", f"TCP-LISTEN:{SERVER},reuseaddr", "OPEN:/dev/null")
    run("socat", "-u", f"FILE:{TMP}/www/big.bin", f"TCP:127.0.0.1:{RELAY}")


@case("held-out", "rtmp-ffmpeg", "RTMP", TS, 1935, "/usr/bin/ffmpeg")
def _(servers):
    movie = media()
    servers.start("ffmpeg", "-listen", "1", "-i", f"rtmp://127.0.0.1:{SERVER}/live", "-f", "null", "-")
    run("ffmpeg", "-re", "-i", movie, "-c", "copy", "-f", "flv", f"rtmp://127.0.0.1:{RELAY}/live")


@case("held-out", "mp4-curl", "HTTP", TS, 80, "/usr/bin/curl")
def _(servers):
    media()
    nginx(servers)
    run("curl", "-s", f"{WEB}/movie.mp4", "-o", "/dev/null")


def icecast(servers):
    write("icecast.xml", f"""
        <icecast><limits><sources>2</sources></limits><authentication><source-password>x</source-password>
        <admin-password>x</admin-password></authentication><hostname>localhost</hostname><listen-socket><port>{SERVER}</port>
        <bind-address>127.0.0.1</bind-address></listen-socket><paths><basedir>/usr/share/icecast2</basedir><logdir>{TMP}</logdir>
        <webroot>/usr/share/icecast2/web</webroot><adminroot>/usr/share/icecast2/admin</adminroot></paths>
        <security><chroot>0</chroot><changeowner><user>nobody</user><group>nogroup</group></changeowner></security></icecast>""")
    TMP.chmod(0o777)
    servers.start("icecast2", "-c", TMP / "icecast.xml")


def source(port):
    return ["ffmpeg", "-re", "-f", "lavfi", "-i", "sine", "-c:a", "libmp3lame", "-f", "mp3", f"icecast://source:x@127.0.0.1:{port}/m"]


@case("held-out", "icecast-source", "Icecast", TS, 8000, "/usr/bin/ffmpeg")
def _(servers):
    icecast(servers)
    run(*source(RELAY))


@case("held-out", "icecast-listener", "Icecast", TS, 8000, "/usr/bin/curl")
def _(servers):
    icecast(servers)
    servers.start(*source(SERVER), port=None)
    time.sleep(3)
    run("curl", "-s", f"{WEB}/m", "-o", "/dev/null", seconds=4)


@case("held-out", "sip-sipp", "SIP", TS, 5060, "/usr/bin/sipp")
def _(servers):
    servers.start("sipp", "-sn", "uas", "-t", "t1", "-i", "127.0.0.1", "-p", SERVER, "-nostdin", env={**os.environ, "TERM": "dumb"})
    run("sipp", "-sn", "uac", "-t", "t1", "-i", "127.0.0.1", f"127.0.0.1:{RELAY}", "-m", "1", "-nostdin", env={"TERM": "dumb"})


@case("held-out", "alaw-ffmpeg", "", TS, 9001, "/usr/bin/ffmpeg")
def _(servers):
    servers.start("socat", "-u", f"TCP-LISTEN:{SERVER},reuseaddr", "OPEN:/dev/null")
    run("ffmpeg", "-re", "-f", "lavfi", "-i", "sine=sample_rate=8000:samples_per_frame=160", "-c:a", "pcm_alaw", "-flush_packets", "1",
        "-f", "alaw", f"tcp://127.0.0.1:{RELAY}", seconds=4)


@case("held-out", "hylafax-sendfax", "HylaFAX", INS, 4559, "/usr/bin/sendfax")
def _(servers):
    hylafax(servers)
    write("page.txt", "words\n")
    run("sendfax", "-h", f"127.0.0.1:{RELAY}", "-n", "-d", "5551234", TMP / "page.txt", env={"FAXUSER": "x"})


WANTED = {"iperf3": 1, "hls-ffmpeg": 0}


def save(part, name, protocol, profile, port, executable, reads):
    lines = [f"# protocol: {protocol}", f"# profile: {profile}", f"# port: {port}", f"# executable: {executable}"]
    kept, first = dict(KEPT), reads[0][1]
    for by, at, data in sorted(reads, key=lambda read: read[1])[:READS]:
        part_of = data[:kept[by]]
        kept[by] -= len(part_of)
        lines.append(f"{by} {at - first} {len(data)} {part_of.hex()}".rstrip())
    (OUT / part).mkdir(parents=True, exist_ok=True)
    (OUT / part / f"{name}.cap").write_text("\n".join(lines) + "\n")


def main():
    wanted, failed = sys.argv[1:], []
    for part, name, protocol, profile, port, executable, function in CASES:
        if wanted and name not in wanted:
            continue
        for leftover in TMP.iterdir():
            if leftover.name not in ("www", "key.pem", "cert.pem", "log"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        servers, recorder = Servers(), Recorder(WANTED.get(name, 0))
        try:
            recorder.start()
            function(servers)
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)
        finally:
            servers.stop()
            recorder.stop()
        if recorder.reads:
            save(part, name, protocol, profile, port, executable, recorder.reads)
            print(f"{part}/{name}: {len(recorder.reads)} reads")
        else:
            failed.append(name)
    if not failed:
        shutil.rmtree(TMP)
    else:
        print(f"nothing recorded: {' '.join(failed)} (see {TMP}/log)", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
