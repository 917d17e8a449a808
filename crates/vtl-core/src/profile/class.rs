//! The four classes of applications of the thesis (section 5.3.1, figure 5.5, after ITU-T G.1010), and
//! their ports: all that tells a connection's class before its first byte.

use std::{fmt, ops::RangeInclusive, str::FromStr};

use serde::{Deserialize, Serialize};

/// A class of applications. Serialized by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// Late is as bad as lost: streaming, telephony.
    TimeSensitive,
    /// Nothing may be lost, and somebody waits: remote login, web, games.
    TimeAndLossSensitive,
    /// Nothing may be lost, however long it takes: file transfer, mail, chat.
    LossSensitive,
    /// Neither matters much: fax.
    Insensitive,
}

/// The classes, their names and ports. A port that is not here belongs to none.
const TABLE: [(Profile, &str, &[RangeInclusive<u16>]); 4] = [
    (
        Profile::TimeSensitive,
        "time-sensitive",
        // RTP (the port that RFC 3551 names), RTSP, RTMP, SIP, RTSP's alternate.
        &[
            5004..=5005,
            554..=554,
            1935..=1935,
            5060..=5061,
            8554..=8554,
        ],
    ),
    (
        Profile::TimeAndLossSensitive,
        "time-and-loss-sensitive",
        // SSH, telnet, web, rlogin, RDP, VNC, web's alternates, game servers.
        &[
            22..=23,
            80..=80,
            443..=443,
            513..=513,
            3389..=3389,
            5900..=5909,
            8080..=8080,
            8443..=8443,
            27015..=27050,
        ],
    ),
    (
        Profile::LossSensitive,
        "loss-sensitive",
        // FTP, SMTP, POP, IMAP, SMB, submission, rsync, FTP and mail over TLS, NFS, XMPP, IRC,
        // BitTorrent.
        &[
            20..=21,
            25..=25,
            110..=110,
            143..=143,
            445..=445,
            465..=465,
            587..=587,
            873..=873,
            989..=990,
            993..=993,
            995..=995,
            2049..=2049,
            5222..=5223,
            6660..=6669,
            6881..=6889,
        ],
    ),
    // HylaFAX.
    (Profile::Insensitive, "insensitive", &[4559..=4559]),
];

impl Profile {
    fn row(self) -> &'static (Self, &'static str, &'static [RangeInclusive<u16>]) {
        let row = TABLE.iter().find(|(profile, ..)| *profile == self);
        row.expect("the table has every profile")
    }

    /// All of them, in the order of the thesis.
    pub const ALL: [Self; 4] = [
        Self::TimeSensitive,
        Self::TimeAndLossSensitive,
        Self::LossSensitive,
        Self::Insensitive,
    ];

    /// The name in rules and in answers of the daemon.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// The ports whose connections belong to it.
    pub fn ports(self) -> &'static [RangeInclusive<u16>] {
        self.row().2
    }

    /// The class that connections to a port belong to.
    pub fn of(port: u16) -> Option<Self> {
        let row = TABLE
            .iter()
            .find(|(_, _, ports)| ports.iter().any(|p| p.contains(&port)));
        row.map(|(profile, ..)| *profile)
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let row = TABLE.iter().find(|(_, name, _)| *name == text);
        row.map(|(profile, ..)| *profile).ok_or_else(|| {
            let names: Vec<_> = TABLE.iter().map(|(_, name, _)| *name).collect();
            format!(
                "there is no profile \"{}\": there are {}",
                text.escape_debug(),
                names.join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table__each_port_belongs_to_one_profile() {
        for port in 1..=u16::MAX {
            let of = |(_, _, ports): &&(Profile, &str, &[RangeInclusive<u16>])| {
                ports.iter().any(|p| p.contains(&port))
            };
            assert!(TABLE.iter().filter(of).count() <= 1, "{port}");
        }
        assert_eq!(Profile::of(443), Some(Profile::TimeAndLossSensitive));
        assert_eq!(Profile::of(7), None);
    }

    #[test]
    fn table__is_what_the_documentation_says() {
        let page = include_str!("../../../../docs/rules.md");
        for (_, name, ports) in TABLE {
            let mut ports = ports.to_vec();
            ports.sort_by_key(|range| *range.start());
            let range = |range: &RangeInclusive<u16>| match (range.start(), range.end()) {
                (first, last) if first == last => first.to_string(),
                (first, last) => format!("{first}-{last}"),
            };
            let ports: Vec<_> = ports.iter().map(range).collect();
            let row = |line: &str| {
                line.starts_with(&format!("| `{name}` |"))
                    && line.ends_with(&format!("| {} |", ports.join(", ")))
            };
            assert!(page.lines().any(row), "{name}: {}", ports.join(", "));
        }
    }

    #[test]
    fn profile__reads_what_it_writes() {
        for (profile, name, _) in TABLE {
            assert_eq!(profile.to_string(), name);
            assert_eq!(name.parse(), Ok(profile));
        }
        assert!(
            "fast"
                .parse::<Profile>()
                .unwrap_err()
                .contains("time-sensitive")
        );
    }
}
