//! KCP, as the daemon uses it, with a peer that sends any datagram: segments of the conversation with fields near
//! those that are due, or anything.
#![no_main]

use std::{cell::RefCell, io::Write, rc::Rc};

use arbitrary::Arbitrary;
use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;

const DATAGRAM: usize = 1280 - 48;
const WINDOW: u16 = 2048;
const NUMBER: u32 = 7;

#[derive(Arbitrary, Debug)]
enum Action<'a> {
    Segment {
        command: u8,
        fragment: u8,
        window: u16,
        time: u32,
        number: i8,
        due: u8,
        data: &'a [u8],
        lie: i8,
    },
    Raw(&'a [u8]),
    Write(u16),
    Read,
    Wait(u16),
}

#[derive(Clone, Default)]
struct Outbox(Rc<RefCell<usize>>);

impl Write for Outbox {
    fn write(&mut self, datagram: &[u8]) -> std::io::Result<usize> {
        assert!(datagram.len() <= DATAGRAM);
        *self.0.borrow_mut() += 1;
        Ok(datagram.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|actions: Vec<Action<'_>>| {
    let mut control = kcp::Kcp::new_stream(NUMBER, Outbox::default());
    control.set_mtu(DATAGRAM).expect("a size");
    control.set_wndsize(WINDOW, WINDOW);
    control.set_nodelay(true, 10, 2, false);
    control.set_rx_minrto(100);
    let mut now = 0;
    let mut got = 0_u32;
    let _ = control.update(now);
    for action in actions.iter().take(200) {
        match *action {
            Action::Segment {
                command,
                fragment,
                window,
                time,
                number,
                due,
                data,
                lie,
            } => {
                let mut segment = NUMBER.to_le_bytes().to_vec();
                segment.extend([81 + command % 4, fragment]);
                segment.extend(window.to_le_bytes());
                segment.extend(time.to_le_bytes());
                segment.extend(got.wrapping_add_signed(number.into()).to_le_bytes());
                segment.extend(u32::from(due).to_le_bytes());
                segment.extend(
                    (data.len() as u32)
                        .wrapping_add_signed(lie.into())
                        .to_le_bytes(),
                );
                segment.extend(data);
                if segment.len() <= DATAGRAM {
                    let _ = control.input(&segment);
                    got = got.wrapping_add(u32::from(command % 4 == 0));
                }
            }
            Action::Raw(bytes) => {
                if (kcp::KCP_OVERHEAD..=DATAGRAM).contains(&bytes.len()) {
                    let _ = control.input(bytes);
                }
            }
            Action::Write(len) => {
                if control.wait_snd() < usize::from(WINDOW) {
                    let _ = control.send(&vec![7; usize::from(len % 8208)]);
                }
            }
            Action::Read => {
                while let Ok(size) = control.peeksize() {
                    assert!(size <= usize::from(WINDOW) * DATAGRAM);
                    let mut bytes = BytesMut::zeroed(size);
                    if control.recv(&mut bytes).is_err() {
                        break;
                    }
                }
            }
            Action::Wait(ms) => {
                now += u32::from(ms);
                let _ = control.update(now);
                control.check(now);
            }
        }
    }
    let _ = control.flush();
});
