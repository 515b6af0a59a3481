//! The certificate of this process, and warnings before it expires.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use fabric_identity::{ReloadError, Role, SharedCredentials};
use fabric_pki::date_text;

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
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl DailyWarning {
    /// Starts a thread that warns, the first time after a day.
    ///
    /// # Errors
    ///
    /// Fails when the host has no thread left.
    pub fn start(credentials: Arc<SharedCredentials>) -> io::Result<Self> {
        Self::each(DAY, move || warn_of_expiry(&credentials))
    }

    fn each(interval: Duration, warn: impl Fn() + Send + 'static) -> io::Result<Self> {
        let (stop, stopped) = bounded(0);
        let thread = std::thread::Builder::new()
            .name("expiry".into())
            .spawn(move || repeat(&stopped, interval, warn))?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for DailyWarning {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It has no result.
            let _ = thread.join();
        }
    }
}

/// Warns in each interval until `stopped` is disconnected.
fn repeat(stopped: &Receiver<()>, interval: Duration, warn: impl Fn()) {
    while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
        warn();
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

    #[test]
    fn it_is_warned_again_and_again_until_the_end() {
        let (warned, warnings) = bounded(0);
        let daily = DailyWarning::each(Duration::from_millis(1), move || {
            // Nobody waits for more at the end.
            let _ = warned.send(());
        });
        let daily = daily.expect("a thread");
        for _ in 0..3 {
            let limit = Duration::from_secs(60);
            warnings.recv_timeout(limit).expect("a warning");
        }
        drop(warnings);
        drop(daily);
    }
}
