//! Frames of flows and carriers, as a peer may send them: what is taken is emitted again as the same frame, and a
//! frame that is cut is not taken.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vtl_proto::{
    carrier::Kind,
    frame::{Frame, FrameError},
};

fuzz_target!(|data: &[u8]| {
    let mut rest = data;
    loop {
        let before = rest;
        let Ok(frame) = Frame::take(&mut rest) else {
            assert_eq!(before, rest);
            return;
        };
        let mut again = vec![0; before.len() - rest.len()];
        assert_eq!(frame.emit(&mut again), Some(again.len()));
        // The other host has opened what this one has not.
        let mut twice = vec![0; again.len()];
        let mirrored = Frame::take(&mut &again[..]).expect("a frame");
        assert_eq!(mirrored.emit(&mut twice), Some(again.len()));
        assert_eq!(Frame::take(&mut &twice[..]), Ok(frame));
        let cut = &before[..again.len() - 1];
        assert_eq!(Frame::take(&mut &cut[..]), Err(FrameError::Truncated));
        if let Frame::Ask { kind, .. } | Frame::Refuse { kind } | Frame::Grant { kind, .. } = frame
            && let Some(known) = u8::try_from(kind).ok().and_then(Kind::numbered)
        {
            // A stack has a name of its own.
            let named = Kind::NAMED.contains(&known).then_some(known);
            assert_eq!(Kind::named(known.name()), named);
        }
    }
});
