//! Measures timers: how late a program runs that slept.
//!
//! The CPU is idle while the program sleeps, so each sleep takes a timer interrupt that wakes a
//! halted CPU, and the programming of the timer before it.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::report::{Latency, latency_of};

/// Sleeps: the median of as many moves by a few percent.
const SLEEPS: usize = 500;
/// How long each is asked to be: longer than the kernel's choice of another way to wait.
const SLEEP: Duration = Duration::from_millis(2);

/// The printed object.
#[derive(Debug, Serialize)]
pub struct Timers {
    sleeps: usize,
    asked_us: u128,
    /// How much longer each sleep took.
    late_us: Latency,
}

impl Timers {
    /// Returns the object as one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|e| format!("{{\"error\":\"{e}\"}}"))
    }
}

/// Sleeps again and again, and measures by how much each sleep was too long.
pub fn run() -> Timers {
    let late = (0..SLEEPS).map(|_| {
        let begin = Instant::now();
        // The sleep is what is measured.
        std::thread::sleep(SLEEP);
        begin.elapsed().saturating_sub(SLEEP)
    });
    summarize(late)
}

fn summarize(late: impl Iterator<Item = Duration>) -> Timers {
    let ns = late.map(|late| u64::try_from(late.as_nanos()).unwrap_or(u64::MAX));
    let ns: Vec<u64> = ns.collect();
    Timers {
        sleeps: ns.len(),
        asked_us: SLEEP.as_micros(),
        late_us: latency_of(&ns, 1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_how_late_the_sleeps_ended() {
        let late = [10, 30, 20, 500].map(Duration::from_micros);
        let json: serde_json::Value =
            serde_json::from_str(&summarize(late.into_iter()).to_json()).unwrap();
        assert_eq!(
            (json["sleeps"].as_u64(), json["asked_us"].as_u64()),
            (Some(4), Some(2000))
        );
        let at = |key: &str| json["late_us"][key].as_f64().unwrap();
        assert!(
            (at("p50") - 20.0).abs() < 0.1 && (at("max") - 500.0).abs() < 1.0,
            "{json}"
        );
    }
}
