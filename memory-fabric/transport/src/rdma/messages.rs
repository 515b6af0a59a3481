//! The exchange of parameters of an RDMA connection, over TCP.

use fabric_verbs::endpoint::{Endpoint, RemoteMemory};
use fabric_wire::AttachRequest;
use serde::{Deserialize, Serialize};

/// The VM's request for an RDMA connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ConnectRequest {
    /// The lease, the traffic class, and the nodes.
    pub attach: AttachRequest,
    /// The VM's end.
    pub endpoint: Endpoint,
}

/// The donor's answer: both ends are connected. The TCP connection stays open as long as the RDMA
/// connection; when it is closed, the donor destroys its end.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ConnectAnswer {
    /// The donor's end.
    pub endpoint: Endpoint,
    /// The memory of the lease.
    pub memory: RemoteMemory,
}

#[cfg(test)]
mod tests {
    use super::*;
    use fabric_homes::NodeId;
    use fabric_verbs::device::{Gid, LinkLayer};
    use fabric_wire::{
        CONTROL_BYTES_MAX, FrameKind, Token, TrafficClass, decode_message, encode_message,
    };
    use proptest::prelude::*;

    #[test]
    fn both_messages_go_into_a_control_frame() {
        // None takes more bytes.
        let endpoint = Endpoint {
            queue_pair: u32::MAX,
            packet_number: u32::MAX,
            link: LinkLayer::Ethernet,
            lid: u16::MAX,
            gid: Gid([u8::MAX; 16]),
            mtu_bytes: u16::MAX,
            reads_answered: u8::MAX,
        };
        let request = ConnectRequest {
            attach: AttachRequest {
                token: Token([0xff; 16]),
                class: TrafficClass::Prefetch,
                node: NodeId(u8::MAX),
                donor: NodeId(u8::MAX),
                epoch: u64::MAX,
            },
            endpoint,
        };
        let bytes = encode_message(&request);
        assert!(bytes.len() <= CONTROL_BYTES_MAX);
        assert_eq!(decode_message(FrameKind::Connect, &bytes), Ok(request));
        let answer = ConnectAnswer {
            endpoint,
            memory: RemoteMemory {
                key: u32::MAX,
                pinned: false,
                base: u64::MAX,
                bytes: u64::MAX,
            },
        };
        let bytes = encode_message(&answer);
        assert!(bytes.len() <= CONTROL_BYTES_MAX);
        assert_eq!(decode_message(FrameKind::Connected, &bytes), Ok(answer));
    }

    proptest! {
        #[test]
        fn no_payload_makes_a_message_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(request) = decode_message::<ConnectRequest>(FrameKind::Connect, &bytes) {
                let _ = request.endpoint.check();
            }
            if let Ok(answer) = decode_message::<ConnectAnswer>(FrameKind::Connected, &bytes) {
                let _ = answer.endpoint.check();
                let _ = answer.memory.check(4096);
            }
        }
    }
}
