//! Whether donors get sealed pages only.

use memory_fabric::fabric::{Compression, Sealing};

use super::choice::Switch;
use super::run::ResolvedDonor;
use super::settings::RunSettings;
use super::validation_error::ValidationError;

impl RunSettings {
    /// What was said, or as the donors' addresses decide.
    pub(super) fn checked_seal(
        &self,
        donors: &[ResolvedDonor],
    ) -> Result<Sealing, ValidationError> {
        let is_elsewhere = |donor: &ResolvedDonor| !donor.address.ip().to_canonical().is_loopback();
        let (seal, is_sealed) = match self.seal {
            Some(Switch::On) => (Sealing::On, true),
            Some(Switch::Off) => (Sealing::Off, false),
            None => (Sealing::Auto, donors.iter().any(is_elsewhere)),
        };
        if is_sealed && self.compression == Compression::On {
            return Err(ValidationError::SealedWithCompression);
        }
        Ok(seal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory_fabric::page::PAGE_SIZE;

    fn checked(
        seal: Option<Switch>,
        compression: Compression,
        address: &str,
    ) -> Result<Sealing, ValidationError> {
        let settings = RunSettings {
            seal,
            compression,
            ..RunSettings::default()
        };
        let donor = ResolvedDonor {
            address: address.parse().expect("an address"),
            name: address.parse().expect("an address"),
            memory: Some(crate::size::ByteSize::from_bytes(PAGE_SIZE as u64)),
            fingerprint: None,
            identity: None,
            zone: None,
        };
        settings.checked_seal(&[donor])
    }

    #[test]
    fn what_was_said_counts_and_otherwise_where_the_donors_are() {
        let (near, far) = ("127.0.0.1:7000", "10.0.0.2:7000");
        for (said, address, wanted) in [
            (Some(Switch::On), near, Sealing::On),
            (Some(Switch::Off), far, Sealing::Off),
            (None, near, Sealing::Auto),
            (None, far, Sealing::Auto),
        ] {
            let found = checked(said, Compression::Auto, address);
            assert_eq!(found.expect("valid"), wanted);
        }
    }

    #[test]
    fn compression_that_could_have_no_effect_is_refused() {
        let (near, far) = ("127.0.0.1:7000", "10.0.0.2:7000");
        let on = Compression::On;
        for (said, address, is_refused) in [
            (Some(Switch::On), near, true),
            (None, far, true),
            (None, near, false),
            (Some(Switch::Off), far, false),
        ] {
            assert_eq!(
                checked(said, on, address).is_err(),
                is_refused,
                "{said:?} {address}"
            );
        }
    }
}
