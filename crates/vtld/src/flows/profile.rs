//! Profile of a flow's application, classified by the flow's first bytes, and those of earlier flows.

use std::{
    cell::RefCell,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use vtl_core::profile::{Cache, Classifier, Profile, Source, Verdict};
use vtl_proto::frame::Side;

use super::{learn::Course, now_ns};
use crate::hooker::Executable;

/// The profiles of earlier flows that this host has opened. Shared by threads.
#[derive(Debug)]
pub(super) struct Profiles {
    began: Instant,
    cache: Mutex<Cache>,
}

impl Default for Profiles {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            cache: Mutex::default(),
        }
    }
}

impl Profiles {
    fn cache(&self) -> MutexGuard<'_, Cache> {
        // Poisoning is harmless: no critical section leaves a partial update.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The profile that a flow is expected to have: that of the latest one of the same program to the same destination,
    /// or else what the port tells.
    pub(super) fn expected(&self, source: &Source) -> Option<Profile> {
        let known = self.cache().get(now_ns(self.began), source);
        known.or_else(|| Profile::of(source.dest.port()))
    }

    fn note(&self, source: Source, profile: Profile) {
        self.cache().note(now_ns(self.began), source, profile);
    }
}

/// Feeds a flow's first reads and writes to a [`Classifier`]; after its verdict the cost is a check of a flag.
pub(super) struct Observer {
    opener: Side,
    began: Instant,
    /// `None` for a flow whose beginning was not seen here.
    classifier: RefCell<Option<Classifier>>,
    /// Where the verdict is noted for later flows, if this host has opened the flow.
    notes: Option<(Source, Arc<Profiles>)>,
    /// Of a flow that may teach what its carrier is worth.
    course: Option<Course>,
}

impl Observer {
    /// The observer of a new flow that this host opens. `exe`: what its application executes, if that is known; `teaches`:
    /// its carrier is chosen.
    pub(super) fn new(
        dest: SocketAddr,
        exe: Option<&Executable>,
        profiles: &Arc<Profiles>,
        teaches: bool,
    ) -> Self {
        let name = exe.map(|exe| exe.name.as_str());
        let program = exe.map(|exe| exe.program);
        let source = Source { dest, program };
        Self {
            opener: Side::Local,
            notes: Some((source, Arc::clone(profiles))),
            course: teaches.then(Course::new),
            ..Self::with(Some(Classifier::new(name, dest.port())))
        }
    }

    /// The observer of a new flow that a peer has opened. `to`: the application here.
    pub(super) fn of_peer(to: SocketAddr) -> Self {
        Self::with(Some(Classifier::new(None, to.port())))
    }

    /// The observer of a flow handed over by a former daemon: no profile.
    pub(super) fn none() -> Self {
        Self::with(None)
    }

    fn with(classifier: Option<Classifier>) -> Self {
        Self {
            opener: Side::Peer,
            began: Instant::now(),
            classifier: RefCell::new(classifier),
            notes: None,
            course: None,
        }
    }

    /// Classifies bytes sent by the application of side `by`.
    pub(super) fn look(&self, by: Side, bytes: &[u8]) {
        let mut classifier = self.classifier.borrow_mut();
        let Some(classifier) = classifier.as_mut().filter(|c| !c.is_done()) else {
            return;
        };
        let now = now_ns(self.began);
        match by == self.opener {
            true => classifier.sent(now, bytes),
            false => classifier.received(now, bytes),
        }
        if let (Some(verdict), Some((source, profiles))) = (classifier.verdict(), &self.notes) {
            profiles.note(*source, verdict.profile);
        }
    }

    /// Notes that the flow goes by something else from now on. `bytes`: moved before.
    pub(super) fn note_moved(&self, bytes: u64) {
        if let Some(course) = &self.course {
            course.begin(bytes);
        }
    }

    /// Notes that bytes of the flow move.
    pub(super) fn note_moving(&self) {
        if let Some(course) = &self.course {
            course.note_moving();
        }
    }

    /// The course of a flow that may teach something.
    pub(super) fn course(&self) -> Option<&Course> {
        self.course.as_ref()
    }

    /// Whether there is no verdict yet.
    pub(super) fn is_looking(&self) -> bool {
        self.classifier
            .borrow()
            .as_ref()
            .is_some_and(|c| !c.is_done())
    }

    /// The profile of the verdict, once there is one.
    pub(super) fn profile(&self) -> Option<Profile> {
        let classifier = self.classifier.borrow();
        Some(classifier.as_ref()?.verdict()?.profile)
    }

    /// The verdict, once there is one.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        self.classifier.borrow().as_ref()?.verdict().cloned()
    }
}

#[cfg(test)]
mod tests {
    use vtl_core::profile::Program;

    use super::*;

    const DEST: &str = "192.0.2.2:25";

    fn dest() -> SocketAddr {
        DEST.parse().expect("an address")
    }

    fn verdict(opener: Side, by: Side, bytes: &[u8]) -> Option<String> {
        let observer = match opener {
            Side::Local => Observer::new(dest(), None, &Arc::default(), false),
            Side::Peer => Observer::of_peer(dest()),
        };
        observer.look(by, bytes);
        observer.verdict().map(|verdict| verdict.evidence)
    }

    #[test]
    fn look__knows_who_opened_the_flow() {
        let greeting = b"220 mx ESMTP\r\n";
        assert_eq!(
            verdict(Side::Local, Side::Peer, greeting).as_deref(),
            Some("SMTP greeting")
        );
        assert_eq!(
            verdict(Side::Peer, Side::Local, greeting).as_deref(),
            Some("SMTP greeting")
        );
        // Clients greet nobody.
        assert_eq!(verdict(Side::Local, Side::Local, greeting), None);
        assert_eq!(verdict(Side::Peer, Side::Peer, greeting), None);
    }

    #[test]
    fn look__notes_the_verdict_for_the_next_flow_of_the_program() {
        let profiles = Arc::<Profiles>::default();
        let exe = |inode, name: &str| Executable {
            program: Program { device: 1, inode },
            name: name.to_owned(),
        };
        let expected = |exe: Option<&Executable>| {
            let program = exe.map(|exe| exe.program);
            let dest = dest();
            profiles.expected(&Source { dest, program })
        };
        let player = exe(7, "player");
        assert_eq!(
            expected(Some(&player)),
            Some(Profile::LossSensitive),
            "the port"
        );
        let observer = Observer::new(dest(), Some(&player), &profiles, false);
        observer.look(Side::Local, b"DESCRIBE rtsp://h/s RTSP/1.0\r\n\r\n");
        assert_eq!(observer.profile(), Some(Profile::TimeSensitive));
        assert_eq!(expected(Some(&player)), Some(Profile::TimeSensitive));
        assert_eq!(
            expected(Some(&exe(8, "mail"))),
            Some(Profile::LossSensitive)
        );
        assert_eq!(expected(None), Some(Profile::LossSensitive));
        // What peers open tells nothing of the programs here.
        Observer::of_peer(dest()).look(Side::Peer, b"DESCRIBE rtsp://h/s RTSP/1.0\r\n\r\n");
        assert_eq!(expected(None), Some(Profile::LossSensitive));
        // The name counts where the bytes leave it open.
        let observer = Observer::new(dest(), Some(&exe(9, "mpv")), &profiles, false);
        observer.look(Side::Local, b"GET /film HTTP/1.1\r\nHost: h\r\n\r\n");
        observer.look(
            Side::Peer,
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n",
        );
        assert_eq!(observer.profile(), Some(Profile::TimeSensitive));
    }

    #[test]
    fn none__has_no_verdict() {
        let observer = Observer::none();
        observer.look(Side::Local, b"SSH-2.0-x\r\n");
        assert_eq!(observer.verdict(), None);
    }
}
