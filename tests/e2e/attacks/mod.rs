//! What attackers can do, and what that costs the host that they attack: the rows of SECURITY.md, "Attackers".
//!
//! Each attack is tried while somebody honest uses VTL, who notices nothing; what it reaches and what it costs (bytes,
//! processor time) is bounded. Where an attack needs a scene of its own it stands with what it is against: forged
//! addresses and repeated requests in `nego.rs`, ports of QUIC, SCTP and KCP in `kinds.rs`, connections for packets in
//! `tunnel.rs`, keys and who reads the wire in `keys.rs` and `identity.rs`, members of the group in `users.rs`,
//! packages and registries in `packages.rs` and `registry.rs`, firewalls in `flows.rs`.

pub(crate) mod member;
pub(crate) mod memory;
pub(crate) mod on_path;
pub(crate) mod peer;
pub(crate) mod stranger;
