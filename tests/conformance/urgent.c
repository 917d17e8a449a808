/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Urgent data, as the sockets interface has it: tcp(7), sockatmark(3), RFC 6093. The last byte of a
 * send with MSG_OOB is not in the stream, but beside it, unless SO_OOBINLINE is set.
 */
#include "conform.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/ioctl.h>

static void mark(int fd) {
    said(sockatmark(fd), "sockatmark");
}

static void urgent(enum role sender) {
    int fd = meet();
    if (role == sender) {
        t_send(fd, "before", 0);
        t_send(fd, "ab!", MSG_OOB);
        t_send(fd, "after", 0);
        step("sent");
        t_close(fd);
        return;
    }
    step("sent");
    t_await(fd, POLLIN | POLLPRI | POLLRDHUP);
    mark(fd);
    t_recv(fd, 20, 0);
    mark(fd);
    t_recv(fd, 5, MSG_OOB | MSG_PEEK);
    t_recv(fd, 5, MSG_OOB);
    t_recv(fd, 5, MSG_OOB);
    t_poll(fd);
    t_recv(fd, 20, 0);
    mark(fd);
    t_recv(fd, 20, 0);
}

static void urgent_by_client(void) {
    urgent(CLIENT);
}

static void urgent_by_server(void) {
    urgent(SERVER);
}

/* Read past without ever being asked for: it is not in the stream. */
static void urgent_unread(void) {
    int fd = meet();
    if (role == CLIENT) {
        t_send(fd, "one", 0);
        t_send(fd, "!", MSG_OOB);
        t_send(fd, "two", 0);
        t_close(fd);
        return;
    }
    t_await(fd, POLLRDHUP);
    t_recv_to_end(fd);
}

static void urgent_in_line(void) {
    int fd = meet();
    if (role == CLIENT) {
        step("ready");
        t_send(fd, "one", 0);
        t_send(fd, "!", MSG_OOB);
        t_send(fd, "two", 0);
        t_close(fd);
        return;
    }
    t_set(fd, SOL_SOCKET, SO_OOBINLINE, 1, "SO_OOBINLINE");
    step("ready");
    t_await(fd, POLLIN | POLLPRI | POLLRDHUP);
    t_recv(fd, 1, MSG_OOB);
    t_recv(fd, 20, 0);
    mark(fd);
    t_recv(fd, 20, 0);
    mark(fd);
    t_recv(fd, 20, 0);
}

/* There is one mark: the second takes its place, and the first byte is an ordinary one. */
static void urgent_twice(void) {
    int fd = meet();
    if (role == CLIENT) {
        t_send(fd, "a", MSG_OOB);
        step("first");
        step("seen");
        t_send(fd, "b", MSG_OOB);
        t_send(fd, "c", 0);
        t_close(fd);
        return;
    }
    step("first");
    t_await(fd, POLLPRI);
    step("seen");
    t_await(fd, POLLRDHUP);
    t_recv(fd, 1, MSG_OOB);
    t_recv_to_end(fd);
}

static void urgent_signal(void) {
    int fd = meet();
    if (role == CLIENT) {
        step("ready");
        t_send(fd, "!", MSG_OOB);
        step("signalled");
        return;
    }
    count_signal(SIGURG);
    said(fcntl(fd, F_SETOWN, getpid()), "F_SETOWN");
    step("ready");
    for (long end = clock_ms() + PATIENCE; !signals() && clock_ms() < end; nap(1))
        ;
    say(signals() ? "signalled" : "no signal");
    t_recv(fd, 1, MSG_OOB);
    step("signalled");
}

static void nothing_urgent(void) {
    int fd = meet();
    t_recv(fd, 1, MSG_OOB);
    mark(fd);
    step("asked");
    t_send(fd, "x", 0);
    t_await(fd, POLLIN);
    t_recv(fd, 1, MSG_OOB);
    mark(fd);
    t_recv(fd, 1, 0);
    step("read");
}

const struct test_case urgent_cases[] = {
    CASE("urgent_by_client", urgent_by_client), CASE("urgent_by_server", urgent_by_server),
    CASE("urgent_unread", urgent_unread),       CASE("urgent_in_line", urgent_in_line),
    CASE("urgent_twice", urgent_twice),         CASE("urgent_signal", urgent_signal),
    CASE("urgent_nothing", nothing_urgent),     {0},
};
