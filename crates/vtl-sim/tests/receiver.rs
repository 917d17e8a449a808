//! Transport functions of ingress, and building acknowledgements, as tables.
#![allow(missing_docs, non_snake_case)]

mod table;

use table::{MS, NEXT, NOW, SID, STOP, data_header, host};
use vtl_proto::{
    intf::{self, VTL_DATA, VTL_F_ACK_NOW, VTL_PROBE},
    ip,
    wire::{Ack, Packet},
};
use vtl_sim::{ffi, host::Host};

#[test]
fn checksum_verify__every_length_and_every_bit() {
    for len in [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 1439, 1440, 1919, 1920] {
        // What tf_checksum_add writes, tf_checksum_verify accepts, and vtl-proto agrees.
        let mut h = host(|s| (s.max_payload, s.path) = (1920, 1920));
        for (i, byte) in h.tx_slot(SID, 0).data.iter_mut().enumerate() {
            *byte = (i * 7 + len) as u8;
        }
        h.tx_slot(SID, 0).len = len as u32;
        h.tx_ctl(SID).producer = 1;
        let mut frame = [0; 2048];
        let length = h.egress(SID, NOW, &mut frame).expect("something to send");
        let Ok(Packet::Data(d)) = Packet::parse(&frame[ip::OFFSET_V4..length]) else {
            panic!("{len}")
        };
        assert_eq!(d.payload.len(), len);
        assert!(
            d.payload
                .iter()
                .enumerate()
                .all(|(i, b)| *b == (i * 7 + len) as u8)
        );

        let mut receiver = host(|_| ());
        let payload = d.payload.to_vec();
        // SAFETY: 40 initialised bytes; any bit pattern is a header.
        let good: intf::vtl_data_hdr =
            unsafe { std::ptr::read_unaligned(frame[ip::OFFSET_V4..].as_ptr().cast()) };
        let verify = |receiver: &mut Host, hdr: &mut _, payload: &[u8]| {
            let sum = payload.chunks(8).map(|word| {
                let mut bytes = [0; 8];
                bytes[..word.len()].copy_from_slice(word);
                u64::from_le_bytes(bytes)
            });
            let sum = sum.fold(0, u64::wrapping_add);
            let fill = |i: &mut ffi::vtl_in| (i.sum, i.len) = (sum, len as u32);
            receiver
                .input(ffi::vtl_native_checksum_verify, SID, hdr, fill)
                .0
        };
        let mut payload = payload;
        let verdict = verify(&mut receiver, &mut good.clone(), &payload);
        assert_eq!(verdict, NEXT, "{len}");
        for bit in 0..len * 8 {
            payload[bit / 8] ^= 1 << (bit % 8);
            let verdict = verify(&mut receiver, &mut good.clone(), &payload);
            assert_eq!(verdict, STOP, "{len}: bit {bit}");
            payload[bit / 8] ^= 1 << (bit % 8);
        }
        let mut other = good;
        other.seq ^= 1 << 40;
        assert_eq!(verify(&mut receiver, &mut other, &payload), STOP);
        assert_eq!(receiver.session(SID).rx.bad_csum, len as u64 * 8 + 1);
        assert_eq!(receiver.stat(intf::VTL_ST_RX_BAD_CSUM), len as u64 * 8 + 1);
    }
}

#[test]
fn checksum_verify__probe_has_no_payload() {
    let mut h = host(|s| s.tx.probe = 1);
    let mut frame = [0; 2048];
    let length = h.egress(SID, NOW, &mut frame).expect("a probe");
    assert!(matches!(
        Packet::parse(&frame[ip::OFFSET_V4..length]),
        Ok(Packet::Probe(_))
    ));
    // SAFETY: 40 initialised bytes; any bit pattern is a header.
    let mut hdr: intf::vtl_data_hdr =
        unsafe { std::ptr::read_unaligned(frame[ip::OFFSET_V4..].as_ptr().cast()) };
    let probe = |i: &mut ffi::vtl_in| i.type_ = VTL_PROBE as u8;
    assert_eq!(
        h.input(ffi::vtl_native_checksum_verify, SID, &mut hdr, probe)
            .0,
        NEXT
    );
}

/// One line of the table of tf_receive_admit.
struct Admit {
    name: &'static str,
    cum: u64,
    /// What the application claims to have read.
    consumer: u64,
    have: &'static [u64],
    seq: u64,
    verdict: u32,
    duplicate: u8,
}

#[test]
fn receive_admit__table() {
    let line = |name, cum, consumer, have, seq, verdict, duplicate| Admit {
        name,
        cum,
        consumer,
        have,
        seq,
        verdict,
        duplicate,
    };
    for l in [
        line("the next", 0, 0, &[], 0, NEXT, 0),
        line("ahead", 0, 0, &[], 255, NEXT, 0),
        line("beyond the ring", 0, 0, &[], 256, STOP, 0),
        line("the largest number", 0, 0, &[], u64::MAX, STOP, 0),
        line("behind", 100, 100, &[], 99, NEXT, 1),
        line("far behind", 100_000, 100_000, &[], 0, NEXT, 1),
        line("there already", 0, 0, &[70], 70, NEXT, 1),
        line("beside one that is there", 0, 0, &[70], 71, NEXT, 0),
        line("room where the app has read", 100, 100, &[], 355, NEXT, 0),
        line("no room where it has not", 100, 99, &[], 355, STOP, 0),
        line(
            "the app claims more than it was given",
            100,
            101,
            &[],
            256,
            STOP,
            0,
        ),
        line("the app claims nonsense", 100, u64::MAX, &[], 256, STOP, 0),
    ] {
        let mut h = host(|s| {
            s.rx.cum = l.cum;
            for seq in l.have {
                s.rx.map[(seq / 64 % 512) as usize] |= 1 << (seq % 64);
            }
        });
        h.rx_ctl(SID).consumer = l.consumer;
        let mut hdr = data_header(VTL_DATA, l.seq, 1, 0);
        let (verdict, i) = h.input(ffi::vtl_native_receive_admit, SID, &mut hdr, |i| {
            i.seq = l.seq;
        });
        assert_eq!(
            (verdict, i.duplicate),
            (l.verdict, l.duplicate),
            "{}",
            l.name
        );
        assert_eq!(
            h.session(SID).rx.beyond,
            u64::from(verdict == STOP),
            "{}",
            l.name
        );
    }
    let mut h = host(|_| ());
    let mut hdr = data_header(VTL_PROBE, u64::MAX, 1, 0);
    let fill = |i: &mut ffi::vtl_in| (i.type_, i.seq) = (VTL_PROBE as u8, u64::MAX);
    assert_eq!(
        h.input(ffi::vtl_native_receive_admit, SID, &mut hdr, fill)
            .0,
        NEXT,
        "probe"
    );
}

#[test]
fn rx_limit__never_falls_and_fits_the_bitmap() {
    let mut h = Host::new();
    h.open(
        SID,
        0,
        &vtl_sim::host::SessionConfig {
            slots: 32768,
            ..Default::default()
        },
    );
    assert_eq!(h.rx_limit(SID), 32768);
    h.session_mut(SID).rx.cum = 100;
    h.rx_ctl(SID).consumer = 100;
    assert_eq!(h.rx_limit(SID), 64 + 32768, "no two packets share a word");
    h.rx_ctl(SID).consumer = 50;
    assert_eq!(h.rx_limit(SID), 64 + 32768, "what was read stays read");
    assert_eq!(h.session(SID).rx.consumer, 100);
}

/// Places packets one after the other.
fn place(h: &mut Host, seq: u64, duplicate: bool, flags: u32) {
    let slot: *mut _ = h.rx_slot(SID, seq);
    let mut hdr = data_header(VTL_DATA, seq, 1, flags);
    h.input(ffi::vtl_native_receive_place, SID, &mut hdr, |i| {
        (i.seq, i.slot, i.len, i.duplicate) = (seq, slot, 99, duplicate.into());
    });
}

#[test]
fn receive_place__order_and_publication() {
    let mut h = host(|_| ());
    // seq in, cum after.
    for (seq, cum) in [(0, 1), (2, 1), (1, 3), (4, 3), (6, 3), (5, 3), (3, 7)] {
        place(&mut h, seq, false, 0);
        assert_eq!(
            (h.session(SID).rx.cum, h.rx_ctl(SID).producer),
            (cum, cum),
            "{seq}"
        );
        assert_eq!(h.rx_slot(SID, seq).len, 99);
    }
    // Over the borders of words, backwards: one store publishes all.
    for seq in (8..200).rev() {
        place(&mut h, seq, false, 0);
        assert_eq!(h.session(SID).rx.cum, 7);
    }
    place(&mut h, 7, false, VTL_F_ACK_NOW);
    let s = h.session(SID);
    assert_eq!((s.rx.cum, s.rx.max, s.rx.received), (200, 200, 200));
    assert!(
        s.rx.map[..3].iter().all(|w| *w == 0),
        "words that are done serve later packets"
    );
    place(&mut h, 3, true, 0);
    let s = h.session(SID);
    assert_eq!((s.rx.dups, s.rx.received), (1, 200));
    assert_eq!(h.stat(intf::VTL_ST_RX_DUPLICATE), 1);
}

#[test]
fn receive_place__wakes_a_sleeper_once() {
    let mut h = host(|_| ());
    place(&mut h, 0, false, 0);
    assert_eq!(h.events(SID), 0, "nobody sleeps");
    h.rx_ctl(SID).waiting = 1;
    place(&mut h, 2, false, 0);
    assert_eq!(h.events(SID), 0, "nothing in order");
    place(&mut h, 1, false, 0);
    assert_eq!(
        (h.events(SID), h.rx_ctl(SID).waiting),
        (intf::VTL_EV_RECV, 0)
    );
    place(&mut h, 3, false, 0);
    assert_eq!(h.events(SID), 0);
}

#[test]
fn ack_build__parses_and_describes_the_window() {
    // cum, packets beyond, words offered; words needed.
    for (cum, beyond, offered, needed) in [
        (0u64, &[][..], 128u32, 0u32),
        (5, &[], 128, 0),
        (5, &[7], 128, 1),
        (64, &[64 + 63, 64 + 64], 128, 2),
        (100, &[130, 191, 192, 355], 128, 5),
        (100, &[130, 191, 192, 355], 2, 5),
        (100, &[130], 0, 2),
    ] {
        let mut h = host(|s| {
            (s.rx.cum, s.rx.max) = (cum, beyond.last().map_or(cum, |last| last + 1));
            (s.rx.received, s.rx.dups) = (cum + beyond.len() as u64, 3);
            (s.rx.echo_seq, s.rx.echo_xid, s.rx.echo_ts) = (8, 9, 10);
            for seq in (cum & !63..cum).chain(beyond.iter().copied()) {
                s.rx.map[(seq / 64 % 512) as usize] |= 1 << (seq % 64);
            }
        });
        h.rx_ctl(SID).consumer = cum;
        let mut hdr = Default::default();
        let mut map = [0; 129];
        let words = offered.min(needed);
        assert_eq!(h.build_ack(SID, &mut hdr, &mut map, words, false), needed);
        // SAFETY: 72 initialised bytes without padding.
        let head: [u8; 72] = unsafe { std::mem::transmute(hdr) };
        let mut packet = head.to_vec();
        packet.extend(map[..words as usize].iter().flat_map(|w| w.to_le_bytes()));
        let Ok(Packet::Ack(a)) = Packet::parse(&packet) else {
            panic!("{:?}", Packet::parse(&packet))
        };
        let want = Ack {
            cum,
            limit: cum + 256,
            received: cum + beyond.len() as u64,
            echo_seq: 8,
            echo_xid: 9,
            echo_ts: 10,
            dups: 3,
            ..a
        };
        assert_eq!(a, want);
        let partial = u32::from(a.header.flags) & intf::VTL_F_PARTIAL != 0;
        assert_eq!(partial, words < needed);
        for seq in 0..600 {
            let told = seq < (cum & !63) + u64::from(words) * 64;
            let there = seq < cum || beyond.contains(&seq);
            let want = if seq >= cum && !told && partial {
                None
            } else {
                Some(there)
            };
            assert_eq!(a.has(seq), want, "{cum} {beyond:?} {words}: {seq}");
        }
    }
}

#[test]
fn ack_build__wide_windows_in_turn() {
    // cum's word is 1, the last packet's 301: 301 words, of which 128 fit.
    // echo; where the bitmap starts in turn, in words from cum's own
    for (echo, second) in [
        (19_327, 173),  // the last one
        (64 * 151, 86), // in the middle: 64 words on each side
        (64 * 20, 0),   // near the beginning
        (3, 173),       // an old one: the last ones
    ] {
        let mut h = host(|s| {
            (s.rx.cum, s.rx.max, s.rx.echo_seq) = (70, 64 * 302, echo);
            for word in 1..302 {
                s.rx.map[word] = word as u64;
            }
        });
        for skip in [0, second, 0] {
            let mut hdr = Default::default();
            let mut map = [0; 129];
            assert_eq!(h.build_ack(SID, &mut hdr, &mut map, 128, false), 128);
            assert_eq!(u32::from_be(hdr.skip), skip, "{echo}");
            assert_eq!(
                (map[0], map[127]),
                (1 + u64::from(skip), 128 + u64::from(skip))
            );
            let partial = u32::from(hdr.h.flags) & intf::VTL_F_PARTIAL != 0;
            assert_eq!(partial, skip + 128 < 301, "{echo}");
        }
    }
}

#[test]
fn ack_note__echoes_the_latest() {
    let mut h = host(|_| ());
    let mut hdr = data_header(VTL_DATA, 4, 77, 0);
    hdr.ts = 1234u32.to_be();
    h.input(ffi::vtl_native_ack_note, SID, &mut hdr, |i| i.seq = 4);
    let rx = &h.session(SID).rx;
    assert_eq!((rx.echo_seq, rx.echo_xid, rx.echo_ts), (4, 77, 1234));
}

#[test]
fn make__window_update_needs_no_data() {
    let mut h = host(|s| s.rx.ack_now = 1);
    let mut frame = [0; 2048];
    let length = h.egress(SID, NOW, &mut frame).expect("an acknowledgement");
    let Ok(Packet::Ack(a)) = Packet::parse(&frame[ip::OFFSET_V4..length]) else {
        panic!("no ACK")
    };
    assert_eq!(
        u32::from(a.header.flags) & intf::VTL_F_UPDATE,
        intf::VTL_F_UPDATE
    );
    assert_eq!(h.session(SID).rx.ack_now, 0);
    assert_eq!(h.egress(SID, NOW + MS, &mut frame), None);
    assert_eq!(
        h.session(SID).tx.wake_ns,
        u64::MAX,
        "nothing to wait for but events"
    );
    // Somebody is at work on the receiving half: the request must not get lost.
    h.session_mut(SID).rx.ack_now = 1;
    h.session_mut(SID).rx.lock = 1;
    assert_eq!(h.egress(SID, NOW + MS, &mut frame), None);
    assert_eq!(h.session(SID).rx.ack_now, 1);
    h.session_mut(SID).rx.lock = 0;
    assert!(h.egress(SID, NOW + MS, &mut frame).is_some());
}
