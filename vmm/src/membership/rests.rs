//! How long a node that was lost again and again is not asked to join.
//!
//! A node that crashes soon after each start is listed each time, and copies are made there each time.
//! Its first loss is none of that: it may join as soon as it is listed again.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fabric_identity::Name;

/// Losses within this time count together. More than twice [`REST_MAX`], so that the losses before a
/// rest count after it.
const WINDOW: Duration = Duration::from_secs(2 * 60 * 60);
/// The rest after the second loss, which is doubled with each further one.
const REST_MIN: Duration = Duration::from_secs(60);
/// Limit of the rest.
const REST_MAX: Duration = Duration::from_secs(32 * 60);
/// Limit of losses that are known: the oldest are forgotten.
const KNOWN_MAX: usize = 1024;

/// Returns how long a node is not asked to join from its last loss on, after so many.
fn rest_after(losses: usize) -> Duration {
    let Some(doublings) = losses.checked_sub(2) else {
        return Duration::ZERO;
    };
    let doublings = u32::try_from(doublings).unwrap_or(u32::MAX);
    let factor = 2_u32.saturating_pow(doublings);
    REST_MIN.saturating_mul(factor).min(REST_MAX)
}

/// A node was lost.
#[derive(Clone, Debug)]
struct Loss {
    name: Option<Name>,
    address: SocketAddr,
    at: Instant,
}

/// The losses of the nodes of a VM.
#[derive(Debug, Default)]
pub(super) struct Rests {
    /// The newest last.
    losses: Vec<Loss>,
}

impl Rests {
    /// Notes that the node at an address was lost. Returns how often it was within the window, and for
    /// how long it is not asked to join.
    pub fn note_lost(
        &mut self,
        name: Option<Name>,
        address: SocketAddr,
        now: Instant,
    ) -> (usize, Duration) {
        let is_old = |loss: &Loss| now.saturating_duration_since(loss.at) > WINDOW;
        self.losses.retain(|loss| !is_old(loss));
        if self.losses.len() == KNOWN_MAX {
            self.losses.remove(0);
        }
        self.losses.push(Loss {
            name: name.clone(),
            address,
            at: now,
        });
        let (count, _) = self.of(name.as_ref(), address, now);
        (count, rest_after(count))
    }

    /// Returns whether a node is not asked to join at the moment.
    pub fn has(&self, name: &Name, address: SocketAddr, now: Instant) -> bool {
        let (count, last) = self.of(Some(name), address, now);
        last.is_some_and(|last| now.saturating_duration_since(last) < rest_after(count))
    }

    /// Returns how often a node was lost within the window, by its name or address, and when last.
    fn of(
        &self,
        name: Option<&Name>,
        address: SocketAddr,
        now: Instant,
    ) -> (usize, Option<Instant>) {
        let is_it = |loss: &&Loss| {
            let is_near = now.saturating_duration_since(loss.at) <= WINDOW;
            let is_named = name.is_some() && loss.name.as_ref() == name;
            is_near && (is_named || loss.address == address)
        };
        let losses = self.losses.iter().filter(is_it);
        (losses.clone().count(), losses.map(|loss| loss.at).max())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> SocketAddr {
        ([10, 0, 0, last], 7000).into()
    }

    fn name(text: &str) -> Name {
        text.parse().expect("a name")
    }

    #[test]
    fn the_rest_is_doubled_with_each_loss_after_the_first_up_to_a_limit() {
        let minutes = (0..=9).chain([100, usize::MAX]).map(rest_after);
        let minutes: Vec<u64> = minutes.map(|rest| rest.as_secs() / 60).collect();
        assert_eq!(minutes, [0, 0, 1, 2, 4, 8, 16, 32, 32, 32, 32, 32]);
        assert!(WINDOW > 2 * REST_MAX);
    }

    #[test]
    fn a_node_that_crashes_in_a_loop_rests_by_its_name_and_its_address() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let (a, b) = (name("a"), name("b"));
        let mut rests = Rests::default();
        assert_eq!(
            rests.note_lost(Some(a.clone()), address(1), at(0)),
            (1, Duration::ZERO)
        );
        assert!(!rests.has(&a, address(1), at(0)));
        // It was started again elsewhere.
        let second = rests.note_lost(Some(a.clone()), address(2), at(10));
        assert_eq!(second, (2, Duration::from_secs(60)));
        assert!(rests.has(&a, address(3), at(69)) && !rests.has(&a, address(3), at(70)));
        // Another one at an address of it was lost there once.
        assert!(!rests.has(&b, address(2), at(11)) && !rests.has(&b, address(9), at(11)));
        // One that was named by its address only.
        let third = rests.note_lost(None, address(2), at(100));
        assert_eq!(third, (2, Duration::from_secs(60)));
        assert!(rests.has(&b, address(2), at(159)) && !rests.has(&b, address(2), at(160)));
        assert!(rests.has(&a, address(2), at(219)), "three losses of both");
        assert!(!rests.has(&a, address(2), at(220)));
    }

    #[test]
    fn losses_are_forgotten_after_the_window_and_beyond_the_limit() {
        let start = Instant::now();
        let a = name("a");
        let mut rests = Rests::default();
        for _ in 0..3 {
            rests.note_lost(Some(a.clone()), address(1), start);
        }
        let later = start + WINDOW + Duration::from_secs(1);
        let rest = rests.note_lost(Some(a.clone()), address(1), later);
        assert_eq!(rest, (1, Duration::ZERO));
        assert_eq!(rests.losses.len(), 1);
        for _ in 0..2 * KNOWN_MAX {
            rests.note_lost(None, address(2), later);
        }
        assert_eq!(rests.losses.len(), KNOWN_MAX);
        assert!(rests.has(&a, address(2), later + REST_MAX / 2));
    }
}
