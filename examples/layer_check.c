/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A layer of a stack that finds damaged packets: a checksum (Fletcher's) in front of each. Where
 * packets are sealed there are none, so it is an example and no more.
 *
 *     cc -shared -fPIC -O2 -Iinclude -o /usr/lib/vtl/layers/check.so examples/layer_check.c
 *
 * and in /etc/vtl/stacks.toml, at both hosts the object:
 *
 *     [[stack]]
 *     name = "checked"
 *     layers = ["flow-control", "ordering", "nack", "check?seed=7"]
 *     rate = 20
 */
#include <stdlib.h>
#include <string.h>

#include "vtl-layer.h"

#define HEADER 4
#define LONGEST 2048

struct check {
    uint32_t seed;
    uint8_t packet[LONGEST];
};

static uint32_t sum(const struct check *check, const uint8_t *bytes, size_t len) {
    uint32_t a = 1 + check->seed, b = 0;

    for (size_t i = 0; i < len; i++) {
        a = (a + bytes[i]) % 65521;
        b = (b + a) % 65521;
    }
    return b << 16 | a;
}

static void *create(const char *params) {
    struct check *check = calloc(1, sizeof(*check));

    if (check && strncmp(params, "seed=", 5) == 0)
        check->seed = (uint32_t)strtoul(params + 5, NULL, 10) % 65521;
    else if (check && *params) {
        free(check);
        return NULL;
    }
    return check;
}

static void send_packet(void *state, uint64_t now, const uint8_t *packet, size_t len,
                        const struct vtl_layer_out *out) {
    struct check *check = state;
    uint32_t value = sum(check, packet, len);

    (void)now;
    if (len > LONGEST - HEADER)
        return;
    memcpy(check->packet, &value, HEADER);
    memcpy(check->packet + HEADER, packet, len);
    out->down(out->context, check->packet, HEADER + len);
}

static void receive(void *state, uint64_t now, const uint8_t *packet, size_t len,
                    const struct vtl_layer_out *out) {
    uint32_t value;

    (void)now;
    if (len >= HEADER) {
        memcpy(&value, packet, HEADER);
        if (value == sum(state, packet + HEADER, len - HEADER)) {
            out->up(out->context, packet + HEADER, len - HEADER);
            return;
        }
    }
    out->refuse(out->context);
}

static const struct vtl_layer layer = {
    .abi = VTL_LAYER_ABI,
    .header = HEADER,
    .create = create,
    .destroy = free,
    .send = send_packet,
    .receive = receive,
};

const struct vtl_layer *vtl_layer(void) {
    return &layer;
}
