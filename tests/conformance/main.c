/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Runs sequences of socket calls between two hosts and says what every call returned. An ordinary
 * program of ordinary sockets: whether TCP carries them, or what stands in for it, must not show.
 *
 *   conform list                      names the cases, with a mark at those that reach no server
 *   conform server CONTROL SERVER CLIENT CASE...
 *   conform client CONTROL SERVER CLIENT CASE...
 *
 * CONTROL is the path of a Unix socket by which the two roles keep in step; SERVER and CLIENT are
 * their addresses. Each case runs in a process of its own, on both sides. The client says at the
 * socket CONTROL.after, if there is one, which case it has finished, and goes on when answered.
 */
#include "conform.h"

#include <arpa/inet.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

enum { CASE_SECONDS = 100 };

enum role role;
int family;
struct place server_host, client_host;

static const struct test_case *const groups[] = {
    connect_cases, ending_cases, moving_cases,  waiting_cases,
    urgent_cases,  option_cases, process_cases,
};
/* The other role. */
static int other = -1;
static long started;

static long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000L + t.tv_nsec / 1000000;
}

long clock_ms(void) {
    return now_ms() - started;
}

void nap(long ms) {
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    while (nanosleep(&t, &t) && errno == EINTR)
        ;
}

void say(const char *format, ...) {
    int error = errno;
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    errno = error;
}

long said(long result, const char *format, ...) {
    int error = errno;
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    if (result < 0)
        printf(" = -1 %s\n", strerrorname_np(error));
    else
        printf(" = %ld\n", result);
    errno = error;
    return result;
}

_Noreturn void give_up(const char *why) {
    say("given up: %s", why);
    exit(1);
}

void t_waited(long since, long min) {
    long ms = clock_ms() - since;
    if (ms < min)
        say("waited %ld ms, not %ld", ms, min);
    else
        say("waited %ld ms, or more", min);
}

/* ---- the other role ---- */

static struct sockaddr_un control_address(const char *path, const char *suffix) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = snprintf(address.sun_path, sizeof(address.sun_path), "%s%s", path, suffix);
    if (length >= (int)sizeof(address.sun_path)) {
        fprintf(stderr, "conform: the path %s is too long\n", path);
        exit(2);
    }
    return address;
}

static void patient(int fd, int seconds) {
    struct timeval limit = {.tv_sec = seconds};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
}

static int try_connect(const char *path, const char *suffix, int type) {
    struct sockaddr_un address = control_address(path, suffix);
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof(address))) {
        close(fd);
        return -1;
    }
    patient(fd, CASE_SECONDS);
    return fd;
}

/* The server's child of a case and the client's child of the same case find each other. */
static void pair_up(int listener, const char *path, const char *name) {
    char said_name[64] = "";
    if (role == CLIENT) {
        for (int turn = 0; turn < 500 && other < 0; turn++) {
            nap(turn ? 20 : 0);
            other = try_connect(path, "", SOCK_SEQPACKET);
        }
        if (other < 0 || send(other, name, strlen(name) + 1, 0) < 0)
            give_up("there is no server");
        return;
    }
    patient(listener, CASE_SECONDS);
    for (;;) {
        other = accept(listener, NULL, NULL);
        if (other < 0)
            give_up("there is no client");
        patient(other, CASE_SECONDS);
        /* One that was left over by an earlier case says another name. */
        if (recv(other, said_name, sizeof(said_name) - 1, 0) > 0 && !strcmp(said_name, name))
            return;
        close(other);
    }
}

void step(const char *where) {
    char there[64] = "";
    send(other, where, strlen(where) + 1, MSG_NOSIGNAL);
    if (recv(other, there, sizeof(there) - 1, 0) <= 0)
        give_up("the other role has gone");
    if (strcmp(where, there))
        give_up("the other role is elsewhere");
}

void tell(uint32_t number) {
    send(other, &number, sizeof(number), MSG_NOSIGNAL);
}

uint32_t hear(void) {
    uint32_t number = 0;
    if (recv(other, &number, sizeof(number), 0) != sizeof(number))
        give_up("the other role has gone");
    return number;
}

/* ---- cases ---- */

static const struct test_case *find(const char *name) {
    for (size_t i = 0; i < sizeof(groups) / sizeof(*groups); i++)
        for (const struct test_case *each = groups[i]; each->name; each++)
            if (!strcmp(each->name, name))
                return each;
    fprintf(stderr, "conform: there is no case %s\n", name);
    exit(2);
}

static void list(void) {
    for (size_t i = 0; i < sizeof(groups) / sizeof(*groups); i++)
        for (const struct test_case *each = groups[i]; each->name; each++)
            printf("%s%s\n", each->name, each->elsewhere ? " elsewhere" : "");
}

/* One case in a child that may hang or die without harm to those that follow. */
static void run_apart(const struct test_case *each, int listener, const char *control) {
    printf("== %s\n", each->name);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        /* So that children of its own end with it, and it with us. */
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pair_up(listener, control, each->name);
        started = now_ms();
        each->run();
        step("end");
        exit(0);
    }
    setpgid(child, child);
    int status = 0;
    for (long end = now_ms() + 1000L * (CASE_SECONDS + 5);;) {
        if (waitpid(child, &status, WNOHANG) == child)
            break;
        if (now_ms() > end) {
            kill(-child, SIGKILL);
            waitpid(child, &status, 0);
            say("hung");
            break;
        }
        nap(2);
    }
    kill(-child, SIGKILL);
    if (WIFSIGNALED(status))
        say("killed by %s", sigabbrev_np(WTERMSIG(status)));
    fflush(stdout);
}

/* Lets somebody look at the world between two cases. */
static void report(const char *control, const char *name) {
    char answer;
    int fd = try_connect(control, ".after", SOCK_STREAM);
    if (fd < 0)
        return;
    send(fd, name, strlen(name), MSG_NOSIGNAL);
    shutdown(fd, SHUT_WR);
    (void)!recv(fd, &answer, 1, 0);
    close(fd);
}

static struct place host(const char *text) {
    struct place place = {0};
    if (inet_pton(AF_INET, text, &place.v4.sin_addr) == 1) {
        place.any.sa_family = AF_INET;
        place.length = sizeof(place.v4);
    } else if (inet_pton(AF_INET6, text, &place.v6.sin6_addr) == 1) {
        place.any.sa_family = AF_INET6;
        place.length = sizeof(place.v6);
    } else {
        fprintf(stderr, "conform: %s is no address\n", text);
        exit(2);
    }
    return place;
}

int main(int argc, char **argv) {
    int listener = -1;

    if (argc == 2 && !strcmp(argv[1], "list")) {
        list();
        return 0;
    }
    if (argc < 6 || (strcmp(argv[1], "server") && strcmp(argv[1], "client"))) {
        fputs("usage: conform list | conform server|client CONTROL SERVER CLIENT CASE...\n",
              stderr);
        return 2;
    }
    /* What a process has said is said once, also if it forks or is killed. */
    setvbuf(stdout, NULL, _IOLBF, 0);
    role = strcmp(argv[1], "server") ? CLIENT : SERVER;
    server_host = host(argv[3]);
    client_host = host(argv[4]);
    family = server_host.any.sa_family;
    if (role == SERVER) {
        struct sockaddr_un address = control_address(argv[2], "");
        listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
        unlink(argv[2]);
        if (bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 8)) {
            perror("conform: control socket");
            return 2;
        }
    }
    for (int i = 5; i < argc; i++) {
        const struct test_case *each = find(argv[i]);
        run_apart(each, listener, argv[2]);
        if (role == CLIENT)
            report(argv[2], each->name);
    }
    return 0;
}
