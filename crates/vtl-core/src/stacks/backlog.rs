//! What a flow has to send, as far as its sender can tell.

/// How many bytes a run counts for at most, as all that goes by a shorter path meanwhile waits at the other host for what
/// goes by a longer one: a sixteenth of what a flow may have unconfirmed, since what the longer one loses comes several
/// times later.
const MAX_RUN: u64 = 1 << 20;

/// Bytes that a flow is expected to send: what waits in the application's connection, or, if that is more, as much again
/// as it has sent without a pause. Sizes of transfers are heavy-tailed (Crovella and Bestavros, 1997), and the connection
/// holds less than a long path does.
#[derive(Debug, Default)]
pub struct Backlog {
    waiting: u64,
    run: u64,
}

impl Backlog {
    /// Notes how many bytes a read has left in the application's connection.
    pub fn read(&mut self, waiting: u64) {
        self.waiting = waiting;
        if waiting == 0 {
            self.run = 0;
        }
    }

    /// Notes bytes sent for the first time.
    pub fn sent(&mut self, bytes: u64) {
        self.run = self.run.saturating_add(bytes);
    }

    /// The bytes expected, besides those that were read and are not sent.
    pub fn expected(&self) -> u64 {
        self.waiting.max(self.run.min(MAX_RUN))
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn backlog__as_much_again_as_was_sent_without_a_pause() {
        let mut backlog = Backlog::default();
        assert_eq!(backlog.expected(), 0);
        backlog.read(1000);
        backlog.sent(500);
        assert_eq!(backlog.expected(), 1000);
        backlog.sent(700);
        assert_eq!(backlog.expected(), 1200);
        backlog.sent(u64::MAX);
        backlog.read(10);
        assert_eq!(backlog.expected(), MAX_RUN);
        backlog.read(0);
        assert_eq!(backlog.expected(), 0, "a pause ends it");
        backlog.sent(100);
        assert_eq!(backlog.expected(), 100);
    }
}
