//! Requests that wait for a change.
//!
//! [`Changes`] counts the changes of a resource, and an answer carries the count. A client repeats
//! its request with that count ([`Seen`]) and is answered as soon as the count differs, or after
//! its timeout. A change between two requests is therefore never missed, however briefly it lasted.

use std::fmt;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::protocol::{CHANGE_WAIT_TIME_MAX, Refusal, RefusalCode};

/// Counts the changes of a resource. Clones share the count.
#[derive(Clone, Debug, Default)]
pub struct Changes(watch::Sender<u64>);

impl Changes {
    /// Counts a change that is already visible, and wakes the waiters without blocking.
    pub fn notify(&self) {
        self.0.send_modify(|count| *count += 1);
    }

    /// Returns the count. Read it before the resource, so that it is never newer than the
    /// resource's state.
    #[must_use]
    pub fn count(&self) -> u64 {
        *self.0.borrow()
    }

    /// Returns a future for the next change after `seen`.
    #[must_use]
    pub fn after(&self, seen: Seen) -> NextChange {
        NextChange {
            changes: self.0.subscribe(),
            seen,
        }
    }
}

/// A change that a request waits for.
#[derive(Debug)]
pub struct NextChange {
    changes: watch::Receiver<u64>,
    seen: Seen,
}

impl NextChange {
    /// Completes at the change or at the timeout.
    pub(super) async fn come(mut self) {
        let Seen { changes, wait } = self.seen;
        let come = self.changes.wait_for(|count| *count != changes);
        // The answer has the current state in both cases.
        let _ = timeout(wait, come).await;
    }
}

/// Parameters of a request: the count that the client has seen, and how long it waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The count of the previous answer.
    pub changes: u64,
    /// Longest wait.
    pub wait: Duration,
}

impl Seen {
    /// Parses the parameters of a request.
    ///
    /// # Errors
    ///
    /// Fails on unknown or repeated parameters, and on numbers beyond their limits.
    pub fn parse(query: &str) -> Result<Self, Refusal> {
        let most = CHANGE_WAIT_TIME_MAX.as_millis();
        let malformed = |found: &str| {
            let text = format!(
                "{found} in the parameters; they are seen=NUMBER, the changes of the last answer, and \
                 wait_ms=NUMBER, 1 to {most}"
            );
            Refusal::new(RefusalCode::Malformed, text)
        };
        let (mut changes, mut wait_ms) = (None, None);
        for part in query.split('&') {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let digits = value.bytes().all(|byte| byte.is_ascii_digit());
            let number = value.parse::<u64>().ok().filter(|_| digits);
            let slot = match name {
                "seen" => &mut changes,
                "wait_ms" => &mut wait_ms,
                _ => return Err(malformed(&format!("{name:.40} is not known"))),
            };
            let number = number.ok_or_else(|| malformed(&format!("{part:.40} is no number")))?;
            if slot.replace(number).is_some() {
                return Err(malformed(&format!("{name} is there twice")));
            }
        }
        let changes = changes.ok_or_else(|| malformed("seen is missing"))?;
        let wait = wait_ms.map_or(CHANGE_WAIT_TIME_MAX, Duration::from_millis);
        if wait.is_zero() || wait > CHANGE_WAIT_TIME_MAX {
            return Err(malformed(&format!("wait_ms={}", wait.as_millis())));
        }
        Ok(Self { changes, wait })
    }
}

/// Formats the parameters as in a request.
impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wait_ms = self.wait.min(CHANGE_WAIT_TIME_MAX).as_millis().max(1);
        write!(f, "seen={}&wait_ms={wait_ms}", self.changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(changes: u64, wait_ms: u64) -> Seen {
        let wait = Duration::from_millis(wait_ms);
        Seen { changes, wait }
    }

    #[test]
    fn parameters_are_read_as_they_are_written() {
        for (seen, text) in [
            (seen(0, 1), "seen=0&wait_ms=1"),
            (
                seen(u64::MAX, 8000),
                "seen=18446744073709551615&wait_ms=8000",
            ),
        ] {
            assert_eq!(seen.to_string(), text);
            assert_eq!(Seen::parse(text), Ok(seen));
        }
        assert_eq!(Seen::parse("wait_ms=20&seen=3"), Ok(seen(3, 20)));
        assert_eq!(Seen::parse("seen=3"), Ok(seen(3, 8000)));
        // The remaining time can exceed the limits of a request in both directions.
        assert_eq!(seen(5, 9000).to_string(), "seen=5&wait_ms=8000");
        assert_eq!(seen(5, 0).to_string(), "seen=5&wait_ms=1");
    }

    #[test]
    fn parameters_that_make_no_sense_are_refused_with_what_is_wrong() {
        for (query, found) in [
            ("", " is not known"),
            ("wait_ms=5", "seen is missing"),
            ("seen", "seen is no number"),
            ("seen=", "seen= is no number"),
            ("seen=-1", "seen=-1 is no number"),
            ("seen=+1", "seen=+1 is no number"),
            ("seen=1.5", "is no number"),
            ("seen=18446744073709551616", "is no number"),
            ("seen=1&seen=1", "seen is there twice"),
            ("seen=1&pretty", "pretty is not known"),
            ("seen=1&wait_ms=0", "wait_ms=0"),
            ("seen=1&wait_ms=8001", "wait_ms=8001"),
            ("seen=1&", " is not known"),
        ] {
            let refusal = Seen::parse(query).expect_err(query);
            assert_eq!(refusal.code, RefusalCode::Malformed);
            assert!(refusal.text.contains(found), "{query}: {}", refusal.text);
            assert!(refusal.text.contains("1 to 8000"), "{}", refusal.text);
        }
        let refusal = Seen::parse(&"x".repeat(8000)).expect_err("long");
        assert!(refusal.text.len() < 300, "{}", refusal.text);
    }
}
