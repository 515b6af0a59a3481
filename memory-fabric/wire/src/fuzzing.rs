//! What fuzz targets run of frames and messages: their decoders, with the state of a connection.
//! The crate `devices` says how they are run; only tests depend on it.

use crate::packing::{Packer, Packing, unpack};
use crate::{
    AUTHORITY_BYTES_MAX, AttachRequest, Attached, ComputeAuthority, ComputeEnd, ComputeLease,
    ComputePorts, ComputeRequest, ComputeTable, DelegateRequest, ErrorMessage, Frame, FrameKind,
    HEADER_BYTES, LeaseGrant, LeaseRequest, LeaseStatus, MEMBER_NAME_BYTES_MAX, NodeClock,
    RUN_PAGES_MAX, Token, TrafficClass, VM_NAME_BYTES_MAX, decode_message, decode_pieces,
    decode_probe, decode_run, encode_message,
};
use fabric_homes::NodeId;
use fabric_pages::page::PAGE_SIZE;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// What a target does with an input.
pub type Body = fn(&[u8]);

/// The names of the targets of this crate, with their bodies.
pub const BODIES: [(&str, Body); 3] = [
    ("unpacking", unpacking),
    ("session_frames", session_frames),
    ("control_message", control_message),
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

/// Most pages of an input that are unpacked: more take longer and reach nothing else.
const PAGES_MAX: usize = 4;

/// Any bytes as packed pages: refused, or unpacked to pages that are packed to the same again.
fn unpacking(input: &[u8]) {
    let Some((pages, packed)) = input.split_first() else {
        return;
    };
    let count = usize::from(*pages) % PAGES_MAX + 1;
    let mut pages = vec![0xa5; count * PAGE_SIZE];
    let Ok(smaller) = unpack(packed, &mut pages) else {
        return;
    };
    assert!(smaller <= u64::try_from(count).unwrap_or(0));
    if let Some(again) = Packer::new(count).pack(&pages, Packing::Lz4) {
        let mut copy = vec![0x5a; pages.len()];
        assert!(unpack(again, &mut copy).is_ok(), "what was packed here");
        assert_eq!(pages, copy);
    }
}

/// Any bytes as the frames of a page connection: refused, or of the connected node and no earlier
/// epoch, and the same when encoded again.
fn session_frames(input: &[u8]) {
    let Some(([node, donor, epoch], mut rest)) = input.split_first_chunk::<3>() else {
        return;
    };
    let attach = AttachRequest {
        token: Token([7; 16]),
        class: TrafficClass::Bulk,
        node: NodeId(*node),
        donor: NodeId(*donor),
        epoch: u64::from(*epoch),
    };
    let mut attached = Attached::new(&attach);
    let mut newest = attached.newest_epoch();
    while let Some((header, behind)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok(frame) = Frame::decode(header) else {
            return;
        };
        let (least, most) = frame.kind.payload_bytes(frame.packing);
        assert!((least..=most).contains(&frame.length), "{frame:?}");
        let payload = &behind[..frame.length.min(behind.len())];
        rest = &behind[payload.len()..];
        let verified = frame.verify(header, payload).is_ok();
        if payload.len() == frame.length {
            let again = frame.encode(payload);
            let decoded = Frame::decode(&again).expect("what was encoded here");
            assert!(decoded.verify(&again, payload).is_ok());
            let shape = |frame: &Frame| (frame.kind, frame.length, frame.packing, frame.stamp);
            assert_eq!(shape(&decoded), shape(&frame));
        }
        match frame.kind {
            FrameKind::ReadPages => {
                let pages = decode_run(payload).unwrap_or(1);
                assert!((1..=RUN_PAGES_MAX).contains(&pages));
            }
            FrameKind::Probe => drop(decode_probe(payload)),
            FrameKind::ReadPiece => drop(decode_pieces(payload)),
            _ => {}
        }
        match attached.check(&frame) {
            Ok(answer) => {
                assert_eq!(frame.stamp.node, attach.node);
                assert!(frame.stamp.epoch >= attach.epoch);
                assert_eq!(
                    (answer.node, answer.epoch),
                    (attach.donor, frame.stamp.epoch)
                );
            }
            Err(_) => assert!(
                frame.stamp.node != attach.node || frame.stamp.epoch < attach.epoch,
                "{frame:?}"
            ),
        }
        let now = attached.newest_epoch();
        assert!(now >= newest, "an epoch went back");
        newest = now;
        if !verified {
            return;
        }
    }
}

/// Any bytes as each message of a control connection: refused, or decoded to what has the same
/// meaning when it is encoded again, and is checked before it is used.
fn control_message(input: &[u8]) {
    let Some((kind, payload)) = input.split_first() else {
        return;
    };
    match kind % 14 {
        0 => drop(same::<LeaseRequest>(payload)),
        1 => lease_grant(payload),
        2 => drop(same::<Token>(payload)),
        3 => drop(same::<LeaseStatus>(payload)),
        4 => drop(same::<AttachRequest>(payload)),
        5 => {
            if let Some(request) = same::<ComputeRequest>(payload)
                && request.check().is_ok()
            {
                assert!(request.name.len() <= VM_NAME_BYTES_MAX);
                assert!((1..request.nodes).contains(&request.me) && request.cpus > 0);
                let shared = request.memory_bytes + request.hotplug_bytes;
                assert!((1..=shared).contains(&request.lent_bytes));
            }
        }
        6 => drop(same::<ComputePorts>(payload)),
        7 => drop(same::<ComputeTable>(payload)),
        8 => drop(same::<ComputeEnd>(payload)),
        11 => drop(same::<NodeClock>(payload)),
        12 => drop(same::<DelegateRequest>(payload)),
        13 => {
            if let Some(authority) = same::<ComputeAuthority>(payload)
                && let Ok(bytes) = authority.check()
            {
                assert!((1..=AUTHORITY_BYTES_MAX).contains(&bytes));
                assert!(authority.cluster.len() <= MEMBER_NAME_BYTES_MAX);
            }
        }
        10 => {
            if let Some(lease) = same::<ComputeLease>(payload)
                && lease.check().is_ok()
            {
                assert!(lease.grant.bytes > 0 && lease.grant.bytes < 1 << 44);
                assert!(lease.name.map_or(0, |name| name.len()) <= MEMBER_NAME_BYTES_MAX);
            }
        }
        _ => {
            if let Ok(error) = ErrorMessage::decode(payload) {
                assert!(!error.text.chars().any(char::is_control), "{error:?}");
            }
        }
    }
}

fn lease_grant(payload: &[u8]) {
    let Some((asked, payload)) = payload.split_first_chunk::<8>() else {
        return;
    };
    let request = LeaseRequest {
        vm: "web".to_owned(),
        bytes: u64::from_le_bytes(*asked),
        or_less: asked[7] % 2 == 0,
        duration_ms: u32::from(asked[6]) << 8,
    };
    if let Some(grant) = same::<LeaseGrant>(payload)
        && grant.check(&request).is_ok()
    {
        assert!(grant.bytes > 0 && grant.bytes <= request.bytes);
        assert!(grant.bytes.is_multiple_of(4096));
        assert!(request.or_less || grant.bytes == request.bytes);
    }
}

fn same<T: Serialize + DeserializeOwned + PartialEq + Debug>(payload: &[u8]) -> Option<T> {
    // The kind is for the error alone.
    let kind = FrameKind::Status;
    let message: T = decode_message(kind, payload).ok()?;
    let again = encode_message(&message);
    assert_eq!(decode_message::<T>(kind, &again).as_ref(), Ok(&message));
    Some(message)
}

#[cfg(test)]
const TARGETS: [devices::fuzzing::Target; BODIES.len()] = devices::fuzzing::targets(BODIES);

#[cfg(test)]
mod tests {
    devices::fuzz_tests! { inputs = 20_000; unpacking session_frames control_message }
}
