/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * What the cases are written with. A case is one function that both roles run, each its own part;
 * every call that starts with t_ leaves one line in the transcript: what was called, what it
 * returned, the error's name. Two runs of a case over TCP leave the same transcript, so nothing
 * goes in that TCP leaves open: how bytes fall into segments, how much a buffer holds, when exactly
 * something arrives. What another process did is waited for (t_await), with patience.
 */
#ifndef CONFORM_H
#define CONFORM_H

/* Before any header of the system. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Ports of the server: two where cases listen, one where nobody does, and one for a listener at a
 * device. */
enum { PORT = 7100, OTHER_PORT = 7101, CLOSED_PORT = 7102, DEVICE_PORT = 7103 };
/* What joins the hosts. */
#define DEVICE "eth0"
/* Milliseconds after which what should happen at once counts as hung, and after which a way that
 * took nothing more is full. */
enum { PATIENCE = 60000, QUIET = 500 };

enum role { CLIENT, SERVER };
extern enum role role;
/* AF_INET or AF_INET6. */
extern int family;

struct test_case {
    const char *name;
    void (*run)(void);
    /* It connects to nobody, or in a way that VTL leaves alone: nothing is carried. */
    bool elsewhere;
};

/* What a table of cases is made of; the last of it is {0}. */
#define CASE(label, function) {.name = label, .run = function}
#define CASE_ELSEWHERE(label, function) {.name = label, .run = function, .elsewhere = true}

extern const struct test_case connect_cases[], ending_cases[], moving_cases[], waiting_cases[],
    urgent_cases[], option_cases[], process_cases[];

/* ---- the transcript, and the other role (main.c) ---- */

/* One line. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Says what a call returned, with the error's name, and returns it. */
long said(long result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Ends the case, since nothing that follows would make sense. */
_Noreturn void give_up(const char *why);
/* Waits until the other role is here, too. */
void step(const char *where);
/* A number for the other role; it takes it by hear(). */
void tell(uint32_t number);
uint32_t hear(void);
/* Milliseconds since the case began. */
long clock_ms(void);
/* Says whether so much time has passed since `since`, ms. Nothing says how much at most: who waits
 * for what does not come hangs. */
void t_waited(long since, long min);
void nap(long ms);

/* ---- addresses (calls.c) ---- */

struct place {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_storage storage;
    };
    socklen_t length;
};

extern struct place server_host, client_host;

struct place at(struct place host, int port);
/* A literal address of the family in use. */
struct place literal(const char *v4, const char *v6, int port);
struct place anywhere(int port);
struct place mapped(struct place v4);
int port_of(const struct place *place);

/* ---- calls, each with its line (calls.c) ---- */

int t_socket(int domain, int flags);
int t_bind(int fd, struct place place);
int t_listen(int fd, int backlog);
int t_connect(int fd, struct place place);
/* Says who connected, but not from which port; `who` may be NULL. */
int t_accept(int listener, struct place *who);
/* Say the addresses by name; return the port. */
int t_local(int fd);
int t_peer(int fd);
long t_send(int fd, const char *text, int flags);
/* One call, of up to `max` bytes; says the bytes. */
long t_recv(int fd, size_t max, int flags);
int t_shutdown(int fd, int how);
int t_close(int fd);
/* What poll() shows of a connection that has ended, or was refused. The kernel sets one after the
 * other (tcp_reset: the error; tcp_done: the state, then the shutdown), and who looks in between
 * sees less, over plain TCP, too. */
enum { ENDED = POLLHUP | POLLRDHUP };
/* Waits until poll() shows all of `events`, and says all that it shows then. */
int t_await(int fd, int events);
/* What poll() shows now. */
int t_poll(int fd);
int t_error(int fd);
int t_set(int fd, int level, int name, int value, const char *what);
int t_get(int fd, int level, int name, const char *what);
int t_linger(int fd, int on, int seconds);
int t_timeout(int fd, int name, int ms, const char *what);
/* The state of the connection, once it is `wanted` or patience has ended. */
void t_state(int fd, int wanted);
/* Waits until nothing is left to be acknowledged. */
void t_drained(int fd);
/* Waits until so many bytes are there to be received. */
void t_arrived(int fd, int count);

/* ---- many bytes: one line for all the calls (calls.c) ---- */

/* The same bytes for the same seed, which no offset repeats. */
void fill(unsigned char *bytes, size_t count, uint64_t seed);
uint64_t digest(const void *bytes, size_t count);
/* Sends all of them, however many calls it takes. */
void t_send_all(int fd, const void *bytes, size_t count);
/* Receives that many, or until the end; says count, digest and how it ended. */
void t_recv_all(int fd, size_t count);
/* Until the end. */
void t_recv_to_end(int fd);

/* ---- connections (calls.c) ---- */

/* A socket of the family that listens at the port, on all addresses. */
int listening(int port);
/* A connection between the roles. */
int meet(void);
/* As meet() does it at the client. */
int connected(int port);

void not_blocking(int fd);
/* Counts a signal instead of dying of it. */
void count_signal(int number);
int signals(void);

#endif
