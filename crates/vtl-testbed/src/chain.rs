//! Two testbeds in a row: a path of two links, with a router between them.

use vtl_link::Host;

use crate::error::Result;
use crate::namespace;
use crate::testbed::{DEVICE, Testbed, number};

/// The wire between the testbeds: its device in the first one's server and in the second one's client.
const OUT: &str = "beyond";
const IN: &str = "before";

impl Testbed {
    /// Appends a testbed: its server is reached through this one's server and its own client, which become routers.
    /// IPv4 only. `beyond` is renumbered, since all testbeds begin with the same addresses: see
    /// [`addr4_beyond`](Self::addr4_beyond).
    ///
    /// ```text
    ///  this testbed                                        beyond
    ///  client 10.73.0.1 ══link══ 10.73.0.2 server ──veth── client 10.74.0.1 ══link══ 10.74.0.2 server
    /// ```
    ///
    /// # Errors
    /// Either is no longer up, or there is no `ip` tool.
    pub fn append(&self, beyond: &Testbed) -> Result<()> {
        let (here, there) = (self.name(), beyond.name());
        let router = namespace::name_of(there, Host::Client);
        namespace::ip_batch(
            here,
            Host::Server,
            &format!(
                "link add {OUT} type veth peer name {IN} netns {router}\n\
                 addr add 10.75.0.1/30 dev {OUT}\n\
                 link set {OUT} up\n\
                 route add 10.74.0.0/24 via 10.75.0.2\n"
            ),
        )?;
        namespace::ip_batch(here, Host::Client, "route add default via 10.73.0.2\n")?;
        for host in [Host::Client, Host::Server] {
            let own = number(host);
            let other = number(if host == Host::Client {
                Host::Server
            } else {
                Host::Client
            });
            namespace::ip_batch(
                there,
                host,
                &format!(
                    "addr flush dev {DEVICE} scope global\n\
                     addr add 10.74.0.{own}/24 dev {DEVICE}\n\
                     neigh replace 10.74.0.{other} lladdr 02:56:54:4c:00:0{other} dev {DEVICE} nud permanent\n"
                ),
            )?;
        }
        namespace::ip_batch(
            there,
            Host::Client,
            &format!(
                "addr add 10.75.0.2/30 dev {IN}\n\
                 link set {IN} up\n\
                 route add 10.73.0.0/24 via 10.75.0.1\n"
            ),
        )?;
        namespace::ip_batch(there, Host::Server, "route add default via 10.74.0.1\n")?;
        for (name, host) in [(here, Host::Server), (there, Host::Client)] {
            namespace::run_in(&namespace::path_of(name, host), || {
                namespace::write_sysctl("ipv4/ip_forward", "1")
            })??;
        }
        Ok(())
    }

    /// A host's IPv4 address in a testbed that was appended to another one.
    pub fn addr4_beyond(&self, host: Host) -> std::net::Ipv4Addr {
        std::net::Ipv4Addr::new(10, 74, 0, number(host))
    }
}
