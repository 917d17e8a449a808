/* SPDX-License-Identifier: Apache-2.0 OR MIT */
#include "conform.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <signal.h>
#include <sys/ioctl.h>

/* ---- addresses ---- */

struct place at(struct place host, int port) {
    if (host.any.sa_family == AF_INET)
        host.v4.sin_port = htons((uint16_t)port);
    else
        host.v6.sin6_port = htons((uint16_t)port);
    return host;
}

struct place literal(const char *v4, const char *v6, int port) {
    struct place place = {0};
    place.any.sa_family = (sa_family_t)family;
    if (family == AF_INET) {
        inet_pton(AF_INET, v4, &place.v4.sin_addr);
        place.length = sizeof(place.v4);
    } else {
        inet_pton(AF_INET6, v6, &place.v6.sin6_addr);
        place.length = sizeof(place.v6);
    }
    return at(place, port);
}

struct place anywhere(int port) {
    return literal("0.0.0.0", "::", port);
}

struct place mapped(struct place v4) {
    struct place place = {.length = sizeof(place.v6)};
    place.v6.sin6_family = AF_INET6;
    place.v6.sin6_port = v4.v4.sin_port;
    place.v6.sin6_addr.s6_addr[10] = place.v6.sin6_addr.s6_addr[11] = 0xff;
    memcpy(&place.v6.sin6_addr.s6_addr[12], &v4.v4.sin_addr, 4);
    return place;
}

int port_of(const struct place *place) {
    return ntohs(place->any.sa_family == AF_INET ? place->v4.sin_port : place->v6.sin6_port);
}

static bool same_host(const struct place *a, const struct place *b) {
    if (a->any.sa_family != b->any.sa_family)
        return false;
    if (a->any.sa_family == AF_INET)
        return a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
    return IN6_ARE_ADDR_EQUAL(&a->v6.sin6_addr, &b->v6.sin6_addr);
}

/* The name of an address, the same for both families, and without a port that nobody chose. */
static const char *name_of(const struct place *place) {
    static char name[128];
    const char *host = "elsewhere", *before = "", *after = "";
    char port[16] = "some";
    struct place plain = *place;
    size_t whole = place->any.sa_family == AF_INET ? sizeof(plain.v4) : sizeof(plain.v6);

    if (place->any.sa_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&place->v6.sin6_addr)) {
        before = "mapped ";
        plain.v4.sin_family = AF_INET;
        memcpy(&plain.v4.sin_addr, &place->v6.sin6_addr.s6_addr[12], 4);
    }
    struct place any = anywhere(0), loopback = literal("127.0.0.1", "::1", 0);
    if (same_host(&plain, &server_host))
        host = "server";
    else if (same_host(&plain, &client_host))
        host = "client";
    else if (same_host(&plain, &any))
        host = "any";
    else if (same_host(&plain, &loopback))
        host = "loopback";
    /* The kernel chooses from 32768 on. */
    if (port_of(place) < 32768)
        snprintf(port, sizeof(port), "%d", port_of(place));
    if (place->length != whole)
        after = ", and not as long as it should be";
    snprintf(name, sizeof(name), "%s%s:%s%s", before, host, port, after);
    return name;
}

/* ---- calls ---- */

int t_socket(int domain, int flags) {
    int fd = socket(domain, SOCK_STREAM | flags, 0);
    said(fd < 0 ? -1 : 0, "socket");
    return fd;
}

int t_bind(int fd, struct place place) {
    return (int)said(bind(fd, &place.any, place.length), "bind to %s", name_of(&place));
}

int t_listen(int fd, int backlog) {
    return (int)said(listen(fd, backlog), "listen");
}

int t_connect(int fd, struct place place) {
    return (int)said(connect(fd, &place.any, place.length), "connect to %s", name_of(&place));
}

int t_accept(int listener, struct place *who) {
    struct place peer = {.length = sizeof(peer.storage)};
    int fd = accept(listener, &peer.any, &peer.length);
    if (fd < 0)
        said(-1, "accept");
    else
        say("accept: %s", name_of(&peer));
    if (who)
        *who = peer;
    return fd;
}

static int t_name(const char *call, int result, const struct place *place) {
    if (result) {
        said(-1, "%s", call);
        return -1;
    }
    say("%s: %s", call, name_of(place));
    return port_of(place);
}

int t_local(int fd) {
    struct place place = {.length = sizeof(place.storage)};
    return t_name("getsockname", getsockname(fd, &place.any, &place.length), &place);
}

int t_peer(int fd) {
    struct place place = {.length = sizeof(place.storage)};
    return t_name("getpeername", getpeername(fd, &place.any, &place.length), &place);
}

long t_send(int fd, const char *text, int flags) {
    return said(send(fd, text, strlen(text), flags), "send \"%s\", flags %#x", text,
                (unsigned)flags);
}

long t_recv(int fd, size_t max, int flags) {
    static char bytes[4096];
    long count = recv(fd, bytes, max, flags);
    if (count <= 0)
        return said(count, "recv, flags %#x", (unsigned)flags);
    long shown = count < (long)max ? count : (long)max;
    return said(count, "recv \"%.*s\", flags %#x", (int)shown, bytes, (unsigned)flags);
}

int t_shutdown(int fd, int how) {
    static const char *const names[] = {"reading", "writing", "both"};
    return (int)said(shutdown(fd, how), "shutdown of %s", names[how]);
}

int t_close(int fd) {
    return (int)said(close(fd), "close");
}

static const char *event_names(int events) {
    static const struct {
        int bit;
        const char *name;
    } bits[] = {{POLLIN, "IN"},   {POLLPRI, "PRI"}, {POLLOUT, "OUT"},  {POLLRDHUP, "RDHUP"},
                {POLLHUP, "HUP"}, {POLLERR, "ERR"}, {POLLNVAL, "NVAL"}};
    static char names[64];
    names[0] = 0;
    for (size_t i = 0; i < sizeof(bits) / sizeof(*bits); i++) {
        if (!(events & bits[i].bit))
            continue;
        strcat(names, *names ? "|" : "");
        strcat(names, bits[i].name);
    }
    return *names ? names : "nothing";
}

static int events_of(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLIN | POLLPRI | POLLOUT | POLLRDHUP};
    poll(&p, 1, 0);
    return p.revents;
}

int t_await(int fd, int events) {
    int shown = events_of(fd);
    for (long end = clock_ms() + PATIENCE; (shown & events) != events && clock_ms() < end;) {
        nap(1);
        shown = events_of(fd);
    }
    say("poll: %s", event_names(shown));
    return shown;
}

int t_poll(int fd) {
    return t_await(fd, 0);
}

int t_error(int fd) {
    int error = -1;
    socklen_t length = sizeof(error);
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length))
        said(-1, "SO_ERROR");
    else
        say("SO_ERROR: %s", error ? strerrorname_np(error) : "none");
    return error;
}

int t_set(int fd, int level, int name, int value, const char *what) {
    return (int)said(setsockopt(fd, level, name, &value, sizeof(value)), "set %s to %d", what,
                     value);
}

int t_get(int fd, int level, int name, const char *what) {
    int value = -1;
    socklen_t length = sizeof(value);
    if (getsockopt(fd, level, name, &value, &length))
        said(-1, "get %s", what);
    else
        say("get %s: %d", what, value);
    return value;
}

int t_linger(int fd, int on, int seconds) {
    struct linger linger = {.l_onoff = on, .l_linger = seconds};
    return (int)said(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)),
                     "set SO_LINGER to %d, %d", on, seconds);
}

int t_timeout(int fd, int name, int ms, const char *what) {
    struct timeval limit = {.tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000};
    return (int)said(setsockopt(fd, SOL_SOCKET, name, &limit, sizeof(limit)), "set %s to %d ms",
                     what, ms);
}

static int state_of(int fd) {
    struct tcp_info info = {0};
    socklen_t length = sizeof(info);
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) ? -1 : info.tcpi_state;
}

void t_state(int fd, int wanted) {
    static const char *const names[] = {"-",          "ESTABLISHED", "SYN_SENT",  "SYN_RECV",
                                        "FIN_WAIT1",  "FIN_WAIT2",   "TIME_WAIT", "CLOSE",
                                        "CLOSE_WAIT", "LAST_ACK",    "LISTEN",    "CLOSING"};
    int state = state_of(fd);
    for (long end = clock_ms() + PATIENCE; state != wanted && clock_ms() < end; nap(1))
        state = state_of(fd);
    say("TCP_INFO: %s", state >= 0 && state <= 11 ? names[state] : "?");
}

void t_drained(int fd) {
    int left = -1;
    for (long end = clock_ms() + PATIENCE; clock_ms() < end; nap(1))
        if (ioctl(fd, SIOCOUTQ, &left) || !left)
            break;
    say(left ? "SIOCOUTQ does not become 0" : "SIOCOUTQ: 0");
}

void t_arrived(int fd, int count) {
    int there = 0;
    for (long end = clock_ms() + PATIENCE; clock_ms() < end; nap(1))
        if (ioctl(fd, FIONREAD, &there) || there >= count)
            break;
    say("FIONREAD: %d", there);
}

/* ---- many bytes ---- */

void fill(unsigned char *bytes, size_t count, uint64_t seed) {
    /* xorshift64, Marsaglia 2003. */
    uint64_t state = seed * 2 + 1;
    for (size_t i = 0; i < count; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes[i] = (unsigned char)(state >> 24);
    }
}

/* FNV-1a, of as many pieces as one likes. */
static uint64_t digest_on(uint64_t sum, const unsigned char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        sum = (sum ^ bytes[i]) * 0x100000001b3;
    return sum;
}

static const uint64_t no_digest = 0xcbf29ce484222325;

uint64_t digest(const void *bytes, size_t count) {
    return digest_on(no_digest, bytes, count);
}

/* Waits where a socket that does not block would block; false if nothing happens. */
static bool wait_for(int fd, short event) {
    struct pollfd p = {.fd = fd, .events = event};
    return poll(&p, 1, PATIENCE) == 1;
}

void t_send_all(int fd, const void *bytes, size_t count) {
    size_t done = 0;
    while (done < count) {
        long n = send(fd, (const char *)bytes + done, count - done, MSG_NOSIGNAL);
        if (n > 0)
            done += (size_t)n;
        else if (n < 0 && errno == EAGAIN && wait_for(fd, POLLOUT))
            continue;
        else
            break;
    }
    said(done == count ? (long)done : -1, "send of %zu bytes, %016lx", count,
         (unsigned long)digest(bytes, count));
}

void t_recv_all(int fd, size_t count) {
    static unsigned char bytes[1 << 16];
    uint64_t sum = no_digest;
    size_t done = 0;
    long n = 1;
    while (done < count) {
        size_t max = count - done < sizeof(bytes) ? count - done : sizeof(bytes);
        n = recv(fd, bytes, max, 0);
        if (n < 0 && errno == EAGAIN && wait_for(fd, POLLIN))
            continue;
        if (n <= 0)
            break;
        sum = digest_on(sum, bytes, (size_t)n);
        done += (size_t)n;
    }
    const char *end = n > 0 ? "more may come" : n == 0 ? "the end" : strerrorname_np(errno);
    say("received %zu bytes, %016lx, then %s", done, (unsigned long)sum, end);
}

void t_recv_to_end(int fd) {
    t_recv_all(fd, SIZE_MAX);
}

/* ---- connections ---- */

int listening(int port) {
    int on = 1, fd = socket(family, SOCK_STREAM, 0);
    struct place place = anywhere(port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, &place.any, place.length) || listen(fd, 64)) {
        said(-1, "bind and listen at %d", port);
        give_up("nobody can connect");
    }
    return fd;
}

int connected(int port) {
    struct place server = at(server_host, port);
    int fd = socket(family, SOCK_STREAM, 0);
    if (connect(fd, &server.any, server.length)) {
        said(-1, "connect to %s", name_of(&server));
        give_up("no connection");
    }
    return fd;
}

int meet(void) {
    int fd;
    if (role == CLIENT) {
        step("listening");
        fd = connected(PORT);
        step("met");
    } else {
        int listener = listening(PORT);
        step("listening");
        fd = accept(listener, NULL, NULL);
        if (fd < 0) {
            said(-1, "accept");
            give_up("no connection");
        }
        step("met");
        close(listener);
    }
    return fd;
}

void not_blocking(int fd) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static volatile sig_atomic_t signalled;

static void count(int number) {
    (void)number;
    signalled++;
}

void count_signal(int number) {
    /* Without SA_RESTART: calls that wait are interrupted. */
    struct sigaction action = {.sa_handler = count};
    sigaction(number, &action, NULL);
}

int signals(void) {
    return signalled;
}
