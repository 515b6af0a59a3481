//! Messages of control connections, and terms that all users of the protocol share.

use super::{FrameKind, LEASE_DURATION_MS_MIN, WireError};
use fabric_homes::NodeId;
use fabric_pages::page::PAGE_SIZE;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fmt;

/// The secret that authorizes the use of a lease: 128 random bits.
#[derive(Clone, Copy, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Token(pub [u8; 16]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token gives access to the VM's memory, so it must not appear in logs.
        f.write_str("Token(..)")
    }
}

/// Requests memory.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct LeaseRequest {
    /// The VM's name, for the donor's log; at most [`VM_NAME_BYTES_MAX`] bytes.
    pub vm: String,
    /// Requested bytes, a multiple of the page size.
    pub bytes: u64,
    /// Whether less is acceptable.
    pub or_less: bool,
    /// Requested time without a renewal after which the lease may end, in milliseconds.
    pub duration_ms: u32,
}

/// Lends memory.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct LeaseGrant {
    /// Secret for every use of the lease.
    pub token: Token,
    /// Bytes lent.
    pub bytes: u64,
    /// The lease ends when it was not renewed for this long, in milliseconds.
    pub duration_ms: u32,
}

/// Lets a process use a lease as the member that has it does: resume it, attach connections for
/// pages to it, renew and release it. It has a certificate that it has made itself. That ends with
/// the lease, and with another request for it.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct DelegateRequest {
    /// The lease.
    pub token: Token,
    /// SHA-256 of the certificate.
    pub certificate: [u8; 32],
}

/// Why a grant is rejected.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum GrantError {
    /// The donor claims to lend more than requested, so its numbers are not trustworthy.
    #[error("{granted} bytes granted, {asked} were asked, which is the limit")]
    TooMuch {
        /// Bytes granted.
        granted: u64,
        /// Requested bytes.
        asked: u64,
    },
    /// Less is acceptable only if the request allows it.
    #[error("{granted} bytes granted, {asked} were asked, and no less will do")]
    TooLittle {
        /// Bytes granted.
        granted: u64,
        /// Requested bytes.
        asked: u64,
    },
    /// The grant is not whole pages.
    #[error("{granted} bytes granted: not a multiple of the page size {PAGE_SIZE}, or zero")]
    Size {
        /// Bytes granted.
        granted: u64,
    },
    /// Such a lease would end between two renewals, or the donor claims to keep it longer than
    /// requested.
    #[error(
        "a lease of {granted_ms} ms granted, {LEASE_DURATION_MS_MIN} to {longest_ms} ms are possible"
    )]
    Duration {
        /// Duration granted, milliseconds.
        granted_ms: u32,
        /// The requested duration, or the shortest lease if that is longer.
        longest_ms: u32,
    },
}

impl LeaseGrant {
    /// Checks a donor's answer to `request`.
    ///
    /// # Errors
    ///
    /// See [`GrantError`].
    pub fn check(&self, request: &LeaseRequest) -> Result<(), GrantError> {
        let (granted, asked) = (self.bytes, request.bytes);
        if granted > asked {
            return Err(GrantError::TooMuch { granted, asked });
        }
        if granted == 0 || !granted.is_multiple_of(PAGE_SIZE as u64) {
            return Err(GrantError::Size { granted });
        }
        if granted < asked && !request.or_less {
            return Err(GrantError::TooLittle { granted, asked });
        }
        let granted_ms = self.duration_ms;
        let longest_ms = request.duration_ms.max(LEASE_DURATION_MS_MIN);
        if !(LEASE_DURATION_MS_MIN..=longest_ms).contains(&granted_ms) {
            return Err(GrantError::Duration {
                granted_ms,
                longest_ms,
            });
        }
        Ok(())
    }
}

/// A donor's counters for a lease.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// Pages sent to the VM.
    pub pages_read: u64,
    /// Pages stored for it.
    pub pages_written: u64,
    /// Pages dropped at the VM's request.
    pub pages_dropped: u64,
}

/// The traffic class of a page connection.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum TrafficClass {
    /// Faults of waiting vCPUs.
    Urgent,
    /// Write-backs.
    Bulk,
    /// Prefetched pages.
    Prefetch,
    /// Measurements.
    Probe,
}

/// Binds a connection to a lease.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct AttachRequest {
    /// The lease.
    pub token: Token,
    /// The class of the connection, which replaces an earlier one of the same class.
    pub class: TrafficClass,
    /// The connecting node.
    pub node: NodeId,
    /// The id of the donor in the VM.
    pub donor: NodeId,
    /// The epoch of the home table. Requests on the connection have this or a later one.
    pub epoch: u64,
}

/// Why a donor refuses.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Refusal {
    /// The frame violated the protocol.
    Malformed,
    /// There is no such lease: it ended, or the donor was restarted.
    UnknownLease,
    /// Not enough memory is free.
    NoMemory,
    /// The page is not in the lease.
    OutOfRange,
    /// Too many connections.
    Busy,
    /// RDMA is not available there.
    NoRdma,
    /// A newer epoch of the VM's home table is known there.
    StaleEpoch,
    /// Not enough vCPUs are free.
    NoCpus,
    /// The donor's policy does not allow the member that.
    NotAllowed,
}

/// A refusal and its reason.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ErrorMessage {
    /// For programs.
    pub refusal: Refusal,
    /// For people.
    pub text: String,
}

impl ErrorMessage {
    /// Decodes a peer's message. Its text may be printed on a terminal, so control characters are
    /// removed.
    ///
    /// # Errors
    ///
    /// As for [`decode_message`].
    pub fn decode(payload: &[u8]) -> Result<Self, WireError> {
        let Self { refusal, text } = decode_message(FrameKind::Error, payload)?;
        let text = text.chars().filter(|c| !c.is_control()).collect();
        Ok(Self { refusal, text })
    }
}

/// Encodes a control payload.
#[must_use]
pub fn encode_message<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_stdvec(message).expect("our messages have a known shape")
}

/// Decodes a control payload.
///
/// # Errors
///
/// Fails when the bytes are not exactly one such message.
pub fn decode_message<T: DeserializeOwned>(
    kind: FrameKind,
    payload: &[u8],
) -> Result<T, WireError> {
    match postcard::take_from_bytes(payload) {
        Ok((message, [])) => Ok(message),
        _ => Err(WireError::Payload { kind }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_is_what_was_asked_or_less_where_that_will_do() {
        const PAGE: u64 = PAGE_SIZE as u64;
        let check = |granted, or_less| {
            let request = LeaseRequest {
                vm: "web".to_owned(),
                bytes: 8 * PAGE,
                or_less,
                duration_ms: 1000,
            };
            let grant = LeaseGrant {
                token: Token([0; 16]),
                bytes: granted,
                duration_ms: 1000,
            };
            grant.check(&request)
        };
        let asked = 8 * PAGE;
        for or_less in [false, true] {
            assert_eq!(check(asked, or_less), Ok(()));
            for granted in [9 * PAGE, u64::MAX] {
                let error = check(granted, or_less).expect_err("more than was asked");
                assert_eq!(error, GrantError::TooMuch { granted, asked });
                let text = error.to_string();
                assert!(text.contains(&granted.to_string()), "{text}");
            }
            for granted in [0, 100, PAGE + 1] {
                assert_eq!(check(granted, or_less), Err(GrantError::Size { granted }));
            }
        }
        let granted = 7 * PAGE;
        assert_eq!(check(granted, true), Ok(()));
        let error = GrantError::TooLittle { granted, asked };
        assert_eq!(check(granted, false), Err(error));
    }

    #[test]
    fn a_lease_lasts_as_long_as_was_asked_or_less_but_can_be_renewed() {
        let check = |asked_ms, granted_ms| {
            let bytes = PAGE_SIZE as u64;
            let request = LeaseRequest {
                vm: "web".to_owned(),
                bytes,
                or_less: false,
                duration_ms: asked_ms,
            };
            let grant = LeaseGrant {
                token: Token([0; 16]),
                bytes,
                duration_ms: granted_ms,
            };
            grant.check(&request)
        };
        for (asked_ms, granted_ms) in [(30_000, 30_000), (30_000, 1000), (1, 1000)] {
            assert_eq!(check(asked_ms, granted_ms), Ok(()));
        }
        for (asked_ms, granted_ms, longest_ms) in [
            (30_000, 0, 30_000),
            (30_000, 999, 30_000),
            (30_000, 30_001, 30_000),
            (30_000, u32::MAX, 30_000),
            (1, 1, 1000),
            (1, 1001, 1000),
        ] {
            let error = check(asked_ms, granted_ms).expect_err("not a possible duration");
            assert_eq!(
                error,
                GrantError::Duration {
                    granted_ms,
                    longest_ms
                }
            );
            let text = error.to_string();
            assert!(text.contains(&format!("{granted_ms} ms granted")), "{text}");
            assert!(text.contains(&format!("1000 to {longest_ms} ms")), "{text}");
        }
    }
}
