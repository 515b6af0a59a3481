//! Certificates of processes to which members have delegated the use of something.
//!
//! Such a process has made its certificate itself. It names no member of the cluster: its URI has
//! another cluster than the node's. So no certificate of the authority is ever one of these.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use fabric_host::lock;

use crate::Fingerprint;

/// The certificates that a node accepts beside those of members, each for as long as something is
/// delegated to it. Who delegates bounds the table: a donor has one delegation of each lease.
#[derive(Debug, Default)]
pub struct Delegates {
    /// How many delegations each has.
    table: Mutex<HashMap<Fingerprint, usize>>,
}

impl Delegates {
    /// Accepts a certificate until the result is dropped.
    pub fn admit(self: &Arc<Self>, certificate: Fingerprint) -> Delegation {
        *lock(&self.table).entry(certificate).or_default() += 1;
        Delegation {
            certificate,
            delegates: Arc::clone(self),
        }
    }

    /// Returns whether something is delegated to a certificate.
    #[must_use]
    pub fn has(&self, certificate: Fingerprint) -> bool {
        lock(&self.table).contains_key(&certificate)
    }

    /// Returns the number of certificates.
    #[must_use]
    pub fn count(&self) -> usize {
        lock(&self.table).len()
    }
}

/// Something that is delegated to a certificate. The certificate is accepted until this, and others
/// for it, are dropped.
#[derive(Debug)]
pub struct Delegation {
    certificate: Fingerprint,
    delegates: Arc<Delegates>,
}

impl Delegation {
    /// Returns the fingerprint of the certificate.
    #[must_use]
    pub const fn certificate(&self) -> Fingerprint {
        self.certificate
    }
}

impl Drop for Delegation {
    fn drop(&mut self) {
        let mut table = lock(&self.delegates.table);
        if let Some(count) = table.get_mut(&self.certificate) {
            *count -= 1;
            if *count == 0 {
                table.remove(&self.certificate);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_accepted_until_its_last_delegation_ends() {
        let delegates = Arc::new(Delegates::default());
        let [one, other] = [[1; 32], [2; 32]].map(Fingerprint::from);
        let first = delegates.admit(one);
        let second = delegates.admit(one);
        assert_eq!((delegates.has(one), delegates.has(other)), (true, false));
        drop(first);
        assert!(delegates.has(one));
        drop(second);
        assert_eq!((delegates.has(one), delegates.count()), (false, 0));
    }
}
