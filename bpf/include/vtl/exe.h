/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The file that a task executes, by CO-RE. Includers define `config`, a struct vtl_hook_config,
 * first.
 */
#ifndef VTL_EXE_H
#define VTL_EXE_H

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "vtl/hooker.h"

/* The kernel's structs. */
struct super_block {
    __u32 s_dev;
} __attribute__((preserve_access_index));

struct inode {
    unsigned long i_ino;
    struct super_block *i_sb;
} __attribute__((preserve_access_index));

struct qstr {
    const unsigned char *name;
} __attribute__((preserve_access_index));

struct dentry {
    struct qstr d_name;
} __attribute__((preserve_access_index));

struct path {
    struct dentry *dentry;
} __attribute__((preserve_access_index));

struct file {
    struct inode *f_inode;
    struct path f_path;
} __attribute__((preserve_access_index));

struct mm_struct {
    struct file *exe_file;
} __attribute__((preserve_access_index));

struct fdtable {
    struct file **fd;
} __attribute__((preserve_access_index));

struct files_struct {
    struct fdtable *fdt;
} __attribute__((preserve_access_index));

struct task_struct {
    struct mm_struct *mm;
    struct files_struct *files;
} __attribute__((preserve_access_index));

/* Executables of captured sockets, in the socket's storage. */
struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, struct vtl_exe);
} vtl_exes SEC(".maps");

/* Notes what the process that connects executes. */
static __always_inline void note_exe(struct bpf_sock *sk) {
    struct vtl_exe *exe;
    struct file *file;

    if (!config.sees_exe)
        return;
    exe = bpf_sk_storage_get(&vtl_exes, sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
    if (!exe)
        return;
    file = BPF_CORE_READ((struct task_struct *)bpf_get_current_task(), mm, exe_file);
    exe->inode = BPF_CORE_READ(file, f_inode, i_ino);
    exe->dev = BPF_CORE_READ(file, f_inode, i_sb, s_dev);
    exe->pad = 0;
    __builtin_memset(exe->name, 0, sizeof(exe->name));
    bpf_probe_read_kernel_str(exe->name, sizeof(exe->name),
                              BPF_CORE_READ(file, f_path.dentry, d_name.name));
}

#endif
