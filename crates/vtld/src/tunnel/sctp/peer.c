/* The other end of a tunnel by usrsctp: returns what it gets in flows, or opens flows and says what
 * became of them. It speaks what PROTOCOL.md says under "Tunnels", and shares no code with VTL.
 *
 *   peer echo LOCAL UDP SCTP TOKEN
 *   peer open LOCAL UDP SCTP TOKEN PEER UDP SCTP FLOWS BYTES
 */
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <usrsctp.h>

enum { DATA, END, CREDIT, RESET, DONE, TOKEN = 16, PING, PONG };

#define FLOWS 64
#define FIRST_CREDIT (256 << 10)
/* More than fits into a packet: these are fragmented. */
#define MESSAGE 3000

/* One flow, at this side. */
struct flow {
    /* What is still to be sent, or came and is to be returned. */
    unsigned char *queue;
    size_t head, tail, room;
    uint64_t credit;
    uint64_t sent, received;
    uint64_t sent_hash, received_hash;
    int used, end_came, end_sent, done_sent, done_came;
};

static struct flow flows[FLOWS + 1];
static struct socket *sock;
static int shown;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static uint64_t fnv(uint64_t hash, const unsigned char *bytes, size_t len) {
    for (size_t i = 0; i < len; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3;
    return hash;
}

static void say(uint16_t stream, const void *message, size_t len) {
    struct sctp_sndinfo info = {.snd_sid = stream, .snd_ppid = htonl(53)};

    if (usrsctp_sendv(sock, message, len, NULL, 0, &info, sizeof(info), SCTP_SENDV_SNDINFO, 0) < 0)
        fail("send");
}

static void say_number(uint16_t stream, unsigned char kind, uint64_t number, int bytes) {
    unsigned char message[9] = {kind};

    for (int i = 0; i < bytes; i++)
        message[1 + i] = number >> 8 * (bytes - 1 - i);
    say(stream, message, 1 + bytes);
}

static uint64_t number(const unsigned char *bytes, size_t len) {
    uint64_t n = 0;

    while (len--)
        n = n << 8 | *bytes++;
    return n;
}

static void use(struct flow *flow) {
    flow->used = 1;
    flow->credit = FIRST_CREDIT;
    flow->sent_hash = flow->received_hash = 0xcbf29ce484222325;
}

static void queue(struct flow *flow, const unsigned char *bytes, size_t len) {
    if (flow->head == flow->tail)
        flow->head = flow->tail = 0;
    if (flow->tail + len > flow->room) {
        flow->room = 2 * (flow->tail + len);
        flow->queue = realloc(flow->queue, flow->room);
        if (!flow->queue)
            fail("memory");
    }
    memcpy(flow->queue + flow->tail, bytes, len);
    flow->tail += len;
}

/* Sends as much as the flow's credit allows. `all`: nothing else will be queued. */
static void push(uint16_t stream, int all) {
    struct flow *flow = &flows[stream];
    unsigned char message[MESSAGE] = {DATA};

    while (flow->credit && flow->head < flow->tail) {
        size_t len = flow->tail - flow->head;

        if (len > MESSAGE - 1)
            len = MESSAGE - 1;
        if (len > flow->credit)
            len = flow->credit;
        memcpy(message + 1, flow->queue + flow->head, len);
        say(stream, message, 1 + len);
        flow->sent_hash = fnv(flow->sent_hash, message + 1, len);
        flow->sent += len;
        flow->head += len;
        flow->credit -= len;
    }
    if (all && flow->head == flow->tail && !flow->end_sent) {
        flow->end_sent = 1;
        say_number(stream, END, 0, 0);
    }
    if (flow->end_sent && flow->end_came && !flow->done_sent) {
        flow->done_sent = 1;
        say_number(stream, DONE, 0, 0);
    }
}

static void control(const unsigned char *message, size_t len, uint64_t token) {
    if (len != 9)
        exit(2);
    if (message[0] == TOKEN) {
        if (number(message + 1, 8) != token)
            exit(3);
        shown = 1;
    } else if (message[0] == PING) {
        say_number(0, PONG, number(message + 1, 8), 8);
    }
}

static void handle(uint16_t stream, const unsigned char *message, size_t len, int echo) {
    struct flow *flow = &flows[stream];

    if (stream > FLOWS || !len)
        exit(4);
    if (!flow->used)
        use(flow);
    if (echo && (flow->done_sent & flow->done_came)) {
        /* The stream carries another flow. */
        free(flow->queue);
        memset(flow, 0, sizeof(*flow));
        use(flow);
    }
    switch (message[0]) {
    case DATA:
        flow->received += len - 1;
        flow->received_hash = fnv(flow->received_hash, message + 1, len - 1);
        if (echo)
            queue(flow, message + 1, len - 1);
        say_number(stream, CREDIT, len - 1, 4);
        break;
    case END:
        flow->end_came = 1;
        break;
    case CREDIT:
        flow->credit += number(message + 1, 4);
        break;
    case DONE:
        flow->done_came = 1;
        break;
    default:
        exit(5);
    }
    push(stream, !echo || flow->end_came);
}

static int flows_left(int count) {
    int left = 0;

    for (int i = 1; i <= count; i++)
        left += !flows[i].done_sent || !flows[i].done_came;
    return left;
}

/* Until the association ends, or `count` flows are over. */
static void serve(uint64_t token, int count) {
    static unsigned char message[64 << 10];

    while (!count || flows_left(count)) {
        struct sctp_rcvinfo info;
        socklen_t info_len = sizeof(info), from_len = 0;
        unsigned int info_type = 0;
        int flags = 0;
        ssize_t len = usrsctp_recvv(sock, message, sizeof(message), NULL, &from_len, &info,
                                    &info_len, &info_type, &flags);

        if (len <= 0)
            break;
        if (flags & MSG_NOTIFICATION)
            continue;
        if (!(flags & MSG_EOR) || info_type != SCTP_RECVV_RCVINFO)
            exit(6);
        if (info.rcv_sid == 0)
            control(message, len, token);
        else
            handle(info.rcv_sid, message, len, !count);
    }
}

static socklen_t address(struct sockaddr_storage *to, const char *ip, uint16_t port) {
    struct sockaddr_in *v4 = (void *)to;
    struct sockaddr_in6 *v6 = (void *)to;

    memset(to, 0, sizeof(*to));
    if (inet_pton(AF_INET, ip, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        return sizeof(*v4);
    }
    if (inet_pton(AF_INET6, ip, &v6->sin6_addr) != 1)
        fail(ip);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    return sizeof(*v6);
}

static void open_flows(int count, size_t bytes) {
    unsigned char *payload = malloc(bytes);
    uint64_t state = 88172645463325252;

    if (!payload)
        fail("memory");
    for (int i = 1; i <= count; i++) {
        for (size_t j = 0; j < bytes; j++) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            payload[j] = state;
        }
        use(&flows[i]);
        queue(&flows[i], payload, bytes);
    }
    free(payload);
    for (int i = 1; i <= count; i++)
        push(i, 1);
}

int main(int argc, char **argv) {
    int opens = argc == 11 && !strcmp(argv[1], "open");
    struct sockaddr_storage local, peer;
    struct sctp_udpencaps encaps = {0};
    const int on = 1, buffer = 8 << 20;
    int count = 0;

    if (!opens && (argc != 6 || strcmp(argv[1], "echo")))
        return 64;

    uint64_t token = strtoull(argv[5], NULL, 16);
    socklen_t len = address(&local, argv[2], atoi(argv[4]));

    usrsctp_init(atoi(argv[3]), NULL, NULL);
    usrsctp_sysctl_set_sctp_blackhole(2);
    sock = usrsctp_socket(local.ss_family, SOCK_STREAM, IPPROTO_SCTP, NULL, NULL, 0, NULL);
    if (!sock)
        fail("socket");
    usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_RECVRCVINFO, &on, sizeof(on));
    usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_NODELAY, &on, sizeof(on));
    usrsctp_setsockopt(sock, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof(buffer));
    usrsctp_setsockopt(sock, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer));
    if (usrsctp_bind(sock, (struct sockaddr *)&local, len) < 0)
        fail("bind");
    if (opens) {
        struct sctp_initmsg init = {.sinit_num_ostreams = FLOWS + 1,
                                    .sinit_max_instreams = FLOWS + 1};

        count = atoi(argv[9]);
        len = address(&peer, argv[6], atoi(argv[8]));
        encaps.sue_address.ss_family = local.ss_family;
        encaps.sue_port = htons(atoi(argv[7]));
        if (usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_REMOTE_UDP_ENCAPS_PORT, &encaps,
                               sizeof(encaps)) < 0)
            fail("encapsulation");
        usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_INITMSG, &init, sizeof(init));
        if (usrsctp_connect(sock, (struct sockaddr *)&peer, len) < 0)
            fail("connect");
        say_number(0, TOKEN, token, 8);
        open_flows(count, atoll(argv[10]));
    } else {
        struct socket *listener = sock;
        socklen_t peer_len = sizeof(peer);

        if (usrsctp_listen(listener, 1) < 0)
            fail("listen");
        printf("ready\n");
        fflush(stdout);
        sock = usrsctp_accept(listener, (struct sockaddr *)&peer, &peer_len);
        if (!sock)
            fail("accept");
        usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_RECVRCVINFO, &on, sizeof(on));
    }
    serve(token, count);
    for (int i = 1; i <= FLOWS; i++) {
        struct flow *flow = &flows[i];

        if (flow->used)
            printf("%d %" PRIu64 " %016" PRIx64 " %" PRIu64 " %016" PRIx64 "\n", i, flow->sent,
                   flow->sent_hash, flow->received, flow->received_hash);
    }
    fflush(stdout);
    if (!opens && !shown)
        return 7;
    /* usrsctp's threads need not end in order, but the other side shall know. */
    usrsctp_close(sock);
    usleep(300000);
    _exit(count ? !!flows_left(count) : 0);
}
