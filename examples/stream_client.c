/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The streaming client of the thesis, chapter 3: waits at a VTL port for a stream_server, keeps
 * what comes, and says how much of it is missing.
 *
 *     stream_client PORT FILE
 *
 *     cc -o stream_client stream_client.c $(pkg-config --cflags --libs vtl)
 */
#include <err.h>
#include <stdio.h>

#include <vtl.h>

#include "stream.h"

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s PORT FILE\n", argv[0]);
        return 2;
    }
    char port[16];
    snprintf(port, sizeof port, ":%s", argv[1]);
    vtl_socket *sock;
    if (vtl_init(VTL_RESPONDER, port, NULL, &sock) < 0)
        errx(1, "%s", vtl_last_error());
    puts("ready");
    fflush(stdout);
    struct vtl_info info = {.size = sizeof info};
    if (vtl_validate(sock) < 0 || vtl_get_info(sock, &info) < 0)
        errx(1, "%s", vtl_last_error());
    printf("from %s over %s\n", info.peer, info.graft);

    FILE *file = fopen(argv[2], "wb");
    if (!file)
        err(1, "%s", argv[2]);
    union {
        struct piece piece;
        uint8_t bytes[4096];
    } message;
    uint64_t size = 0, got = 0;
    ssize_t n;
    while ((n = vtl_recv_message(sock, &message, sizeof message)) > 0) {
        if ((size_t)n <= sizeof(struct piece))
            errx(1, "that is no stream");
        size_t length = (size_t)n - sizeof(struct piece);
        size = get64(message.piece.size);
        if (fseek(file, (long)get64(message.piece.offset), SEEK_SET) != 0 ||
            fwrite(message.piece.data, 1, length, file) != length)
            err(1, "%s", argv[2]);
        got += length;
    }
    if (n < 0)
        errx(1, "%s", vtl_last_error());
    vtl_close(sock);
    if (fclose(file) != 0)
        err(1, "%s", argv[2]);
    printf("%llu of %llu bytes, %.2f %% missing\n", (unsigned long long)got,
           (unsigned long long)size, size ? 100.0 * (double)(size - got) / (double)size : 0.0);
    return 0;
}
