//! Rings whose other side writes anything anywhere: what is read lies in a slot, and what is written, too.
#![no_main]

use std::{cell::RefCell, fs::File, os::fd::AsFd, os::unix::fs::FileExt};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use nix::{
    sys::memfd::{MFdFlags, memfd_create},
    unistd::ftruncate,
};
use vtl_proto::{
    intf,
    keys::{Keys, Suite},
};
use vtl_ring::{Controls, Lanes, RxRing, TxRing};

const SLOTS: u32 = 8;
const SLOT: u64 = intf::VTL_SLOT_SIZE as u64;
const PAYLOAD: u16 = 1000;

#[derive(Arbitrary, Debug)]
enum Action {
    /// The other side writes a word of the control slot, or of a packet's.
    Control {
        ring: bool,
        at: u8,
        value: u64,
    },
    Slot {
        ring: bool,
        slot: u8,
        at: u8,
        value: u64,
    },
    /// As the kernel does: one more packet, one less in flight.
    Arrive(u8),
    Acknowledge(u8),
    Read {
        count: u8,
    },
    TakeLast,
    WaitToRead,
    Write {
        len: u16,
        how: u8,
    },
    WaitForRoom,
    Daemon(u8),
}

#[derive(Arbitrary, Debug)]
struct Input {
    listed: bool,
    /// Whether payloads are sealed, and packets tell their numbers.
    sealed: Option<bool>,
    actions: Vec<Action>,
}

fn memory() -> File {
    let fd = memfd_create(c"ring", MFdFlags::MFD_CLOEXEC).expect("memory");
    ftruncate(
        &fd,
        ((u64::from(SLOTS) + 1) * SLOT).next_multiple_of(4096) as i64,
    )
    .expect("memory");
    File::from(fd)
}

thread_local! {
    static RINGS: RefCell<[File; 2]> = RefCell::new([memory(), memory()]);
}

fn word(ring: &File, at: usize) -> u64 {
    let mut bytes = [0; 8];
    ring.read_exact_at(&mut bytes, at as u64).expect("memory");
    u64::from_ne_bytes(bytes)
}

fn set(ring: &File, at: u64, value: u64) {
    ring.write_all_at(&value.to_ne_bytes(), at).expect("memory");
}

const PRODUCER: usize = std::mem::offset_of!(intf::vtl_ring_ctl, producer);
const CONSUMER: usize = std::mem::offset_of!(intf::vtl_ring_ctl, consumer);

fn run(input: &Input, [tx_memory, rx_memory]: &[File; 2]) {
    for ring in [tx_memory, rx_memory] {
        vtl_ring::clear(ring.as_fd(), SLOTS).expect("a ring");
    }
    let mut tx = TxRing::map(tx_memory.as_fd(), SLOTS, PAYLOAD).expect("a ring");
    let mut rx = RxRing::map(rx_memory.as_fd(), SLOTS).expect("a ring");
    if input.listed {
        rx = rx.with_list();
    }
    if let Some(numbered) = input.sealed {
        let keys = Keys {
            suite: Suite::Aes128Gcm,
            send: [1; 32].into(),
            receive: [1; 32].into(),
        };
        tx = tx.with_keys(&keys, numbered);
        rx = rx.with_keys(&keys, numbered);
    }
    let controls = Controls::map(tx_memory.as_fd(), rx_memory.as_fd()).expect("rings");
    let mut lanes = Lanes::default();
    for action in &input.actions {
        match action {
            Action::Control { ring, at, value } => {
                let ring = if *ring { tx_memory } else { rx_memory };
                set(ring, u64::from(*at) % (SLOT / 8) * 8, *value);
            }
            Action::Slot {
                ring,
                slot,
                at,
                value,
            } => {
                let ring = if *ring { tx_memory } else { rx_memory };
                let slot = 1 + u64::from(*slot) % u64::from(SLOTS);
                set(ring, slot * SLOT + u64::from(*at) * 8, *value);
            }
            Action::Arrive(count) => {
                let producer = word(rx_memory, PRODUCER).wrapping_add(u64::from(*count) % 9);
                set(rx_memory, PRODUCER as u64, producer);
            }
            Action::Acknowledge(count) => {
                let consumer = word(tx_memory, CONSUMER).wrapping_add(u64::from(*count) % 9);
                set(tx_memory, CONSUMER as u64, consumer);
            }
            Action::Read { count } => {
                let count = rx.available().min(u64::from(*count));
                let mut sum = 0_usize;
                for ahead in 0..count {
                    let packet = rx.packet(ahead);
                    assert!(packet.len() <= intf::VTL_MAX_PAYLOAD as usize);
                    // All of it can be read.
                    sum += packet.iter().map(|b| usize::from(*b)).sum::<usize>();
                    sum += usize::from(rx.goes_on(ahead)) + usize::from(rx.is_last(ahead));
                }
                std::hint::black_box(sum);
                rx.consume(count);
            }
            Action::TakeLast if rx.available() > 0 => {
                rx.take_last();
                rx.is_at_end();
            }
            Action::TakeLast => {}
            Action::WaitToRead => {
                rx.prepare_wait();
                rx.prepare_wait_for_any();
                rx.offer_room();
                rx.closed();
            }
            Action::Write { len, how } => {
                assert!(tx.max_payload() <= PAYLOAD.into());
                let room = tx.room();
                assert!(room <= SLOTS.into());
                if room == 0 {
                    continue;
                }
                let slot = tx.slot(room - 1);
                slot.fill(7);
                let lengths = [u32::from(*len) % slot.len() as u32 + 1];
                match how % 5 {
                    0 => tx.publish(&lengths),
                    1 => tx.publish_message(&lengths, true),
                    2 => tx.publish_in_lane(&lengths, u32::from(*how) / 5, &mut lanes),
                    3 => tx.publish_last(),
                    _ => {
                        tx.stage(&lengths);
                        tx.staged();
                        tx.publish_staged()
                    }
                };
            }
            Action::WaitForRoom => {
                tx.wait_for_room();
                tx.unacknowledged();
                tx.closed();
                tx.is_succeeded();
            }
            Action::Daemon(what) => {
                controls.published();
                controls.take_offer();
                match what % 4 {
                    0 => controls.set_path(u16::from(*what)),
                    1 => controls.set_closed(u32::from(*what) / 4),
                    2 => controls.set_succeeded(),
                    _ => {}
                }
            }
        }
    }
}

fuzz_target!(|input: Input| {
    RINGS.with_borrow(|rings| run(&input, rings));
});
