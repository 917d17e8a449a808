/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * libvtl: ask for transport services, not for a protocol.
 *
 * The six operations of the VTL thesis (section 3.2.7, table 3.4), and what applications need
 * besides. They talk to the daemon vtld of this host, at the socket named by the environment
 * variable VTL_SOCKET, or else at /run/vtl/vtld.sock. Its users are root and the members of the
 * socket's group (vtl).
 *
 *     vtl_socket *s;
 *     struct vtl_requirements want = VTL_REQUIREMENTS;
 *     want.reliability = want.order = VTL_REQUIRE;
 *     if (vtl_init(VTL_INITIATOR, NULL, "10.0.0.2:7000", &s) < 0 || vtl_negotiate(s, &want) < 0)
 *         errx(1, "%s", vtl_last_error());
 *     vtl_send_data(s, "hello", 5);
 *     vtl_close(s);
 *
 * RESULTS. Functions that return int or ssize_t return 0 or more if they succeed, and the negative
 * of an errno code if not. vtl_strerror() says what the code means, vtl_last_error() what happened,
 * in a sentence. Codes that any function may return: -EBADF, not an open socket; -EINVAL, an
 * argument or an operation that does not fit the socket; -ENOTRECOVERABLE, a bug in the library;
 * and those of the system, such as -EMFILE.
 *
 * OWNERSHIP. A socket belongs to the caller from vtl_init() or vtl_accept() until vtl_close() or
 * vtl_abort(). A `vtl_socket *` is a handle and points to nothing: one that was never given out, or
 * that has been closed, is found out and answered by -EBADF. The library keeps no pointer of the
 * caller's after a call, and gives none out that has to be freed.
 *
 * THREADS. Every function may be called from any thread at any time. On one socket, one thread
 * sends and one receives at once; others wait for their turn. vtl_abort() and vtl_close() in one
 * thread end calls that wait in others, with -EBADF. A socket whose vtl_fd() is polled is to be
 * used by one thread at a time. After fork() only the process that made a socket may use it.
 *
 * WAITING. Calls wait as long as vtl_set_timeout() says, at first for ever; signals do not end
 * them. No signal is ever raised: there is no SIGPIPE.
 */
#ifndef VTL_H
#define VTL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A VTL socket: of an initiator, a responder, or a listener. A handle, see above. */
typedef struct vtl_socket vtl_socket;

/* What a socket is for. */
enum vtl_mode {
    VTL_INITIATOR = 1, /* opens a session: vtl_negotiate() */
    VTL_RESPONDER = 2, /* waits at a port for a session: vtl_validate() */
    VTL_LISTENER = 3   /* waits at a port for many sessions: vtl_accept() */
};

/* How much an application wants a service, or wants to be without it: RFC 9622, section 6.2. */
enum vtl_preference {
    VTL_NO_PREFERENCE = 0,
    VTL_REQUIRE = 1, /* only protocols that provide it */
    VTL_PREFER = 2,  /* rather protocols that provide it */
    VTL_AVOID = 3,   /* rather protocols that do not provide it */
    VTL_PROHIBIT = 4 /* only protocols that do not provide it */
};

/*
 * What an application asks for. Begin with VTL_REQUIREMENTS, which asks for nothing. Preferences
 * are of enum vtl_preference. Of the protocols that both hosts have, the one is taken that
 * provides all that is required and nothing that is prohibited, and of those the one with most of
 * what is preferred and then least of what is to be avoided.
 */
struct vtl_requirements {
    uint32_t size;              /* sizeof(struct vtl_requirements) */
    int32_t reliability;        /* nothing lost, damaged or duplicated */
    int32_t order;              /* delivered in the order of sending */
    int32_t flow_control;       /* the receiver is not overrun */
    int32_t congestion_control; /* the network is not overrun */
    int32_t multipath;          /* over several paths at once */
    int32_t encryption;         /* confidential and authentic */
    int32_t partial_order;      /* ordered as far as messages depend on each other */
    double max_loss;            /* packets that may be missing of those that the initiator sends,
                                 * percent, up to 100; 0: no limit is named. Excludes reliability
                                 * at VTL_REQUIRE */
    double min_throughput;      /* Mbit/s of payload; 0: do not care */
    uint32_t max_delay;         /* from the sending call to the receiver, ms; 0: do not care */
    uint32_t reserved;          /* 0 */
};
/* clang-format off */
#define VTL_REQUIREMENTS {sizeof(struct vtl_requirements), 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0}
/* clang-format on */

/* Services, as bits of vtl_info.services. */
enum {
    VTL_SERVICE_RELIABLE = 1,
    VTL_SERVICE_ORDERED = 2,
    VTL_SERVICE_FLOW_CONTROL = 4,
    VTL_SERVICE_CONGESTION_CONTROL = 8,
    VTL_SERVICE_PARTIAL_RELIABILITY = 16,
    VTL_SERVICE_PARTIAL_ORDER = 32,
    VTL_SERVICE_MULTIPATH = 256,
    VTL_SERVICE_ENCRYPTION = 512
};

/* What was negotiated. */
struct vtl_info {
    uint32_t size;        /* sizeof(struct vtl_info), set by the caller */
    uint32_t services;    /* what the protocol provides */
    uint32_t gid;         /* the protocol's number */
    uint32_t max_message; /* the longest message, bytes: 64 << 20 where the protocol provides
                           * reliability and order, unless the peer's host is too old; else
                           * max_packet */
    char graft[32];       /* the protocol's name */
    char peer[48];        /* the other host's address */
    uint32_t max_packet;  /* what one packet carries at most, bytes; becomes less if the path takes
                           * smaller packets from some time on */
    uint32_t reserved;    /* 0 */
};

/* What is counted of a session, since it began unless said otherwise. Packets carry up to
 * vtl_info.max_packet bytes. */
struct vtl_stats {
    uint32_t size; /* sizeof(struct vtl_stats), set by the caller */
    uint32_t reserved;
    double rtt;              /* smoothed round-trip time, ms */
    double min_rtt;          /* the shortest of the last 10 s, ms */
    double rate;             /* at which payload arrives, the highest of late, Mbit/s */
    double loss;             /* transmissions lost on their way of late, percent */
    uint64_t window;         /* packets that may be under way */
    uint64_t sent;           /* packets, repetitions included */
    uint64_t retransmitted;  /* packets sent again */
    uint64_t lost;           /* transmissions that have not arrived */
    uint64_t delivered;      /* packets that have arrived at the peer */
    uint64_t unacknowledged; /* packets that it has not acknowledged yet */
    uint64_t received;       /* different packets */
    uint64_t duplicates;     /* packets that came again */
    uint64_t timeouts;       /* probe timeouts in a row; 0 once something comes */
};

/* The stateless switches of a socket so far, whichever side has asked for them. What this side has
 * given up in them, at most: of what was under way at that moment, the peer may have got some. */
struct vtl_switches {
    uint32_t size; /* sizeof(struct vtl_switches), set by the caller */
    uint32_t reserved;
    uint64_t count;    /* switches */
    uint64_t packets;  /* packets sent, or to be sent, that were not acknowledged */
    uint64_t messages; /* messages that end in them; a packet of a byte stream counts as one */
    uint64_t bytes;    /* bytes of their payload */
};

/*
 * Makes a socket and stores its handle in *sock; on failure stores NULL. Needs the daemon, sends
 * nothing.
 *
 *   VTL_INITIATOR: `dst` is the peer, "address:port"; an IPv6 address stands in brackets. `src` is
 *     NULL: the address of the route to the peer is used.
 *   VTL_RESPONDER, VTL_LISTENER: `src` is ":port", on all addresses of this host; `dst` is NULL.
 *
 * Ports are VTL's own, 1 to 65534.
 *
 * -ECONNREFUSED: no daemon answers. -ETIMEDOUT: it hangs. -EACCES: this user may not use it.
 * -EADDRINUSE: the port is taken.
 */
int vtl_init(enum vtl_mode mode, const char *src, const char *dst, vtl_socket **sock);

/*
 * Asks the peer for a session that meets the requirements; NULL asks for reliability, order and
 * congestion control at VTL_REQUIRE. Returns the number of the agreed protocol, more than 0.
 *
 * With a peer met before it does not wait for the answer: data may be sent at once, and if the peer
 * then refuses, or does not answer for nine seconds, the session ends with an error.
 *
 * In a session, either side may call it to have the requirements changed: another session succeeds
 * the one that there is. Data sent after that go by it; each side first reads what came by the one
 * before, of which the last packets may get lost, or be read later, if its protocol may lose some.
 * The peer goes over when it next sends or receives; what it required itself stays. The session
 * before is looked after by whatever is called next, so who has asked should not fall silent at
 * once. If it fails, the session stays as it is. vtl_get_info() says what has become of
 * max_message.
 *
 * If it fails with -EAGAIN or -ETIMEDOUT the negotiation goes on: call again, the requirements of
 * the first call count. After any other error it may be called again for another attempt.
 *
 * -EINVAL: the requirements contradict each other, vtl_last_error() names the pair; or a message
 * was begun and not sent whole; or the last eight changes are not finished, because something of
 * the sessions before was not read or not acknowledged.
 * -ECONNREFUSED: no protocol of both hosts meets the requirements, or nobody waits at the port, or
 * the peer has not answered for nine seconds, or changes the session itself; vtl_last_error() says
 * which.
 */
int vtl_negotiate(vtl_socket *sock, const struct vtl_requirements *requirements);

/*
 * With `stateless` not 0, changes that vtl_negotiate() requests in a session are stateless from now
 * on; at first they are not. Then the session before ends at once, in both directions. What either
 * side had sent in it, and the peer had not acknowledged, is given up and counted: see
 * vtl_get_switches(). What had arrived is still read, in order; nothing arrives twice, and no
 * message in part. A message that was begun goes by the new session, from its beginning. If
 * vtl_recv_part() or vtl_recv_data() has fetched a part of a message of which the rest was given
 * up, the next call says -ECONNABORTED, once.
 *
 * vtl_negotiate() refuses that with -ECONNREFUSED unless the protocol may lose packets, or the
 * session was opened with a max_loss, and neither side has required reliability. What is given up
 * comes on top of max_loss. If the peer's host is too old, nothing is given up, as without.
 */
int vtl_set_stateless(vtl_socket *sock, int stateless);

/*
 * Waits until a peer opens a session with this responder. Returns the number of the agreed
 * protocol, more than 0; vtl_get_info() has more. -EAGAIN, -ETIMEDOUT: none yet, call again.
 */
int vtl_validate(vtl_socket *sock);

/*
 * Waits until a peer opens a session with this listener, and stores a socket for it in *session; on
 * failure stores NULL. Sessions outlive their listener. -EAGAIN, -ETIMEDOUT: none yet, call again.
 */
int vtl_accept(vtl_socket *listener, vtl_socket **session);

/*
 * Hands over bytes for sending. Returns how many were taken: at least one and perhaps fewer than
 * `size`, 0 if that is 0. They are on their way, not yet delivered: vtl_close() waits for that.
 * Without a session, negotiates or validates one first, as vtl_negotiate(sock, NULL) does.
 *
 * -EAGAIN, -ETIMEDOUT: there was no room; nothing was taken. -EPIPE: the peer has closed the
 * session. -ECONNABORTED: the session broke, what was sent last may not have arrived. -EBADMSG: as
 * vtl_recv_data() has said.
 */
ssize_t vtl_send_data(vtl_socket *sock, const void *buffer, size_t size);

/*
 * Fetches bytes that have arrived, up to `size`. Returns how many; 0 means that the peer has closed
 * the session and everything that it sent was read, or that `size` is 0. Without a session, as
 * vtl_send_data().
 *
 * -EAGAIN, -ETIMEDOUT: nothing has arrived. -ECONNABORTED: the session broke. -EBADMSG: somebody on
 * the path has changed a packet of an encrypted session that loses none. Nothing behind that is
 * read, and the session is of no more use.
 */
ssize_t vtl_recv_data(vtl_socket *sock, void *buffer, size_t size);

/*
 * Sends a message of 1 to vtl_info.max_message bytes, which arrives as one or not at all. With
 * protocols that do not keep the order, or may lose packets, it is one packet. Otherwise as
 * vtl_send_data(), but returns 0. -EMSGSIZE: empty or too long.
 *
 * -EAGAIN, -ETIMEDOUT: there was not room for all of it. A message of up to max_packet bytes has
 * not been begun then. Of a longer one part may be under way: call again with the same message,
 * which goes on where it stopped (the library keeps no copy, and knows the message again by its
 * length and by the first and the last 32 KiB of what has gone). Until it has gone whole,
 * everything else that is to be sent is refused with -EINVAL, and vtl_close() fails with -EINVAL
 * and ends the session; the peer learns that something is missing.
 */
int vtl_send_message(vtl_socket *sock, const void *message, size_t size);

/*
 * As vtl_send_message(), in a lane of the application's choice. Where the protocol provides partial
 * order only, messages of a lane arrive in order, and no lane waits for another one; the receiver
 * is not told which lane it was. Everything sent in other ways is in lane 0. Where the order is
 * full, or none, lanes change nothing.
 */
int vtl_send_in_lane(vtl_socket *sock, uint32_t lane, const void *message, size_t size);

/*
 * Fetches the next message, once it is here as a whole. Otherwise as vtl_recv_data(); what that
 * has left of a message counts as one.
 *
 * -EAGAIN, -ETIMEDOUT: it is not whole yet. What has come is kept in the library's memory, up to
 * `size` bytes, for the next call, with whatever buffer. -ENOBUFS: it is longer than `size`, and is
 * still there: call again with a larger buffer, or take it with vtl_recv_part(). -ENOMEM: there is
 * no memory to keep it; it is still there. -ECONNABORTED: the session broke, or the peer closed it
 * in the middle of the message.
 */
ssize_t vtl_recv_message(vtl_socket *sock, void *buffer, size_t size);

/*
 * Fetches what has arrived of a message, up to `size` bytes, and stores in *more whether the
 * message goes on behind them (1) or ends there (0): for messages that nobody wants to hold as a
 * whole. 0 means that the peer has closed the session, or that `size` is 0. Otherwise as
 * vtl_recv_data(). -ECONNABORTED: as in vtl_recv_message(): what came of the last message is not
 * all of it.
 */
ssize_t vtl_recv_part(vtl_socket *sock, void *buffer, size_t size, int *more);

/*
 * Waits until the peer has everything, ends the session, and gives the socket back. A listener, or
 * a socket without session, is just given back.
 *
 * -EAGAIN, -ETIMEDOUT: the peer does not have everything yet; the socket is still open, so call
 * again, or vtl_abort(). There is no wake-up for that. After any other error the socket is gone.
 * -EPIPE: the peer closed the session first. -ECONNABORTED: the session broke. -EBADMSG: as
 * vtl_recv_data() has said. -EINVAL: a message was begun and has not gone whole; the peer learns
 * that.
 */
int vtl_close(vtl_socket *sock);

/* Ends the session at once, and gives the socket back; the peer learns that data may be missing. */
int vtl_abort(vtl_socket *sock);

/*
 * How long calls on this socket may wait, in ms: negative, for ever; 0, not at all. Without waiting
 * they fail with -EAGAIN, after the time with -ETIMEDOUT; either leaves everything as it was, but
 * for messages of several packets: see vtl_send_message() and vtl_recv_message(). A
 * session's socket begins with the timeout of its listener.
 */
int vtl_set_timeout(vtl_socket *sock, int milliseconds);

/*
 * A descriptor to wait with (poll, epoll, ...). It becomes readable (POLLIN) when what a call has
 * last refused with -EAGAIN may succeed, in any direction: so after it was readable, try all that
 * was refused until each says -EAGAIN again, and only then wait. Who has lost interest in one of
 * them says so by sending, or receiving, 0 bytes: else it may stay readable. The same one as long
 * as the socket is open. It belongs to the socket: do not read from it, and do not close it.
 */
int vtl_fd(const vtl_socket *sock);

/* What was negotiated. Set info->size first. -ENOTCONN: there is no session yet. */
int vtl_get_info(const vtl_socket *sock, struct vtl_info *info);

/* Counters and estimates. Set stats->size first. Asks the daemon: about 0.1 ms. -ENOTCONN: there
 * is no session yet. -ETIMEDOUT: the daemon hangs. */
int vtl_get_stats(const vtl_socket *sock, struct vtl_stats *stats);

/* The stateless switches so far: see vtl_set_stateless(). Set switches->size first. */
int vtl_get_switches(const vtl_socket *sock, struct vtl_switches *switches);

/* What went wrong in this thread's last call that failed: one sentence, or "". Never NULL; valid
 * until this thread's next call that fails. */
const char *vtl_last_error(void);

/* What a result means, in general. Never NULL; valid for ever. */
const char *vtl_strerror(int result);

/* The library's version, such as "0.1.0". */
const char *vtl_version(void);

#ifdef __cplusplus
}
#endif
#endif
