/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * What the streaming server and its client say to each other: each message is a piece of the file
 * that says where it belongs, so that it is of use whatever became of the others.
 */
#ifndef STREAM_H
#define STREAM_H

#include <stdint.h>
#include <stdlib.h>

struct piece {
    uint8_t offset[8]; /* of the data in the file, big-endian, as is */
    uint8_t size[8];   /* the file's */
    uint8_t data[];
};

static inline void put64(uint8_t to[8], uint64_t value) {
    for (int i = 7; i >= 0; i--, value >>= 8)
        to[i] = (uint8_t)value;
}

static inline uint64_t get64(const uint8_t from[8]) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value = value << 8 | from[i];
    return value;
}

#endif
