//! Compiles rules to the steps of `bpf/rules.bpf.c`.

use std::net::Ipv6Addr;

use super::super::abi::{
    VTL_PREFIX_6, VTL_STEP_ACT, VTL_STEP_END, VTL_STEP_EXE, VTL_STEP_GROUP, VTL_STEP_LOCAL,
    VTL_STEP_PORT, VTL_STEP_PREFIX, VTL_STEP_USER, VTL_STEPS_MAX, vtl_step,
};

/// A test of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Test {
    User(u32),
    /// First and last port.
    Port(u16, u16),
    Prefix(Ipv6Addr, u8),
    Exe {
        id: u64,
        device: u32,
    },
    /// `level`: depth below the topmost cgroup.
    Group {
        id: u64,
        level: u32,
    },
}

impl Test {
    /// In place of a file or cgroup that is not there: holds for no process. With its step the table is as long as
    /// when it appears, so that what was accepted once keeps its room.
    pub(super) const ABSENT: Self = Self::Exe {
        id: 0,
        device: u32::MAX,
    };
}

/// The action of the programs on a connection that a rule matches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Act {
    pub(super) policy: u32,
    /// Index of its counter.
    pub(super) place: u32,
    /// Congestion control, by its name in the kernel; empty = the system's.
    pub(super) control: String,
}

/// A rule in the programs' terms.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// Conjunction of disjunctions: of each list at least one test must hold.
    pub(super) all: Vec<Vec<Test>>,
    /// Local destinations match, too.
    pub(super) local: bool,
    pub(super) act: Act,
}

impl Entry {
    fn len(&self) -> usize {
        self.all.iter().map(Vec::len).sum::<usize>() + 1
    }
}

/// Compiles rules, in order, to steps; `None` if they are too many. Steps for local destinations
/// precede those for others.
pub(super) fn compile(entries: &[Entry]) -> Option<Vec<vtl_step>> {
    // A rule that cannot match needs no steps.
    let possible = |entry: &&Entry| entry.all.iter().all(|any| !any.is_empty());
    let remote: Vec<_> = entries.iter().filter(possible).collect();
    let local: Vec<_> = remote.iter().copied().filter(|entry| entry.local).collect();
    let mut steps = vec![vtl_step {
        kind: VTL_STEP_LOCAL,
        hit: 1,
        ..Default::default()
    }];
    chain(&mut steps, &local);
    steps[0].miss = steps.len() as u32;
    chain(&mut steps, &remote);
    (steps.len() <= VTL_STEPS_MAX as usize).then_some(steps)
}

/// Appends the steps of the rules in order, and the end.
fn chain(steps: &mut Vec<vtl_step>, entries: &[&Entry]) {
    for entry in entries {
        let next_entry = steps.len() + entry.len();
        for any in &entry.all {
            let next_kind = steps.len() + any.len();
            for test in any {
                let next = steps.len() + 1;
                let miss = if next == next_kind { next_entry } else { next };
                steps.push(vtl_step {
                    hit: next_kind as u32,
                    miss: miss as u32,
                    ..question(test)
                });
            }
        }
        let mut step = vtl_step {
            kind: VTL_STEP_ACT,
            arg: entry.act.policy,
            hit: entry.act.place,
            ..Default::default()
        };
        for (to, from) in step.value.iter_mut().zip(entry.act.control.bytes()) {
            *to = from;
        }
        steps.push(step);
    }
    steps.push(vtl_step {
        kind: VTL_STEP_END,
        ..Default::default()
    });
}

fn question(test: &Test) -> vtl_step {
    let mut step = vtl_step::default();
    match *test {
        Test::User(id) => (step.kind, step.arg) = (VTL_STEP_USER, id),
        Test::Port(first, last) => {
            step.kind = VTL_STEP_PORT;
            step.value[..4].copy_from_slice(&u32::from(first).to_ne_bytes());
            step.value[4..8].copy_from_slice(&u32::from(last).to_ne_bytes());
        }
        Test::Prefix(address, bits) => {
            (step.kind, step.arg) = (VTL_STEP_PREFIX, bits.into());
            if address.to_ipv4_mapped().is_none() {
                step.arg |= VTL_PREFIX_6;
            }
            step.value = address.octets();
        }
        Test::Exe { id, device } => {
            (step.kind, step.arg) = (VTL_STEP_EXE, device);
            step.value[..8].copy_from_slice(&id.to_ne_bytes());
        }
        Test::Group { id, level } => {
            (step.kind, step.arg) = (VTL_STEP_GROUP, level);
            step.value[..8].copy_from_slice(&id.to_ne_bytes());
        }
    }
    step
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// What the programs know of a connection.
    #[derive(Clone, Debug)]
    struct Facts {
        local: bool,
        user: u32,
        port: u16,
        to: Ipv6Addr,
        exe: u64,
        group: u64,
    }

    fn holds(test: &Test, facts: &Facts) -> bool {
        match *test {
            Test::User(id) => facts.user == id,
            Test::Port(first, last) => (first..=last).contains(&facts.port),
            Test::Prefix(address, bits) => {
                let mapped = |a: Ipv6Addr| a.to_ipv4_mapped().is_some();
                let shift = 128 - u32::from(bits);
                let top = |a: Ipv6Addr| a.to_bits().checked_shr(shift).unwrap_or(0);
                mapped(address) == mapped(facts.to) && top(address) == top(facts.to)
            }
            Test::Exe { id, .. } => facts.exe == id,
            Test::Group { id, .. } => facts.group == id,
        }
    }

    /// The rule that decides, as it is meant.
    fn meant(entries: &[Entry], facts: &Facts) -> Option<u32> {
        let matches = |entry: &&Entry| {
            (entry.local || !facts.local)
                && entry
                    .all
                    .iter()
                    .all(|any| any.iter().any(|test| holds(test, facts)))
        };
        entries.iter().find(matches).map(|entry| entry.act.place)
    }

    /// The rule that decides, as `bpf/rules.bpf.c` finds it.
    fn found(steps: &[vtl_step], facts: &Facts) -> Option<u32> {
        let mut at = 0;
        loop {
            let step = &steps[at];
            let number = |at: usize| {
                u32::from_ne_bytes(step.value[at..at + 4].try_into().expect("four bytes"))
            };
            let id = u64::from_ne_bytes(step.value[..8].try_into().expect("eight bytes"));
            let yes = match step.kind {
                VTL_STEP_END => return None,
                VTL_STEP_ACT => return Some(step.hit),
                VTL_STEP_LOCAL => facts.local,
                VTL_STEP_USER => facts.user == step.arg,
                VTL_STEP_PORT => (number(0)..=number(4)).contains(&facts.port.into()),
                VTL_STEP_PREFIX => {
                    let six = step.arg & VTL_PREFIX_6 != 0;
                    let shift = 128 - (step.arg & 255);
                    let top = |bits: u128| bits.checked_shr(shift).unwrap_or(0);
                    let prefix = u128::from_be_bytes(step.value);
                    !(six && facts.to.to_ipv4_mapped().is_some())
                        && top(facts.to.to_bits()) == top(prefix)
                }
                VTL_STEP_EXE => facts.exe == id,
                VTL_STEP_GROUP => facts.group == id,
                other => panic!("{other}"),
            };
            let next = if yes { step.hit } else { step.miss } as usize;
            assert!(next > at, "{at} leads to {next}");
            at = next;
        }
    }

    fn address() -> impl Strategy<Value = Ipv6Addr> {
        prop_oneof![
            (0..4_u32)
                .prop_map(|a| std::net::Ipv4Addr::from(0x0a00_0000 | a << 14).to_ipv6_mapped()),
            (0..4_u128).prop_map(|a| Ipv6Addr::from_bits(0x2001_0db8 << 96 | a << 62)),
        ]
    }

    fn test() -> impl Strategy<Value = Test> {
        prop_oneof![
            (0..4_u32).prop_map(Test::User),
            (1..5_u16, 0..3_u16).prop_map(|(first, more)| Test::Port(first, first + more)),
            (address(), 0..=32_u8).prop_map(|(address, bits)| {
                if address.to_ipv4_mapped().is_some() {
                    Test::Prefix(address, 96 + bits)
                } else {
                    Test::Prefix(address, bits * 4)
                }
            }),
            (0..3_u64).prop_map(|id| Test::Exe { id, device: 1 }),
            (0..3_u64).prop_map(|id| Test::Group { id, level: 1 }),
        ]
    }

    fn entry() -> impl Strategy<Value = (Vec<Vec<Test>>, bool)> {
        (vec(vec(test(), 0..4), 0..3), any::<bool>())
    }

    fn facts() -> impl Strategy<Value = Facts> {
        let all = (
            any::<bool>(),
            0..4_u32,
            1..8_u16,
            address(),
            0..3_u64,
            0..3_u64,
        );
        all.prop_map(|(local, user, port, to, exe, group)| Facts {
            local,
            user,
            port,
            to,
            exe,
            group,
        })
    }

    proptest! {
        #[test]
        fn compile__decides_as_meant(entries in vec(entry(), 0..8), facts in vec(facts(), 20)) {
            let entries: Vec<_> = (0..)
                .zip(entries)
                .map(|(place, (all, local))| Entry {
                    all,
                    local,
                    act: Act { place, ..Default::default() },
                })
                .collect();
            let steps = compile(&entries).expect("few");
            for facts in &facts {
                prop_assert_eq!(found(&steps, facts), meant(&entries, facts), "{:?}", facts);
            }
        }
    }

    /// The table is as long before a file appears as behind it.
    #[test]
    fn compile__what_is_absent_has_its_step() {
        let compiled = |test| {
            let entry = Entry {
                all: vec![vec![test]],
                local: false,
                act: Act::default(),
            };
            compile(&[entry]).expect("room")
        };
        let there = Test::Exe { id: 7, device: 1 };
        assert_eq!(compiled(Test::ABSENT).len(), compiled(there).len());
        assert_ne!(compiled(Test::ABSENT), compiled(there));
    }

    #[test]
    fn compile__says_when_it_is_too_much() {
        let many = |count| Entry {
            all: vec![vec![Test::User(1); count]],
            local: false,
            act: Act::default(),
        };
        let room = VTL_STEPS_MAX as usize - 4;
        assert_eq!(compile(&[many(room)]).map(|s| s.len()), Some(room + 4));
        assert!(compile(&[many(room + 1)]).is_none());
    }
}
