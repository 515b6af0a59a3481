//! What frames of control connections carry, and what everybody has to know of it.

use super::{FrameKind, WireError};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fmt;

/// The secret that a lease is used with: 128 random bits.
#[derive(Clone, Copy, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Token(pub [u8; 16]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Whoever has the token has the VM's memory: keep it out of logs.
        f.write_str("Token(..)")
    }
}

/// Asks for memory.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct LeaseRequest {
    /// The VM's name, for the donor's log; at most [`VM_NAME_BYTES_MAX`] bytes.
    pub vm: String,
    /// Bytes wanted, a multiple of the page size.
    pub bytes: u64,
    /// Whether less will do.
    pub or_less: bool,
    /// Wanted time between renewals after which the lease may end, milliseconds.
    pub duration_ms: u32,
}

/// Lends memory.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct LeaseGrant {
    /// To be presented with every use.
    pub token: Token,
    /// Bytes lent.
    pub bytes: u64,
    /// The lease ends when it was not renewed for so long, milliseconds.
    pub duration_ms: u32,
}

/// What a donor counted for a lease.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// Pages sent to the VM.
    pub pages_read: u64,
    /// Pages stored for it.
    pub pages_written: u64,
    /// Pages that it told to forget.
    pub pages_dropped: u64,
}

/// What a page connection carries.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub enum TrafficClass {
    /// Faults that a vCPU waits for.
    Urgent,
    /// Write-back.
    Bulk,
    /// Pages that nobody has asked for yet.
    Prefetch,
    /// Bytes that are only asked for to see how long they take.
    Probe,
}

/// Binds a connection to a lease.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct AttachRequest {
    /// The lease.
    pub token: Token,
    /// What the connection is for. It replaces an earlier one of the same class.
    pub class: TrafficClass,
}

/// Why a donor refuses.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Refusal {
    /// The frame broke the protocol.
    Malformed,
    /// There is no such lease: it ended, or the donor was restarted.
    UnknownLease,
    /// Not enough memory is free.
    NoMemory,
    /// The page is not in the lease.
    OutOfRange,
    /// Too many connections.
    Busy,
    /// RDMA is not to be had there.
    NoRdma,
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
    /// Decodes what a peer sent. Its text is for people's terminals, so it has no control
    /// characters afterwards.
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

/// A control payload.
#[must_use]
pub fn encode_message<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_stdvec(message).expect("our messages have a known shape")
}

/// Decodes a control payload.
///
/// # Errors
///
/// When the bytes are not such a message and nothing else.
pub fn decode_message<T: DeserializeOwned>(
    kind: FrameKind,
    payload: &[u8],
) -> Result<T, WireError> {
    match postcard::take_from_bytes(payload) {
        Ok((message, [])) => Ok(message),
        _ => Err(WireError::Payload { kind }),
    }
}
