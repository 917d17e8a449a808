/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Bytes on their way: send(2), recv(2), sendfile(2), splice(2), vmsplice(2), socket(7), tcp(7).
 */
#include "conform.h"

#include <fcntl.h>
#include <linux/errqueue.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <sys/wait.h>

static void server_first(void) {
    int fd = meet();
    if (role == SERVER) {
        t_send(fd, "220 ready", 0);
        t_recv(fd, 10, MSG_WAITALL);
        t_send(fd, "221 bye", 0);
        t_close(fd);
        return;
    }
    t_recv(fd, 9, MSG_WAITALL);
    t_send(fd, "QUIT again", 0);
    t_recv_to_end(fd);
}

/* Each side sends what is small in two writes and waits for the answer: with Nagle's algorithm (RFC
 * 896) and delayed acknowledgements every turn would take 40 ms. */
static void small_writes(void) {
    enum { TURNS = 60 };
    int fd = meet();
    char bytes[8];
    t_set(fd, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
    long shortest = PATIENCE, turns = 0;
    for (int turn = 0; turn < TURNS; turn++) {
        long since = clock_ms();
        if (role == SERVER && recv(fd, bytes, 8, MSG_WAITALL) != 8)
            break;
        if (send(fd, "half", 4, 0) != 4 || send(fd, "more", 4, 0) != 4)
            break;
        if (role == CLIENT && recv(fd, bytes, 8, MSG_WAITALL) != 8)
            break;
        long took = clock_ms() - since;
        shortest = took < shortest ? took : shortest;
        turns++;
    }
    say("%ld turns, %s", turns, shortest < 35 ? "not delayed" : "delayed");
}

static void single_bytes(void) {
    enum { COUNT = 3000 };
    static unsigned char bytes[COUNT];
    fill(bytes, COUNT, 9);
    int fd = meet();
    if (role == SERVER) {
        t_recv_to_end(fd);
        return;
    }
    long sent = 0;
    t_set(fd, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
    for (int i = 0; i < COUNT; i++)
        sent += send(fd, &bytes[i], 1, 0);
    say("%ld bytes, %016lx", sent, (unsigned long)digest(bytes, COUNT));
    t_close(fd);
}

static void cork(void) {
    int fd = meet();
    if (role == SERVER) {
        t_recv(fd, 20, MSG_WAITALL);
        step("corked");
        t_recv(fd, 8, MSG_WAITALL);
        t_recv_to_end(fd);
        return;
    }
    t_set(fd, IPPROTO_TCP, TCP_CORK, 1, "TCP_CORK");
    for (int i = 0; i < 10; i++)
        t_send(fd, "ab", 0);
    t_set(fd, IPPROTO_TCP, TCP_CORK, 0, "TCP_CORK");
    step("corked");
    t_send(fd, "more", MSG_MORE);
    t_send(fd, "done", 0);
    /* Left corked: the end pulls the cork. */
    t_set(fd, IPPROTO_TCP, TCP_CORK, 1, "TCP_CORK");
    t_send(fd, "last", 0);
    t_close(fd);
}

static void several_buffers(void) {
    int fd = meet();
    char a[5] = "", b[7] = "", c[9] = "";
    if (role == CLIENT) {
        struct iovec out[] = {{"first", 5}, {"", 0}, {"second ", 7}, {"third one", 9}};
        said(writev(fd, out, 4), "writev");
        struct msghdr message = {.msg_iov = out, .msg_iovlen = 4};
        said(sendmsg(fd, &message, 0), "sendmsg");
        said(writev(fd, out, 0), "writev of none");
        struct mmsghdr many[3];
        for (int i = 0; i < 3; i++)
            many[i] = (struct mmsghdr){.msg_hdr = message};
        many[2].msg_hdr.msg_iovlen = 1;
        said(sendmmsg(fd, many, 3, 0), "sendmmsg");
        say("%u, %u, %u bytes", many[0].msg_len, many[1].msg_len, many[2].msg_len);
        t_drained(fd);
        step("sent");
        t_close(fd);
        return;
    }
    struct iovec in[] = {{a, 5}, {b, 7}, {c, 9}};
    step("sent");
    t_arrived(fd, 89);
    said(readv(fd, in, 3), "readv");
    say("%.5s|%.7s|%.9s", a, b, c);
    memset(a, 0, sizeof(a));
    struct msghdr message = {.msg_iov = in, .msg_iovlen = 3, .msg_flags = -1};
    said(recvmsg(fd, &message, MSG_WAITALL), "recvmsg");
    say("%.5s|%.7s|%.9s, flags %#x", a, b, c, (unsigned)message.msg_flags);
    struct mmsghdr many[2];
    memset(many, 0, sizeof(many));
    many[0].msg_hdr.msg_iov = many[1].msg_hdr.msg_iov = in;
    many[0].msg_hdr.msg_iovlen = 3;
    many[1].msg_hdr.msg_iovlen = 2;
    said(recvmmsg(fd, many, 2, MSG_WAITALL, NULL), "recvmmsg");
    say("%u, %u bytes", many[0].msg_len, many[1].msg_len);
    t_recv_to_end(fd);
}

static void peek(void) {
    int fd = meet();
    if (role == CLIENT) {
        t_send(fd, "peek at me", 0);
        step("peeked");
        t_send(fd, ", again", 0);
        t_close(fd);
        return;
    }
    t_await(fd, POLLIN);
    t_recv(fd, 4, MSG_PEEK);
    t_recv(fd, 10, MSG_PEEK | MSG_WAITALL);
    t_recv(fd, 4, 0);
    t_recv(fd, 4, MSG_PEEK | MSG_DONTWAIT);
    step("peeked");
    t_recv(fd, 13, MSG_PEEK | MSG_WAITALL);
    /* More than there will ever be. */
    t_recv(fd, 20, MSG_PEEK | MSG_WAITALL);
    t_recv(fd, 20, MSG_WAITALL);
    t_recv(fd, 20, MSG_PEEK);
}

static void wait_for_all(void) {
    int fd = meet();
    if (role == CLIENT) {
        for (int i = 0; i < 4; i++) {
            t_send(fd, "abcde", 0);
            nap(10);
        }
        step("sent");
        t_send(fd, "rest", 0);
        t_shutdown(fd, SHUT_WR);
        return;
    }
    t_recv(fd, 20, MSG_WAITALL);
    step("sent");
    /* The end cuts it short. */
    t_recv(fd, 20, MSG_WAITALL);
    t_recv(fd, 20, MSG_WAITALL);
}

/* tcp(7): MSG_TRUNC discards. */
static void truncate_bytes(void) {
    int fd = meet();
    if (role == CLIENT) {
        t_send(fd, "thrown away, kept", 0);
        t_close(fd);
        return;
    }
    t_await(fd, POLLRDHUP);
    said(recv(fd, NULL, 13, MSG_TRUNC), "recv into nothing with MSG_TRUNC");
    t_recv_to_end(fd);
}

static void without_waiting(void) {
    int fd = meet();
    t_recv(fd, 1, MSG_DONTWAIT);
    step("empty");
    t_send(fd, "x", MSG_DONTWAIT);
    t_await(fd, POLLIN);
    t_recv(fd, 9, MSG_DONTWAIT);
    t_recv(fd, 9, MSG_DONTWAIT);
    not_blocking(fd);
    t_recv(fd, 9, 0);
    step("tried");
}

static void nothing_and_nonsense(void) {
    int fd = meet();
    if (role == CLIENT) {
        t_send(fd, "", 0);
        said(send(fd, NULL, 5, 0), "send of what is not there");
        said(recv(fd, NULL, 0, MSG_DONTWAIT), "recv of nothing");
        said(send(fd, "abc", 3, 0), "send");
        t_send(fd, "", 0);
        t_close(fd);
        said(send(fd, "abc", 3, 0), "send when closed");
        return;
    }
    t_await(fd, POLLIN | POLLRDHUP);
    said(recv(fd, NULL, 3, 0), "recv to nowhere");
    t_recv(fd, 0, 0);
    t_recv_to_end(fd);
}

/* How many bytes wait, in and out. */
static void queues(void) {
    int fd = meet(), count = -1;
    if (role == CLIENT) {
        step("looked");
        t_send(fd, "0123456789", 0);
        t_drained(fd);
        step("sent");
        step("read");
        t_send(fd, "x", 0);
        t_drained(fd);
        t_close(fd);
        return;
    }
    said(ioctl(fd, FIONREAD, &count), "FIONREAD");
    say("%d bytes", count);
    step("looked");
    step("sent");
    t_await(fd, POLLIN);
    for (int turn = 0; turn < 2; turn++) {
        said(ioctl(fd, FIONREAD, &count), "FIONREAD");
        say("%d bytes", count);
        t_recv(fd, 6, 0);
    }
    said(ioctl(fd, FIONREAD, &count), "FIONREAD");
    say("%d bytes", count);
    said(ioctl(fd, SIOCOUTQ, &count), "SIOCOUTQ");
    say("%d bytes", count);
    step("read");
    t_recv_to_end(fd);
}

enum { FILE_SIZE = 300000 };

/* A file with bytes in it, at its beginning. */
static int file(void) {
    static unsigned char bytes[FILE_SIZE];
    int fd = memfd_create("conform", 0);
    fill(bytes, sizeof(bytes), 11);
    said(write(fd, bytes, sizeof(bytes)), "write of a file, %016lx",
         (unsigned long)digest(bytes, sizeof(bytes)));
    lseek(fd, 0, SEEK_SET);
    return fd;
}

static void send_file(void) {
    int fd = meet();
    if (role == SERVER) {
        t_recv_to_end(fd);
        return;
    }
    int from = file();
    off_t place = 1000;
    long n, all = 0;
    while ((n = sendfile(fd, from, &place, FILE_SIZE)) > 0)
        all += n;
    said(n, "sendfile at the end");
    say("%ld bytes, at %ld, %ld", all, (long)place, (long)lseek(from, 0, SEEK_CUR));
    said(sendfile(from, fd, NULL, 10), "sendfile from a socket");
    t_close(fd);
}

static void splice_through(void) {
    int fd = meet(), pipe_ends[2];
    if (pipe(pipe_ends))
        give_up("no pipe");
    if (role == CLIENT) {
        int from = file();
        long n, all = 0;
        while ((n = splice(from, NULL, pipe_ends[1], NULL, 50000, 0)) > 0)
            for (long left = n, m = 1; left > 0 && m > 0; left -= m, all += m)
                m = splice(pipe_ends[0], NULL, fd, NULL, (size_t)left, SPLICE_F_MORE);
        said(n, "splice at the end");
        say("%ld bytes", all);
        char *text = "gift of pages";
        struct iovec out = {text, strlen(text)};
        said(vmsplice(pipe_ends[1], &out, 1, 0), "vmsplice");
        said(splice(pipe_ends[0], NULL, fd, NULL, strlen(text), 0), "splice");
        said(splice(pipe_ends[0], NULL, fd, NULL, 1, SPLICE_F_NONBLOCK), "splice of nothing");
        t_shutdown(fd, SHUT_WR);
        t_recv_to_end(fd);
        return;
    }
    static unsigned char bytes[FILE_SIZE + 100];
    size_t all = 0;
    long n;
    said(splice(fd, NULL, pipe_ends[1], NULL, 0, 0), "splice of no bytes");
    while ((n = splice(fd, NULL, pipe_ends[1], NULL, 40000, SPLICE_F_MOVE)) > 0)
        for (long m = 1; n > 0 && m > 0; n -= m, all += (size_t)m)
            m = read(pipe_ends[0], bytes + all, sizeof(bytes) - all);
    said(n, "splice at the end");
    say("%zu bytes, %016lx", all, (unsigned long)digest(bytes, all));
    t_send(fd, "seen", 0);
    t_close(fd);
}

static void zero_copy(void) {
    enum { SENDS = 5, SIZE = 40000 };
    static unsigned char bytes[SENDS][SIZE];
    int fd = meet();
    if (role == SERVER) {
        t_recv_all(fd, sizeof(bytes));
        step("read");
        t_recv_to_end(fd);
        return;
    }
    fill(bytes[0], sizeof(bytes), 13);
    t_send(fd, "", MSG_ZEROCOPY);
    t_set(fd, SOL_SOCKET, SO_ZEROCOPY, 1, "SO_ZEROCOPY");
    for (int i = 0; i < SENDS; i++)
        said(send(fd, bytes[i], SIZE, MSG_ZEROCOPY), "send with MSG_ZEROCOPY");
    step("read");
    /* Documentation/networking/msg_zerocopy.rst: ranges of sends, in whatever pieces. */
    unsigned next = 0;
    for (long end = clock_ms() + PATIENCE; next < SENDS && clock_ms() < end;) {
        char control[128];
        struct msghdr message = {.msg_control = control, .msg_controllen = sizeof(control)};
        if (recvmsg(fd, &message, MSG_ERRQUEUE) < 0) {
            nap(1);
            continue;
        }
        struct sock_extended_err error = {0};
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        if (!head)
            break;
        memcpy(&error, CMSG_DATA(head), sizeof(error));
        if (error.ee_origin != SO_EE_ORIGIN_ZEROCOPY || error.ee_info != next)
            say("origin %d, from %u to %u", error.ee_origin, error.ee_info, error.ee_data);
        next = error.ee_data + 1;
    }
    say("%u sends completed", next);
    t_poll(fd);
    t_close(fd);
}

static void receive_limit(void) {
    int fd = meet();
    if (role == CLIENT) {
        t_timeout(fd, SO_RCVTIMEO, 120, "SO_RCVTIMEO");
        long since = clock_ms();
        t_recv(fd, 1, 0);
        t_waited(since, 115);
        step("waited");
        t_await(fd, POLLIN);
        t_recv(fd, 5, 0);
        since = clock_ms();
        t_recv(fd, 5, MSG_WAITALL);
        t_waited(since, 115);
    } else {
        step("waited");
        t_send(fd, "there", 0);
    }
    step("done");
}

/* A reader that stops; then the writer's calls, until none does anything. */
static unsigned char *block(void) {
    static unsigned char bytes[1 << 18];
    static bool filled;
    if (!filled)
        fill(bytes, sizeof(bytes), 17);
    filled = true;
    return bytes;
}

enum { BLOCK = 1 << 18, MANY = 400 << 20 };

static void send_limit(void) {
    int fd = meet();
    if (role == SERVER) {
        step("stuck");
        t_close(fd);
        return;
    }
    t_timeout(fd, SO_SNDTIMEO, 150, "SO_SNDTIMEO");
    long all = 0, n, since;
    do {
        since = clock_ms();
        n = send(fd, block(), BLOCK, MSG_NOSIGNAL);
        all += n > 0 ? n : 0;
    } while (n > 0 && all < MANY);
    said(n, "send until it fails");
    t_waited(since, 140);
    step("stuck");
    t_await(fd, ENDED);
}

static void back_pressure(enum role writer) {
    int fd = meet();
    if (role == writer) {
        static unsigned char again[4096];
        unsigned char *bytes = block();
        not_blocking(fd);
        size_t all = 0;
        uint64_t sum = 0;
        /* Full when nothing was taken for a while. */
        for (long full = clock_ms() + QUIET; clock_ms() < full && all < MANY;) {
            size_t from = all % BLOCK;
            long n = send(fd, bytes + from, BLOCK - from, 0);
            if (n < 0) {
                if (errno != EAGAIN)
                    said(n, "send");
                nap(2);
                continue;
            }
            all += (size_t)n;
            full = clock_ms() + QUIET;
        }
        say(all < MANY ? "full" : "no end of it");
        t_send(fd, "x", 0);
        t_poll(fd);
        step("full");
        t_await(fd, POLLOUT);
        fill(again, sizeof(again), 19);
        t_send_all(fd, again, sizeof(again));
        t_shutdown(fd, SHUT_WR);
        /* How much it was is not for the transcript; that it arrived is. */
        for (size_t at = 0; at < all; at += BLOCK)
            sum = sum * 31 + digest(bytes, all - at < BLOCK ? all - at : BLOCK);
        tell((uint32_t)all);
        tell((uint32_t)sum);
        say("the reader has it: %s", hear() ? "yes" : "no");
        return;
    }
    step("full");
    static unsigned char piece[BLOCK + 4096], last[4096];
    size_t all = 0, held = 0;
    uint64_t sum = 0;
    long n;
    /* All but the last 4096 bytes count; only the end tells which those are. */
    while ((n = recv(fd, piece + held, sizeof(piece) - held, 0)) > 0) {
        held += (size_t)n;
        if (held < sizeof(piece))
            continue;
        sum = sum * 31 + digest(piece, BLOCK);
        all += BLOCK;
        memmove(piece, piece + BLOCK, held -= BLOCK);
    }
    said(n, "recv at the end");
    if (held < sizeof(last))
        give_up("bytes are missing");
    size_t rest = held - sizeof(last);
    if (rest)
        sum = sum * 31 + digest(piece, rest);
    all += rest;
    say("the last: %016lx", (unsigned long)digest(piece + rest, sizeof(last)));
    uint32_t there = hear(), sum_there = hear();
    say("bytes: %s", there == (uint32_t)all && sum_there == (uint32_t)sum ? "all" : "others");
    tell(there == (uint32_t)all && sum_there == (uint32_t)sum);
}

static void back_pressure_on_client(void) {
    back_pressure(CLIENT);
}

static void back_pressure_on_server(void) {
    back_pressure(SERVER);
}

static void much_both_ways(void) {
    enum { MUCH = 8 << 20 };
    unsigned char *bytes = malloc(MUCH);
    int fd = meet();
    fill(bytes, MUCH, 23 + (uint64_t)role);
    pid_t child = fork();
    if (!child) {
        t_send_all(fd, bytes, MUCH);
        shutdown(fd, SHUT_WR);
        _exit(0);
    }
    waitpid(child, NULL, WNOHANG);
    unsigned char *got = malloc(MUCH);
    size_t done = 0;
    for (long n = 1; n > 0 && done < MUCH; done += n > 0 ? (size_t)n : 0)
        n = recv(fd, got + done, MUCH - done, 0);
    /* The child's line comes first. */
    waitpid(child, NULL, 0);
    say("received %zu bytes, %016lx", done, (unsigned long)digest(got, done));
    t_recv_to_end(fd);
}

static void many_short(void) {
    enum { COUNT = 200 };
    int good = 0;
    if (role == SERVER) {
        int listener = listening(PORT);
        step("listening");
        for (int i = 0; i < COUNT; i++) {
            char text[16] = "";
            int fd = accept(listener, NULL, NULL);
            long n = recv(fd, text, 8, MSG_WAITALL);
            good += n == 8 && atoi(text) == i && recv(fd, text, 1, 0) == 0;
            send(fd, text, 8, 0);
            close(fd);
        }
    } else {
        step("listening");
        for (int i = 0; i < COUNT; i++) {
            char text[16], back[16] = "";
            int fd = connected(PORT);
            snprintf(text, sizeof(text), "%08d", i);
            send(fd, text, 8, 0);
            shutdown(fd, SHUT_WR);
            good += recv(fd, back, 8, MSG_WAITALL) == 8 && !memcmp(text, back, 8) &&
                    recv(fd, back, 1, 0) == 0;
            close(fd);
        }
    }
    say("%d of %d connections", good, COUNT);
}

const struct test_case moving_cases[] = {
    CASE("move_server_first", server_first),
    CASE("move_small_writes", small_writes),
    CASE("move_single_bytes", single_bytes),
    CASE("move_cork", cork),
    CASE("move_several_buffers", several_buffers),
    CASE("move_peek", peek),
    CASE("move_wait_for_all", wait_for_all),
    CASE("move_truncate", truncate_bytes),
    CASE("move_without_waiting", without_waiting),
    CASE("move_nothing_and_nonsense", nothing_and_nonsense),
    CASE("move_queues", queues),
    CASE("move_send_file", send_file),
    CASE("move_splice", splice_through),
    CASE("move_zero_copy", zero_copy),
    CASE("move_receive_limit", receive_limit),
    CASE("move_send_limit", send_limit),
    CASE("move_back_pressure_on_client", back_pressure_on_client),
    CASE("move_back_pressure_on_server", back_pressure_on_server),
    CASE("move_much_both_ways", much_both_ways),
    CASE("move_many_short", many_short),
    {0},
};
