//! Event sources of the broker's thread.

/// Source of an epoll event; packed into 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Commands,
    /// News of shards.
    Shards,
    /// Rings are ready, the launcher has news, or another reason to retry parked requests.
    Parked,
    Native {
        v6: bool,
    },
    Udp {
        v6: bool,
    },
    /// Peers' TCP connections to accept.
    Tunnels {
        v6: bool,
    },
    Tunnel {
        number: u32,
    },
    Interfaces,
}

impl Source {
    pub(super) fn pack(self) -> u64 {
        let (kind, which): (u64, u32) = match self {
            Self::Commands => (0, 0),
            Self::Shards => (1, 0),
            Self::Parked => (2, 0),
            Self::Native { v6 } => (3, v6.into()),
            Self::Udp { v6 } => (4, v6.into()),
            Self::Tunnels { v6 } => (5, v6.into()),
            Self::Tunnel { number } => (6, number),
            Self::Interfaces => (7, 0),
        };
        kind << 32 | u64::from(which)
    }

    pub(super) fn unpack(data: u64) -> Self {
        let (v6, number) = (data as u32 != 0, data as u32);
        match data >> 32 {
            0 => Self::Commands,
            1 => Self::Shards,
            2 => Self::Parked,
            3 => Self::Native { v6 },
            4 => Self::Udp { v6 },
            5 => Self::Tunnels { v6 },
            6 => Self::Tunnel { number },
            _ => Self::Interfaces,
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn unpack__what_was_packed() {
        let mut all = vec![
            Source::Commands,
            Source::Shards,
            Source::Parked,
            Source::Interfaces,
        ];
        for v6 in [false, true] {
            all.extend([
                Source::Native { v6 },
                Source::Udp { v6 },
                Source::Tunnels { v6 },
            ]);
        }
        all.extend([0, u32::MAX].map(|number| Source::Tunnel { number }));
        for source in all {
            assert_eq!(Source::unpack(source.pack()), source);
        }
    }
}
