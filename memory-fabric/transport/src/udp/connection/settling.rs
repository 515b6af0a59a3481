//! The end of an exchange after which nobody drives the connection for a while.
//!
//! The protocol takes the time until an acknowledgement is read for the round trip. One that came
//! while nobody drove the connection is read seconds later, and then the protocol waits for seconds
//! before it sends a lost packet again.

use super::Driver;
use std::time::Instant;

impl Driver {
    /// Acknowledges all received data, since this end is not driven for a while.
    pub fn acknowledge(&mut self) {
        self.connection.ping();
        self.transmit();
    }

    /// Drives the connection until each end has acknowledged what the other has sent, the deadline
    /// has come, or the connection has failed. Does not wait for what the peer sends unasked after
    /// that. Call it after [`acknowledge`](Self::acknowledge).
    pub fn settle(&mut self, deadline: Instant) {
        while self.poll_io().is_ok() && !self.is_settled() && self.wait(Some(deadline)).is_ok() {}
    }

    /// Returns whether the protocol waits for nothing: without idle timeouts and keep-alives it has
    /// timers only while packets are not acknowledged, and for a moment after the handshake.
    pub(super) fn is_settled(&mut self) -> bool {
        !self.is_blocked() && self.connection.poll_timeout().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{PATIENCE, connected, next, send};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    #[test]
    fn nothing_is_under_way_after_a_connection_has_settled() {
        let deadline = Instant::now() + PATIENCE;
        let (mut vm, mut donor) = connected();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(next(&mut donor, deadline), 1);
                send(&mut donor, 1);
                // As a donor that waits for the next request.
                while !done.load(Ordering::SeqCst) {
                    assert!(Instant::now() < deadline, "it does not settle");
                    donor.poll_io().expect("a connection");
                }
            });
            send(&mut vm, 1);
            assert_eq!(next(&mut vm, deadline), 1);
            vm.acknowledge();
            assert!(!vm.is_settled(), "the donor has to acknowledge");
            vm.settle(deadline);
            let settled = vm.is_settled();
            done.store(true, Ordering::SeqCst);
            assert!(
                settled,
                "an acknowledgement would be read with the next request"
            );
        });
    }

    #[test]
    fn a_peer_that_acknowledges_nothing_is_waited_for_until_the_deadline() {
        let (mut vm, _donor) = connected();
        send(&mut vm, 1);
        let deadline = Instant::now() + Duration::from_millis(50);
        vm.settle(deadline);
        assert!(Instant::now() >= deadline && !vm.is_settled());
    }
}
