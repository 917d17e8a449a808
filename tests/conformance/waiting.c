/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Waiting for something to happen: poll(2), select(2), epoll(7), io_uring(7), signal(7).
 */
#include "conform.h"

#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/time_types.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>

/* Each stage of a connection's life, as poll shows it. */
static void poll_stages(void) {
    int fd;
    if (role == CLIENT) {
        fd = t_socket(family, SOCK_NONBLOCK);
        t_poll(fd);
        step("listening");
        t_connect(fd, at(server_host, PORT));
        t_await(fd, POLLOUT);
    } else {
        int listener = listening(PORT);
        t_poll(listener);
        step("listening");
        t_await(listener, POLLIN);
        fd = t_accept(listener, NULL);
        t_poll(listener);
    }
    step("met");
    t_poll(fd);
    step("sending");
    t_send(fd, "x", 0);
    t_await(fd, POLLIN);
    t_recv(fd, 5, 0);
    t_poll(fd);
    step("read");
    if (role == CLIENT)
        t_shutdown(fd, SHUT_WR);
    else
        t_await(fd, POLLRDHUP);
    step("half closed");
    t_poll(fd);
    step("looked");
    if (role == SERVER)
        t_shutdown(fd, SHUT_WR);
    t_await(fd, ENDED);
    step("closed");
    struct pollfd none = {.fd = fd, .events = 0};
    said(poll(&none, 1, 0), "poll for nothing");
    say("events %#x", (unsigned)none.revents);
    t_close(fd);
    t_poll(fd);
}

/* The file descriptor is of no use to select() if it is too large; here it is not. */
static void selected(int fd, long ms) {
    fd_set in, out, except;
    struct timeval limit = {.tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000};
    FD_ZERO(&in);
    FD_ZERO(&out);
    FD_ZERO(&except);
    FD_SET(fd, &in);
    FD_SET(fd, &except);
    int count = select(fd + 1, &in, NULL, &except, &limit);
    said(count, "select");
    say("in %d, except %d", FD_ISSET(fd, &in) != 0, FD_ISSET(fd, &except) != 0);
    FD_SET(fd, &out);
    limit = (struct timeval){0};
    said(select(fd + 1, NULL, &out, NULL, &limit), "select for writing");
}

static void select_stages(void) {
    int fd = meet();
    if (role == SERVER) {
        step("empty");
        t_send(fd, "x", 0);
        step("read");
        t_close(fd);
        return;
    }
    selected(fd, 20);
    step("empty");
    selected(fd, PATIENCE);
    t_recv(fd, 5, 0);
    selected(fd, 0);
    step("read");
    selected(fd, PATIENCE);
    t_recv(fd, 5, 0);
    selected(fd, 0);
}

static int epoll_of(int fd, uint32_t events) {
    int poller = epoll_create1(0);
    struct epoll_event event = {.events = events, .data.fd = fd};
    said(epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
    return poller;
}

static void say_event(int count, struct epoll_event event) {
    if (count == 1)
        say("epoll:%s%s%s%s%s%s", event.events & EPOLLIN ? " IN" : "",
            event.events & EPOLLPRI ? " PRI" : "", event.events & EPOLLOUT ? " OUT" : "",
            event.events & EPOLLRDHUP ? " RDHUP" : "", event.events & EPOLLHUP ? " HUP" : "",
            event.events & EPOLLERR ? " ERR" : "");
    else
        said(count, "epoll_wait");
}

/* One epoll_wait. */
static void t_epoll(int poller, int ms) {
    struct epoll_event event = {0};
    say_event(epoll_wait(poller, &event, 1, ms), event);
}

/* Edges that follow at once. The kernel wakes twice for the end of a stream (tcp_fin, then
 * tcp_data_queue) and for a reset (tcp_done_with_error: its state, then its error): who looks in
 * between sees both. */
static struct epoll_event last_edge(int poller, struct epoll_event event) {
    struct epoll_event next;
    while (epoll_wait(poller, &next, 1, 20) == 1)
        event = next;
    return event;
}

static void t_edge(int poller) {
    struct epoll_event event = {0};
    int count = epoll_wait(poller, &event, 1, PATIENCE);
    say_event(count, last_edge(poller, event));
}

static void epoll_level(void) {
    int fd = meet();
    if (role == SERVER) {
        step("empty");
        t_send(fd, "abc", 0);
        step("read");
        t_shutdown(fd, SHUT_WR);
        step("ended");
        t_recv_to_end(fd);
        return;
    }
    int poller = epoll_of(fd, EPOLLIN | EPOLLRDHUP);
    t_epoll(poller, 20);
    step("empty");
    t_epoll(poller, PATIENCE);
    t_epoll(poller, 0);
    t_recv(fd, 2, 0);
    t_epoll(poller, 0);
    t_recv(fd, 2, 0);
    t_epoll(poller, 0);
    step("read");
    t_epoll(poller, PATIENCE);
    t_epoll(poller, 0);
    t_recv(fd, 2, 0);
    t_epoll(poller, 0);
    step("ended");
    t_close(fd);
    t_epoll(poller, 0);
}

/* epoll(7): one event for each arrival, read or not. */
static void epoll_edge(void) {
    int fd = meet();
    if (role == SERVER) {
        step("empty");
        t_send(fd, "abc", 0);
        step("one");
        t_send(fd, "def", 0);
        step("two");
        t_shutdown(fd, SHUT_WR);
        step("end");
        return;
    }
    int poller = epoll_of(fd, EPOLLIN | EPOLLRDHUP | EPOLLET);
    t_epoll(poller, 20);
    step("empty");
    t_edge(poller);
    t_epoll(poller, 20);
    t_recv(fd, 2, 0);
    t_epoll(poller, 20);
    step("one");
    t_edge(poller);
    t_recv(fd, 9, 0);
    t_epoll(poller, 20);
    step("two");
    t_edge(poller);
    t_recv(fd, 9, 0);
    t_epoll(poller, 20);
    step("end");
}

static void epoll_once(void) {
    int fd = meet();
    if (role == SERVER) {
        t_send(fd, "a", 0);
        step("one");
        t_send(fd, "b", 0);
        step("two");
        return;
    }
    int poller = epoll_of(fd, EPOLLIN | EPOLLONESHOT);
    t_epoll(poller, PATIENCE);
    t_recv(fd, 1, 0);
    step("one");
    t_await(fd, POLLIN);
    t_epoll(poller, 0);
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT};
    said(epoll_ctl(poller, EPOLL_CTL_MOD, fd, &event), "epoll_ctl");
    t_epoll(poller, 0);
    t_epoll(poller, 0);
    step("two");
}

static void epoll_reset(uint32_t edge) {
    int fd = meet();
    if (role == SERVER) {
        t_linger(fd, 1, 0);
        t_close(fd);
        step("reset");
        return;
    }
    int poller = epoll_of(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | edge);
    struct epoll_event event = {0};
    for (long end = clock_ms() + PATIENCE; clock_ms() < end;)
        if (epoll_wait(poller, &event, 1, 10) == 1 && event.events & EPOLLHUP)
            break;
    step("reset");
    if (edge)
        last_edge(poller, event);
    t_epoll(poller, 0);
    t_error(fd);
    t_epoll(poller, 0);
}

static void epoll_reset_level(void) {
    epoll_reset(0);
}

static void epoll_reset_edge(void) {
    epoll_reset(EPOLLET);
}

/* Room again: one event, once a good part of the buffer is empty. */
static void epoll_room(void) {
    static char bytes[1 << 16];
    int fd = meet();
    if (role == SERVER) {
        step("full");
        t_await(fd, POLLIN);
        while (recv(fd, bytes, sizeof(bytes), 0) > 0)
            ;
        step("read");
        return;
    }
    not_blocking(fd);
    int poller = epoll_of(fd, EPOLLOUT | EPOLLET);
    t_epoll(poller, PATIENCE);
    t_epoll(poller, 0);
    /* Until nothing moves for a while. */
    for (long full = clock_ms() + QUIET; clock_ms() < full; nap(2))
        while (send(fd, bytes, sizeof(bytes), 0) > 0)
            full = clock_ms() + QUIET;
    struct epoll_event event;
    while (epoll_wait(poller, &event, 1, 0) == 1)
        ;
    t_send(fd, "x", 0);
    t_epoll(poller, 50);
    step("full");
    t_epoll(poller, PATIENCE);
    t_send(fd, "y", 0);
    t_close(fd);
    step("read");
}

static void low_water(void) {
    int fd = meet();
    if (role == SERVER) {
        t_send(fd, "12345", 0);
        t_drained(fd);
        step("half");
        step("seen");
        t_send(fd, "67890", 0);
        step("read");
        return;
    }
    t_set(fd, SOL_SOCKET, SO_RCVLOWAT, 10, "SO_RCVLOWAT");
    step("half");
    nap(50);
    t_poll(fd);
    step("seen");
    t_await(fd, POLLIN);
    t_recv(fd, 20, 0);
    step("read");
}

/* A signal ends a wait; one that comes after bytes does not lose them. */
static void interrupted(void) {
    int fd = meet();
    if (role == SERVER) {
        step("interrupted");
        t_send(fd, "half", 0);
        step("again");
        return;
    }
    count_signal(SIGALRM);
    struct itimerval soon = {.it_value.tv_usec = 60000};
    setitimer(ITIMER_REAL, &soon, NULL);
    t_recv(fd, 5, 0);
    say("%d signals", signals());
    step("interrupted");
    t_await(fd, POLLIN);
    setitimer(ITIMER_REAL, &soon, NULL);
    t_recv(fd, 8, MSG_WAITALL);
    say("%d signals", signals());
    step("again");
}

static void signal_driven(void) {
    int fd = meet();
    if (role == SERVER) {
        step("armed");
        t_send(fd, "x", 0);
        step("signalled");
        return;
    }
    count_signal(SIGIO);
    said(fcntl(fd, F_SETOWN, getpid()), "F_SETOWN");
    said(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_ASYNC), "O_ASYNC");
    step("armed");
    t_await(fd, POLLIN);
    for (long end = clock_ms() + PATIENCE; !signals() && clock_ms() < end; nap(1))
        ;
    say(signals() ? "signalled" : "no signal");
    step("signalled");
}

static void *receive(void *fd) {
    char byte;
    return (void *)recv(*(int *)fd, &byte, 1, 0);
}

/* POSIX: shutdown() wakes who waits in another thread. */
static void shutdown_wakes(void) {
    int fd = meet();
    if (role == CLIENT) {
        pthread_t thread;
        void *result = (void *)-2;
        pthread_create(&thread, NULL, receive, &fd);
        nap(30);
        t_shutdown(fd, SHUT_RD);
        pthread_join(thread, &result);
        say("recv = %ld", (long)result);
    }
    step("woken");
}

/* ---- io_uring, by hand: one request after the other ---- */

struct uring {
    int fd;
    unsigned *tail, *mask, *array, *done_head, *done_tail, *done_mask;
    struct io_uring_sqe *requests;
    struct io_uring_cqe *results;
};

static bool uring_open(struct uring *u) {
    struct io_uring_params p = {0};
    u->fd = (int)syscall(SYS_io_uring_setup, 8, &p);
    if (u->fd < 0 || !(p.features & IORING_FEAT_SINGLE_MMAP))
        return false;
    size_t size = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    size_t other = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    char *ring = mmap(NULL, size > other ? size : other, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_POPULATE, u->fd, IORING_OFF_SQ_RING);
    u->requests = mmap(NULL, p.sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_POPULATE, u->fd, IORING_OFF_SQES);
    if (ring == MAP_FAILED || u->requests == MAP_FAILED)
        return false;
    u->tail = (unsigned *)(ring + p.sq_off.tail);
    u->mask = (unsigned *)(ring + p.sq_off.ring_mask);
    u->array = (unsigned *)(ring + p.sq_off.array);
    u->done_head = (unsigned *)(ring + p.cq_off.head);
    u->done_tail = (unsigned *)(ring + p.cq_off.tail);
    u->done_mask = (unsigned *)(ring + p.cq_off.ring_mask);
    u->results = (struct io_uring_cqe *)(ring + p.cq_off.cqes);
    return true;
}

/* Submits one request, waits for its result, and says it. */
static int uring_do(struct uring *u, struct io_uring_sqe request, const char *what) {
    unsigned tail = *u->tail, place = tail & *u->mask;
    u->requests[place] = request;
    u->array[place] = place;
    __atomic_store_n(u->tail, tail + 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, u->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
        return (int)said(-1, "io_uring_enter");
    unsigned head = *u->done_head;
    if (head == __atomic_load_n(u->done_tail, __ATOMIC_ACQUIRE)) {
        say("io_uring %s: no result", what);
        return -1;
    }
    int result = u->results[head & *u->done_mask].res;
    __atomic_store_n(u->done_head, head + 1, __ATOMIC_RELEASE);
    errno = result < 0 ? -result : 0;
    /* Descriptors have any number, and more may have happened than was waited for. */
    if (request.opcode == IORING_OP_ACCEPT && result > 0)
        said(0, "io_uring %s", what);
    else if (request.opcode == IORING_OP_POLL_ADD && result > 0)
        said(result & POLLHUP, "io_uring %s", what);
    else
        said(result < 0 ? -1 : result, "io_uring %s", what);
    return result;
}

static struct io_uring_sqe request(uint8_t op, int fd, const void *address, unsigned length) {
    return (struct io_uring_sqe){.opcode = op, .fd = fd, .addr = (uintptr_t)address, .len = length};
}

static void uring(void) {
    struct uring u;
    char bytes[64] = "";
    if (!uring_open(&u)) {
        say("skipped: no io_uring here");
        return;
    }
    if (role == CLIENT) {
        int fd = t_socket(family, 0);
        struct place to = at(server_host, CLOSED_PORT);
        struct io_uring_sqe connecting = request(IORING_OP_CONNECT, fd, &to, 0);
        connecting.off = to.length;
        uring_do(&u, connecting, "connect to a closed port");
        step("listening");
        to = at(server_host, PORT);
        uring_do(&u, connecting, "connect");
        t_peer(fd);
        uring_do(&u, request(IORING_OP_SEND, fd, "from the ring", 13), "send");
        struct io_uring_sqe waiting = request(IORING_OP_RECV, fd, bytes, sizeof(bytes));
        uring_do(&u, waiting, "recv");
        say("%s", bytes);
        uring_do(&u, request(IORING_OP_WRITE, fd, "written", 7), "write");
        uring_do(&u, request(IORING_OP_SHUTDOWN, fd, NULL, SHUT_WR), "shutdown");
        struct io_uring_sqe polling = request(IORING_OP_POLL_ADD, fd, NULL, 0);
        polling.poll32_events = POLLHUP;
        uring_do(&u, polling, "poll for HUP");
        uring_do(&u, waiting, "recv at the end");
        uring_do(&u, request(IORING_OP_CLOSE, fd, NULL, 0), "close");
        return;
    }
    int listener = listening(PORT);
    step("listening");
    struct place who = {.length = sizeof(who.storage)};
    struct io_uring_sqe accepting = request(IORING_OP_ACCEPT, listener, &who.any, 0);
    accepting.addr2 = (uintptr_t)&who.length;
    int fd = uring_do(&u, accepting, "accept");
    t_peer(fd);
    struct io_uring_sqe waiting = request(IORING_OP_RECV, fd, bytes, 13);
    waiting.msg_flags = MSG_WAITALL;
    uring_do(&u, waiting, "recv");
    say("%.13s", bytes);
    uring_do(&u, request(IORING_OP_SEND, fd, "answer", 6), "send");
    t_recv_to_end(fd);
    uring_do(&u, request(IORING_OP_CLOSE, fd, NULL, 0), "close");
}

const struct test_case waiting_cases[] = {
    CASE("wait_poll_stages", poll_stages),
    CASE("wait_select_stages", select_stages),
    CASE("wait_epoll_level", epoll_level),
    CASE("wait_epoll_edge", epoll_edge),
    CASE("wait_epoll_once", epoll_once),
    CASE("wait_epoll_reset_level", epoll_reset_level),
    CASE("wait_epoll_reset_edge", epoll_reset_edge),
    CASE("wait_epoll_room", epoll_room),
    CASE("wait_low_water", low_water),
    CASE("wait_interrupted", interrupted),
    CASE("wait_signal_driven", signal_driven),
    CASE("wait_shutdown_wakes", shutdown_wakes),
    CASE("wait_uring", uring),
    {0},
};
