/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Decodes test vectors with the C structs of wire.h. Each line of standard input is a packet in
 * hexadecimal, each line of output what it means, in the notation of vectors/packets.txt.
 * vectors.rs compiles and runs this, and passes MIN_PAYLOAD, which the kernel does not need.
 */
#include <endian.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "vtl/wire.h"

enum { MAX_BYTES = 4096 };

static void print_hex(const char *name, const __u8 *bytes, size_t len) {
    printf("%s%s", name, len ? "" : "-");
    for (size_t i = 0; i < len; i++)
        printf("%02x", bytes[i]);
}

static void print_header(const char *type, const struct vtl_hdr *h) {
    printf("%s flags=%u gid=%u sid=%" PRIu32 " token=%" PRIu64, type, h->flags, be16toh(h->gid),
           be32toh(h->sid), (uint64_t)be64toh(h->token));
}

static uint32_t checksum(const __u8 *packet, size_t len) {
    __u8 copy[MAX_BYTES + 8] = {0};
    memcpy(copy, packet, len);
    memset(copy + __builtin_offsetof(struct vtl_hdr, csum), 0, sizeof(__le32));
    uint64_t sum = 0;
    for (size_t i = 0; i < len; i += 8) {
        uint64_t word;
        memcpy(&word, copy + i, 8);
        sum += le64toh(word);
    }
    sum = (sum & 0xffffffff) + (sum >> 32);
    sum = (sum & 0xffffffff) + (sum >> 32);
    return ~(uint32_t)sum;
}

static size_t header_size(unsigned type) {
    switch (type) {
    case VTL_DATA:
    case VTL_PROBE:
        return sizeof(struct vtl_data_hdr);
    case VTL_ACK:
        return sizeof(struct vtl_ack_hdr);
    case VTL_NEGO:
    case VTL_NEGO_ACK:
    case VTL_NEGO_NACK:
        return sizeof(struct vtl_nego);
    case VTL_CLOSE:
    case VTL_SIZE:
        return sizeof(struct vtl_hdr);
    }
    return 0;
}

/* Bytes behind the payload. Whatever they are, the checksum counts them as zero. */
static size_t padding(unsigned type, size_t body) {
    size_t used = sizeof(struct vtl_data_hdr) + body;
    if ((type != VTL_DATA && type != VTL_PROBE) || used >= VTL_MIN_PACKET)
        return 0;
    return VTL_MIN_PACKET - used;
}

static int nego_is_valid(unsigned type, const struct vtl_nego *n) {
    if (n->grafts > VTL_NEGO_GRAFTS || n->params > VTL_NEGO_PARAMS)
        return 0;
    for (unsigned i = 0; i < n->params; i++)
        if (n->param[i].graft >= n->grafts || n->param[i].index >= VTL_NEGO_PARAMS)
            return 0;
    if (type == VTL_NEGO_NACK)
        return n->reason != VTL_NACK_NONE;
    if (type == VTL_NEGO ? n->grafts == 0 : n->grafts != 1)
        return 0;
    return n->reason == VTL_NACK_NONE && n->sid && n->ring_slots &&
           be16toh(n->max_payload) >= MIN_PAYLOAD;
}

/* Bytes of the first of `len` bytes of extensions, or 0 if it reaches behind them. */
static size_t extension_size(const __u8 *bytes, size_t len) {
    struct vtl_ext e;
    if (len < sizeof(e))
        return 0;
    memcpy(&e, bytes, sizeof(e));
    size_t value = be16toh(e.length);
    size_t size = sizeof(e) + (value + VTL_EXT_ALIGN - 1) / VTL_EXT_ALIGN * VTL_EXT_ALIGN;
    return size > len ? 0 : size;
}

static int extensions_are_whole(const __u8 *bytes, size_t len) {
    size_t size;
    for (; len; bytes += size, len -= size) {
        size = extension_size(bytes, len);
        if (!size)
            return 0;
    }
    return 1;
}

/* The class of what is wrong with a packet, or NULL. */
static const char *packet_error(const __u8 *packet, size_t len) {
    struct vtl_hdr h;
    if (len < sizeof(h))
        return "truncated";
    memcpy(&h, packet, sizeof(h));
    if (h.version_type >> 4 != VTL_VERSION)
        return "version";
    unsigned type = h.version_type & 15;
    size_t size = header_size(type);
    if (!size)
        return "type";
    if (len < size)
        return "truncated";
    size_t body = be16toh(h.len);
    if (size + body + padding(type, body) != len)
        return "length";
    if (type == VTL_ACK) {
        struct vtl_ack_hdr a;
        memcpy(&a, packet, sizeof(a));
        if (body > VTL_ACK_MAX_BITMAP || body % 8 ||
            be32toh(a.skip) > VTL_MAX_WINDOW / 64 - body / 8)
            return "bitmap";
    } else if (type == VTL_SIZE) {
        if (size + body > sizeof(struct vtl_data_hdr) + VTL_MAX_PAYLOAD)
            return "payload";
    } else if (type == VTL_NEGO || type == VTL_NEGO_ACK || type == VTL_NEGO_NACK) {
        struct vtl_nego n;
        if (len > VTL_NEGO_MAX)
            return "payload";
        if (!extensions_are_whole(packet + size, body))
            return "extension";
        memcpy(&n, packet, sizeof(n));
        if (!nego_is_valid(type, &n))
            return "field";
    } else if (type == VTL_DATA ? body == 0 || body > VTL_MAX_PAYLOAD : body != 0) {
        return "payload";
    }
    if (checksum(packet, size + body) != le32toh(h.csum))
        return "checksum";
    return NULL;
}

static void print_data(const char *type, const __u8 *packet) {
    struct vtl_data_hdr d;
    memcpy(&d, packet, sizeof(d));
    print_header(type, &d.h);
    printf(" seq=%" PRIu64 " xid=%" PRIu32 " ts=%" PRIu32, (uint64_t)be64toh(d.seq), be32toh(d.xid),
           be32toh(d.ts));
    print_hex(" payload=", packet + sizeof(d), be16toh(d.h.len));
}

static void print_ack(const __u8 *packet, size_t len) {
    struct vtl_ack_hdr a;
    memcpy(&a, packet, sizeof(a));
    print_header("ack", &a.h);
    printf(" cum=%" PRIu64 " limit=%" PRIu64 " received=%" PRIu64 " echo_seq=%" PRIu64,
           (uint64_t)be64toh(a.cum), (uint64_t)be64toh(a.limit), (uint64_t)be64toh(a.received),
           (uint64_t)be64toh(a.echo_seq));
    printf(" echo_xid=%" PRIu32 " echo_ts=%" PRIu32 " dups=%" PRIu32 " skip=%" PRIu32,
           be32toh(a.echo_xid), be32toh(a.echo_ts), be32toh(a.dups), be32toh(a.skip));
    print_hex(" bitmap=", packet + sizeof(a), len - sizeof(a));
}

static void print_nego(const char *type, const __u8 *packet) {
    struct vtl_nego n;
    memcpy(&n, packet, sizeof(n));
    print_header(type, &n.h);
    printf(" own_token=%" PRIu64 " peer_token=%" PRIu64 " own_sid=%" PRIu32 " ring_slots=%" PRIu32,
           (uint64_t)be64toh(n.token), (uint64_t)be64toh(n.peer_token), be32toh(n.sid),
           be32toh(n.ring_slots));
    printf(" max_payload=%u port=%u services=%u reason=%u gids=%s", be16toh(n.max_payload),
           be16toh(n.port), be16toh(n.services), n.reason, n.grafts ? "" : "-");
    for (unsigned i = 0; i < n.grafts; i++)
        printf("%s%u", i ? "," : "", be16toh(n.gids[i]));
    printf(" ticket=%" PRIu64 "/%" PRIu64 "/%" PRIu32 " params=%s",
           (uint64_t)be64toh(n.ticket_time), (uint64_t)be64toh(n.ticket_mac), be32toh(n.ticket_sid),
           n.params ? "" : "-");
    for (unsigned i = 0; i < n.params; i++)
        printf("%s%u.%u=%" PRIu32, i ? "," : "", n.param[i].graft, n.param[i].index,
               be32toh(n.param[i].value));
    const __u8 *at = packet + sizeof(n);
    size_t left = be16toh(n.h.len);
    for (size_t size; left; at += size, left -= size) {
        struct vtl_ext e;
        size = extension_size(at, left);
        memcpy(&e, at, sizeof(e));
        unsigned type = be16toh(e.type);
        printf(" extension=%u%s", type & ~(unsigned)VTL_EXT_CRITICAL,
               type & VTL_EXT_CRITICAL ? "!" : "");
        print_hex(":", at + sizeof(e), be16toh(e.length));
    }
}

static void print_packet(const __u8 *packet, size_t len) {
    const char *error = packet_error(packet, len);
    if (error) {
        printf("error %s", error);
        return;
    }
    struct vtl_hdr h;
    memcpy(&h, packet, sizeof(h));
    switch (h.version_type & 15) {
    case VTL_DATA:
        print_data("data", packet);
        break;
    case VTL_PROBE:
        print_data("probe", packet);
        break;
    case VTL_ACK:
        print_ack(packet, len);
        break;
    case VTL_NEGO:
        print_nego("nego", packet);
        break;
    case VTL_NEGO_ACK:
        print_nego("nego_ack", packet);
        break;
    case VTL_NEGO_NACK:
        print_nego("nego_nack", packet);
        break;
    case VTL_CLOSE:
        print_header("close", &h);
        break;
    case VTL_SIZE:
        print_header("size", &h);
        printf(" zeros=%u answers=%u", be16toh(h.len), be16toh(h.aux));
        break;
    }
}

int main(int argc, char **argv) {
    static char line[2 * MAX_BYTES + 2];
    static __u8 bytes[MAX_BYTES];
    if (argc != 1) {
        fprintf(stderr, "usage: %s\n", argv[0]);
        return 2;
    }
    while (fgets(line, sizeof(line), stdin)) {
        size_t len = 0;
        unsigned byte;
        while (len < MAX_BYTES && sscanf(line + 2 * len, "%2x", &byte) == 1)
            bytes[len++] = (__u8)byte;
        print_packet(bytes, len);
        putchar('\n');
    }
    return 0;
}
