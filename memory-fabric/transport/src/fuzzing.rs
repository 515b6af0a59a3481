//! What fuzz targets run of this crate: the parameters of RDMA connections, and frames on the
//! streams of a QUIC connection. The crate `devices` says how they are run; only tests depend on
//! it.

use crate::rdma::messages::{ConnectAnswer, ConnectRequest};
use crate::udp::streams::{Inbox, STREAMS, place};
use fabric_verbs::endpoint::{Endpoint, NUMBER_MAX};
use fabric_wire::{Frame, FrameKind, HEADER_BYTES, decode_message, encode_count, encode_message};

/// What a target does with an input.
pub type Body = fn(&[u8]);

/// The names of the targets of this crate, with their bodies.
pub const BODIES: [(&str, Body); 2] =
    [("rdma_endpoint", rdma_endpoint), ("quic_lanes", quic_lanes)];

/// The body of the target `name`.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn body(name: &str) -> Body {
    let found = BODIES.iter().find(|(other, _)| *other == name);
    found.unwrap_or_else(|| panic!("no fuzz target {name}")).1
}

/// Any bytes as the parameters of an RDMA connection: refused, or within what the hardware takes.
fn rdma_endpoint(input: &[u8]) {
    let Some(([side, lease @ ..], payload)) = input.split_first_chunk::<5>() else {
        return;
    };
    if side % 2 == 0 {
        let Ok(request) = decode_message::<ConnectRequest>(FrameKind::Connect, payload) else {
            return;
        };
        let again = decode_message(FrameKind::Connect, &encode_message(&request));
        assert_eq!(again, Ok(request));
        endpoint(&request.endpoint);
        return;
    }
    let Ok(answer) = decode_message::<ConnectAnswer>(FrameKind::Connected, payload) else {
        return;
    };
    let again = decode_message(FrameKind::Connected, &encode_message(&answer));
    assert_eq!(again, Ok(answer));
    endpoint(&answer.endpoint);
    let bytes = u64::from(u32::from_le_bytes(*lease)) << 12;
    if answer.memory.check(bytes).is_ok() {
        let end = answer.memory.base.checked_add(bytes);
        assert!(end.is_some(), "{:?}", answer.memory);
    }
}

fn endpoint(end: &Endpoint) {
    if let Ok(mtu) = end.check() {
        assert!(end.queue_pair <= NUMBER_MAX && end.packet_number <= NUMBER_MAX);
        assert!(end.reads_answered > 0);
        assert_eq!(mtu.bytes(), end.mtu_bytes);
    }
}

/// Frames, or any bytes, on the streams of a connection, in pieces: no more comes out than went in,
/// each stream keeps its order, and a frame that is not whole delays no other stream.
fn quic_lanes(input: &[u8]) {
    match input.split_first() {
        Some((mode, rest)) if mode % 2 == 0 => frames(rest),
        Some((mode, rest)) => noise(rest, usize::from(*mode) << 8),
        None => {}
    }
}

/// Takes what is there through a buffer of this size.
fn take(inbox: &mut Inbox, room: usize, taken: &mut Vec<u8>) {
    let mut buffer = vec![0; room];
    loop {
        let count = inbox.take(&mut buffer);
        taken.extend(&buffer[..count]);
        if count == 0 {
            return;
        }
    }
}

fn frames(steps: &[u8]) {
    let mut inbox = Inbox::new(usize::MAX);
    let mut taken = Vec::new();
    let mut late: [Vec<u8>; STREAMS] = Default::default();
    let mut sent = 0;
    for step in steps.chunks_exact(3) {
        let &[kind, request, cut] = step else {
            return;
        };
        let (kind, payload) = match kind % 5 {
            0 => (FrameKind::ReadPage, Vec::new()),
            1 => (FrameKind::Written, Vec::new()),
            2 => (FrameKind::ReadPages, encode_count(3).to_vec()),
            3 => (FrameKind::ProbeData, vec![7; usize::from(request) + 1]),
            _ => (FrameKind::DropPages, encode_count(9).to_vec()),
        };
        // The offset says in which order they were sent.
        let header = Frame::new(kind, request.into(), sent, true).encode(&payload);
        sent += 1;
        let (stream, length) = place(&header).expect("a frame of ours");
        let mut frame = std::mem::take(&mut late[stream]);
        frame.extend(header);
        frame.extend(payload);
        assert!(length <= frame.len());
        // A part comes later, with the next frame of the stream.
        late[stream] = frame.split_off(frame.len() - usize::from(cut) % length);
        inbox.push(stream, &frame);
        if cut % 3 == 0 {
            take(&mut inbox, usize::from(cut) + 1, &mut taken);
        }
    }
    for (stream, rest) in late.iter().enumerate() {
        inbox.push(stream, rest);
    }
    take(&mut inbox, 1000, &mut taken);
    assert!(!inbox.is_ready());
    let mut rest = &taken[..];
    let mut newest = [None; STREAMS];
    let mut received = 0;
    while let Some((header, behind)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let frame = Frame::decode(header).expect("a frame of ours");
        let (payload, behind) = behind.split_at(frame.length);
        frame.verify(header, payload).expect("its payload");
        let (stream, _) = place(header).expect("a frame of ours");
        assert!(newest[stream] < Some(frame.offset), "stream {stream}");
        newest[stream] = Some(frame.offset);
        rest = behind;
        received += 1;
    }
    assert_eq!((received, rest.len()), (sent, 0));
}

fn noise(mut bytes: &[u8], limit: usize) {
    let mut inbox = Inbox::new(limit);
    let (mut pushed, mut taken) = (0, Vec::new());
    while let Some((&[stream, count], rest)) = bytes.split_first_chunk::<2>() {
        let stream = usize::from(stream) % STREAMS;
        let (part, rest) = rest.split_at(usize::from(count).min(rest.len()));
        bytes = rest;
        if inbox.has_room(stream) {
            assert!(pushed - taken.len() < limit, "more is kept than the limit");
            inbox.push(stream, part);
            pushed += part.len();
        } else {
            take(&mut inbox, 100, &mut taken);
        }
        assert!(taken.len() <= pushed);
    }
    take(&mut inbox, 33, &mut taken);
    assert!(taken.len() <= pushed && !inbox.is_ready());
}

#[cfg(test)]
const TARGETS: [devices::fuzzing::Target; BODIES.len()] = devices::fuzzing::targets(BODIES);

#[cfg(test)]
mod tests {
    devices::fuzz_tests! { inputs = 20_000; rdma_endpoint quic_lanes }
}
