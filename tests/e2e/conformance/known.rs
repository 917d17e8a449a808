//! Where sockets that VTL carries differ from TCP's.

use vtl_testbed::Host;

/// A difference that is known and stays, for now.
pub(super) struct Known {
    pub(super) case: &'static str,
    pub(super) host: Host,
    /// These lines over TCP ...
    pub(super) tcp: &'static [&'static str],
    /// ... are one of these where VTL carries.
    pub(super) vtl: &'static [&'static [&'static str]],
    /// Not always: a matter of microseconds.
    pub(super) sometimes: bool,
    #[allow(dead_code, reason = "for those who read this table")]
    why: &'static str,
}

const ICMP: &str = "vtld looks the route up when connect() has chosen the way to vtld; its answer is an ICMP message";

/// So in SO_ERROR or in what poll() says, or both: the message is in the socket's error queue, which poll() shows, and
/// one that comes while connect() has the socket locked is kept for SO_ERROR (`sk_err_soft`; connect() then returns the
/// next SYN's, a second later: of 3,000 one).
const TWICE: &str = "an ICMP message, as its error comes, too, after connect() has returned it";

/// All of them. A line that is not needed any more fails the test, too.
pub(super) const KNOWN: &[Known] = &[
    Known {
        case: "connect_local_name_while_connecting",
        host: Host::Client,
        tcp: &["getsockname: client:some"],
        vtl: &[&["getsockname: loopback:some"]],
        sometimes: true,
        why: "vtld looks the route up, some 100 us after connect() has returned",
    },
    Known {
        case: "connect_from_port_to_two",
        host: Host::Client,
        tcp: &[
            "connect to server:7101 = 0",
            "send \"one\", flags 0 = 3",
            "send \"two\", flags 0x4000 = 3",
        ],
        vtl: &[&[
            "connect to server:7101 = -1 EADDRNOTAVAIL",
            "send \"one\", flags 0 = 3",
            "send \"two\", flags 0x4000 = -1 EPIPE",
        ]],
        sometimes: false,
        why: "both connections go to the same port of vtld's, and would differ in nothing",
    },
    Known {
        case: "connect_from_port_to_two",
        host: Host::Server,
        tcp: &[
            "accept: client:20223",
            "from port 20223",
            "recv \"one\", flags 0 = 3",
            "accept: client:20223",
            "from port 20223",
            "recv \"two\", flags 0 = 3",
        ],
        vtl: &[
            &[
                "accept: client:20223",
                "from port 20223",
                "recv \"one\", flags 0 = 3",
                "accept = -1 EAGAIN",
            ],
            &["accept = -1 EAGAIN", "accept = -1 EAGAIN"],
        ],
        sometimes: false,
        why: "as above; and a flow with a TCP connection of its own is connected before the server's vtld has \
              reached the application: who learns of it by another way may be too early",
    },
    Known {
        case: "connect_unreachable_near",
        host: Host::Client,
        tcp: &[
            "-- no route",
            "socket = 0",
            "connect to elsewhere:7100 = -1 ENETUNREACH",
            "SO_ERROR: none",
            "poll: OUT|HUP",
        ],
        vtl: &[
            &[
                "-- no route",
                "socket = 0",
                "connect to elsewhere:7100 = -1 ENETUNREACH",
                "SO_ERROR: none",
                "poll: OUT|HUP|ERR",
            ],
            &[
                "-- no route",
                "socket = 0",
                "connect to elsewhere:7100 = -1 ENETUNREACH",
                "SO_ERROR: ENETUNREACH",
                "poll: OUT|HUP",
            ],
            &[
                "-- no route",
                "socket = 0",
                "connect to elsewhere:7100 = -1 ENETUNREACH",
                "SO_ERROR: ENETUNREACH",
                "poll: OUT|HUP|ERR",
            ],
        ],
        sometimes: true,
        why: TWICE,
    },
    Known {
        case: "connect_unreachable_near",
        host: Host::Client,
        tcp: &[
            "-- unreachable",
            "socket = 0",
            "connect to elsewhere:7100 = -1 EHOSTUNREACH",
            "SO_ERROR: none",
            "poll: OUT|HUP",
        ],
        vtl: &[
            &[
                "-- unreachable",
                "socket = 0",
                "connect to elsewhere:7100 = -1 EHOSTUNREACH",
                "SO_ERROR: none",
                "poll: OUT|HUP|ERR",
            ],
            &[
                "-- unreachable",
                "socket = 0",
                "connect to elsewhere:7100 = -1 EHOSTUNREACH",
                "SO_ERROR: EHOSTUNREACH",
                "poll: OUT|HUP",
            ],
            &[
                "-- unreachable",
                "socket = 0",
                "connect to elsewhere:7100 = -1 EHOSTUNREACH",
                "SO_ERROR: EHOSTUNREACH",
                "poll: OUT|HUP|ERR",
            ],
        ],
        sometimes: true,
        why: TWICE,
    },
    Known {
        case: "connect_unreachable_near",
        host: Host::Client,
        tcp: &[
            "-- prohibited",
            "socket = 0",
            "connect to elsewhere:7100 = -1 EACCES",
            "SO_ERROR: none",
            "poll: OUT|HUP",
        ],
        vtl: &[
            &[
                "-- prohibited",
                "socket = 0",
                "connect to elsewhere:7100 = -1 EHOSTUNREACH",
                "SO_ERROR: none",
                "poll: OUT|HUP|ERR",
            ],
            &[
                "-- prohibited",
                "socket = 0",
                "connect to elsewhere:7100 = -1 EHOSTUNREACH",
                "SO_ERROR: EHOSTUNREACH",
                "poll: OUT|HUP",
            ],
            &[
                "-- prohibited",
                "socket = 0",
                "connect to elsewhere:7100 = -1 EHOSTUNREACH",
                "SO_ERROR: EHOSTUNREACH",
                "poll: OUT|HUP|ERR",
            ],
            &[
                "-- prohibited",
                "socket = 0",
                "connect to elsewhere:7100 = -1 EHOSTUNREACH",
                "SO_ERROR: none",
                "poll: OUT|HUP",
            ],
            &[
                "-- prohibited",
                "socket = 0",
                "connect to elsewhere:7100 = -1 EACCES",
                "SO_ERROR: none",
                "poll: OUT|HUP|ERR",
            ],
            &[
                "-- prohibited",
                "socket = 0",
                "connect to elsewhere:7100 = -1 EACCES",
                "SO_ERROR: EACCES",
                "poll: OUT|HUP",
            ],
            &[
                "-- prohibited",
                "socket = 0",
                "connect to elsewhere:7100 = -1 EACCES",
                "SO_ERROR: EACCES",
                "poll: OUT|HUP|ERR",
            ],
        ],
        sometimes: true,
        why: "as above, and ICMP has no such error for IPv4",
    },
    Known {
        case: "connect_unreachable_near",
        host: Host::Client,
        tcp: &[
            "-- black hole",
            "socket = 0",
            "connect to elsewhere:7100 = -1 EINVAL",
        ],
        vtl: &[&[
            "-- black hole",
            "socket = 0",
            "connect to elsewhere:7100 = -1 ECONNREFUSED",
        ]],
        sometimes: false,
        why: ICMP,
    },
    Known {
        case: "connect_unreachable_near_not_blocking",
        host: Host::Client,
        tcp: &[
            "-- no route",
            "socket = 0",
            "connect to elsewhere:7100 = -1 ENETUNREACH",
            "poll: OUT|HUP",
            "SO_ERROR: none",
        ],
        vtl: &[&[
            "-- no route",
            "socket = 0",
            "connect to elsewhere:7100 = -1 EINPROGRESS",
            "poll: IN|OUT|RDHUP|HUP|ERR",
            "SO_ERROR: ENETUNREACH",
        ]],
        sometimes: false,
        why: ICMP,
    },
    Known {
        case: "connect_unreachable_near_not_blocking",
        host: Host::Client,
        tcp: &[
            "-- unreachable",
            "socket = 0",
            "connect to elsewhere:7100 = -1 EHOSTUNREACH",
            "poll: OUT|HUP",
            "SO_ERROR: none",
        ],
        vtl: &[&[
            "-- unreachable",
            "socket = 0",
            "connect to elsewhere:7100 = -1 EINPROGRESS",
            "poll: IN|OUT|RDHUP|HUP|ERR",
            "SO_ERROR: EHOSTUNREACH",
        ]],
        sometimes: false,
        why: ICMP,
    },
    Known {
        case: "connect_unreachable_near_not_blocking",
        host: Host::Client,
        tcp: &[
            "-- prohibited",
            "socket = 0",
            "connect to elsewhere:7100 = -1 EACCES",
            "poll: OUT|HUP",
            "SO_ERROR: none",
        ],
        vtl: &[&[
            "-- prohibited",
            "socket = 0",
            "connect to elsewhere:7100 = -1 EINPROGRESS",
            "poll: IN|OUT|RDHUP|HUP|ERR",
            "SO_ERROR: EACCES",
        ]],
        sometimes: true,
        why: ICMP,
    },
    Known {
        case: "connect_unreachable_near_not_blocking",
        host: Host::Client,
        tcp: &[
            "-- prohibited",
            "socket = 0",
            "connect to elsewhere:7100 = -1 EACCES",
            "poll: OUT|HUP",
            "SO_ERROR: none",
        ],
        vtl: &[&[
            "-- prohibited",
            "socket = 0",
            "connect to elsewhere:7100 = -1 EINPROGRESS",
            "poll: IN|OUT|RDHUP|HUP|ERR",
            "SO_ERROR: EHOSTUNREACH",
        ]],
        sometimes: true,
        why: ICMP,
    },
    Known {
        case: "connect_unreachable_near_not_blocking",
        host: Host::Client,
        tcp: &[
            "-- black hole",
            "socket = 0",
            "connect to elsewhere:7100 = -1 EINVAL",
            "poll: OUT|HUP",
            "SO_ERROR: none",
        ],
        vtl: &[&[
            "-- black hole",
            "socket = 0",
            "connect to elsewhere:7100 = -1 EINPROGRESS",
            "poll: IN|OUT|RDHUP|HUP|ERR",
            "SO_ERROR: ECONNREFUSED",
        ]],
        sometimes: false,
        why: ICMP,
    },
];
