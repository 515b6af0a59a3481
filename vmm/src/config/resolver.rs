//! Names of donors that are resolved while a guest runs: until a deadline.

use std::io;
use std::time::Instant;

use crossbeam_channel::bounded;
use memory_fabric::fabric::TransportKind;

use super::address::{Donor, HostPort};
use super::protection::Protection;
use super::run::{ResolvedDonor, resolved_donor};
use super::validation_error::ValidationError;

/// Why a donor cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// It is named wrongly, or its name has no address.
    #[error(transparent)]
    Invalid(#[from] ValidationError),
    /// The name servers do not answer.
    #[error("the name of {address} was not resolved in time; give the address of the host")]
    Late {
        /// What was given.
        address: HostPort,
    },
    /// There is no thread for it.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// Checks a donor, and resolves its name until a deadline.
///
/// # Errors
///
/// If it cannot be used, or its name is not resolved by then.
pub fn resolved_until(
    donor: &Donor,
    transport: TransportKind,
    protection: Protection,
    until: Instant,
) -> Result<ResolvedDonor, ResolveError> {
    if donor.address.is_numeric() {
        return Ok(resolved_donor(donor, transport, protection)?);
    }
    let resolve = move |donor: &Donor| resolved_donor(donor, transport, protection);
    resolved_by(donor, until, resolve)
}

fn resolved_by(
    donor: &Donor,
    until: Instant,
    resolve: impl FnOnce(&Donor) -> Result<ResolvedDonor, ValidationError> + Send + 'static,
) -> Result<ResolvedDonor, ResolveError> {
    let (sender, resolved) = bounded(1);
    let of_thread = donor.clone();
    let resolve = move || {
        // Nobody waits after the deadline.
        let _ = sender.send(resolve(&of_thread));
    };
    let thread = std::thread::Builder::new().name("resolver".into());
    thread.spawn(resolve).map_err(ResolveError::Thread)?;
    let late = |_| ResolveError::Late {
        address: donor.address.clone(),
    };
    Ok(resolved.recv_deadline(until).map_err(late)??)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn name_servers_that_do_not_answer_delay_a_request_until_its_deadline_only() {
        let donor: Donor = "far:7000".parse().expect("an address");
        let until = Instant::now() + Duration::from_millis(20);
        for _ in 0..3 {
            let (release, wait) = bounded::<()>(0);
            let resolved = resolved_by(&donor, until, move |_| {
                let _ = wait.recv();
                unreachable!("nobody waits for it");
            });
            let error = resolved.expect_err("it does not answer").to_string();
            assert!(error.contains("far:7000 was not resolved"), "{error}");
            // The thread is left behind.
            std::mem::forget(release);
        }
    }

    #[test]
    fn an_address_needs_no_name_server() {
        let donor: Donor = "127.0.0.1:7000".parse().expect("an address");
        let long_ago = Instant::now();
        let resolved = resolved_until(&donor, TransportKind::Tcp, Protection::None, long_ago);
        let resolved = resolved.expect("loopback");
        assert_eq!(resolved.address, ([127, 0, 0, 1], 7000).into());
    }
}
