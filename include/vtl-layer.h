/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A layer of a stack, compiled outside of VTL (docs/stacks.md, "Layers compiled outside of VTL").
 *
 * A layer is a shared object NAME.so in the directory of layers (vtld --layers, /usr/lib/vtl/layers
 * unless given), which exports vtl_layer(). It and the directory belong to root, and nobody else
 * may write there. vtld loads it only into its process of stacks, which has no privileges and
 * parses what strangers send: a layer can open nothing there, and if it crashes, flows go on by
 * TCP. Both hosts need the layer under the same name.
 *
 * CONTRACT. A packet from above goes down, and at the peer's layer up, with the bytes that it had
 * above, 1 to 2,048. A layer may put at most `header` bytes in front, and change what is behind, so
 * that the peer's can undo it. It passes on each packet at once, in order, and neither drops nor
 * repeats one, but for packets from below that make no sense, which it drops and says so by
 * refuse(): these may be anything. It may send packets of its own down, from poll() or in answer to
 * one. Its memory is bounded.
 *
 * WHAT IS BELOW. The same layer serves over every carrier. Over udp and kcp packets from below may
 * come twice, late, in any order, or never. Over quic, sctp, mptcp and graft a packet is a message:
 * each comes, once; over graft and sctp others may overtake it, unless the layer `ordering` is
 * below. What a layer drops there is lost for good: refuse() ends the stack, and its flows go on by
 * TCP without losing a byte, whereas flows of which a layer drops a packet in silence stall.
 *
 * THREADS. All functions are called by one thread, for each stack with the state that create() has
 * made for it. They do not wait, and do not call each other. Time is in ns, from any beginning, and
 * never goes back.
 */
#ifndef VTL_LAYER_H
#define VTL_LAYER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. */
#define VTL_LAYER_ABI 1

/* Maximum of `header`, bytes. */
#define VTL_LAYER_MAX_HEADER 64

/* Takes what a layer passes on, during the call that has got it. Packets are copied; one that is
 * longer than the contract has it is dropped. */
struct vtl_layer_out {
    void *context;
    void (*down)(void *context, const uint8_t *packet, size_t len);
    void (*up)(void *context, const uint8_t *packet, size_t len);
    /* Counts a packet from below that makes no sense, and is dropped. */
    void (*refuse)(void *context);
};

/* The functions of a layer. */
struct vtl_layer {
    /* VTL_LAYER_ABI. */
    uint32_t abi;
    /* Bytes that it puts in front of a packet, at most. */
    uint32_t header;
    /* Makes the state for a stack. `params`: what follows the layer's name there, as
     * NAME=VALUE&NAME=VALUE with whole numbers, or
     * "". NULL: the parameters make no sense. */
    void *(*create)(const char *params);
    /* Frees it. */
    void (*destroy)(void *state);
    /* Handles a packet from above. */
    void (*send)(void *state, uint64_t now, const uint8_t *packet, size_t len,
                 const struct vtl_layer_out *out);
    /* Handles a packet from below. */
    void (*receive)(void *state, uint64_t now, const uint8_t *packet, size_t len,
                    const struct vtl_layer_out *out);
    /* Sends packets of its own, `room` at most; NULL: it has none. */
    void (*poll)(void *state, uint64_t now, size_t room, const struct vtl_layer_out *out);
    /* When poll() is due; UINT64_MAX: not. NULL with poll(). */
    uint64_t (*next_timeout)(void *state);
};

/* The layer. What it returns stays where it is. */
const struct vtl_layer *vtl_layer(void);

#ifdef __cplusplus
}
#endif

#endif
