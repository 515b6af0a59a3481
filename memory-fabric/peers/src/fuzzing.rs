//! What fuzz targets run of the messages between compute nodes: their decoder, and the handlers of
//! what it lets through. The crate `devices` says how they are run; only tests depend on it.

mod nodes;

use crate::codec::{Bounds, Kind, decode, encode};
use nodes::{HOSTILE, Nodes};

/// What a target does with an input.
pub type Body = fn(&[u8]);

/// The names of the targets of this crate, with their bodies.
pub const BODIES: [(&str, Body); 2] = [
    ("peer_message", peer_message),
    ("peer_handler", peer_handler),
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

/// Most steps of one input.
const STEPS_MAX: usize = 1_000;

/// Any bytes as a message: refused, or decoded to what has the same bytes.
fn peer_message(input: &[u8]) {
    let Some(([kind, pages, members], payload)) = input.split_first_chunk::<3>() else {
        return;
    };
    let bounds = Bounds {
        pages: u32::from(*pages) << 8,
        members: members % 17,
    };
    let Ok(kind) = Kind::new(*kind) else {
        return;
    };
    if let Ok(message) = decode(kind, payload, bounds) {
        let encoded = encode(&message);
        assert_eq!((encoded.kind(), encoded.payload()), (kind, payload));
        assert_eq!(
            (kind.lane(), kind.has_page()),
            (message.lane(), message.has_page())
        );
    }
}

/// Two nodes that share memory, and a third one that sends them anything that can be decoded: they
/// do not panic, and blame nobody but the third.
fn peer_handler(input: &[u8]) {
    let mut input = input.iter().copied();
    let mut nodes = Nodes::new();
    for _ in 0..STEPS_MAX {
        if nodes.step(&mut input).is_none() {
            break;
        }
    }
    if let Some(offence) = nodes.deliver_all() {
        assert_eq!(offence.peer.place(), HOSTILE, "{offence}");
    }
}

#[cfg(test)]
const TARGETS: [devices::fuzzing::Target; BODIES.len()] = {
    let [message, handler] = BODIES;
    [
        devices::fuzzing::Target {
            name: message.0,
            run: message.1,
        },
        devices::fuzzing::Target {
            name: handler.0,
            run: handler.1,
        },
    ]
};

#[cfg(test)]
mod tests {
    devices::fuzz_tests! { peer_message peer_handler }
}
