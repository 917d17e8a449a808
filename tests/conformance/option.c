/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Options of socket(7), ip(7) and tcp(7): what was set, what is inherited, what is known of a peer.
 */
#include "conform.h"

#include <netinet/tcp.h>

/* What TCP leaves open has a range. */
static void within(int fd, int level, int name, const char *what, int min, int max) {
    int value = -1;
    socklen_t length = sizeof(value);
    if (getsockopt(fd, level, name, &value, &length))
        said(-1, "get %s", what);
    else if (value < min || value > max)
        say("%s is %d", what, value);
    else
        say("%s is from %d to %d", what, min, max);
}

static void kinds(int fd) {
    int domain = 0;
    socklen_t length = sizeof(domain);
    t_get(fd, SOL_SOCKET, SO_TYPE, "SO_TYPE");
    t_get(fd, SOL_SOCKET, SO_PROTOCOL, "SO_PROTOCOL");
    t_get(fd, SOL_SOCKET, SO_ACCEPTCONN, "SO_ACCEPTCONN");
    said(getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length), "get SO_DOMAIN");
    say(domain == family ? "the right family" : "another family");
}

static void defaults(int fd) {
    kinds(fd);
    t_get(fd, SOL_SOCKET, SO_KEEPALIVE, "SO_KEEPALIVE");
    t_get(fd, SOL_SOCKET, SO_OOBINLINE, "SO_OOBINLINE");
    t_get(fd, SOL_SOCKET, SO_REUSEADDR, "SO_REUSEADDR");
    t_get(fd, SOL_SOCKET, SO_BROADCAST, "SO_BROADCAST");
    t_get(fd, SOL_SOCKET, SO_DONTROUTE, "SO_DONTROUTE");
    t_get(fd, SOL_SOCKET, SO_RCVLOWAT, "SO_RCVLOWAT");
    t_get(fd, SOL_SOCKET, SO_PRIORITY, "SO_PRIORITY");
    t_get(fd, SOL_SOCKET, SO_MARK, "SO_MARK");
    t_get(fd, IPPROTO_TCP, TCP_NODELAY, "TCP_NODELAY");
    t_get(fd, IPPROTO_TCP, TCP_CORK, "TCP_CORK");
    t_get(fd, IPPROTO_TCP, TCP_KEEPIDLE, "TCP_KEEPIDLE");
    t_get(fd, IPPROTO_TCP, TCP_KEEPINTVL, "TCP_KEEPINTVL");
    t_get(fd, IPPROTO_TCP, TCP_KEEPCNT, "TCP_KEEPCNT");
    t_get(fd, IPPROTO_TCP, TCP_SYNCNT, "TCP_SYNCNT");
    t_get(fd, IPPROTO_TCP, TCP_LINGER2, "TCP_LINGER2");
    t_get(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, "TCP_DEFER_ACCEPT");
    t_get(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, "TCP_USER_TIMEOUT");
    t_error(fd);
    within(fd, IPPROTO_TCP, TCP_MAXSEG, "TCP_MAXSEG", 500, 65535);
    within(fd, SOL_SOCKET, SO_SNDBUF, "SO_SNDBUF", 4096, 64 << 20);
    within(fd, SOL_SOCKET, SO_RCVBUF, "SO_RCVBUF", 4096, 64 << 20);
    struct linger linger = {.l_onoff = -1};
    socklen_t length = sizeof(linger);
    said(getsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, &length), "SO_LINGER");
    say("%d, %d", linger.l_onoff, linger.l_linger);
}

static void ordinary(void) {
    int fd = socket(family, SOCK_STREAM, 0);
    defaults(fd);
    close(fd);
    fd = meet();
    defaults(fd);
    t_state(fd, TCP_ESTABLISHED);
    step("asked");
}

static void change(int fd) {
    static const struct {
        int level, name, value;
        const char *what;
    } changes[] = {
        {SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE"},
        {SOL_SOCKET, SO_SNDBUF, 20000, "SO_SNDBUF"},
        {SOL_SOCKET, SO_RCVBUF, 30000, "SO_RCVBUF"},
        {SOL_SOCKET, SO_PRIORITY, 3, "SO_PRIORITY"},
        {IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY"},
        {IPPROTO_TCP, TCP_KEEPIDLE, 77, "TCP_KEEPIDLE"},
        {IPPROTO_TCP, TCP_KEEPINTVL, 7, "TCP_KEEPINTVL"},
        {IPPROTO_TCP, TCP_KEEPCNT, 3, "TCP_KEEPCNT"},
        {IPPROTO_TCP, TCP_USER_TIMEOUT, 12345, "TCP_USER_TIMEOUT"},
        {IPPROTO_TCP, TCP_NOTSENT_LOWAT, 50000, "TCP_NOTSENT_LOWAT"},
        {IPPROTO_TCP, TCP_KEEPIDLE, 0, "TCP_KEEPIDLE"},
        {IPPROTO_TCP, TCP_KEEPCNT, 1000, "TCP_KEEPCNT"},
        {IPPROTO_TCP, 9999, 1, "an option that there is not"},
        {SOL_SOCKET, SO_TYPE, 1, "SO_TYPE"},
    };
    for (size_t i = 0; i < sizeof(changes) / sizeof(*changes); i++) {
        t_set(fd, changes[i].level, changes[i].name, changes[i].value, changes[i].what);
        t_get(fd, changes[i].level, changes[i].name, changes[i].what);
    }
}

static void changed(void) {
    int fd;
    if (role == CLIENT) {
        fd = t_socket(family, 0);
        change(fd);
        step("listening");
        t_connect(fd, at(server_host, PORT));
        t_get(fd, IPPROTO_TCP, TCP_KEEPIDLE, "TCP_KEEPIDLE");
        t_get(fd, SOL_SOCKET, SO_RCVBUF, "SO_RCVBUF");
        t_send(fd, "small buffers", 0);
        t_close(fd);
        return;
    }
    int listener = listening(PORT);
    change(listener);
    step("listening");
    fd = t_accept(listener, NULL);
    /* Inherited. */
    t_get(fd, SOL_SOCKET, SO_KEEPALIVE, "SO_KEEPALIVE");
    t_get(fd, SOL_SOCKET, SO_SNDBUF, "SO_SNDBUF");
    t_get(fd, SOL_SOCKET, SO_RCVBUF, "SO_RCVBUF");
    t_get(fd, IPPROTO_TCP, TCP_NODELAY, "TCP_NODELAY");
    t_get(fd, IPPROTO_TCP, TCP_KEEPIDLE, "TCP_KEEPIDLE");
    t_recv_to_end(fd);
    change(fd);
}

/* Buffers as small as can be: still every byte. */
static void small_buffers(void) {
    static unsigned char bytes[200000];
    fill(bytes, sizeof(bytes), 29);
    if (role == CLIENT) {
        int fd = t_socket(family, 0);
        t_set(fd, SOL_SOCKET, SO_SNDBUF, 1, "SO_SNDBUF");
        t_get(fd, SOL_SOCKET, SO_SNDBUF, "SO_SNDBUF");
        step("listening");
        t_connect(fd, at(server_host, PORT));
        t_send_all(fd, bytes, sizeof(bytes));
        t_close(fd);
        return;
    }
    int listener = listening(PORT);
    t_set(listener, SOL_SOCKET, SO_RCVBUF, 1, "SO_RCVBUF");
    t_get(listener, SOL_SOCKET, SO_RCVBUF, "SO_RCVBUF");
    step("listening");
    t_recv_to_end(t_accept(listener, NULL));
}

/* tcp(7): a size that is set now has no effect; on how fast it goes, it has. So these are few. */
static void shrunk_buffers(void) {
    static unsigned char bytes[10000];
    int fd = meet();
    fill(bytes, sizeof(bytes), 31);
    t_set(fd, SOL_SOCKET, SO_SNDBUF, 1, "SO_SNDBUF");
    t_set(fd, SOL_SOCKET, SO_RCVBUF, 1, "SO_RCVBUF");
    step("set");
    if (role == CLIENT)
        t_send_all(fd, bytes, sizeof(bytes));
    else
        t_recv_all(fd, sizeof(bytes));
    step("moved");
}

/* tcp(7): accept() waits for bytes, too. */
static void deferred(void) {
    if (role == CLIENT) {
        step("listening");
        int fd = t_socket(family, 0);
        t_connect(fd, at(server_host, PORT));
        step("connected");
        step("not accepted");
        t_send(fd, "now", 0);
        t_recv_to_end(fd);
        return;
    }
    int listener = listening(PORT);
    t_set(listener, IPPROTO_TCP, TCP_DEFER_ACCEPT, 5, "TCP_DEFER_ACCEPT");
    step("listening");
    step("connected");
    nap(50);
    t_poll(listener);
    step("not accepted");
    t_await(listener, POLLIN);
    int fd = t_accept(listener, NULL);
    t_recv(fd, 5, MSG_DONTWAIT);
    t_close(fd);
}

static void congestion_control(void) {
    int fd = meet();
    char name[32] = "";
    socklen_t length = sizeof(name);
    said(setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4), "set TCP_CONGESTION");
    said(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &length), "get TCP_CONGESTION");
    say("%s", name);
    said(setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "nonesuch", 8), "set TCP_CONGESTION");
    step("asked");
}

static void info(void) {
    int fd = meet();
    t_send(fd, "some bytes", 0);
    t_recv(fd, 10, MSG_WAITALL);
    t_drained(fd);
    struct tcp_info info = {0};
    socklen_t length = sizeof(info);
    said(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length), "TCP_INFO");
    say("state %d, unacknowledged %u, retransmits %u", info.tcpi_state, info.tcpi_unacked,
        info.tcpi_retransmits);
    say("rtt %s, segments %s, window %s",
        info.tcpi_rtt > 0 && info.tcpi_rtt < 2000000 ? "sane" : "odd",
        info.tcpi_snd_mss >= 500 ? "sane" : "odd", info.tcpi_snd_cwnd > 0 ? "sane" : "odd");
    step("asked");
}

const struct test_case option_cases[] = {
    CASE("option_defaults", ordinary),
    CASE("option_changed", changed),
    CASE("option_small_buffers", small_buffers),
    CASE("option_shrunk_buffers", shrunk_buffers),
    CASE("option_deferred", deferred),
    CASE("option_congestion_control", congestion_control),
    CASE("option_info", info),
    {0},
};
