/* The other end of an association by usrsctp: returns what it gets, or sends chunks and control
 * bytes and checks that they come back. It speaks what PROTOCOL.md says under "Flows over
 * carriers", and shares no code with VTL.
 *
 *   peer echo LOCAL UDP SCTP TOKEN
 *   peer open LOCAL UDP SCTP TOKEN PEER UDP SCTP
 */
#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <usrsctp.h>

/* Streams, and types of messages on stream OWN. */
enum { OWN, CONTROL, CHUNKS, STREAMS };
enum { TOKEN = 16, PING, PONG };

/* Maximum size of VTL's messages, and a frame's header: number, length, type, flags, offset. */
#define MESSAGE 1168
#define HEADER 16
#define CHUNK 1
#define OPENER 1

/* Sent when this side opens: BYTES of each flow, and as many control bytes (index 0). */
#define FLOWS 4
#define BYTES 500000
#define PING_BODY 0x0123456789abcdef

static unsigned char sent[FLOWS + 1][BYTES], is_back[FLOWS + 1][BYTES];
/* Bytes not echoed yet; control bytes echoed. */
static size_t left = sizeof(sent), control_back;
static struct socket *sock;
static int shown, ponged;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void check(int right, const char *what) {
    if (right)
        return;
    fprintf(stderr, "peer: %s\n", what);
    exit(2);
}

static uint64_t number(const unsigned char *bytes, size_t len) {
    uint64_t n = 0;

    while (len--)
        n = n << 8 | *bytes++;
    return n;
}

static void put(unsigned char *bytes, size_t len, uint64_t n) {
    for (; len--; n >>= 8)
        bytes[len] = n;
}

static void say(uint16_t stream, const void *message, size_t len) {
    struct sctp_sndinfo info = {.snd_sid = stream, .snd_ppid = htonl(53)};

    if (stream == CHUNKS)
        info.snd_flags = SCTP_UNORDERED;
    if (usrsctp_sendv(sock, message, len, NULL, 0, &info, sizeof(info), SCTP_SENDV_SNDINFO, 0) < 0)
        fail("send");
}

static void say_own(unsigned char kind, uint64_t body) {
    unsigned char message[9] = {kind};

    put(message + 1, 8, body);
    say(OWN, message, sizeof(message));
}

static void say_chunk(uint32_t flow, uint64_t offset, const unsigned char *bytes, uint16_t len) {
    unsigned char message[HEADER + UINT16_MAX];

    put(message, 4, flow);
    put(message + 4, 2, len);
    message[6] = CHUNK;
    message[7] = OPENER;
    put(message + 8, 8, offset);
    memcpy(message + HEADER, bytes, len);
    say(CHUNKS, message, HEADER + len);
}

static void own(const unsigned char *message, size_t len, uint64_t token) {
    check(len == 9, "a message of another length on stream 0");

    uint64_t body = number(message + 1, 8);

    switch (message[0]) {
    case TOKEN:
        check(token && !shown && body == token, "another token, or one too many");
        shown = 1;
        break;
    case PING:
        say_own(PONG, body);
        break;
    case PONG:
        check(body == PING_BODY, "another pong");
        ponged = 1;
        break;
    default:
        check(0, "an unknown message on stream 0");
    }
}

/* Checks the form of a message of VTL's. */
static void check_form(const struct sctp_rcvinfo *info, const unsigned char *message, size_t len) {
    check(info->rcv_sid < STREAMS, "a stream too many");
    check(len <= MESSAGE, "a message that is too long");
    check(!(info->rcv_flags & SCTP_UNORDERED) == (info->rcv_sid != CHUNKS),
          "chunks are unordered, and nothing else");
    if (info->rcv_sid == CHUNKS)
        check(len > HEADER && number(message + 4, 2) == len - HEADER && message[6] == CHUNK,
              "a message that is not one whole chunk");
}

static void check_back(uint16_t stream, const unsigned char *message, size_t len) {
    size_t flow = 0, offset = control_back;

    if (stream == CHUNKS) {
        flow = number(message, 4);
        offset = number(message + 8, 8);
        check(flow && message[7] == 0, "a flow of the other side");
        message += HEADER;
        len -= HEADER;
    } else {
        control_back += len;
    }
    check(flow <= FLOWS && offset <= BYTES && len <= BYTES - offset, "bytes that were never sent");
    check(!memcmp(sent[flow] + offset, message, len), "other bytes");
    for (size_t i = offset; i < offset + len; i++)
        check(!is_back[flow][i]++, "bytes twice");
    left -= len;
}

/* Serves until the association ends or everything is echoed. */
static void serve(uint64_t token, int opens) {
    static unsigned char message[64 << 10];

    while (!opens || left || !ponged) {
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
        check((flags & MSG_EOR) && info_type == SCTP_RECVV_RCVINFO, "half a message");
        check_form(&info, message, len);
        if (info.rcv_sid == OWN)
            own(message, len, opens ? 0 : token);
        else if (opens)
            check_back(info.rcv_sid, message, len);
        else
            say(info.rcv_sid, message, len);
    }
}

static void send_all(uint64_t token) {
    /* A full message, a fragmented one, and one that shares a packet. */
    static const size_t lens[] = {MESSAGE - HEADER, 3000, 50};
    uint64_t state = 88172645463325252;
    unsigned char *byte = sent[0];
    size_t len;

    for (size_t i = 0; i < sizeof(sent); i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        byte[i] = state;
    }
    for (size_t at = 0, turn = 0; at < BYTES; at += len, turn++) {
        len = lens[turn % 3];
        if (len > BYTES - at)
            len = BYTES - at;
        say(CONTROL, sent[0] + at, len);
        for (int flow = 1; flow <= FLOWS; flow++)
            say_chunk(flow, at, sent[flow] + at, len);
        /* Messages sent before the token wait for it at the peer. */
        if (!turn)
            say_own(TOKEN, token);
    }
    say_own(PING, PING_BODY);
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

int main(int argc, char **argv) {
    int opens = argc == 9 && !strcmp(argv[1], "open");
    struct sctp_initmsg init = {.sinit_num_ostreams = STREAMS, .sinit_max_instreams = STREAMS};
    struct sockaddr_storage local, peer;
    struct sctp_udpencaps encaps = {0};
    const int on = 1, buffer = 8 << 20;

    if (!opens && (argc != 6 || strcmp(argv[1], "echo")))
        return 64;

    uint64_t token = strtoull(argv[5], NULL, 16);
    socklen_t len = address(&local, argv[2], atoi(argv[4]));

    usrsctp_init(atoi(argv[3]), NULL, NULL);
    usrsctp_sysctl_set_sctp_blackhole(2);
    /* No call blocks: usrsctp 0.9.5 loses the wake-up of a sender that waits for room, once
     * in some 200 runs here. The default is 512 chunks. */
    usrsctp_sysctl_set_sctp_max_chunks_on_queue(1 << 20);
    sock = usrsctp_socket(local.ss_family, SOCK_STREAM, IPPROTO_SCTP, NULL, NULL, 0, NULL);
    if (!sock)
        fail("socket");
    usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_RECVRCVINFO, &on, sizeof(on));
    usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_NODELAY, &on, sizeof(on));
    usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_INITMSG, &init, sizeof(init));
    /* Room for everything. */
    usrsctp_setsockopt(sock, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof(buffer));
    usrsctp_setsockopt(sock, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer));
    if (usrsctp_bind(sock, (struct sockaddr *)&local, len) < 0)
        fail("bind");
    if (opens) {
        len = address(&peer, argv[6], atoi(argv[8]));
        encaps.sue_address.ss_family = local.ss_family;
        encaps.sue_port = htons(atoi(argv[7]));
        if (usrsctp_setsockopt(sock, IPPROTO_SCTP, SCTP_REMOTE_UDP_ENCAPS_PORT, &encaps,
                               sizeof(encaps)) < 0)
            fail("encapsulation");
        if (usrsctp_connect(sock, (struct sockaddr *)&peer, len) < 0)
            fail("connect");
        send_all(token);
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
    serve(token, opens);
    if (opens)
        check(!left && ponged, "the association ended before everything was back");
    else
        check(shown, "no token");
    /* Time to tell the peer; usrsctp's threads need not end in order. */
    usrsctp_close(sock);
    usleep(300000);
    _exit(0);
}
