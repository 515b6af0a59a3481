//! Lists of host CPUs in textual form: `2-5` or `0,0,1`.

use std::fmt;
use std::str::FromStr;

use super::text::serde_as_text;

/// Highest number of a CPU: Linux for x86-64 can be built for 8192 (CONFIG_NR_CPUS).
pub const HOST_CPU_MAX: u32 = 8191;
/// The longest list: no machine has more vCPUs than this.
const LENGTH_MAX: usize = 1024;

/// Numbers of host CPUs, in order; a number may occur more than once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuList(pub Vec<u32>);

/// A text that is not such a list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{part}` is neither a CPU from 0 to {HOST_CPU_MAX} nor a range of them; write one CPU for each vCPU, such as 2-5 or 0,0,1"
)]
pub struct ParseCpuListError {
    /// The invalid part.
    part: String,
}

impl FromStr for CpuList {
    type Err = ParseCpuListError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.parse().ok().filter(|cpu: &u32| *cpu <= HOST_CPU_MAX);
            let range = number(first).zip(number(last));
            let range = range.filter(|(first, last)| first <= last);
            let (first, last) = range.ok_or_else(|| ParseCpuListError { part: part.into() })?;
            cpus.extend((first..=last).take(LENGTH_MAX + 1 - cpus.len().min(LENGTH_MAX)));
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for run in self.0.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
            match run {
                [first, .., last] => write!(f, "{separator}{first}-{last}")?,
                _ => write!(f, "{separator}{}", run[0])?,
            }
            separator = ",";
        }
        Ok(())
    }
}

serde_as_text!(CpuList);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_and_ranges_are_cpus_in_their_order() {
        for (text, cpus) in [
            ("0", &[0][..]),
            ("2-5", &[2, 3, 4, 5]),
            ("0,0,1", &[0, 0, 1]),
            ("7,1-2,1", &[7, 1, 2, 1]),
        ] {
            assert_eq!(text.parse(), Ok(CpuList(cpus.to_vec())));
        }
    }

    #[test]
    fn other_texts_are_refused_with_the_part_that_is_wrong() {
        for (text, part) in [
            ("", "``"),
            ("1,", "``"),
            ("5-2", "`5-2`"),
            ("1,x", "`x`"),
            ("0-8192", "`0-8192`"),
            ("-1", "`-1`"),
            ("1-2-3", "`1-2-3`"),
        ] {
            let error = text.parse::<CpuList>().unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("2-5"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(cpus in proptest::collection::vec(0..9_u32, 1..20)) {
            let list = CpuList(cpus);
            prop_assert_eq!(list.to_string().parse(), Ok(list));
        }

        #[test]
        fn no_text_makes_a_list_that_takes_the_memory_of_the_host(text in "[0-9,-]{0,200}") {
            if let Ok(list) = text.parse::<CpuList>() {
                prop_assert!(list.0.len() <= LENGTH_MAX + 101);
            }
        }
    }
}
