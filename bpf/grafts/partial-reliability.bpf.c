// SPDX-License-Identifier: GPL-2.0-only
/* Selective repeat that gives up lost packets, as many as the application allows, where a late
 * packet is worth less than the wait for it. */
#define VTL_WITHOUT_HALVES
#include "tf/fec.h"
#include "tf/loss.h"
#include "tf/partial.h"
#include "tf/receive.h"
#include "tf/skip.h"

enum { WINDOW, MAX_LOSS, LOSS_WINDOW, LIFETIME, FEC };

struct own {
    struct vtl_partial partial;
    struct vtl_budget budget;
    struct vtl_fec fec;
};
#define OWN(s) VTL_OWN(s, tx, struct own)
#define PARTIAL(s) (&OWN(s)->partial)
/* Maximum of packets given up in LOSS_WINDOW. */
#define MAX_LOST(s) ((__u64)(s)->param[LOSS_WINDOW] * (s)->param[MAX_LOSS] / 1000)

#define GRAFT_START(o) tf_window_start(o, (o)->s->param[WINDOW])
#define GRAFT_MAKE(o) tf_fec_make(o, &OWN((o)->s)->fec, (o)->s->param[FEC])
#define GRAFT_CHOOSE(o) tf_partial_choose(o, PARTIAL((o)->s), 1)
#define GRAFT_NUMBER(o) tf_number(o), tf_partial_tell(o, PARTIAL((o)->s)), tf_lifetime_start(o)
#define GRAFT_ADMIT(in) (vtl_is_parity(in) ? tf_fec_admit(in) : tf_receive_admit(in))
#define GRAFT_TAKE(in) tf_fec_take(in)
#define GRAFT_PLACE(in) tf_receive_place(in), tf_skip(in)
#define GRAFT_HEAR(a) tf_window_limit(a, (a)->s->param[WINDOW])
#define GRAFT_LOSS(a) tf_loss_reordering(a), tf_loss_selective(a, 0)
#define GRAFT_CONTROL(a)                                                                           \
    tf_partial_budget(a, PARTIAL((a)->s), &OWN((a)->s)->budget, MAX_LOST((a)->s),                  \
                      (a)->s->param[LOSS_WINDOW], (a)->s->param[LIFETIME])
#define GRAFT_CAN_SEND(s) vtl_partial_can_send(s, PARTIAL(s))
#include "vtl/compose.h"

VTL_GRAFT("partial-reliability", 6, VTL_S_PARTIAL_RELIABILITY | VTL_S_ORDERED | VTL_S_FLOW_CONTROL,
          20, "In order, with losses up to a bound that holds over every stretch of packets.",
          VTL_PARAM("window", "packets", 16, 1, VTL_PARTIAL_MAX),
          VTL_PARAM("max-loss", "per mille", 100, 0, 1000),
          VTL_PARAM("loss-window", "packets", 100, 1, 10000),
          VTL_PARAM("lifetime", "ms", 0, 0, 60000), VTL_PARAM("fec", "packets", 0, 0, VTL_FEC_MAX));
