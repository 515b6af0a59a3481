//! What passes the network of a host while pages travel by RDMA: which packets of RoCE have a text,
//! or the token of a lease.

use std::collections::HashSet;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use fabric_wire::{
    AttachRequest, Frame, FrameKind, HEADER_BYTES, LeaseGrant, Token, decode_message,
};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size_force, set_socket_timeout};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use signal_hook::consts::SIGTERM;

/// Port of RoCE version 2 (InfiniBand specification, annex 17).
const ROCE_PORT: u16 = 4791;
/// `ETH_P_ALL`: packets of all protocols, in either direction.
const ALL_PROTOCOLS: u16 = 3;
/// Bytes that the kernel keeps until this process has looked at them.
const BUFFER_BYTES: usize = 64 << 20;
/// More than any packet has.
const PACKET_BYTES_MAX: usize = 64 << 10;
/// Time between two looks for a signal.
const LOOK: Duration = Duration::from_millis(200);
/// Shorter texts occur by chance.
const TEXT_BYTES_MIN: usize = 8;

/// Arguments of the capture.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Port of the donor
    port: u16,
    /// The text to look for
    text: String,
}

/// What passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seen {
    pub roce_packets: u64,
    pub roce_bytes: u64,
    pub roce_with_text: u64,
    pub roce_with_token: u64,
    pub tcp_packets: u64,
    pub tcp_with_text: u64,
    /// Different tokens in frames over TCP.
    pub tokens: usize,
}

/// A capture.
#[derive(Debug)]
struct Capture {
    port: u16,
    text: Vec<u8>,
    tokens: HashSet<Token>,
    seen: Seen,
}

/// A payload, and by what it travels.
#[derive(Debug, PartialEq, Eq)]
enum Payload<'a> {
    Roce(&'a [u8]),
    Tcp(&'a [u8]),
}

/// Returns the payload of an Ethernet packet with IP version 4, if it is one of RoCE or of this TCP
/// port.
fn payload_of(packet: &[u8], port: u16) -> Option<Payload<'_>> {
    let ip = packet.get(14..)?;
    if packet[12..14] != [0x08, 0x00] {
        return None;
    }
    let total = usize::from(u16::from_be_bytes([*ip.get(2)?, *ip.get(3)?]));
    let ip = ip.get(..total)?;
    let header = usize::from(*ip.first()? & 15) * 4;
    let (protocol, body) = (*ip.get(9)?, ip.get(header..)?);
    let port_at = |at: usize| Some(u16::from_be_bytes([*body.get(at)?, *body.get(at + 1)?]));
    let (from, to) = (port_at(0)?, port_at(2)?);
    match protocol {
        17 if to == ROCE_PORT => Some(Payload::Roce(body.get(8..)?)),
        6 if from == port || to == port => {
            let header = usize::from(body.get(12)? >> 4) * 4;
            Some(Payload::Tcp(body.get(header..)?))
        }
        _ => None,
    }
}

/// Returns whether `bytes` has `part` at any offset.
fn has(bytes: &[u8], part: &[u8]) -> bool {
    let Some(first) = part.first() else {
        return true;
    };
    let mut rest = bytes;
    while let Some(at) = rest.iter().position(|byte| byte == first) {
        if rest[at..].starts_with(part) {
            return true;
        }
        rest = &rest[at + 1..];
    }
    false
}

/// Returns the token of a frame at the beginning of what a connection carries.
fn token_of(bytes: &[u8]) -> Option<Token> {
    let (header, payload) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let frame = Frame::decode(header).ok()?;
    let payload = payload.get(..frame.length)?;
    match frame.kind {
        FrameKind::Granted => {
            let grant: LeaseGrant = decode_message(frame.kind, payload).ok()?;
            Some(grant.token)
        }
        FrameKind::Attach => {
            let attach: AttachRequest = decode_message(frame.kind, payload).ok()?;
            Some(attach.token)
        }
        _ => None,
    }
}

impl Capture {
    fn packet(&mut self, packet: &[u8]) {
        let seen = &mut self.seen;
        match payload_of(packet, self.port) {
            Some(Payload::Roce(bytes)) => {
                seen.roce_packets += 1;
                seen.roce_bytes += bytes.len() as u64;
                seen.roce_with_text += u64::from(has(bytes, &self.text));
                let has_token = self.tokens.iter().any(|token| has(bytes, &token.0));
                seen.roce_with_token += u64::from(has_token);
            }
            Some(Payload::Tcp(bytes)) => {
                seen.tcp_packets += 1;
                seen.tcp_with_text += u64::from(has(bytes, &self.text));
                self.tokens.extend(token_of(bytes));
                seen.tokens = self.tokens.len();
            }
            None => {}
        }
    }
}

/// Captures until SIGTERM. Prints `CAPTURING` when it has begun, and one line of JSON at the end.
///
/// # Errors
/// Fails when this process may not capture.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    ensure!(
        arguments.text.len() >= TEXT_BYTES_MIN,
        "a text of {} bytes, which occurs by chance: give at least {TEXT_BYTES_MIN}",
        arguments.text.len()
    );
    let ended = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGTERM, Arc::clone(&ended))?;
    let protocol = std::num::NonZeroU32::new(u32::from(ALL_PROTOCOLS.to_be()));
    let socket = rustix::net::socket_with(
        AddressFamily::PACKET,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        protocol.map(Protocol::from_raw),
    )
    .context("no socket for all packets, which takes CAP_NET_RAW")?;
    set_socket_recv_buffer_size_force(&socket, BUFFER_BYTES).context("no buffer for packets")?;
    set_socket_timeout(&socket, Timeout::Recv, Some(LOOK))?;
    let mut capture = Capture {
        port: arguments.port,
        text: arguments.text.clone().into_bytes(),
        tokens: HashSet::new(),
        seen: Seen::default(),
    };
    println!("CAPTURING");
    std::io::stdout().flush()?;
    let mut packet = vec![0; PACKET_BYTES_MAX];
    loop {
        match rustix::net::recv(&socket, &mut packet[..], RecvFlags::empty()) {
            Ok((count, _)) => capture.packet(&packet[..count]),
            // What was received before the signal is looked at first.
            Err(Errno::AGAIN) if ended.load(Ordering::Relaxed) => break,
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error).context("no more packets"),
        }
    }
    println!("{}", serde_json::to_string(&capture.seen)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a packet with this payload behind headers of Ethernet, IP version 4 and `transport`.
    fn packet(protocol: u8, transport: &[u8], payload: &[u8]) -> Vec<u8> {
        let total = u16::try_from(20 + transport.len() + payload.len()).expect("short");
        let mut ip = [0; 20];
        ip[0] = 0x45;
        ip[2..4].copy_from_slice(&total.to_be_bytes());
        ip[9] = protocol;
        let ethernet = [&[0; 12][..], &[0x08, 0x00]].concat();
        // Short packets are padded.
        [&ethernet, &ip[..], transport, payload, &[0; 6]].concat()
    }

    fn roce(payload: &[u8]) -> Vec<u8> {
        let mut udp = [0; 8];
        udp[2..4].copy_from_slice(&ROCE_PORT.to_be_bytes());
        packet(17, &udp, payload)
    }

    fn tcp(port: u16, payload: &[u8]) -> Vec<u8> {
        let mut tcp = [0; 32];
        tcp[2..4].copy_from_slice(&port.to_be_bytes());
        tcp[12] = 8 << 4;
        packet(6, &tcp, payload)
    }

    #[test]
    fn texts_and_tokens_are_found_in_what_carries_them() {
        let mut capture = Capture {
            port: 7700,
            text: b"a mark of ours".to_vec(),
            tokens: HashSet::new(),
            seen: Seen::default(),
        };
        let grant = LeaseGrant {
            token: Token(*b"0123456789abcdef"),
            bytes: 4096,
            duration_ms: 5000,
        };
        let message = fabric_wire::encode_message(&grant);
        let header = Frame::new(FrameKind::Granted, 1, 0, true).encode(&message);
        capture.packet(&tcp(7700, &[&header[..], &message].concat()));
        capture.packet(&tcp(7700, b"has a mark of ours"));
        capture.packet(&tcp(7701, b"has a mark of ours"));
        capture.packet(&roce(b"nothing"));
        capture.packet(&roce(b"aa mark of ours."));
        capture.packet(&roce(b"token: 0123456789abcdef"));
        // Cut anywhere, it is none; the last 6 bytes are padding.
        let whole = roce(b"a mark of ours");
        for cut in 0..whole.len() - 6 {
            capture.packet(&whole[..cut]);
        }
        let expected = Seen {
            roce_packets: 3,
            roce_bytes: 7 + 16 + 23,
            roce_with_text: 1,
            roce_with_token: 1,
            tcp_packets: 2,
            tcp_with_text: 1,
            tokens: 1,
        };
        assert_eq!(capture.seen, expected);
    }
}
