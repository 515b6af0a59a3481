//! What came of the guests.

use std::time::Duration;

use serde_json::Value;

use super::choice::Kill;

/// How long a guest may wait for the loss of a donor to be noticed: a write-back that another donor
/// has confirmed takes 2 s to put it out of use (docs/replicas.md).
const DETECTION: Duration = Duration::from_secs(2);
/// How long it may be stopped beyond that.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A guest that has survived both kills.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Survival {
    /// From the first kill until nothing lacked a copy, with the grace time.
    pub repair: Duration,
    /// The longest time that an access to memory took, from the first kill on.
    pub pause_ms: f64,
    /// Whether the VM was paused because it waited for a donor.
    pub was_paused: bool,
}

impl Survival {
    /// Whether it was stopped for longer than the loss of a donor may take.
    fn was_stopped_too_long(&self) -> bool {
        let limit = DETECTION + PAUSE_MAX;
        self.was_paused || self.pause_ms > limit.as_secs_f64() * 1e3
    }
}

/// Returns the longest time that an access to memory took since a moment, as far as it is
/// known: what the guest has measured in the passes that ended since then, and the slowest remote
/// fault of the VM if that was not before, in microseconds.
pub(super) fn longest_pause_ms(probes: &[Value], before_us: f64, slowest_us: f64) -> f64 {
    let of_probe = |probe: &Value| probe["latency_us"]["max"].as_f64();
    let in_guest = probes.iter().filter_map(of_probe);
    let of_vm = (slowest_us > before_us).then_some(slowest_us);
    in_guest.chain(of_vm).fold(0.0, f64::max) / 1e3
}

/// All guests of a scenario.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub survived: Vec<Survival>,
    /// What is said of each that has not.
    pub failed: Vec<String>,
}

impl Tally {
    /// Returns the numbers in one line.
    pub fn summary(&self) -> String {
        let all = self.survived.len() + self.failed.len();
        let mut text = format!("{} of {all} guests survived", self.survived.len());
        let sorted = |of: fn(&Survival) -> f64| {
            let mut values: Vec<f64> = self.survived.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            let last = *values.last()?;
            Some((values[values.len() / 2], last))
        };
        let repairs = sorted(|survival| survival.repair.as_secs_f64());
        let pauses = sorted(|survival| survival.pause_ms);
        if let (Some((repair, repair_max)), Some((pause, pause_max))) = (repairs, pauses) {
            text += &format!(
                "; whole again {repair:.1} s after the first kill (p50; max {repair_max:.1} s), \
                 grace time included; longest pause of a guest {pause:.0} ms (p50; max \
                 {pause_max:.0} ms)"
            );
        }
        text
    }

    /// Returns what is not as it should be.
    pub fn wrong(&self) -> Vec<String> {
        let mut wrong = self.failed.clone();
        let late = self
            .survived
            .iter()
            .filter(|one| one.was_stopped_too_long());
        let late: Vec<&Survival> = late.collect();
        if let Some(longest) = late.iter().map(|one| one.pause_ms).max_by(f64::total_cmp) {
            let limit = (DETECTION + PAUSE_MAX).as_secs_f64();
            let paused = late.iter().filter(|one| one.was_paused).count();
            wrong.push(format!(
                "{} guests were stopped for more than {limit:.1} s, or paused ({paused}); the \
                 longest for {longest:.0} ms",
                late.len()
            ));
        }
        wrong
    }
}

/// Returns what is said of a guest.
pub(super) fn line(
    guest: usize,
    kills: &[Kill; 2],
    ended: Result<&Survival, &anyhow::Error>,
) -> String {
    let [first, second] = kills.each_ref().map(|kill| {
        // As the VM numbers them.
        let lost: Vec<String> = kill.lost.iter().map(|at| (at + 1).to_string()).collect();
        let lost = lost.join(" and ");
        format!("donors {lost} after {:.1} s", kill.after.as_secs_f64())
    });
    let came = match ended {
        Ok(survival) => format!(
            "survived, whole again after {:.1} s, longest pause {:.0} ms{}",
            survival.repair.as_secs_f64(),
            survival.pause_ms,
            if survival.was_paused { ", paused" } else { "" }
        ),
        Err(error) => format!("FAILED: {error:#}"),
    };
    format!("guest {guest}, {first}, then {second}: {came}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn survival(pause_ms: f64) -> Survival {
        Survival {
            repair: Duration::from_millis(8400),
            pause_ms,
            was_paused: false,
        }
    }

    #[test]
    fn a_pause_is_the_longest_that_guest_or_vm_has_seen_since_the_kill() {
        let probe = |max: f64| json!({"latency_us": {"max": max}});
        let probes = [probe(900.0), probe(4000.0)];
        assert_eq!(longest_pause_ms(&probes, 9000.0, 9000.0), 4.0);
        assert_eq!(longest_pause_ms(&probes, 3000.0, 9000.0), 9.0);
        assert_eq!(longest_pause_ms(&[], 1.0, 1.0), 0.0);
    }

    #[test]
    fn a_tally_says_how_many_survived_and_what_is_wrong() {
        let mut tally = Tally::default();
        assert_eq!(tally.summary(), "0 of 0 guests survived");
        tally.survived = vec![survival(120.0), survival(2990.0)];
        assert_eq!(
            tally.summary(),
            "2 of 2 guests survived; whole again 8.4 s after the first kill (p50; max 8.4 s), \
             grace time included; longest pause of a guest 2990 ms (p50; max 2990 ms)"
        );
        assert_eq!(tally.wrong(), Vec::<String>::new());

        tally.survived.push(survival(3010.0));
        tally.survived.push(Survival {
            was_paused: true,
            ..survival(10.0)
        });
        tally.failed.push("guest 5: lost".into());
        assert!(tally.summary().starts_with("4 of 5 guests survived"));
        let wrong = tally.wrong();
        assert_eq!(wrong[0], "guest 5: lost");
        assert_eq!(
            wrong[1..],
            ["2 guests were stopped for more than 3.0 s, or paused (1); the longest for 3010 ms"]
        );
    }

    #[test]
    fn the_line_of_a_guest_has_its_kills_and_what_came_of_it() {
        let kill = |lost: &[usize], millis| Kill {
            after: Duration::from_millis(millis),
            lost: lost.to_vec(),
        };
        let kills = [kill(&[0, 6], 1500), kill(&[2, 3], 40)];
        let said = line(7, &kills, Ok(&survival(310.4)));
        assert_eq!(
            said,
            "guest 7, donors 1 and 7 after 1.5 s, then donors 3 and 4 after 0.0 s: survived, \
             whole again after 8.4 s, longest pause 310 ms"
        );
        let error = anyhow::anyhow!("status").context("after the first kill");
        let said = line(1, &kills, Err(&error));
        assert!(
            said.ends_with("FAILED: after the first kill: status"),
            "{said}"
        );
    }
}
