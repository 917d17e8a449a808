/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Connections ending, in order and otherwise: shutdown(2), close(2), SO_LINGER of socket(7), RFC
 * 9293 3.6 and 3.10.
 */
#include "conform.h"

#include <netinet/tcp.h>
#include <signal.h>
#include <sys/wait.h>

static void half_close(enum role first) {
    int fd = meet();
    if (role == first) {
        t_send(fd, "question", 0);
        t_shutdown(fd, SHUT_WR);
        t_state(fd, TCP_FIN_WAIT2);
        t_send(fd, "more", MSG_NOSIGNAL);
        t_poll(fd);
        t_shutdown(fd, SHUT_WR);
        step("asked");
        t_recv_to_end(fd);
        t_recv(fd, 1, 0);
        t_poll(fd);
    } else {
        step("asked");
        t_await(fd, POLLRDHUP);
        t_state(fd, TCP_CLOSE_WAIT);
        t_recv_to_end(fd);
        t_recv(fd, 1, 0);
        t_poll(fd);
        t_send(fd, "ans", 0);
        nap(20);
        t_send(fd, "wer", 0);
        t_shutdown(fd, SHUT_WR);
        t_drained(fd);
        t_await(fd, ENDED);
        t_recv(fd, 1, 0);
    }
    step("ended");
    t_close(fd);
}

static void half_close_by_client(void) {
    half_close(CLIENT);
}

static void half_close_by_server(void) {
    half_close(SERVER);
}

/* As `nc -N` and many others do: the request and its end in one go. */
static void half_close_at_once(void) {
    static unsigned char answer[300000];
    fill(answer, sizeof(answer), 3);
    if (role == CLIENT) {
        step("listening");
        int fd = connected(PORT);
        t_send(fd, "request", 0);
        t_shutdown(fd, SHUT_WR);
        t_recv_to_end(fd);
        t_close(fd);
        return;
    }
    int listener = listening(PORT);
    step("listening");
    int fd = t_accept(listener, NULL);
    t_recv_to_end(fd);
    t_send_all(fd, answer, sizeof(answer));
    t_close(fd);
}

static void close_both_at_once(void) {
    int fd = meet();
    t_send(fd, role == CLIENT ? "from here" : "from there", 0);
    t_shutdown(fd, SHUT_WR);
    t_recv_to_end(fd);
    t_state(fd, TCP_CLOSE);
    t_await(fd, ENDED);
    t_close(fd);
}

static void broken_pipe(void) {
    int fd = meet();
    if (role == SERVER) {
        step("closed");
        return;
    }
    count_signal(SIGPIPE);
    t_shutdown(fd, SHUT_WR);
    t_send(fd, "x", 0);
    say("%d signals", signals());
    t_send(fd, "x", MSG_NOSIGNAL);
    said(write(fd, "x", 1), "write");
    say("%d signals", signals());
    step("closed");
}

static void killed_by_broken_pipe(void) {
    int fd = meet();
    if (role == CLIENT) {
        pid_t child = fork();
        if (!child) {
            shutdown(fd, SHUT_WR);
            send(fd, "x", 1, 0);
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        say("the child ended by signal %d", WTERMSIG(status));
    }
    step("done");
}

static void reset_by_linger(enum role first) {
    int fd = meet();
    if (role == first) {
        t_linger(fd, 1, 0);
        t_close(fd);
        step("reset");
        return;
    }
    step("reset");
    t_await(fd, ENDED);
    t_recv(fd, 1, 0);
    t_recv(fd, 1, 0);
    t_send(fd, "x", MSG_NOSIGNAL);
    t_error(fd);
    t_peer(fd);
    t_state(fd, TCP_CLOSE);
    t_shutdown(fd, SHUT_WR);
    t_close(fd);
}

static void reset_by_client(void) {
    reset_by_linger(CLIENT);
}

static void reset_by_server(void) {
    reset_by_linger(SERVER);
}

static void reset_while_waiting(void) {
    int fd = meet();
    if (role == SERVER) {
        t_linger(fd, 1, 0);
        nap(50);
        t_close(fd);
        return;
    }
    t_recv(fd, 1, 0);
    t_recv(fd, 1, 0);
}

/* RFC 2525 2.17: who closes with unread data sends a reset. */
static void close_with_unread(enum role first) {
    int fd = meet();
    if (role == first) {
        step("sent");
        t_await(fd, POLLIN);
        t_close(fd);
        step("closed");
        return;
    }
    t_send(fd, "nobody reads this", 0);
    step("sent");
    step("closed");
    t_await(fd, ENDED);
    t_error(fd);
    t_recv(fd, 1, 0);
    t_send(fd, "x", MSG_NOSIGNAL);
}

static void unread_at_server(void) {
    close_with_unread(SERVER);
}

static void unread_at_client(void) {
    close_with_unread(CLIENT);
}

/* RFC 9293 3.10.7: the peer has closed; what is sent now comes back as a reset. */
static void write_after_close(enum role first) {
    int fd = meet();
    if (role == first) {
        t_close(fd);
        step("closed");
        return;
    }
    count_signal(SIGPIPE);
    step("closed");
    t_await(fd, POLLRDHUP);
    t_recv(fd, 1, 0);
    t_send(fd, "too late", 0);
    t_await(fd, ENDED);
    t_recv(fd, 1, 0);
    t_send(fd, "x", 0);
    t_send(fd, "x", 0);
    say("%d signals", signals());
    t_error(fd);
}

static void write_after_server_closed(void) {
    write_after_close(SERVER);
}

static void write_after_client_closed(void) {
    write_after_close(CLIENT);
}

/* Reads what came before a reset, and the reset. */
static void read_to_reset(int fd) {
    t_await(fd, ENDED);
    t_recv(fd, 20, 0);
    t_recv(fd, 20, 0);
    t_recv(fd, 20, 0);
}

/* What arrived before the reset can still be read. */
static void data_then_reset(void) {
    int fd = meet();
    if (role == CLIENT) {
        t_send(fd, "last words", 0);
        t_drained(fd);
        step("arrived");
        t_linger(fd, 1, 0);
        t_close(fd);
        step("reset");
        return;
    }
    t_await(fd, POLLIN);
    step("arrived");
    step("reset");
    read_to_reset(fd);
}

/* So can what is right in front of it. */
static void data_and_reset(void) {
    int fd = meet();
    if (role == CLIENT) {
        t_send(fd, "last words", 0);
        t_linger(fd, 1, 0);
        t_close(fd);
        step("reset");
        return;
    }
    step("reset");
    read_to_reset(fd);
}

/* A server that answers early, and closes with unread bytes: a reset right behind its answer. */
static void answer_and_reset(void) {
    int fd = meet();
    if (role == CLIENT) {
        t_send(fd, "a long request", 0);
        step("answered");
        read_to_reset(fd);
        return;
    }
    t_await(fd, POLLIN);
    t_send(fd, "too long", 0);
    t_close(fd);
    step("answered");
}

/* The first half is closed in order, then comes a reset. */
static void reset_after_half_close(enum role first) {
    int fd = meet();
    if (role == first) {
        t_shutdown(fd, SHUT_WR);
        step("half");
        step("seen");
        t_linger(fd, 1, 0);
        t_close(fd);
        step("reset");
        return;
    }
    step("half");
    t_await(fd, POLLRDHUP);
    t_recv(fd, 1, 0);
    step("seen");
    step("reset");
    t_await(fd, ENDED);
    t_error(fd);
    t_recv(fd, 1, 0);
    t_send(fd, "x", MSG_NOSIGNAL);
}

static void reset_after_half_close_by_client(void) {
    reset_after_half_close(CLIENT);
}

static void reset_after_half_close_by_server(void) {
    reset_after_half_close(SERVER);
}

/* The other way about: who has seen the end resets. */
static void reset_by_the_half_closed(void) {
    int fd = meet();
    if (role == CLIENT) {
        t_shutdown(fd, SHUT_WR);
        step("half");
        step("reset");
        t_await(fd, ENDED);
        t_recv(fd, 1, 0);
        t_recv(fd, 1, 0);
        return;
    }
    step("half");
    t_await(fd, POLLRDHUP);
    t_linger(fd, 1, 0);
    t_close(fd);
    step("reset");
}

/* tcp(7) does not say it, but Linux and POSIX do: reading is over, writing is not. */
static void shutdown_of_reading(void) {
    int fd = meet();
    if (role == CLIENT) {
        t_shutdown(fd, SHUT_RD);
        t_recv(fd, 1, 0);
        t_poll(fd);
        t_send(fd, "still writing", 0);
        step("shut");
        step("answered");
        /* What comes to a socket that is shut in both directions resets it. */
        t_arrived(fd, 7);
        t_shutdown(fd, SHUT_WR);
        return;
    }
    step("shut");
    t_recv(fd, 13, 0);
    t_send(fd, "ignored", MSG_NOSIGNAL);
    t_drained(fd);
    step("answered");
    t_recv_to_end(fd);
}

/* Nobody will read: data is answered by a reset. */
static void shutdown_of_both(enum role first) {
    int fd = meet();
    if (role == first) {
        t_shutdown(fd, SHUT_RDWR);
        t_recv(fd, 1, 0);
        t_send(fd, "x", MSG_NOSIGNAL);
        t_poll(fd);
        step("shut");
        step("reset");
        return;
    }
    step("shut");
    t_await(fd, POLLRDHUP);
    t_send(fd, "who reads this", MSG_NOSIGNAL);
    t_await(fd, ENDED);
    t_error(fd);
    t_send(fd, "x", MSG_NOSIGNAL);
    step("reset");
}

static void shutdown_of_both_by_client(void) {
    shutdown_of_both(CLIENT);
}

static void shutdown_of_both_by_server(void) {
    shutdown_of_both(SERVER);
}

/* close(2) in the background: everything that was written arrives, then the end. */
static void close_with_unsent(enum role first) {
    static unsigned char bytes[2 << 20];
    fill(bytes, sizeof(bytes), 7);
    int fd = meet();
    if (role == first) {
        t_send_all(fd, bytes, sizeof(bytes));
        t_close(fd);
        return;
    }
    nap(30);
    t_recv_to_end(fd);
    t_recv(fd, 1, 0);
}

static void unsent_at_client(void) {
    close_with_unsent(CLIENT);
}

static void unsent_at_server(void) {
    close_with_unsent(SERVER);
}

static void linger(void) {
    int fd = meet();
    if (role == SERVER) {
        t_recv_to_end(fd);
        return;
    }
    static unsigned char bytes[100000];
    fill(bytes, sizeof(bytes), 1);
    /* All is acknowledged sooner, or the case hangs. */
    t_linger(fd, 1, 1000);
    t_send_all(fd, bytes, sizeof(bytes));
    t_close(fd);
}

/* A process that is killed leaves the same as one that closes. */
static void killed(void) {
    int fd = meet();
    if (role == CLIENT) {
        pid_t child = fork();
        if (!child) {
            for (;;)
                pause();
        }
        t_send(fd, "farewell", 0);
        close(fd);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        return;
    }
    t_recv_to_end(fd);
}

static void killed_with_unread(void) {
    int fd = meet();
    if (role == SERVER) {
        t_await(fd, POLLIN);
        pid_t child = fork();
        if (!child) {
            for (;;)
                pause();
        }
        close(fd);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        step("killed");
        return;
    }
    t_send(fd, "unread", 0);
    step("killed");
    t_await(fd, ENDED);
    t_recv(fd, 1, 0);
}

/* A writer that waits for room learns of the reset. */
static void reset_of_blocked_writer(void) {
    int fd = meet();
    if (role == SERVER) {
        nap(300);
        t_linger(fd, 1, 0);
        t_close(fd);
        return;
    }
    static unsigned char bytes[1 << 20];
    long n;
    while ((n = send(fd, bytes, sizeof(bytes), MSG_NOSIGNAL)) > 0)
        ;
    said(n, "send until it fails");
    t_send(fd, "x", MSG_NOSIGNAL);
}

const struct test_case ending_cases[] = {
    CASE("end_half_close_by_client", half_close_by_client),
    CASE("end_half_close_by_server", half_close_by_server),
    CASE("end_half_close_at_once", half_close_at_once),
    CASE("end_both_at_once", close_both_at_once),
    CASE("end_broken_pipe", broken_pipe),
    CASE("end_killed_by_broken_pipe", killed_by_broken_pipe),
    CASE("end_reset_by_client", reset_by_client),
    CASE("end_reset_by_server", reset_by_server),
    CASE("end_reset_while_waiting", reset_while_waiting),
    CASE("end_unread_at_server", unread_at_server),
    CASE("end_unread_at_client", unread_at_client),
    CASE("end_write_after_server_closed", write_after_server_closed),
    CASE("end_write_after_client_closed", write_after_client_closed),
    CASE("end_data_then_reset", data_then_reset),
    CASE("end_data_and_reset", data_and_reset),
    CASE("end_answer_and_reset", answer_and_reset),
    CASE("end_reset_after_half_close_by_client", reset_after_half_close_by_client),
    CASE("end_reset_after_half_close_by_server", reset_after_half_close_by_server),
    CASE("end_reset_by_the_half_closed", reset_by_the_half_closed),
    CASE("end_shutdown_of_reading", shutdown_of_reading),
    CASE("end_shutdown_of_both_by_client", shutdown_of_both_by_client),
    CASE("end_shutdown_of_both_by_server", shutdown_of_both_by_server),
    CASE("end_unsent_at_client", unsent_at_client),
    CASE("end_unsent_at_server", unsent_at_server),
    CASE("end_linger", linger),
    CASE("end_killed", killed),
    CASE("end_killed_with_unread", killed_with_unread),
    CASE("end_reset_of_blocked_writer", reset_of_blocked_writer),
    {0},
};
