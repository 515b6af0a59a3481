//! The time stamp counter of this host, as the guest's vCPUs here have it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::sys::{is_amd, time_stamp};

/// Two rates that KVM takes for equal, so that it does not scale: it lets the vCPU count at the rate of
/// the host (`tsc_tolerance_ppm` of Linux, arch/x86/kvm/x86.c).
const TOLERANCE_PPM: u64 = 250;

/// Bits behind the point of the factor by which AMD processors scale (AMD64 Architecture Programmer's
/// Manual 2, 15.30.5) and Intel's (SDM 3C, 25.3).
const FACTOR_BITS_AMD: u32 = 32;
const FACTOR_BITS_INTEL: u32 = 48;

/// A drift with which guests are tested on hosts whose counters do not drift.
#[derive(Debug)]
struct Drift {
    ppm: i64,
    since: u64,
    /// What it has added so far, in steps that all vCPUs of the node get at once.
    added: AtomicI64,
    watch: Option<Arc<dyn WhileStopped>>,
}

/// Watches a node whose vCPUs are out of the guest while their counters are changed: for tests.
pub trait WhileStopped: fmt::Debug + Send + Sync {
    /// No vCPU of the node enters the guest before this returns.
    fn stopped(&self);
}

/// How this host's counter becomes that of its vCPUs, apart from their offset.
#[derive(Clone, Debug, Default)]
pub struct HostCounter {
    /// The factor of a KVM that scales, and the bits behind its point.
    factor: Option<(u64, u32)>,
    drift: Option<Arc<Drift>>,
}

/// Why a host cannot give its vCPUs the rate of the primary's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the time stamp counter of this host has {here} kHz, that of the primary {of_primary} kHz, which \
     differs by more than {TOLERANCE_PPM} millionths, and this host's KVM cannot scale it: use hosts \
     with equal rates, or with processors that have TSC scaling"
)]
pub struct OtherRate {
    /// This host's rate in kHz.
    pub here: u32,
    /// The primary's.
    pub of_primary: u32,
}

impl HostCounter {
    /// The counter of this host with a drift of so many millionths, in small steps: for tests.
    #[must_use]
    pub fn drifting(ppm: i64, watch: Option<Arc<dyn WhileStopped>>) -> Self {
        let drift = Drift {
            ppm,
            since: time_stamp(),
            added: AtomicI64::new(0),
            watch,
        };
        Self {
            factor: None,
            drift: Some(Arc::new(drift)),
        }
    }

    /// This counter on a host with rate `here`, in kHz, for a guest whose counters have that of the
    /// primary. `scales`: KVM can scale.
    pub(crate) fn with_rates(
        self,
        here: u32,
        of_primary: u32,
        scales: bool,
    ) -> Result<Self, OtherRate> {
        if is_equal(here, of_primary) {
            return Ok(self);
        }
        if !scales || here == 0 {
            return Err(OtherRate { here, of_primary });
        }
        let bits = match is_amd() {
            true => FACTOR_BITS_AMD,
            false => FACTOR_BITS_INTEL,
        };
        let factor = (u128::from(of_primary) << bits) / u128::from(here);
        let factor = u64::try_from(factor).map_err(|_| OtherRate { here, of_primary })?;
        Ok(Self {
            factor: Some((factor, bits)),
            ..self
        })
    }

    /// Whether KVM has to scale.
    pub(crate) fn scales(&self) -> bool {
        self.factor.is_some()
    }

    /// Reads it.
    pub(crate) fn now(&self) -> u64 {
        self.scaled(time_stamp()).wrapping_add(self.drift())
    }

    /// What the drift has added so far.
    pub(crate) fn drift(&self) -> u64 {
        let drift = self.drift.as_ref();
        drift.map_or(0, |drift| {
            drift.added.load(Ordering::SeqCst).cast_unsigned()
        })
    }

    /// What the drift adds next, if there is one.
    pub(crate) fn next_drift(&self) -> Option<i64> {
        let drift = self.drift.as_ref()?;
        let passed = time_stamp().wrapping_sub(drift.since);
        let all = i128::from(passed) * i128::from(drift.ppm) / 1_000_000;
        let all = i64::try_from(all).unwrap_or_default();
        Some(all - drift.added.load(Ordering::SeqCst))
    }

    /// All vCPUs are out of the guest.
    pub(crate) fn stopped(&self) {
        if let Some(watch) = self.drift.as_ref().and_then(|drift| drift.watch.as_ref()) {
            watch.stopped();
        }
    }

    /// Adds a step of the drift.
    pub(crate) fn add_drift(&self, step: i64) {
        if let Some(drift) = &self.drift {
            drift.added.fetch_add(step, Ordering::SeqCst);
        }
    }

    /// What a vCPU has when the host's counter is at `ticks`, apart from its offset.
    pub(crate) fn scaled(&self, ticks: u64) -> u64 {
        self.factor.map_or(ticks, |(factor, bits)| {
            let scaled = (u128::from(ticks) * u128::from(factor)) >> bits;
            #[expect(clippy::cast_possible_truncation, reason = "counters wrap around")]
            let scaled = scaled as u64;
            scaled
        })
    }
}

fn is_equal(here: u32, of_primary: u32) -> bool {
    u64::from(here.abs_diff(of_primary)) * 1_000_000 <= u64::from(here) * TOLERANCE_PPM
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_that_kvm_takes_for_equal_is_not_scaled() {
        for here in [2_600_000, 2_600_650, 2_599_351] {
            let counter = HostCounter::default().with_rates(here, 2_600_000, false);
            assert!(counter.is_ok_and(|counter| !counter.scales()), "{here}");
        }
    }

    #[test]
    fn another_rate_without_scaling_is_refused_with_both_rates() {
        for here in [2_601_000, 2_599_000, 2_000_000, 0, u32::MAX] {
            let error = HostCounter::default()
                .with_rates(here, 2_600_000, false)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains(&format!("this host has {here} kHz")),
                "{error}"
            );
            assert!(error.contains("primary 2600000 kHz"), "{error}");
        }
    }

    #[test]
    fn another_rate_is_scaled_as_kvm_scales() {
        let scaled = |here, of_primary, ticks| {
            let counter = HostCounter::default();
            let counter = counter.with_rates(here, of_primary, true).unwrap();
            assert!(counter.scales());
            counter.scaled(ticks)
        };
        assert_eq!(scaled(2_000_000, 3_000_000, 1 << 50), 3 << 49);
        assert_eq!(scaled(3_000_000, 1_500_000, 1 << 50), 1 << 49);
        assert_eq!(scaled(1_000_000, 4_000_000_000, 1), 4_000);
        // A day at 3 GHz, to within a tick per second.
        let day = 86_400 * 3_000_000_000;
        let exact = 86_400 * 2_900_000_000;
        assert!(scaled(3_000_000, 2_900_000, day).abs_diff(exact) < 86_400);
        let error = HostCounter::default().with_rates(1, u32::MAX, true);
        assert!(error.is_err() || is_amd(), "the factor has no room for it");
    }

    #[test]
    fn a_drift_grows_with_time() {
        let counter = HostCounter::drifting(-1000, None);
        assert_eq!(counter.drift(), 0);
        let since = time_stamp();
        let step = loop {
            match counter.next_drift() {
                Some(step) if step < -100 => break step,
                _ => {}
            }
        };
        assert!(time_stamp() - since >= 99_000);
        counter.add_drift(step);
        assert_eq!(counter.clone().drift().cast_signed(), step, "of all copies");
    }
}
