/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Uses everything that vtl.h offers, and checks it. `api serve-blocking COUNT` or `api serve-polled
 * COUNT` at one host echoes COUNT sessions; `api ADDRESS` at the other opens four. `api
 * serve-messages` echoes the messages of one session, and `api messages ADDRESS MAX` sends some of
 * up to MAX bytes.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <vtl.h>

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "%s:%d: %s: not so; last error: %s\n", __FILE__, __LINE__, #what,      \
                    vtl_last_error());                                                             \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum { SIZE = 3 << 20, PATIENCE = 30000, MAX_SESSIONS = 64 };

static unsigned char at(size_t i) {
    return (unsigned char)(i * 31 + i / 251);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void wait_for(const vtl_socket *sock) {
    struct pollfd p = {.fd = vtl_fd(sock), .events = POLLIN};
    CHECK(p.fd >= 0);
    CHECK(poll(&p, 1, PATIENCE) == 1);
}

/* Closes without ever waiting in the library. */
static void close_polled(vtl_socket *sock) {
    int r;
    while ((r = vtl_close(sock)) == -EAGAIN)
        usleep(1000);
    CHECK(r == 0 || r == -EPIPE);
}

/* ------------------------------------------------------------------ servers */

static void *echo(void *arg) {
    vtl_socket *sock = arg;
    static __thread unsigned char buffer[64 << 10];
    ssize_t n;
    while ((n = vtl_recv_data(sock, buffer, sizeof buffer)) > 0)
        for (ssize_t sent = 0; sent < n;) {
            ssize_t r = vtl_send_data(sock, buffer + sent, (size_t)(n - sent));
            CHECK(r > 0);
            sent += r;
        }
    CHECK(n == 0);
    int r = vtl_close(sock);
    CHECK(r == 0 || r == -EPIPE);
    return NULL;
}

static void serve_blocking(int count) {
    vtl_socket *listener, *taken;
    CHECK(vtl_init(VTL_LISTENER, ":7100", NULL, &listener) == 0);
    CHECK(vtl_init(VTL_LISTENER, ":7100", NULL, &taken) == -EADDRINUSE && taken == NULL);
    CHECK(strstr(vtl_last_error(), "7100"));
    CHECK(vtl_set_timeout(listener, 20) == 0);
    double start = now();
    CHECK(vtl_accept(listener, &taken) == -ETIMEDOUT && taken == NULL);
    CHECK(now() - start > 0.015 && now() - start < 5);
    CHECK(vtl_set_timeout(listener, PATIENCE) == 0);
    puts("ready");
    fflush(stdout);
    pthread_t threads[MAX_SESSIONS];
    for (int i = 0; i < count; i++) {
        vtl_socket *sock;
        CHECK(vtl_accept(listener, &sock) == 0);
        CHECK(pthread_create(&threads[i], NULL, echo, sock) == 0);
    }
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    CHECK(vtl_close(listener) == 0);
    CHECK(vtl_close(listener) == -EBADF);
}

struct polled {
    vtl_socket *sock;
    unsigned char *buffer;
    size_t have, sent;
};

/* Moves what can be moved. False at the end of the session. */
static int pump(struct polled *p) {
    for (;;) {
        if (p->sent < p->have) {
            ssize_t n = vtl_send_data(p->sock, p->buffer + p->sent, p->have - p->sent);
            if (n == -EAGAIN)
                return 1;
            CHECK(n > 0);
            p->sent += (size_t)n;
            continue;
        }
        ssize_t n = vtl_recv_data(p->sock, p->buffer, 32 << 10);
        if (n == -EAGAIN)
            return 1;
        CHECK(n >= 0);
        if (n == 0)
            return 0;
        p->have = (size_t)n;
        p->sent = 0;
    }
}

static void serve_polled(int count) {
    vtl_socket *listener;
    CHECK(vtl_init(VTL_LISTENER, "[::]:7100", NULL, &listener) == 0);
    CHECK(vtl_set_timeout(listener, 0) == 0);
    puts("ready");
    fflush(stdout);
    struct polled sessions[MAX_SESSIONS] = {{0}};
    struct pollfd fds[MAX_SESSIONS + 1];
    int accepted = 0, open = 0;
    while (accepted < count || open > 0) {
        int n = 0;
        fds[n++] =
            (struct pollfd){.fd = accepted < count ? vtl_fd(listener) : -1, .events = POLLIN};
        for (int i = 0; i < accepted; i++)
            fds[n++] = (struct pollfd){.fd = sessions[i].sock ? vtl_fd(sessions[i].sock) : -1,
                                       .events = POLLIN};
        CHECK(poll(fds, (nfds_t)n, PATIENCE) > 0);
        for (int i = 0; i < accepted; i++) {
            if (!fds[i + 1].revents || pump(&sessions[i]))
                continue;
            close_polled(sessions[i].sock);
            free(sessions[i].buffer);
            sessions[i].sock = NULL;
            open--;
        }
        while (accepted < count) {
            struct polled *p = &sessions[accepted];
            int r = vtl_accept(listener, &p->sock);
            if (r == -EAGAIN)
                break;
            CHECK(r == 0);
            p->buffer = malloc(32 << 10);
            accepted++;
            open++;
            /* What came before the first poll is not told by it. */
            CHECK(pump(p));
        }
    }
    CHECK(vtl_close(listener) == 0);
}

/* ------------------------------------------------------------------ client */

static void *send_all(void *arg) {
    unsigned char *data = malloc(SIZE);
    for (size_t i = 0; i < SIZE; i++)
        data[i] = at(i);
    for (size_t sent = 0; sent < SIZE;) {
        ssize_t n = vtl_send_data(arg, data + sent, SIZE - sent);
        CHECK(n > 0);
        sent += (size_t)n;
    }
    free(data);
    return NULL;
}

static void check_info(const vtl_socket *sock, int gid) {
    struct vtl_info info = {.size = sizeof info};
    CHECK(vtl_get_info(sock, &info) == 0);
    CHECK(info.size == sizeof info && (int)info.gid == gid && info.graft[0] && info.peer[0]);
    CHECK(info.services & VTL_SERVICE_RELIABLE && info.services & VTL_SERVICE_ORDERED);
    CHECK(info.max_message == 64 << 20 && info.max_packet >= 512 && info.reserved == 0);
    /* An older program's structure is shorter; what lies behind it is left alone. */
    struct vtl_info old;
    memset(&old, 0x55, sizeof old);
    old.size = 12;
    CHECK(vtl_get_info(sock, &old) == 0);
    CHECK((int)old.gid == gid && old.max_message == 0x55555555);
    old.size = 96;
    CHECK(vtl_get_info(sock, &old) == 0);
    CHECK(old.max_message == info.max_message && old.max_packet == 0x55555555);
    old.size = 2;
    CHECK(vtl_get_info(sock, &old) == -EINVAL);
}

/* One thread sends, one receives; with requirements. */
static void blocking(const char *peer) {
    vtl_socket *sock;
    CHECK(vtl_init(VTL_INITIATOR, NULL, peer, &sock) == 0);
    struct vtl_info none = {.size = sizeof none};
    struct vtl_stats stats = {.size = sizeof stats};
    CHECK(vtl_get_info(sock, &none) == -ENOTCONN && vtl_get_stats(sock, &stats) == -ENOTCONN);
    CHECK(vtl_validate(sock) == -EINVAL);

    struct vtl_requirements want = VTL_REQUIREMENTS;
    want.reliability = VTL_REQUIRE;
    want.max_loss = 5;
    CHECK(vtl_negotiate(sock, &want) == -EINVAL);
    CHECK(strstr(vtl_last_error(), "reliable") && strstr(vtl_last_error(), "max_loss 5 %"));
    want.max_loss = 0;
    want.order = 7;
    CHECK(vtl_negotiate(sock, &want) == -EINVAL && strstr(vtl_last_error(), "ordered"));
    want.order = VTL_REQUIRE;
    want.size = 4;
    CHECK(vtl_negotiate(sock, &want) == -EINVAL);
    want.size = sizeof want + 8;
    CHECK(vtl_negotiate(sock, &want) == -E2BIG);
    want.size = sizeof want;
    want.multipath = VTL_REQUIRE;
    CHECK(vtl_negotiate(sock, &want) == -ECONNREFUSED);
    want.multipath = VTL_NO_PREFERENCE;
    want.encryption = getenv("CLEAR") ? VTL_NO_PREFERENCE : VTL_REQUIRE;
    int gid = vtl_negotiate(sock, &want);
    CHECK(gid > 0);
    check_info(sock, gid);
    /* In the session, for another one in its place. */
    want.congestion_control = VTL_PROHIBIT;
    int other = vtl_negotiate(sock, &want);
    CHECK(other > 0 && other != gid);
    check_info(sock, other);
    want.congestion_control = VTL_REQUIRE;
    want.multipath = VTL_REQUIRE;
    CHECK(vtl_negotiate(sock, &want) == -ECONNREFUSED);
    want.multipath = VTL_NO_PREFERENCE;
    CHECK(vtl_negotiate(sock, &want) == gid);
    /* At once: never what is reliable. */
    CHECK(vtl_set_stateless(sock, 1) == 0);
    CHECK(vtl_negotiate(sock, &want) == -ECONNREFUSED);
    CHECK(strstr(vtl_last_error(), "requires reliability"));
    CHECK(vtl_set_stateless(sock, 0) == 0);
    struct vtl_switches switches = {.size = sizeof switches, .count = 7};
    CHECK(vtl_get_switches(sock, &switches) == 0 && switches.count == 0);

    pthread_t sender;
    CHECK(pthread_create(&sender, NULL, send_all, sock) == 0);
    static unsigned char buffer[64 << 10];
    for (size_t got = 0; got < SIZE;) {
        ssize_t n = vtl_recv_data(sock, buffer, sizeof buffer);
        CHECK(n > 0);
        for (ssize_t i = 0; i < n; i++)
            CHECK(buffer[i] == at(got + (size_t)i));
        got += (size_t)n;
    }
    pthread_join(sender, NULL);

    CHECK(vtl_set_timeout(sock, 30) == 0);
    double start = now();
    CHECK(vtl_recv_data(sock, buffer, 1) == -ETIMEDOUT);
    CHECK(now() - start > 0.025 && now() - start < 5);
    CHECK(vtl_get_stats(sock, &stats) == 0);
    CHECK(stats.rtt > 0 && stats.sent >= SIZE / 1500 && stats.received >= SIZE / 1500);
    CHECK(vtl_set_timeout(sock, -1) == 0);
    CHECK(vtl_close(sock) == 0);
    CHECK(vtl_close(sock) == -EBADF && vtl_send_data(sock, "x", 1) == -EBADF);
    CHECK(vtl_fd(sock) == -EBADF);
}

/* One thread that never waits but in poll. */
static void polled(const char *peer) {
    vtl_socket *sock;
    CHECK(vtl_init(VTL_INITIATOR, NULL, peer, &sock) == 0);
    CHECK(vtl_set_timeout(sock, 0) == 0);
    int fd = vtl_fd(sock), r;
    while ((r = vtl_negotiate(sock, NULL)) == -EAGAIN)
        wait_for(sock);
    CHECK(r > 0);
    CHECK(vtl_fd(sock) == fd);
    unsigned char *data = malloc(SIZE);
    static unsigned char buffer[64 << 10];
    for (size_t i = 0; i < SIZE; i++)
        data[i] = at(i);
    size_t sent = 0, got = 0;
    while (got < SIZE) {
        ssize_t n = 0, m;
        if (sent < SIZE && (n = vtl_send_data(sock, data + sent, SIZE - sent)) > 0)
            sent += (size_t)n;
        CHECK(n >= 0 || n == -EAGAIN);
        m = vtl_recv_data(sock, buffer, sizeof buffer);
        CHECK(m > 0 || m == -EAGAIN);
        for (ssize_t i = 0; i < m; i++)
            CHECK(buffer[i] == at(got + (size_t)i));
        if (m > 0)
            got += (size_t)m;
        else if (n <= 0)
            wait_for(sock);
    }
    free(data);
    close_polled(sock);
}

/* Messages; a session without requirements opens by itself. */
static void messages(const char *peer) {
    vtl_socket *sock;
    unsigned char buffer[4096];
    int more = 7;
    CHECK(vtl_init(VTL_INITIATOR, NULL, peer, &sock) == 0);
    CHECK(vtl_send_message(sock, "one", 3) == 0);
    struct vtl_info info = {.size = sizeof info};
    CHECK(vtl_get_info(sock, &info) == 0);
    CHECK(vtl_send_message(sock, buffer, 0) == -EMSGSIZE);
    unsigned char *long_one = calloc(1, (size_t)info.max_message + 1);
    CHECK(long_one);
    CHECK(vtl_send_message(sock, long_one, (size_t)info.max_message + 1) == -EMSGSIZE);
    CHECK(strstr(vtl_last_error(), "67108864"));
    free(long_one);
    CHECK(vtl_recv_message(sock, buffer, 2) == -ENOBUFS);
    CHECK(vtl_recv_message(sock, buffer, sizeof buffer) == 3 && !memcmp(buffer, "one", 3));
    memset(buffer, 7, sizeof buffer);
    /* The echo's packets may be a little smaller. */
    const size_t size = (size_t)info.max_packet - 64;
    CHECK(vtl_send_message(sock, buffer, size) == 0);
    CHECK(vtl_recv_part(sock, buffer, 100, NULL) == -EINVAL);
    CHECK(vtl_recv_part(sock, buffer, 100, &more) == 100 && more == 1);
    CHECK(vtl_recv_message(sock, buffer, sizeof buffer) == (ssize_t)size - 100);
    CHECK(vtl_close(sock) == 0);
}

/* Echoes messages of any length. */
static void serve_messages(void) {
    vtl_socket *sock;
    CHECK(vtl_init(VTL_RESPONDER, ":7100", NULL, &sock) == 0);
    puts("ready");
    fflush(stdout);
    CHECK(vtl_validate(sock) > 0);
    const size_t max = 64 << 20;
    unsigned char *buffer = malloc(max);
    CHECK(buffer);
    ssize_t n;
    while ((n = vtl_recv_message(sock, buffer, max)) > 0)
        CHECK(vtl_send_message(sock, buffer, (size_t)n) == 0);
    CHECK(n == 0);
    free(buffer);
    int r = vtl_close(sock);
    CHECK(r == 0 || r == -EPIPE);
}

/* Sends a message, in one call with `wait`, else by calls that do not wait, and takes its echo in
 * pieces. */
static void echoed(vtl_socket *sock, const unsigned char *data, size_t size, int wait) {
    CHECK(vtl_set_timeout(sock, wait ? PATIENCE : 0) == 0);
    int sent = 0, more = 1;
    size_t got = 0;
    static unsigned char part[10000];
    while (more) {
        ssize_t n = -EAGAIN;
        if (!sent) {
            int r = vtl_send_message(sock, data, size);
            CHECK(r == 0 || (r == -EAGAIN && !wait));
            sent = r == 0;
            if (!sent && size >= 1 << 20)
                CHECK(vtl_send_message(sock, data, size - 1) < 0);
        }
        if (sent)
            n = vtl_recv_part(sock, part, sizeof part, &more);
        if (n == -EAGAIN) {
            CHECK(!wait);
            wait_for(sock);
            continue;
        }
        CHECK(n > 0 && got + (size_t)n <= size && !memcmp(part, data + got, (size_t)n));
        got += (size_t)n;
    }
    CHECK(got == size);
}

static void send_messages(const char *peer, size_t max) {
    vtl_socket *sock;
    CHECK(vtl_init(VTL_INITIATOR, NULL, peer, &sock) == 0);
    CHECK(vtl_negotiate(sock, NULL) > 0);
    struct vtl_info info = {.size = sizeof info};
    CHECK(vtl_get_info(sock, &info) == 0);
    const size_t packet = info.max_packet;
    const size_t sizes[] = {1, packet - 1, packet, packet + 1, 3 * packet, 1 << 20, max};
    unsigned char *data = malloc(max);
    CHECK(data);
    for (size_t i = 0; i < max; i++)
        data[i] = at(i);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int wait = 0; wait < 2; wait++)
            if (sizes[i] < 32 << 20 || wait)
                echoed(sock, data, sizes[i], wait);
    free(data);
    CHECK(vtl_set_timeout(sock, -1) == 0);
    CHECK(vtl_close(sock) == 0);
}

static void *receive_until_closed(void *sock) {
    char byte;
    CHECK(vtl_recv_data(sock, &byte, 1) == -EBADF);
    return NULL;
}

/* A socket that is given up while a thread waits in it. */
static void aborted(const char *peer) {
    vtl_socket *sock;
    CHECK(vtl_init(VTL_INITIATOR, NULL, peer, &sock) == 0);
    /* Now the other side has accepted. */
    char byte;
    CHECK(vtl_send_data(sock, "x", 1) == 1 && vtl_recv_data(sock, &byte, 1) == 1);
    pthread_t waiter;
    CHECK(pthread_create(&waiter, NULL, receive_until_closed, sock) == 0);
    usleep(50000);
    double start = now();
    CHECK(vtl_close(sock) == 0);
    pthread_join(waiter, NULL);
    CHECK(now() - start < 5);
}

/* What can go wrong without a peer. */
static void misuse(void) {
    vtl_socket *sock, *other = (vtl_socket *)&sock;
    CHECK(vtl_send_data(NULL, "x", 1) == -EBADF && vtl_close(NULL) == -EBADF);
    CHECK(vtl_recv_data(other, NULL, 1) == -EBADF && vtl_abort(other) == -EBADF);
    CHECK(strstr(vtl_last_error(), "socket"));
    CHECK(vtl_init(VTL_INITIATOR, NULL, "10.0.0.2:7000", NULL) == -EINVAL);
    const char *wrong[] = {NULL, "", "nowhere", "10.0.0.2", "10.0.0.2:0", "fd00::1:70000"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(vtl_init(VTL_INITIATOR, NULL, wrong[i], &sock) == -EINVAL && sock == NULL);
    const char *ports[] = {NULL, "", "7100", ":0", ":65536", "10.0.0.1:7100"};
    for (size_t i = 0; i < sizeof ports / sizeof *ports; i++)
        CHECK(vtl_init(VTL_RESPONDER, ports[i], NULL, &sock) == -EINVAL);
    CHECK(vtl_init(VTL_RESPONDER, ":7100", "10.0.0.2:7000", &sock) == -EINVAL);
    CHECK(vtl_init(VTL_INITIATOR, ":7100", "10.0.0.2:7000", &sock) == -EINVAL);
    CHECK(vtl_init((enum vtl_mode)9, ":7100", NULL, &sock) == -EINVAL);
    CHECK(vtl_init(VTL_RESPONDER, ":7101", NULL, &sock) == 0);
    CHECK(vtl_accept(sock, &other) == -EINVAL && other == NULL);
    CHECK(vtl_negotiate(sock, NULL) == -EINVAL);
    CHECK(vtl_send_data(sock, NULL, 1) == -EINVAL);
    CHECK(vtl_send_data(sock, "x", (size_t)-1) == -EINVAL);
    CHECK(vtl_set_timeout(sock, 0) == 0);
    CHECK(vtl_validate(sock) == -EAGAIN);
    CHECK(vtl_close(sock) == 0);
    for (int i = 0; i < 200; i++)
        CHECK(vtl_strerror(-i)[0]);
    CHECK(strcmp(vtl_strerror(5), vtl_strerror(0)) == 0);
    CHECK(vtl_version()[0] == '0');
    char *daemon = strdup(getenv("VTL_SOCKET"));
    setenv("VTL_SOCKET", "/nonexistent/vtld.sock", 1);
    CHECK(vtl_init(VTL_INITIATOR, NULL, "10.0.0.2:7000", &sock) == -ECONNREFUSED);
    CHECK(strstr(vtl_last_error(), "/nonexistent/vtld.sock"));
    setenv("VTL_SOCKET", daemon, 1);
    free(daemon);
}

/* The servers' port at an address. */
static const char *name(const char *address) {
    static char peer[80];
    snprintf(peer, sizeof peer, strchr(address, ':') ? "[%s]:7100" : "%s:7100", address);
    return peer;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "serve-blocking"))
        serve_blocking(atoi(argv[2]));
    else if (argc == 3 && !strcmp(argv[1], "serve-polled"))
        serve_polled(atoi(argv[2]));
    else if (argc == 2 && !strcmp(argv[1], "serve-messages"))
        serve_messages();
    else if (argc == 4 && !strcmp(argv[1], "messages"))
        send_messages(name(argv[2]), (size_t)atol(argv[3]));
    else if (argc == 2) {
        const char *peer = name(argv[1]);
        misuse();
        blocking(peer);
        polled(peer);
        messages(peer);
        aborted(peer);
    } else {
        fprintf(stderr, "usage: api serve-blocking COUNT | api serve-polled COUNT | api ADDRESS | "
                        "api serve-messages | api messages ADDRESS MAX\n");
        return 2;
    }
    puts("ok");
    return 0;
}
