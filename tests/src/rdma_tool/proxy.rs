//! A proxy between a VM and a donor that forwards everything, but falsifies the parameters that the
//! two ends of an RDMA connection exchange.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};

use clap::ValueEnum;
use fabric_transport::rdma::endpoint::NUMBER_MAX;
use fabric_transport::rdma::messages::{ConnectAnswer, ConnectRequest};
use fabric_wire::{Frame, FrameKind, HEADER_BYTES, decode_message, encode_message};

/// The parameter to falsify.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Lie {
    /// The key of the lease's memory: the VM reads with an invalid one.
    Key,
    /// The VM's first packet number: the donor's end expects another.
    PacketNumber,
    /// The number of the donor's queue pair: the VM's requests reach no queue pair.
    QueuePair,
    /// The number of the VM's queue pair: the donor's answers reach no queue pair.
    Answers,
}

/// Listens at `here` for connections to `donor`, and returns its address. Its threads end with the
/// process.
pub(super) fn start(here: IpAddr, donor: SocketAddr, lie: Lie) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((here, 0))?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            std::thread::spawn(move || pass(client, donor, lie));
        }
    });
    Ok(address)
}

fn pass(client: TcpStream, donor: SocketAddr, lie: Lie) {
    let Ok(donor) = TcpStream::connect(donor) else {
        return;
    };
    // A connection that fails is closed at both ends, as without a proxy.
    let _ = client.set_nodelay(true).and(donor.set_nodelay(true));
    if first_frames(&client, &donor, lie).is_ok() {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _ = io::copy(&mut &client, &mut &donor);
                let _ = donor.shutdown(Shutdown::Write);
            });
            let _ = io::copy(&mut &donor, &mut &client);
            let _ = client.shutdown(Shutdown::Both);
            let _ = donor.shutdown(Shutdown::Both);
        });
    }
    let _ = client.shutdown(Shutdown::Both);
    let _ = donor.shutdown(Shutdown::Both);
}

/// Forwards the VM's first frame and, if it is `Connect`, the answer.
fn first_frames(mut client: &TcpStream, mut donor: &TcpStream, lie: Lie) -> io::Result<()> {
    let (frame, bytes) = read_frame(client)?;
    donor.write_all(&falsified(frame, bytes, lie))?;
    if frame.kind == FrameKind::Connect {
        let (frame, bytes) = read_frame(donor)?;
        client.write_all(&falsified(frame, bytes, lie))?;
    }
    Ok(())
}

fn read_frame(mut stream: &TcpStream) -> io::Result<(Frame, Vec<u8>)> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let frame = Frame::decode(&header).map_err(io::Error::other)?;
    let mut bytes = header.to_vec();
    bytes.resize(HEADER_BYTES + frame.length, 0);
    stream.read_exact(&mut bytes[HEADER_BYTES..])?;
    Ok((frame, bytes))
}

/// Returns the bytes of a frame, falsified if the lie concerns this frame.
fn falsified(frame: Frame, bytes: Vec<u8>, lie: Lie) -> Vec<u8> {
    let payload = &bytes[HEADER_BYTES..];
    let message = match frame.kind {
        FrameKind::Connect => decode_message::<ConnectRequest>(frame.kind, payload)
            .ok()
            .and_then(|mut request| {
                let end = &mut request.endpoint;
                match lie {
                    Lie::PacketNumber => {
                        end.packet_number = end.packet_number.wrapping_add(0x40_0000) & NUMBER_MAX;
                    }
                    Lie::Answers => end.queue_pair = NUMBER_MAX - 1,
                    Lie::Key | Lie::QueuePair => return None,
                }
                Some(encode_message(&request))
            }),
        FrameKind::Connected => decode_message::<ConnectAnswer>(frame.kind, payload)
            .ok()
            .and_then(|mut answer| {
                match lie {
                    Lie::Key => answer.memory.key ^= 0x0055_5500,
                    Lie::QueuePair => answer.endpoint.queue_pair = NUMBER_MAX - 1,
                    Lie::PacketNumber | Lie::Answers => return None,
                }
                Some(encode_message(&answer))
            }),
        _ => None,
    };
    match message {
        None => bytes,
        Some(payload) => [frame.encode(&payload).as_slice(), &payload].concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fabric_homes::NodeId;
    use fabric_transport::rdma::LinkLayer;
    use fabric_transport::rdma::device::Gid;
    use fabric_transport::rdma::endpoint::{Endpoint, RemoteMemory};
    use fabric_wire::{AttachRequest, Token, TrafficClass};

    fn endpoint() -> Endpoint {
        Endpoint {
            queue_pair: 17,
            packet_number: NUMBER_MAX - 1,
            link: LinkLayer::Ethernet,
            lid: 0,
            gid: Gid::from_ip(IpAddr::from([10, 77, 0, 1])),
            mtu_bytes: 4096,
            reads_answered: 16,
        }
    }

    fn through(kind: FrameKind, payload: &[u8], lie: Lie) -> Vec<u8> {
        let frame = Frame::new(kind, 0, 0, true);
        let header = frame.encode(payload);
        let bytes = [header.as_slice(), payload].concat();
        let falsified = falsified(frame, bytes, lie);
        let header: &[u8; HEADER_BYTES] = falsified[..HEADER_BYTES].try_into().expect("a header");
        let seen = Frame::decode(header).expect("a frame");
        let payload = &falsified[HEADER_BYTES..];
        seen.verify(header, payload).expect("a right checksum");
        payload.to_vec()
    }

    #[test]
    fn each_lie_changes_one_number_and_the_checksum_is_right() {
        let request = ConnectRequest {
            attach: AttachRequest {
                token: Token([7; 16]),
                class: TrafficClass::Urgent,
                node: NodeId(0),
                donor: NodeId(1),
                epoch: 1,
            },
            endpoint: endpoint(),
        };
        let answer = ConnectAnswer {
            endpoint: endpoint(),
            memory: RemoteMemory {
                key: 0x1234,
                pinned: true,
                base: 4096,
                bytes: 4096,
            },
        };
        for lie in [Lie::Key, Lie::PacketNumber, Lie::QueuePair, Lie::Answers] {
            let (mut wanted, mut parameters) = (request, answer);
            match lie {
                Lie::Key => parameters.memory.key = 0x0055_4734,
                Lie::PacketNumber => wanted.endpoint.packet_number = 0x3f_fffe,
                Lie::QueuePair => parameters.endpoint.queue_pair = NUMBER_MAX - 1,
                Lie::Answers => wanted.endpoint.queue_pair = NUMBER_MAX - 1,
            }
            let payload = through(FrameKind::Connect, &encode_message(&request), lie);
            assert_eq!(decode_message(FrameKind::Connect, &payload), Ok(wanted));
            let payload = through(FrameKind::Connected, &encode_message(&answer), lie);
            assert_eq!(
                decode_message(FrameKind::Connected, &payload),
                Ok(parameters)
            );
        }
        let status = through(FrameKind::Status, &[1, 2, 3], Lie::Key);
        assert_eq!(status, [1, 2, 3], "all else goes through as it is");
    }
}
