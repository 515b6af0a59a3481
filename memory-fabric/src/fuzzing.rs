//! What fuzz targets run of this crate: certificates under a policy, and files of working sets. The
//! crate `devices` says how they are run; only tests depend on it.

use crate::donor::policy::{Accounts, Amounts, Resource, Rule};
use crate::working_set::{self, Subject as Image};
use fabric_identity::presented::{Presented, public_key};
use fabric_identity::{HolderPattern, Subject};
use rustls::pki_types::CertificateDer;

/// What a target does with an input.
pub type Body = fn(&[u8]);

/// The names of the targets of this crate, with their bodies.
pub const BODIES: [(&str, Body); 2] = [
    ("certificate", certificate),
    ("working_set", working_set_file),
];

/// The body of the target `name`.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn body(name: &str) -> Body {
    let found = BODIES.iter().find(|(other, _)| *other == name);
    found.unwrap_or_else(|| panic!("no fuzz target {name}")).1
}

/// A rule and any bytes as the certificate of a member: the certificate is refused, or names a
/// member that may use as much as the rule says if it names the member, and nothing otherwise.
fn certificate(input: &[u8]) {
    let Some((length, rest)) = input.split_first() else {
        return;
    };
    let Some((members, der)) = rest.split_at_checked(usize::from(*length)) else {
        return;
    };
    let certificate = CertificateDer::from(der);
    let Ok(presented) = Presented::read(&certificate) else {
        // It may still be well-formed.
        let _ = public_key(&certificate);
        return;
    };
    let key = public_key(&certificate).expect("it was read before");
    assert_eq!(key, presented.public_key);
    let subject = presented.subject;
    let again: Result<Subject, _> = subject.to_string().parse();
    assert_eq!(again.as_ref(), Ok(&subject));
    let pattern: Result<HolderPattern, _> = String::from_utf8_lossy(members).parse();
    let Ok(members) = pattern else {
        return;
    };
    let is_named = members.names(&subject.holder);
    let limits = Amounts {
        leases: Some(1),
        ..Amounts::default()
    };
    let accounts = Accounts::new(vec![Rule {
        members,
        limits,
        gids: Vec::new(),
    }]);
    let charge = || accounts.charge(Some(&subject), Resource::Leases, 1);
    let first = charge();
    assert_eq!(first.is_ok(), is_named);
    assert!(charge().is_err(), "one is the limit");
    drop(first);
    assert!(accounts.used().is_empty());
}

/// The guest of the seeds.
const IMAGE: Image = Image {
    guest_bytes: 64 << 20,
    span_pages: 16 << 10,
    image_bytes: 1_000_000,
    image_checksum: 0x1234_5678,
};

/// Any bytes as a working set, half of them with the right checksum: refused, or runs of pages that
/// the guest has.
fn working_set_file(input: &[u8]) {
    let Some((corrected, file)) = input.split_first() else {
        return;
    };
    let mut file = file.to_vec();
    if corrected % 2 == 0
        && let Some((body, checksum)) = file.split_last_chunk_mut::<4>()
    {
        *checksum = crc32c::crc32c(body).to_le_bytes();
    }
    let Ok(runs) = working_set::decode(&file, &IMAGE) else {
        return;
    };
    for run in &runs {
        assert!(run.count > 0 && run.end() <= IMAGE.span_pages, "{run:?}");
    }
    assert_eq!(working_set::encode(&IMAGE, &runs), file);
}

#[cfg(test)]
const TARGETS: [devices::fuzzing::Target; BODIES.len()] = devices::fuzzing::targets(BODIES);

#[cfg(test)]
mod tests {
    devices::fuzz_tests! { inputs = 20_000; certificate working_set }
}
