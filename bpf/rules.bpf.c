// SPDX-License-Identifier: GPL-2.0-only
/*
 * Rules (/etc/vtl/rules.toml): choose the carrier of TCP connections at connect. Attached to the
 * root cgroup while there are rules. Ignores hooked sockets, and those outside the daemon's network
 * namespace.
 */
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "vtl/hooker.h"
#include "vtl/tf.h"

char _license[] SEC("license") = "GPL";

const volatile struct vtl_hook_config config SEC(".rodata.config");

#include "vtl/capture.h"

struct vtl_table {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(map_flags, BPF_F_INNER_MAP);
    __uint(max_entries, 1);
    __uint(key_size, sizeof(__u32));
    __uint(value_size, sizeof(struct vtl_step));
};

/* The current table. vtld replaces it atomically: a running program continues with the one it
 * started with. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
    __uint(max_entries, 1);
    __type(key, __u32);
    __array(values, struct vtl_table);
} vtl_rules SEC(".maps");

/* Matches of each rule. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, VTL_RULES_MAX);
    __type(key, __u32);
    __type(value, __u64);
} vtl_matched SEC(".maps");

/* The host's own addresses, 16 bytes each. Written by vtld. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, 65536);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, __u8[16]);
    __type(value, __u8);
} vtl_addresses SEC(".maps");

/* Facts about a connect, the input of rules. */
struct facts {
    struct vtl_endpoint dest;
    __u32 user;
    __u32 dev;       /* device of the process's executable */
    __u64 id;        /* its inode number */
    __u32 knows_exe; /* 1: the two above are valid */
    __u32 pad;
};

static __always_inline int is_local(const __u8 addr[16]) {
    const __u32 *w = (const __u32 *)addr;

    if (is_mapped(w)) {
        /* 169.254.0.0/16: link-local, RFC 3927. */
        if (stays_local4(w[3]) || bpf_ntohl(w[3]) >> 16 == 0xa9fe)
            return 1;
    } else if (stays_local6(w)) {
        return 1;
    }
    return bpf_map_lookup_elem(&vtl_addresses, addr) != NULL;
}

static __always_inline int has_prefix(const __u8 addr[16], const __u8 prefix[16], __u32 arg) {
    const __u32 *a = (const __u32 *)addr, *p = (const __u32 *)prefix;
    __u32 bits = arg & 255;
    int i;

    if ((arg & VTL_PREFIX_6) && is_mapped(a))
        return 0;

    for (i = 0; i < 4; i++, bits -= 32) {
        __u32 differ = bpf_ntohl(a[i] ^ p[i]);

        if (bits < 32)
            return !bits || !(differ >> (32 - bits));
        if (differ)
            return 0;
    }
    return 1;
}

/* 1 if the process executes this file. Looks at the task at most once per connect. */
static __always_inline int executes(struct facts *f, __u64 id, __u32 dev) {
    struct inode *inode;

    if (!config.sees_exe)
        return 0;
    if (!f->knows_exe) {
        inode = BPF_CORE_READ((struct task_struct *)bpf_get_current_task(), mm, exe_file, f_inode);
        f->id = BPF_CORE_READ(inode, i_ino);
        f->dev = BPF_CORE_READ(inode, i_sb, s_dev);
        f->knows_exe = 1;
    }
    return f->id == id && f->dev == dev;
}

/* 1 if the step's condition is true. */
static __always_inline int holds(const struct vtl_step *s, struct facts *f) {
    const __u32 *range = (const __u32 *)s->value;
    const __u64 *id = (const __u64 *)s->value;
    __u16 port = bpf_ntohs(f->dest.port);

    switch (s->kind) {
    case VTL_STEP_LOCAL:
        return is_local(f->dest.addr);
    case VTL_STEP_USER:
        return f->user == s->arg;
    case VTL_STEP_PORT:
        return range[0] <= port && port <= range[1];
    case VTL_STEP_PREFIX:
        return has_prefix(f->dest.addr, s->value, s->arg);
    case VTL_STEP_EXE:
        return executes(f, *id, s->arg);
    case VTL_STEP_GROUP:
        return bpf_get_current_ancestor_cgroup_id(s->arg) == *id;
    }
    return 0;
}

/* The step behind this one. A global function: verified once, instead of in each turn of the loop
 * below with each outcome of the turns before. */
VTL_GLOBAL __u32 next_step(const struct vtl_step *s, struct facts *f) {
    if (!s || !f)
        return 0;
    return holds(s, f) ? s->hit : s->miss;
}

/* First matching rule: its step, or NULL. */
static __always_inline struct vtl_step *decide(struct facts *f) {
    __u32 at = 0, first = 0;
    void *table;
    int i;

    table = bpf_map_lookup_elem(&vtl_rules, &first);
    if (!table)
        return NULL;
    vtl_for(i, 0, VTL_STEPS_MAX) {
        struct vtl_step *s = bpf_map_lookup_elem(table, &at);

        if (!s || s->kind == VTL_STEP_END)
            return NULL;
        if (s->kind == VTL_STEP_ACT)
            return s;
        at = next_step(s, f);
    }
    return NULL;
}

/* Applies the first matching rule. 1: the connect goes to vtld, with *policy. */
static __always_inline int leads_to_vtld(struct bpf_sock_addr *ctx, const struct vtl_endpoint *dest,
                                         __u32 *policy) {
    struct facts f = {.dest = *dest, .user = bpf_get_current_uid_gid()};
    char control[VTL_CC_NAME_MAX];
    struct vtl_step *s;
    __u32 place;
    __u64 *count;

    s = decide(&f);
    if (!s)
        return 0;
    place = s->hit;
    count = bpf_map_lookup_elem(&vtl_matched, &place);
    if (count)
        __sync_fetch_and_add(count, 1);
    *policy = s->arg;
    if (*policy != VTL_POLICY_PLAIN)
        return 1;
    __builtin_memcpy(control, s->value, sizeof(control));
    if (control[0])
        bpf_setsockopt(ctx, IPPROTO_TCP, TCP_CONGESTION, control, sizeof(control));
    return 0;
}

/* 1 if rules apply to the socket: it is not vtld's own, and not hooked. */
static __always_inline int is_subject_to_rules(struct bpf_sock_addr *ctx) {
    return is_tcp_of_others(ctx) && !bpf_sk_storage_get(&vtl_policies, ctx->sk, NULL, 0);
}

SEC("cgroup/connect4")
int vtl_rule4(struct bpf_sock_addr *ctx) {
    struct vtl_endpoint dest;
    __u32 policy = VTL_POLICY_PLAIN;

    if (!is_subject_to_rules(ctx) || is_taken4(ctx))
        return 1;
    destination4(ctx, &dest);
    if (leads_to_vtld(ctx, &dest, &policy) && take4(ctx, &dest, policy))
        return 1;
    bpf_sk_storage_delete(&vtl_captured, ctx->sk);
    return goes_on(&dest, policy);
}

SEC("cgroup/connect6")
int vtl_rule6(struct bpf_sock_addr *ctx) {
    struct vtl_endpoint dest;
    __u32 policy = VTL_POLICY_PLAIN;

    destination6(ctx, &dest);
    if (!is_subject_to_rules(ctx) || is_taken6(&dest))
        return 1;
    if (leads_to_vtld(ctx, &dest, &policy) && take6(ctx, &dest, policy))
        return 1;
    bpf_sk_storage_delete(&vtl_captured, ctx->sk);
    return goes_on(&dest, policy);
}

/* Identity of a file and a cgroup of vtld's, as these programs see it. Run by vtld. */
SEC("syscall")
int vtl_identify(struct vtl_identity *ctx) {
    struct task_struct *task = (struct task_struct *)bpf_get_current_task();
    struct file **files, *file = NULL;
    struct inode *inode;
    __u32 level = VTL_LEVELS;
    int i;

    if (config.sees_exe) {
        files = BPF_CORE_READ(task, files, fdt, fd);
        bpf_probe_read_kernel(&file, sizeof(file), files + ctx->fd);
        inode = BPF_CORE_READ(file, f_inode);
        ctx->id = BPF_CORE_READ(inode, i_ino);
        ctx->dev = BPF_CORE_READ(inode, i_sb, s_dev);
        ctx->own = BPF_CORE_READ(task, mm, exe_file, f_inode, i_ino);
    }
    vtl_for(i, 0, VTL_LEVELS) {
        if (bpf_get_current_ancestor_cgroup_id(i) == ctx->group) {
            level = i;
            break;
        }
    }
    ctx->level = level;
    return 0;
}
