/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Connections coming about, or not: connect(2), accept(2), getsockname(2), tcp(7), RFC 9293 3.5.
 */
#include "conform.h"

#include <netinet/tcp.h>
#include <sys/un.h>

/* Destinations that the test makes: the client's own routing table refuses the near ones, a
 * router's behind the server the far ones, by ICMP. */
static struct place no_route(void) {
    return literal("192.0.2.1", "2001:db8:1::1", PORT);
}

static struct place near(int which) {
    static const char *const v4[] = {"198.51.100.1", "198.51.100.2", "198.51.100.3"};
    static const char *const v6[] = {"2001:db8:2::1", "2001:db8:2::2", "2001:db8:2::3"};
    return literal(v4[which], v6[which], PORT);
}

static struct place far(int which) {
    static const char *const v4[] = {"203.0.113.1", "203.0.113.2", "203.0.113.3"};
    static const char *const v6[] = {"2001:db8:3::1", "2001:db8:3::2", "2001:db8:3::3"};
    return literal(v4[which], v6[which], PORT);
}

enum { UNREACHABLE, PROHIBITED, SILENT };

static struct place closed_port(void) {
    return at(server_host, CLOSED_PORT);
}

static void refused(void) {
    if (role == SERVER)
        return;
    int fd = t_socket(family, 0);
    t_connect(fd, closed_port());
    t_error(fd);
    t_peer(fd);
    t_poll(fd);
    t_recv(fd, 1, 0);
    t_send(fd, "x", MSG_NOSIGNAL);
    /* The socket can be used again. */
    t_connect(fd, closed_port());
    t_close(fd);
}

static void refused_not_blocking(void) {
    if (role == SERVER)
        return;
    int fd = t_socket(family, SOCK_NONBLOCK);
    t_connect(fd, closed_port());
    t_await(fd, POLLERR | ENDED);
    t_error(fd);
    t_error(fd);
    t_poll(fd);
    t_peer(fd);
    t_close(fd);
    fd = t_socket(family, SOCK_NONBLOCK);
    t_connect(fd, closed_port());
    t_await(fd, POLLERR | ENDED);
    t_connect(fd, closed_port());
    t_await(fd, ENDED);
    t_recv(fd, 1, 0);
    t_recv(fd, 1, 0);
}

static void refused_many_times(void) {
    if (role == SERVER)
        return;
    int refusals = 0;
    for (int i = 0; i < 30; i++) {
        int fd = socket(family, SOCK_STREAM, 0);
        struct place to = closed_port();
        refusals += connect(fd, &to.any, to.length) < 0 && errno == ECONNREFUSED;
        close(fd);
    }
    say("%d refusals", refusals);
}

static void not_blocking_connect(void) {
    if (role == SERVER) {
        t_recv(meet(), 5, 0);
        return;
    }
    step("listening");
    int fd = t_socket(family, SOCK_NONBLOCK);
    t_connect(fd, at(server_host, PORT));
    t_await(fd, POLLOUT);
    t_error(fd);
    /* The one that completes the first, and one too many. */
    t_connect(fd, at(server_host, PORT));
    t_connect(fd, at(server_host, PORT));
    t_peer(fd);
    t_local(fd);
    step("met");
    t_recv(fd, 1, 0);
    t_send(fd, "hello", 0);
}

static void connect_twice(void) {
    int fd = meet();
    if (role == CLIENT) {
        t_connect(fd, at(server_host, PORT));
        t_connect(fd, at(server_host, CLOSED_PORT));
        t_send(fd, "still", 0);
    } else {
        t_recv(fd, 5, 0);
    }
}

/* A destination that never answers. */
static void silence(void) {
    if (role == SERVER)
        return;
    int fd = t_socket(family, SOCK_NONBLOCK);
    t_connect(fd, far(SILENT));
    t_connect(fd, far(SILENT));
    nap(50);
    t_state(fd, TCP_SYN_SENT);
    t_local(fd);
    t_peer(fd);
    t_poll(fd);
    t_error(fd);
    t_send(fd, "x", MSG_NOSIGNAL);
    t_recv(fd, 1, 0);
    t_close(fd);
}

static void silence_given_up(void) {
    if (role == SERVER)
        return;
    int fd = t_socket(family, SOCK_NONBLOCK);
    t_connect(fd, far(SILENT));
    nap(20);
    t_shutdown(fd, SHUT_RDWR);
    t_poll(fd);
    t_peer(fd);
    t_error(fd);
}

static void local_name_while_connecting(void) {
    if (role == SERVER)
        return;
    int fd = t_socket(family, SOCK_NONBLOCK);
    t_connect(fd, far(SILENT));
    t_local(fd);
}

static void timed_out(void) {
    if (role == SERVER)
        return;
    int fd = t_socket(family, 0);
    t_set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 600, "TCP_USER_TIMEOUT");
    long since = clock_ms();
    t_connect(fd, far(SILENT));
    t_waited(since, 500);
    t_error(fd);
    t_poll(fd);
}

/* connect(2): EINPROGRESS also where SO_SNDTIMEO has run out. */
static void connect_with_limit(void) {
    if (role == SERVER)
        return;
    int fd = t_socket(family, 0);
    t_timeout(fd, SO_SNDTIMEO, 100, "SO_SNDTIMEO");
    long since = clock_ms();
    t_connect(fd, far(SILENT));
    t_waited(since, 95);
}

static void try(struct place to, const char *what) {
    say("-- %s", what);
    int fd = t_socket(family, 0);
    t_connect(fd, to);
    t_error(fd);
    t_poll(fd);
    t_close(fd);
}

static void try_not_blocking(struct place to, const char *what) {
    say("-- %s", what);
    int fd = t_socket(family, SOCK_NONBLOCK);
    int pending = t_connect(fd, to) && errno == EINPROGRESS;
    t_await(fd, pending ? ENDED : POLLHUP);
    t_error(fd);
    t_close(fd);
}

static void unreachable_near(void) {
    if (role == SERVER)
        return;
    try(no_route(), "no route");
    try(near(UNREACHABLE), "unreachable");
    try(near(PROHIBITED), "prohibited");
    try(near(SILENT), "black hole");
}

static void unreachable_near_not_blocking(void) {
    if (role == SERVER)
        return;
    try_not_blocking(no_route(), "no route");
    try_not_blocking(near(UNREACHABLE), "unreachable");
    try_not_blocking(near(PROHIBITED), "prohibited");
    try_not_blocking(near(SILENT), "black hole");
}

static void unreachable_far(void) {
    if (role == SERVER)
        return;
    try(far(UNREACHABLE), "unreachable");
    try(far(PROHIBITED), "prohibited");
    try_not_blocking(far(UNREACHABLE), "unreachable");
    try_not_blocking(far(PROHIBITED), "prohibited");
}

static void port_zero(void) {
    if (role == SERVER)
        return;
    int fd = t_socket(family, 0);
    t_connect(fd, at(server_host, 0));
    t_error(fd);
}

static void wrong_addresses(void) {
    if (role == SERVER)
        return;
    int fd = t_socket(family, 0);
    struct place place = at(server_host, PORT);
    place.any.sa_family = AF_UNIX;
    said(connect(fd, &place.any, place.length), "connect to another family");
    place = at(server_host, PORT);
    place.length = 8;
    said(connect(fd, &place.any, place.length), "connect to half an address");
    said(connect(fd, NULL, place.length), "connect to nothing");
    said(connect(-1, &place.any, place.length), "connect of nothing");
    place = literal("255.255.255.255", "ff02::1", PORT);
    said(connect(fd, &place.any, place.length), "connect to everybody");
}

static void dissolved(void) {
    if (role == CLIENT) {
        int fd = meet();
        struct sockaddr none = {.sa_family = AF_UNSPEC};
        said(connect(fd, &none, sizeof(none)), "connect to AF_UNSPEC");
        t_peer(fd);
        t_poll(fd);
        step("dissolved");
        step("listening again");
        t_connect(fd, at(server_host, PORT));
        t_send(fd, "again", 0);
        return;
    }
    int fd = meet();
    step("dissolved");
    t_await(fd, ENDED);
    t_recv(fd, 1, 0);
    int listener = listening(PORT);
    step("listening again");
    fd = t_accept(listener, NULL);
    t_recv(fd, 5, 0);
}

static void after_failure(void) {
    if (role == SERVER) {
        t_recv(meet(), 5, 0);
        return;
    }
    step("listening");
    int fd = t_socket(family, 0);
    t_connect(fd, closed_port());
    t_connect(fd, at(server_host, PORT));
    step("met");
    t_send(fd, "hello", 0);
    t_peer(fd);
}

static void names(void) {
    if (role == CLIENT) {
        step("listening");
        int fd = t_socket(family, 0);
        t_local(fd);
        t_peer(fd);
        t_connect(fd, at(server_host, PORT));
        int port = t_local(fd);
        t_peer(fd);
        say(hear() == (uint32_t)port ? "the server saw this port" : "the server saw another port");
        struct place small = {0};
        small.length = 4;
        said(getpeername(fd, &small.any, &small.length), "getpeername into 4 bytes");
        say("%d bytes, family %d", (int)small.length, small.any.sa_family == family);
        step("seen");
        return;
    }
    int listener = listening(PORT);
    t_local(listener);
    t_peer(listener);
    step("listening");
    struct place who;
    int fd = t_accept(listener, &who);
    t_local(fd);
    int port = t_peer(fd);
    say(port == port_of(&who) ? "the same port" : "another port");
    tell((uint32_t)port);
    step("seen");
    /* Without room for an address. */
    t_peer(fd);
}

static void from_port(void) {
    enum { FROM = 20123 };
    if (role == CLIENT) {
        step("listening");
        for (int turn = 0; turn < 2; turn++) {
            int fd = t_socket(family, 0);
            t_set(fd, SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");
            t_bind(fd, turn ? at(client_host, FROM + 1) : anywhere(FROM));
            t_local(fd);
            t_connect(fd, at(server_host, PORT));
            t_local(fd);
            t_bind(fd, anywhere(FROM + 2));
            t_send(fd, "from", 0);
            t_recv_to_end(fd);
        }
        return;
    }
    int listener = listening(PORT);
    step("listening");
    for (int turn = 0; turn < 2; turn++) {
        struct place who;
        int fd = t_accept(listener, &who);
        say("from port %d", port_of(&who));
        t_recv(fd, 4, 0);
        t_close(fd);
    }
}

/* RFC 9293 3.4: connections differ if either end does. */
static void from_port_to_two(void) {
    enum { FROM = 20223 };
    if (role == CLIENT) {
        step("listening");
        int fds[2];
        for (int turn = 0; turn < 2; turn++) {
            fds[turn] = t_socket(family, 0);
            t_set(fds[turn], SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");
            t_bind(fds[turn], anywhere(FROM));
        }
        t_connect(fds[0], at(server_host, PORT));
        t_connect(fds[1], at(server_host, OTHER_PORT));
        t_send(fds[0], "one", 0);
        t_send(fds[1], "two", MSG_NOSIGNAL);
        step("sent");
        return;
    }
    int listeners[2] = {listening(PORT), listening(OTHER_PORT)};
    step("listening");
    step("sent");
    for (int turn = 0; turn < 2; turn++) {
        not_blocking(listeners[turn]);
        struct place who;
        int fd = t_accept(listeners[turn], &who);
        if (fd >= 0) {
            say("from port %d", port_of(&who));
            t_recv(fd, 3, 0);
        }
    }
}

/* One listener for both families, or, as ipv6(7) has it, for one. */
static void dual_stack(void) {
    if (role == CLIENT) {
        step("listening");
        int fd = t_socket(family, 0);
        t_connect(fd, at(server_host, PORT));
        t_local(fd);
        t_peer(fd);
        t_send(fd, "as it is", 0);
        step("met");
        if (family == AF_INET6)
            return;
        fd = t_socket(AF_INET6, 0);
        t_connect(fd, mapped(at(server_host, PORT)));
        t_local(fd);
        t_peer(fd);
        t_send(fd, "mapped", 0);
        fd = t_socket(AF_INET6, 0);
        t_connect(fd, mapped(at(server_host, CLOSED_PORT)));
        fd = t_socket(AF_INET6, 0);
        t_set(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1, "IPV6_V6ONLY");
        t_connect(fd, mapped(at(server_host, PORT)));
        return;
    }
    int listener = t_socket(AF_INET6, 0);
    t_set(listener, SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");
    t_set(listener, IPPROTO_IPV6, IPV6_V6ONLY, family == AF_INET6, "IPV6_V6ONLY");
    struct place all = {.length = sizeof(all.v6)};
    all.v6.sin6_family = AF_INET6;
    t_bind(listener, at(all, PORT));
    t_listen(listener, 5);
    step("listening");
    for (int turn = 0; turn < (family == AF_INET6 ? 1 : 2); turn++) {
        int fd = t_accept(listener, NULL);
        t_local(fd);
        t_peer(fd);
        t_recv(fd, 20, 0);
        if (!turn)
            step("met");
    }
}

/* RFC 7413: with or without a cookie, the bytes arrive. */
static void fast_open(void) {
    if (role == CLIENT) {
        step("listening");
        for (int turn = 0; turn < 2; turn++) {
            int fd = t_socket(family, 0);
            struct place to = at(server_host, PORT);
            said(sendto(fd, "fast", 4, MSG_FASTOPEN | MSG_NOSIGNAL, &to.any, to.length),
                 "sendto with MSG_FASTOPEN");
            t_peer(fd);
            t_shutdown(fd, SHUT_WR);
            t_recv_to_end(fd);
        }
        return;
    }
    int listener = listening(PORT);
    t_set(listener, IPPROTO_TCP, TCP_FASTOPEN, 5, "TCP_FASTOPEN");
    step("listening");
    for (int turn = 0; turn < 2; turn++) {
        int fd = t_accept(listener, NULL);
        t_recv_to_end(fd);
        t_send(fd, "open", 0);
        t_close(fd);
    }
}

static void address_in_use(void) {
    if (role == CLIENT) {
        step("listening");
        int fd = connected(PORT);
        t_recv_to_end(fd);
        t_close(fd);
        step("closed");
        return;
    }
    int listener = listening(PORT), second = t_socket(family, 0);
    t_bind(second, anywhere(PORT));
    t_set(second, SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");
    t_bind(second, anywhere(PORT));
    step("listening");
    int fd = t_accept(listener, NULL);
    /* The one that closes first keeps TIME_WAIT. */
    t_close(fd);
    step("closed");
    t_close(listener);
    t_bind(second, anywhere(PORT));
    t_listen(second, 1);
}

static void wrong_state(void) {
    if (role == SERVER) {
        int listener = listening(PORT);
        step("listening");
        t_recv(listener, 1, 0);
        t_send(listener, "x", MSG_NOSIGNAL);
        t_connect(listener, at(client_host, PORT));
        t_listen(listener, 7);
        int fd = t_accept(listener, NULL);
        t_accept(fd, NULL);
        t_listen(fd, 1);
        step("done");
        t_poll(listener);
        t_shutdown(listener, SHUT_RDWR);
        t_accept(listener, NULL);
        return;
    }
    int fd = t_socket(family, 0);
    t_accept(fd, NULL);
    t_recv(fd, 1, 0);
    t_send(fd, "x", MSG_NOSIGNAL);
    t_poll(fd);
    step("listening");
    t_connect(fd, at(server_host, PORT));
    t_accept(fd, NULL);
    t_listen(fd, 1);
    t_bind(fd, anywhere(20323));
    struct place to = at(server_host, OTHER_PORT);
    said(sendto(fd, "x", 1, MSG_NOSIGNAL, &to.any, to.length), "sendto somewhere else");
    step("done");
}

/* One waits in a queue for one; the other's SYN is dropped and sent again (tcp(7)). */
static void queue_full(void) {
    if (role == CLIENT) {
        step("listening");
        int first = connected(PORT);
        step("first");
        nap(100); /* carried, it is in the server's queue a moment later */
        int second = t_socket(family, SOCK_NONBLOCK);
        t_connect(second, at(server_host, PORT));
        nap(100);
        t_poll(second);
        step("second");
        t_await(second, POLLOUT);
        t_error(second);
        t_send(first, "one", 0);
        t_send(second, "two", 0);
        step("sent");
        return;
    }
    int listener = t_socket(family, 0);
    t_set(listener, SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");
    t_bind(listener, anywhere(PORT));
    t_listen(listener, 0);
    step("listening");
    step("first");
    step("second");
    t_recv(t_accept(listener, NULL), 3, 0);
    t_recv(t_accept(listener, NULL), 3, 0);
    step("sent");
}

static void listener_leaves(void) {
    if (role == CLIENT) {
        step("listening");
        int fd = connected(PORT);
        step("connected");
        t_await(fd, ENDED);
        t_recv(fd, 1, 0);
        t_connect(t_socket(family, 0), at(server_host, PORT));
        return;
    }
    int listener = listening(PORT);
    step("listening");
    step("connected");
    t_await(listener, POLLIN);
    t_close(listener);
}

static void reset_before_accept(void) {
    if (role == CLIENT) {
        step("listening");
        int fd = connected(PORT);
        t_linger(fd, 1, 0);
        step("connected");
        t_close(fd);
        step("reset");
        return;
    }
    int listener = listening(PORT);
    step("listening");
    t_await(listener, POLLIN);
    step("connected");
    step("reset");
    nap(150);
    int fd = t_accept(listener, NULL);
    t_await(fd, ENDED);
    t_peer(fd);
    t_recv(fd, 1, 0);
    t_recv(fd, 1, 0);
}

static void left_before_accept(void) {
    if (role == CLIENT) {
        step("listening");
        int fd = connected(PORT);
        t_send(fd, "gone already", 0);
        t_close(fd);
        step("left");
        return;
    }
    int listener = listening(PORT);
    step("listening");
    step("left");
    nap(50);
    int fd = t_accept(listener, NULL);
    t_await(fd, POLLRDHUP);
    t_peer(fd);
    t_recv_to_end(fd);
}

/* The listener is there for one of the host's addresses, or for one of its devices. */
static void one_connection(void (*restrict_to)(int), struct place place) {
    if (role == CLIENT) {
        step("listening");
        int fd = t_socket(family, 0);
        t_connect(fd, at(server_host, port_of(&place)));
        t_send(fd, "hello", MSG_NOSIGNAL);
        t_close(fd);
        return;
    }
    int listener = t_socket(family, 0);
    t_set(listener, SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");
    if (restrict_to)
        restrict_to(listener);
    t_bind(listener, place);
    t_listen(listener, 5);
    step("listening");
    t_await(listener, POLLIN);
    not_blocking(listener);
    int fd = t_accept(listener, NULL);
    if (fd >= 0)
        t_recv_to_end(fd);
}

static void own_address(void) {
    one_connection(NULL, at(server_host, PORT));
}

static void to_device(int fd) {
    said(setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, DEVICE, sizeof(DEVICE)), "SO_BINDTODEVICE");
}

static void device_of_server(void) {
    one_connection(to_device, anywhere(DEVICE_PORT));
}

static void device_of_client(void) {
    if (role == SERVER) {
        t_recv_to_end(meet());
        return;
    }
    step("listening");
    int fd = t_socket(family, 0);
    to_device(fd);
    t_connect(fd, at(server_host, PORT));
    step("met");
    t_local(fd);
    t_peer(fd);
    t_send(fd, "hello", 0);
    t_close(fd);
}

/* RFC 2385: segments that are not signed do not count. */
static void signed_segments(void) {
    struct tcp_md5sig key = {.tcpm_keylen = 6, .tcpm_key = "secret"};
    struct place other = role == CLIENT ? server_host : client_host;
    memcpy(&key.tcpm_addr, &other.storage, sizeof(key.tcpm_addr));
    int fd = t_socket(family, SOCK_NONBLOCK);
    t_set(fd, SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");
    said(setsockopt(fd, IPPROTO_TCP, TCP_MD5SIG, &key, sizeof(key)), "TCP_MD5SIG");
    if (role == CLIENT) {
        step("listening");
        t_connect(fd, at(server_host, PORT));
        t_await(fd, POLLOUT);
        t_error(fd);
        t_send(fd, "signed", MSG_NOSIGNAL);
        t_close(fd);
        return;
    }
    t_bind(fd, anywhere(PORT));
    t_listen(fd, 5);
    step("listening");
    t_await(fd, POLLIN);
    fd = t_accept(fd, NULL);
    if (fd >= 0)
        t_recv_to_end(fd);
}

/* As programs do that have one thread and an event loop. */
static void many_at_once(void) {
    enum { COUNT = 100 };
    struct place to = at(server_host, PORT);
    char text[16] = "";
    int fds[COUNT], good = 0;
    if (role == SERVER) {
        int listener = listening(PORT);
        listen(listener, COUNT);
        step("listening");
        for (int i = 0; i < COUNT; i++)
            fds[i] = accept(listener, NULL, NULL);
        step("all");
        for (int i = 0; i < COUNT; i++)
            good += recv(fds[i], text, 8, MSG_WAITALL) == 8 && send(fds[i], text, 8, 0) == 8;
    } else {
        step("listening");
        for (int i = 0; i < COUNT; i++) {
            fds[i] = socket(family, SOCK_STREAM | SOCK_NONBLOCK, 0);
            if (connect(fds[i], &to.any, to.length) == 0 || errno != EINPROGRESS)
                said(-1, "connect");
        }
        step("all");
        for (int i = 0; i < COUNT; i++) {
            struct pollfd p = {.fd = fds[i], .events = POLLOUT};
            poll(&p, 1, PATIENCE);
            snprintf(text, sizeof(text), "%08d", i);
            send(fds[i], text, 8, MSG_NOSIGNAL);
        }
        for (int i = 0; i < COUNT; i++) {
            struct pollfd p = {.fd = fds[i], .events = POLLIN};
            poll(&p, 1, PATIENCE);
            good += recv(fds[i], text, 8, 0) == 8 && atoi(text) == i;
        }
    }
    say("%d of %d connections", good, COUNT);
}

/* SO_REUSEPORT: whichever listener it is, each connection has one. */
static void two_listeners(void) {
    enum { COUNT = 16 };
    if (role == CLIENT) {
        step("listening");
        int fds[COUNT];
        for (int i = 0; i < COUNT; i++)
            fds[i] = connected(PORT);
        step("connected");
        for (int i = 0; i < COUNT; i++)
            close(fds[i]);
        return;
    }
    int listeners[2], count = 0;
    for (int i = 0; i < 2; i++) {
        listeners[i] = t_socket(family, SOCK_NONBLOCK);
        t_set(listeners[i], SOL_SOCKET, SO_REUSEPORT, 1, "SO_REUSEPORT");
        t_set(listeners[i], SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");
        t_bind(listeners[i], anywhere(PORT));
        t_listen(listeners[i], COUNT);
    }
    step("listening");
    step("connected");
    for (long end = clock_ms() + PATIENCE; count < COUNT && clock_ms() < end; nap(1))
        for (int i = 0; i < 2; i++)
            count += accept(listeners[i], NULL, NULL) >= 0;
    say("%d connections", count);
}

const struct test_case connect_cases[] = {
    CASE("connect_refused", refused),
    CASE("connect_refused_not_blocking", refused_not_blocking),
    CASE("connect_refused_many_times", refused_many_times),
    CASE("connect_not_blocking", not_blocking_connect),
    CASE("connect_twice", connect_twice),
    CASE_ELSEWHERE("connect_silence", silence),
    CASE_ELSEWHERE("connect_silence_given_up", silence_given_up),
    CASE_ELSEWHERE("connect_local_name_while_connecting", local_name_while_connecting),
    CASE_ELSEWHERE("connect_timed_out", timed_out),
    CASE_ELSEWHERE("connect_with_limit", connect_with_limit),
    CASE_ELSEWHERE("connect_unreachable_near", unreachable_near),
    CASE_ELSEWHERE("connect_unreachable_near_not_blocking", unreachable_near_not_blocking),
    CASE_ELSEWHERE("connect_unreachable_far", unreachable_far),
    CASE_ELSEWHERE("connect_port_zero", port_zero),
    CASE_ELSEWHERE("connect_wrong_addresses", wrong_addresses),
    CASE("connect_dissolved", dissolved),
    CASE("connect_after_failure", after_failure),
    CASE("connect_names", names),
    CASE("connect_from_port", from_port),
    CASE("connect_from_port_to_two", from_port_to_two),
    CASE("connect_dual_stack", dual_stack),
    CASE("connect_own_address", own_address),
    CASE("connect_device_of_server", device_of_server),
    CASE_ELSEWHERE("connect_device_of_client", device_of_client),
    CASE_ELSEWHERE("connect_signed_segments", signed_segments),
    CASE("connect_many_at_once", many_at_once),
    CASE("connect_two_listeners", two_listeners),
    CASE("connect_fast_open", fast_open),
    CASE("connect_address_in_use", address_in_use),
    CASE("connect_wrong_state", wrong_state),
    CASE("connect_queue_full", queue_full),
    CASE("connect_listener_leaves", listener_leaves),
    CASE("connect_reset_before_accept", reset_before_accept),
    CASE("connect_left_before_accept", left_before_accept),
    {0},
};
