//! The certificate of this process, and warnings before it expires.

use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fabric_identity::{ReloadError, Role, SharedCredentials};
use fabric_pki::date_text;

use crate::intervals::Intervals;

/// A certificate with less time left is warned about.
const WARNED_SECONDS: i64 = 30 * DAY_SECONDS;
const DAY_SECONDS: i64 = 24 * 60 * 60;
const DAY: Duration = Duration::from_secs(DAY_SECONDS.unsigned_abs());

/// Reads the credentials in a directory, and warns when they expire soon.
///
/// # Errors
///
/// Fails when they cannot be used, or are those of another role.
pub fn load(directory: &Path, role: Role) -> Result<Arc<SharedCredentials>, ReloadError> {
    let credentials = SharedCredentials::load(directory, role)?;
    warn_of_expiry(&credentials);
    Ok(credentials)
}

/// Returns when the certificate in use expires, in seconds since 1970.
#[must_use]
pub fn not_after(credentials: &SharedCredentials) -> i64 {
    credentials.current().presented().not_after
}

/// Warns when the credentials in use expire soon.
pub fn warn_of_expiry(credentials: &SharedCredentials) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
    let not_after = not_after(credentials);
    if let Some(text) = warning(credentials.directory(), not_after, now) {
        tracing::warn!("{text}");
    }
}

/// Warns again on each day on which the credentials in use expire soon, until it is dropped.
#[derive(Debug)]
pub struct DailyWarning {
    _thread: Intervals,
}

impl DailyWarning {
    /// Starts a thread that warns, the first time after a day.
    ///
    /// # Errors
    ///
    /// Fails when the host has no thread left.
    pub fn start(credentials: Arc<SharedCredentials>) -> io::Result<Self> {
        let warn = move || {
            warn_of_expiry(&credentials);
            ControlFlow::Continue(())
        };
        let _thread = Intervals::start("expiry", DAY, warn)?;
        Ok(Self { _thread })
    }
}

fn warning(directory: &Path, not_after: i64, now: i64) -> Option<String> {
    let left = not_after - now;
    (left < WARNED_SECONDS).then(|| {
        format!(
            "the certificate in {} expires in {} days, at {}, and new connections are refused from then on; renew it with `ssi-hv pki renew`",
            directory.display(),
            left.max(0) / DAY_SECONDS,
            date_text(not_after)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_warned_about_in_its_last_month() {
        let (now, month) = (1_800_000_000, WARNED_SECONDS);
        let warned = |left| warning(Path::new("alpha"), now + left, now);
        assert_eq!(warned(month), None);
        let text = warned(month - 1).expect("a warning");
        assert!(
            text.contains("in alpha expires in 29 days, at 2027-"),
            "{text}"
        );
        assert!(text.contains("ssi-hv pki renew"), "{text}");
        assert!(warned(-5).is_some_and(|text| text.contains("in 0 days")));
    }
}
