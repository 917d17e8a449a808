/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The streaming server of the thesis, chapter 3: sends a text, an image or a video to a client that
 * waits for it, and asks for the services that suit it, never for a protocol. As in the thesis, the
 * sender negotiates.
 *
 *     stream_server FILE ADDRESS:PORT
 *
 *     cc -o stream_server stream_server.c $(pkg-config --cflags --libs vtl)
 */
#define _GNU_SOURCE
#include <err.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include <vtl.h>

#include "stream.h"

/* A kind of file, by the end of its name. */
static const struct kind {
    const char *name, *ends;
    enum vtl_preference reliability, order;
    double max_loss;    /* percent */
    uint32_t max_delay; /* ms */
} kinds[] = {
    /* Every letter counts. */
    {"text", ".txt .md .html .json ", VTL_REQUIRE, VTL_REQUIRE, 0, 0},
    /* Every pixel counts, but they may come in any order. */
    {"image", ".png .jpg .jpeg .gif ", VTL_REQUIRE, VTL_AVOID, 0, 0},
    /* Nobody misses one picture out of twenty, but everybody a picture that comes too late. */
    {"video", ".mp4 .mkv .avi .webm ", VTL_NO_PREFERENCE, VTL_NO_PREFERENCE, 5, 200},
};

static const struct kind *kind_of(const char *path) {
    const char *end = strrchr(path, '.');
    char word[16];
    if (end && strlen(end) < sizeof word - 1) {
        snprintf(word, sizeof word, "%s ", end);
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
            if (strcasestr(kinds[i].ends, word))
                return &kinds[i];
    }
    return &kinds[0];
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s FILE ADDRESS:PORT\n", argv[0]);
        return 2;
    }
    FILE *file = fopen(argv[1], "rb");
    if (!file || fseek(file, 0, SEEK_END) != 0)
        err(1, "%s", argv[1]);
    uint64_t size = (uint64_t)ftell(file);
    rewind(file);

    const struct kind *kind = kind_of(argv[1]);
    struct vtl_requirements want = VTL_REQUIREMENTS;
    want.reliability = kind->reliability;
    want.order = kind->order;
    want.congestion_control = VTL_PREFER;
    want.max_loss = kind->max_loss;
    want.max_delay = kind->max_delay;

    vtl_socket *sock;
    if (vtl_init(VTL_INITIATOR, NULL, argv[2], &sock) < 0)
        errx(1, "%s", vtl_last_error());
    struct vtl_info info = {.size = sizeof info};
    if (vtl_negotiate(sock, &want) < 0 || vtl_get_info(sock, &info) < 0)
        errx(1, "%s", vtl_last_error());
    printf("%s as %s over %s\n", argv[1], kind->name, info.graft);

    struct piece *piece = malloc(info.max_packet);
    if (!piece)
        err(1, NULL);
    put64(piece->size, size);
    for (uint64_t offset = 0; offset < size;) {
        size_t n = fread(piece->data, 1, info.max_packet - sizeof *piece, file);
        if (n == 0)
            errx(1, "%s has become shorter", argv[1]);
        put64(piece->offset, offset);
        if (vtl_send_message(sock, piece, sizeof *piece + n) < 0)
            errx(1, "%s", vtl_last_error());
        offset += n;
    }
    struct vtl_stats stats = {.size = sizeof stats};
    if (vtl_get_stats(sock, &stats) == 0)
        printf("rtt %.1f ms, lost on the way %.1f %%\n", stats.rtt, stats.loss);
    /* Waits until it is delivered, as far as the protocol delivers. */
    if (vtl_close(sock) < 0)
        errx(1, "%s", vtl_last_error());
    free(piece);
    fclose(file);
    return 0;
}
