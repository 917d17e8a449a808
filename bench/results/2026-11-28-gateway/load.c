/*
 * Load for scale.sh, and the server that it is put on. Every byte is checked.
 *
 *   load serve PORT             echoes on PORT; on PORT + 1 counts what arrives, and answers at its
 * end load bulk ADDRESS PORT S    writes to PORT + 1 for S seconds load rate ADDRESS PORT N S  N
 * new connections a second for S seconds: 64 bytes there and back each load idle ADDRESS PORT N
 * opens N connections; with the next line of input one message on each
 *
 * Results are one line of words and numbers on standard output.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MESSAGE = 64, BLOCK = 256 << 10, EVENTS = 512, GIVE_UP_S = 20 };

static void die(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void watch(int epoll, int op, int fd, uint32_t events, uint64_t data) {
    struct epoll_event event = {.events = events, .data.u64 = data};

    if (epoll_ctl(epoll, op, fd, &event))
        die("epoll_ctl");
}

/* ---- server ---- */

/* A connection: what is echoed, or counted. */
struct served {
    int fd, is_sink;
    uint64_t count, wrong;
    unsigned used, sent;
    char bytes[MESSAGE * 4];
};

static char block[BLOCK];

/* Counts words that are not those of the place. */
static void check(struct served *c, const char *bytes, size_t len) {
    for (size_t i = 0; i < len;) {
        uint64_t at = c->count + i, word = at / 8;

        if (at % 8 == 0 && len - i >= 8) {
            c->wrong += memcmp(bytes + i, &word, 8) != 0;
            i += 8;
        } else {
            c->wrong += bytes[i] != ((char *)&word)[at % 8];
            i++;
        }
    }
    c->count += len;
}

/* One turn of a connection; 0: it has ended. */
static int serve_one(int epoll, struct served *c) {
    ssize_t n;

    if (c->is_sink) {
        n = read(c->fd, block, sizeof(block));
        if (n > 0) {
            check(c, block, n);
            return 1;
        }
        if (n < 0)
            return errno == EAGAIN;
        uint64_t answer[2] = {c->count, c->wrong};
        if (write(c->fd, answer, sizeof(answer)) != sizeof(answer))
            perror("answer");
        return 0;
    }
    if (c->used == c->sent) {
        c->used = c->sent = 0;
        n = read(c->fd, c->bytes, sizeof(c->bytes));
        if (n <= 0)
            return n < 0 && errno == EAGAIN;
        c->used = n;
    }
    n = write(c->fd, c->bytes + c->sent, c->used - c->sent);
    if (n < 0 && errno != EAGAIN)
        return 0;
    c->sent += n > 0 ? n : 0;
    watch(epoll, EPOLL_CTL_MOD, c->fd, c->sent < c->used ? EPOLLOUT : EPOLLIN, (uintptr_t)c);
    return 1;
}

static int listener(int port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;

    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, (struct sockaddr *)&at, sizeof(at)) || listen(fd, 65535))
        die("listen");
    return fd;
}

static void serve(int port) {
    struct epoll_event events[EVENTS];
    int epoll = epoll_create1(0);
    int listeners[2] = {listener(port), listener(port + 1)};

    for (int i = 0; i < 2; i++)
        watch(epoll, EPOLL_CTL_ADD, listeners[i], EPOLLIN, i);
    puts("ready");
    fflush(stdout);
    for (;;) {
        int count = epoll_wait(epoll, events, EVENTS, -1);

        for (int i = 0; i < count; i++) {
            uint64_t data = events[i].data.u64;
            struct served *c = (void *)(uintptr_t)data;
            int fd;

            if (data > 1) {
                if (!serve_one(epoll, c)) {
                    close(c->fd);
                    free(c);
                }
                continue;
            }
            while ((fd = accept4(listeners[data], NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                c = calloc(1, sizeof(*c));
                c->fd = fd;
                c->is_sink = data;
                watch(epoll, EPOLL_CTL_ADD, fd, EPOLLIN, (uintptr_t)c);
            }
        }
    }
}

/* ---- clients ---- */

static struct sockaddr_in server;

static int begin(int flags) {
    int fd = socket(AF_INET, SOCK_STREAM | flags, 0), on = 1;

    if (fd < 0)
        die("socket");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    if (connect(fd, (struct sockaddr *)&server, sizeof(server)) && errno != EINPROGRESS) {
        perror("connect");
        close(fd);
        return -1;
    }
    return fd;
}

static void bulk(double seconds) {
    uint64_t *words = (uint64_t *)block, sent = 0, answer[2] = {0, 0};
    struct timeval patience = {.tv_sec = GIVE_UP_S};
    int fd = begin(0);
    double began = now(), took;
    ssize_t n;

    if (fd < 0)
        exit(1);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    while (now() - began < seconds) {
        for (size_t i = 0; i < BLOCK / 8; i++)
            words[i] = sent / 8 + i;
        for (size_t done = 0; done < BLOCK; done += n, sent += n)
            if ((n = write(fd, block + done, BLOCK - done)) < 0)
                die("write");
    }
    shutdown(fd, SHUT_WR);
    n = recv(fd, answer, sizeof(answer), MSG_WAITALL);
    took = now() - began;
    if (n != sizeof(answer))
        die("answer");
    printf("bytes %lu arrived %lu wrong %lu seconds %.3f mbit %.0f\n", sent, answer[0], answer[1],
           took, answer[0] * 8 / took / 1e6);
}

/* A connection of `rate` or `idle`. */
struct client {
    int fd; /* -1: over */
    int is_open, got;
    double began;
    char bytes[MESSAGE];
};

static struct client *clients;
static double *times;
static int opened, exact, lost, late;

/* What connection i says. */
static void message(int i, char *bytes) {
    for (int at = 0; at < MESSAGE; at += 4)
        memcpy(bytes + at, (int[]){i * 31 + at}, 4);
}

static void end(struct client *c, int *what) {
    close(c->fd);
    c->fd = -1;
    ++*what;
}

static void say(struct client *c, int i) {
    char bytes[MESSAGE];

    message(i, bytes);
    if (write(c->fd, bytes, MESSAGE) != MESSAGE)
        end(c, &lost);
}

/* Takes what has come for connection i. */
static void take(struct client *c, int i) {
    char wanted[MESSAGE];
    ssize_t n = read(c->fd, c->bytes + c->got, MESSAGE - c->got);

    if (n < 0 && errno == EAGAIN)
        return;
    if (n <= 0) {
        if (lost < 3)
            fprintf(stderr, "connection %d: %s\n", i, n ? strerror(errno) : "end");
        end(c, &lost);
        return;
    }
    c->got += n;
    if (c->got < MESSAGE)
        return;
    message(i, wanted);
    times[exact] = now() - c->began;
    end(c, memcmp(wanted, c->bytes, MESSAGE) ? &lost : &exact);
}

/* Waits for events of all connections. `speaks`: each says its message once it is open. */
static void turn(int epoll, int timeout_ms, int speaks) {
    struct epoll_event events[EVENTS];
    int count = epoll_wait(epoll, events, EVENTS, timeout_ms);

    for (int n = 0; n < count; n++) {
        int i = events[n].data.u64, error = 0;
        struct client *c = &clients[i];
        socklen_t size = sizeof(error);

        if (c->fd < 0)
            continue;
        if (c->is_open) {
            take(c, i);
            continue;
        }
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error) {
            if (lost < 3)
                fprintf(stderr, "connect %d: %s\n", i, strerror(error));
            end(c, &lost);
            continue;
        }
        c->is_open = 1;
        opened++;
        watch(epoll, EPOLL_CTL_MOD, c->fd, EPOLLIN, i);
        if (speaks)
            say(c, i);
    }
}

static void start(int epoll, int i) {
    struct client *c = &clients[i];

    c->began = now();
    c->fd = begin(SOCK_NONBLOCK);
    if (c->fd < 0)
        lost++;
    else
        watch(epoll, EPOLL_CTL_ADD, c->fd, EPOLLOUT, i);
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Exits with 1 if any was lost. */
static void report(int count, double took) {
    qsort(times, exact, sizeof(*times), compare);
    printf("exact %d of %d lost %d seconds %.3f p50_ms %.3f p99_ms %.3f max_ms %.3f late %d\n",
           exact, count, lost, took, exact ? times[exact / 2] * 1e3 : 0,
           exact ? times[exact * 99 / 100] * 1e3 : 0, exact ? times[exact - 1] * 1e3 : 0, late);
    exit(exact < count);
}

static void reserve(int count) {
    clients = calloc(count, sizeof(*clients));
    times = calloc(count + 1, sizeof(*times));
}

static void rate(int each_second, double seconds) {
    int epoll = epoll_create1(0), count = each_second * seconds, started = 0;
    double began = now(), last = began;

    reserve(count);
    while (exact + lost < count && now() - last < GIVE_UP_S) {
        int due = (now() - began) * each_second, before = exact + lost;

        due = due < count ? due : count;
        /* This program was too slow. */
        late += due - started > each_second / 10;
        while (started < due)
            start(epoll, started++);
        turn(epoll, 1, 1);
        if (exact + lost > before)
            last = now();
    }
    report(count, last - began);
}

static void idle(int count) {
    int epoll = epoll_create1(0);
    double began = now(), last = began;
    char line[16];

    reserve(count);
    for (int i = 0; i < count; i++) {
        start(epoll, i);
        /* 2,000 a second: this is about how many there are. */
        do
            turn(epoll, 0, 0);
        while (now() - began < i / 2000.0);
    }
    while (opened + lost < count && now() - last < GIVE_UP_S)
        turn(epoll, 10, 0);
    printf("open %d lost %d seconds %.3f\n", opened, lost, now() - began);
    fflush(stdout);
    if (!fgets(line, sizeof(line), stdin))
        exit(1);
    began = last = now();
    for (int i = 0; i < count; i++) {
        clients[i].began = now();
        if (clients[i].fd >= 0)
            say(&clients[i], i);
        turn(epoll, 0, 0);
    }
    while (exact + lost < count && now() - last < GIVE_UP_S) {
        int before = exact + lost;

        turn(epoll, 10, 0);
        if (exact + lost > before)
            last = now();
    }
    report(count, last - began);
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    if (argc == 3 && !strcmp(argv[1], "serve"))
        serve(atoi(argv[2]));
    if (argc < 5 || inet_pton(AF_INET, argv[2], &server.sin_addr) != 1) {
        fprintf(stderr, "load serve PORT | {bulk|rate|idle} ADDRESS PORT NUMBER [SECONDS]\n");
        return 2;
    }
    int is_bulk = !strcmp(argv[1], "bulk");
    server.sin_family = AF_INET;
    server.sin_port = htons(atoi(argv[3]) + is_bulk);
    if (is_bulk)
        bulk(atof(argv[4]));
    else if (!strcmp(argv[1], "rate") && argc == 6)
        rate(atoi(argv[4]), atof(argv[5]));
    else if (!strcmp(argv[1], "idle"))
        idle(atoi(argv[4]));
    else
        return 2;
    return 0;
}
