// SPDX-License-Identifier: GPL-2.0-only
/* The table of grafts of a program that has one graft only. */
#include "ops.h"

extern const struct vtl_native_ops vtl_graft_ops;
const struct vtl_native_ops *const vtl_native_grafts[] = {&vtl_graft_ops, 0};
