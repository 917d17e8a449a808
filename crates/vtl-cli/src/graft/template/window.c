// SPDX-License-Identifier: GPL-2.0-only
/*
 * A table test: a transport function is a C function over plain memory, so calling it is testing
 * it. `vtl graft test` compiles each file of this directory with the graft, and runs it; what it
 * returns counts.
 */
#include <stdio.h>

#include "graft.bpf.c"

int main(void) {
    struct {
        unsigned limit, window; /* what the receiver grants, what the graft allows itself */
        unsigned expected;
    } rows[] = {{1000, 16, 16}, {1000, 1, 1}, {8, 16, 8}};
    int failed = 0;
    for (unsigned i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        static struct vtl_session s;
        struct vtl_out o = {.s = &s};
        s.tx.limit = rows[i].limit;
        tf_window_start(&o, rows[i].window);
        if (s.tx.limit != rows[i].expected) {
            printf("row %u: %llu packets are allowed, not %u\n", i, (unsigned long long)s.tx.limit,
                   rows[i].expected);
            failed = 1;
        }
    }
    return failed;
}
