//! `ssi-hv top`: which VM to watch, and how often to look.

use std::time::Duration;

use clap::Args;

/// Shortest refresh interval, in seconds: a refresh costs the VM's process about a millisecond.
pub const INTERVAL_SECONDS_MIN: f64 = 0.2;
/// Longest refresh interval, in seconds: beyond that the display is outdated.
pub const INTERVAL_SECONDS_MAX: f64 = 60.0;

/// The flags of `ssi-hv top`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct TopConfig {
    /// A VM by its name or process id [default: all that run, one at a time]
    #[arg(value_name = "VM", hide_default_value = true)]
    pub vm: Option<String>,

    /// Refresh interval, 0.2 to 60
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (INTERVAL_SECONDS_MIN..=INTERVAL_SECONDS_MAX).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!(
            "it is outside {INTERVAL_SECONDS_MIN} to {INTERVAL_SECONDS_MAX}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_a_number_of_seconds_within_its_limits() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(interval("60"), Ok(Duration::from_secs(60)));
        for wrong in ["0", "0.19", "61", "-1", "NaN", "inf", "1s", ""] {
            assert!(interval(wrong).is_err(), "{wrong}");
        }
    }
}
