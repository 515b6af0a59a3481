//! When which donors of a guest are killed.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::e2e::random::SplitMix;

/// The time within which donors are killed: the first ones after init runs, while memory is filled
/// or verified; the next ones after the repair and a verified pass.
const WITHIN: [Duration; 2] = [Duration::from_secs(20), Duration::from_secs(8)];

/// Donors that are killed at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kill {
    /// When, from the moment at which it may happen.
    pub after: Duration,
    /// Which ones, from 0.
    pub lost: Vec<usize>,
}

/// Chooses the two kills of a guest with so many donors. No donor is killed twice.
pub(super) fn choose(random: &mut SplitMix, donors: usize, at_once: usize) -> [Kill; 2] {
    let mut left: Vec<usize> = (0..donors).collect();
    WITHIN.map(|within| {
        // Seconds, which fit.
        let limit = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        let after = Duration::from_millis(random.below(limit));
        let chosen = (0..at_once).filter_map(|_| random.take(&mut left));
        let mut lost: Vec<usize> = chosen.collect();
        lost.sort_unstable();
        Kill { after, lost }
    })
}

/// Returns the seed that is named, or one that follows from the time since 1970.
///
/// # Errors
/// Says what is wrong with a name.
pub(super) fn seed_of(named: Option<&str>, now: Duration) -> Result<u64, String> {
    let Some(text) = named else {
        return Ok(now.as_secs());
    };
    let limit = u64::MAX;
    text.parse()
        .map_err(|_| format!("{text:?} is not a number from 0 to {limit}"))
}

/// Limit of guests in a row: about a day.
const GUESTS_MAX: usize = 1000;

/// Returns the guests that are named, by their number or as `FIRST-LAST` of a longer row, or the
/// usual ones.
///
/// # Errors
/// Says what is wrong with a name.
pub(super) fn guests_of(
    named: Option<&str>,
    usual: usize,
) -> Result<RangeInclusive<usize>, String> {
    let Some(text) = named else {
        return Ok(1..=usual);
    };
    let (first, last) = text.split_once('-').unwrap_or(("1", text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if 1 <= first && first <= last && last <= GUESTS_MAX => {
            Ok(first..=last)
        }
        _ => Err(format!(
            "{text:?} is not a number from 1 to {GUESTS_MAX}, nor two of them such as 21-40"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_kills_again_and_another_one_others() {
        let all = |seed| {
            let mut random = SplitMix::new(seed);
            (0..20)
                .map(|_| choose(&mut random, 8, 2))
                .collect::<Vec<_>>()
        };
        assert_eq!(all(5), all(5));
        assert_ne!(all(5), all(6));
    }

    #[test]
    fn each_donor_is_killed_at_some_time_and_none_twice_in_a_guest() {
        let mut random = SplitMix::new(1);
        let mut seen = [[0; 8]; 2];
        let mut latest = [Duration::ZERO; 2];
        for _ in 0..200 {
            let kills = choose(&mut random, 8, 2);
            let mut lost: Vec<usize> = kills.iter().flat_map(|kill| kill.lost.clone()).collect();
            assert_eq!(lost.len(), 4);
            lost.sort_unstable();
            lost.dedup();
            assert_eq!(lost.len(), 4, "{kills:?}");
            for (at, kill) in kills.iter().enumerate() {
                assert!(kill.after < WITHIN[at], "{kill:?}");
                latest[at] = latest[at].max(kill.after);
                for &donor in &kill.lost {
                    seen[at][donor] += 1;
                }
            }
        }
        assert!(seen.iter().flatten().all(|&times| times > 20), "{seen:?}");
        assert!(latest[0] > WITHIN[0] / 2 && latest[1] > WITHIN[1] / 2);
    }

    #[test]
    fn a_seed_is_named_or_follows_from_the_time() {
        let now = Duration::from_secs(77);
        assert_eq!(seed_of(None, now), Ok(77));
        assert_eq!(seed_of(Some("12"), now), Ok(12));
        let refused = seed_of(Some("x"), now).unwrap_err();
        assert!(refused.contains("\"x\"") && refused.contains("18446744073709551615"));
    }

    #[test]
    fn fewer_guests_are_named_and_none_is_refused() {
        assert_eq!(guests_of(None, 100), Ok(1..=100));
        assert_eq!(guests_of(Some("3"), 100), Ok(1..=3));
        assert_eq!(guests_of(Some("21-40"), 100), Ok(21..=40));
        for wrong in [
            "0", "1001", "-1", "x", "", "0-3", "4-3", "3-", "3-1001", "1-2-3",
        ] {
            let refused = guests_of(Some(wrong), 100).unwrap_err();
            assert!(
                refused.contains(wrong) && refused.contains("1 to 1000"),
                "{refused}"
            );
        }
    }
}
