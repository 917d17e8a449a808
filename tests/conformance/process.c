/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A connection in several processes and descriptors: fork(2), dup(2), unix(7), execve(2). */
#include "conform.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/wait.h>

/* The child goes on when the parent has closed, and the end comes with the last of them. */
static void forked(void) {
    int fd = meet();
    if (role == CLIENT) {
        int go[2];
        if (pipe(go))
            give_up("no pipe");
        t_send(fd, "parent, ", 0);
        pid_t child = fork();
        if (!child) {
            char byte;
            close(go[1]);
            /* Until the parent has closed. */
            (void)!read(go[0], &byte, 1);
            send(fd, "child", 5, 0);
            char answer[16] = "";
            long n = recv(fd, answer, 6, MSG_WAITALL);
            say("the child got %ld bytes, %s", n, answer);
            _exit(0);
        }
        close(go[0]);
        t_close(fd);
        step("closed");
        close(go[1]);
        waitpid(child, NULL, 0);
        return;
    }
    step("closed");
    t_recv(fd, 13, MSG_WAITALL);
    t_poll(fd);
    t_send(fd, "answer", 0);
    t_recv_to_end(fd);
}

/* As servers do that have a process for each connection. */
static void forked_server(void) {
    if (role == CLIENT) {
        step("listening");
        for (int i = 0; i < 3; i++) {
            int fd = connected(PORT);
            t_send(fd, "hello", 0);
            t_recv_to_end(fd);
            t_close(fd);
        }
        return;
    }
    int listener = listening(PORT);
    step("listening");
    for (int i = 0; i < 3; i++) {
        int fd = t_accept(listener, NULL);
        pid_t child = fork();
        if (!child) {
            char bytes[8];
            close(listener);
            long n = recv(fd, bytes, 5, MSG_WAITALL);
            send(fd, bytes, (size_t)n, 0);
            _exit(0);
        }
        close(fd);
        waitpid(child, NULL, 0);
    }
}

static void duplicated(void) {
    int fd = meet();
    if (role == CLIENT) {
        int second = dup(fd), third = fcntl(fd, F_DUPFD, 100);
        t_send(fd, "one ", 0);
        t_close(fd);
        t_send(second, "two ", 0);
        t_peer(second);
        t_close(second);
        t_send(third, "three", 0);
        t_close(third);
        return;
    }
    t_recv_to_end(fd);
}

/* shutdown() is for the connection, not for the descriptor. */
static void shutdown_of_one(void) {
    int fd = meet();
    if (role == CLIENT) {
        int second = dup(fd);
        t_shutdown(fd, SHUT_WR);
        t_send(second, "x", MSG_NOSIGNAL);
        t_recv_to_end(second);
        return;
    }
    t_recv_to_end(fd);
    t_send(fd, "bye", 0);
    t_close(fd);
}

static void pass(int channel, int fd) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec one = {"x", 1};
    struct msghdr message = {.msg_iov = &one,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &fd, sizeof(fd));
    /* No line: whoever takes it writes lines at the same time. */
    if (sendmsg(channel, &message, 0) != 1)
        give_up("the descriptor is not passed");
}

static int take(int channel) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    char byte;
    struct iovec one = {&byte, 1};
    struct msghdr message = {.msg_iov = &one,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    int fd = -1;
    if (recvmsg(channel, &message, 0) == 1 && CMSG_FIRSTHDR(&message))
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
    return fd;
}

static void passed_on(void) {
    int channel[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, channel))
        give_up("no socketpair");
    pid_t child = fork();
    if (!child) {
        /* Never had the socket. */
        int fd = take(channel[1]);
        char bytes[16] = "";
        send(fd, "from a stranger", 15, 0);
        long n = recv(fd, bytes, 15, MSG_WAITALL);
        say("the stranger got %ld bytes, %s", n, bytes);
        t_peer(fd);
        _exit(0);
    }
    int fd = meet();
    pass(channel[0], fd);
    close(fd);
    waitpid(child, NULL, 0);
    step("passed");
}

/* Another program, which has the connection as its input and output. */
static void executed(void) {
    int fd = meet();
    if (role == SERVER) {
        pid_t child = fork();
        if (!child) {
            dup2(fd, 0);
            dup2(fd, 1);
            execlp("tr", "tr", "a-z", "A-Z", NULL);
            _exit(1);
        }
        close(fd);
        int status = -1;
        waitpid(child, &status, 0);
        say("the program ended with %d", status);
        return;
    }
    t_send(fd, "through another program", 0);
    t_shutdown(fd, SHUT_WR);
    t_recv(fd, 23, MSG_WAITALL);
    t_recv_to_end(fd);
}

/* Closed by execve(), if that was asked for. */
static void closed_by_exec(void) {
    int fd = meet();
    if (role == SERVER) {
        t_recv_to_end(fd);
        return;
    }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    pid_t child = fork();
    if (!child) {
        execlp("sleep", "sleep", "1", NULL);
        _exit(1);
    }
    t_send(fd, "closed", 0);
    t_close(fd);
    waitpid(child, NULL, 0);
}

const struct test_case process_cases[] = {
    CASE("process_forked", forked),
    CASE("process_forked_server", forked_server),
    CASE("process_duplicated", duplicated),
    CASE("process_shutdown_of_one", shutdown_of_one),
    CASE("process_passed_on", passed_on),
    CASE("process_executed", executed),
    CASE("process_closed_by_exec", closed_by_exec),
    {0},
};
