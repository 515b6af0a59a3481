//! A peer that is silent for longer than it should be.
//!
//! No kernel reports that the process at the other end has been killed. That of its host refuses what
//! is sent to it after that, so an overdue peer is asked for a packet that a living one would
//! acknowledge.

use super::Driver;
use std::time::Instant;

impl Driver {
    /// Waits until there is something to read, or the connection has failed, which the next read
    /// reports; at `overdue`, asks the peer for an acknowledgement instead. Call it when nothing is
    /// left to be read. The protocol asks again, at growing intervals, as long as this end is driven.
    pub fn ask_if_silent(&mut self, overdue: Instant) {
        while self.poll_io().is_ok() && !self.is_ready() {
            if self.wait(Some(overdue)).is_err() {
                self.connection.ping();
                self.transmit();
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{PATIENCE, connected, next, send};
    use fabric_wire::HEADER_BYTES;
    use std::io;
    use std::time::{Duration, Instant};

    const SILENCE: Duration = Duration::from_millis(50);

    #[test]
    fn a_peer_that_was_killed_is_noticed() {
        let (mut vm, mut donor) = connected();
        // It sends nothing more, and its socket is closed.
        vm.fail(io::ErrorKind::Other, "killed".to_owned());
        drop(vm);
        let deadline = Instant::now() + PATIENCE;
        donor.ask_if_silent(Instant::now() + SILENCE);
        let error = loop {
            match donor.read(&mut [0; HEADER_BYTES]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    donor.wait(Some(deadline)).expect("its end");
                }
                read => break read.expect_err("it says nothing"),
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_forged_refusal_ends_no_connection() {
        let (mut vm, mut donor) = connected();
        let deadline = Instant::now() + PATIENCE;
        for number in 1..=2 {
            donor.note_refusal();
            donor.poll_io().expect("a connection");
            send(&mut vm, number);
            assert_eq!(next(&mut donor, deadline), number);
            assert_eq!(donor.refused_since, None);
        }
        vm.note_refusal();
        vm.poll_io().expect_err("it connects again");
    }

    #[test]
    fn a_late_peer_keeps_its_connection() {
        let (mut vm, mut donor) = connected();
        let deadline = Instant::now() + PATIENCE;
        donor.ask_if_silent(Instant::now() + SILENCE);
        send(&mut vm, 1);
        // No time to wait: there is something to read.
        donor.ask_if_silent(deadline);
        assert!(Instant::now() < deadline && next(&mut donor, deadline) == 1);
        send(&mut donor, 2);
        assert_eq!(next(&mut vm, deadline), 2);
    }
}
