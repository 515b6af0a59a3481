//! Tests of sockets between guest and host, on real Unix sockets.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use event_manager::{EventManager, SubscriberOps};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::connection::BUFFER_BYTES;
use super::packet::{HOST_CID, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM, op};
use super::test_bed::{Bed, CID, SENT, answer, first, rest};
use super::*;
use crate::virtio::QueueServer;
use crate::virtio::test_driver::{SECOND_PART, STARTED, VERSION_1};

#[test]
fn the_configuration_has_the_address() {
    let bed = Bed::new();
    assert_eq!((bed.driver.get(0x100), bed.driver.get(0x104)), (3, 0));
}

#[test]
fn the_host_connects_to_the_guest_and_both_speak_and_end() {
    let bed = Bed::new();
    let (mut client, guest) = bed.connected(52);
    client.write_all(b"hello guest").unwrap();
    assert_eq!(bed.expect(op::DATA).1, b"hello guest");
    bed.send(
        Header {
            op: op::DATA,
            ..guest
        },
        b"hello host",
    );
    let mut heard = [0; 10];
    client.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"hello host");
    // The host sends no more, and still receives.
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let (header, _) = bed.expect(op::SHUTDOWN);
    assert_eq!(header.flags, SHUTDOWN_SEND);
    assert_eq!(header.forwarded, 10, "what the host has taken");
    bed.send(
        Header {
            op: op::DATA,
            ..guest
        },
        b"late",
    );
    let flags = SHUTDOWN_SEND | SHUTDOWN_RECEIVE;
    bed.send(
        Header {
            op: op::SHUTDOWN,
            flags,
            ..guest
        },
        &[],
    );
    bed.expect(op::RESET);
    assert_eq!(rest(client), b"late");
    bed.send(
        Header {
            op: op::DATA,
            ..guest
        },
        b"gone",
    );
    bed.expect(op::RESET);
    assert!(bed.packet().is_none());
}

#[test]
fn the_guest_connects_to_a_port_that_has_a_listener() {
    let bed = Bed::new();
    let listener = bed.listener(9000);
    bed.send(first(1025, 9000, op::REQUEST), &[]);
    let (response, _) = bed.expect(op::RESPONSE);
    assert_eq!((response.source_port, response.target_port), (9000, 1025));
    assert_eq!(response.buffer, BUFFER_BYTES);
    let (mut host, _) = listener.accept().unwrap();
    host.write_all(b"welcome").unwrap();
    assert_eq!(bed.expect(op::DATA).1, b"welcome");
    // The guest sends its last bytes, and still receives.
    bed.send(first(1025, 9000, op::DATA), b"bye");
    let flags = SHUTDOWN_SEND;
    bed.send(
        Header {
            flags,
            ..first(1025, 9000, op::SHUTDOWN)
        },
        &[],
    );
    host.write_all(b" back").unwrap();
    assert_eq!(bed.expect(op::DATA).1, b" back");
    assert_eq!(rest(host.try_clone().unwrap()), b"bye");
    drop(host);
    let (end, _) = bed.expect(op::SHUTDOWN);
    assert_ne!(end.flags & SHUTDOWN_SEND, 0);
    // A port without a listener, and a wrong address.
    bed.send(first(1026, 9001, op::REQUEST), &[]);
    let (refusal, _) = bed.expect(op::RESET);
    assert_eq!((refusal.source_port, refusal.target_port), (9001, 1026));
}

#[test]
fn a_client_that_asks_wrongly_is_closed() {
    let bed = Bed::new();
    for line in ["", "x", "-1", "4294967296", "5 5", &"1".repeat(40)] {
        let client = bed.client(line);
        assert!(bed.packet().is_none(), "{line}");
        assert_eq!(rest(client), b"", "{line}");
    }
    // One byte at a time.
    let mut slow = UnixStream::connect(bed.path()).unwrap();
    for byte in b"CONNECT 7\nmore" {
        assert!(
            bed.packet()
                .is_none_or(|(header, _)| header.op == op::REQUEST)
        );
        slow.write_all(&[*byte]).unwrap();
    }
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(UnixStream::connect(bed.path()).unwrap());
    }
    // They are accepted in several turns.
    for _ in 0..3 {
        assert!(bed.packet().is_none());
    }
    assert_eq!(rest(silent.remove(0)), b"", "the oldest had to go");
}

#[test]
fn a_client_that_goes_before_the_guest_answers_is_reset() {
    let bed = Bed::new();
    let client = bed.client("52");
    let (request, _) = bed.expect(op::REQUEST);
    drop(client);
    bed.expect(op::RESET);
    bed.send(
        Header {
            op: op::RESPONSE,
            ..answer(&request)
        },
        &[],
    );
    bed.expect(op::RESET);
}

#[test]
fn a_guest_that_refuses_closes_the_client() {
    let bed = Bed::new();
    let client = bed.client("52");
    let (request, _) = bed.expect(op::REQUEST);
    bed.send(
        Header {
            op: op::RESET,
            ..answer(&request)
        },
        &[],
    );
    assert_eq!(rest(client), b"");
    assert!(bed.packet().is_none(), "a reset is not answered");
}

#[test]
fn the_guest_gets_no_more_than_it_has_room_for() {
    let bed = Bed::new();
    let (mut client, guest) = bed.connected(52);
    let small = Header {
        buffer: 10,
        op: op::CREDIT_UPDATE,
        ..guest
    };
    bed.send(small, &[]);
    client.write_all(b"0123456789abcdef").unwrap();
    assert_eq!(bed.expect(op::DATA).1, b"0123456789");
    assert!(bed.packet().is_none());
    bed.send(
        Header {
            forwarded: 4,
            ..small
        },
        &[],
    );
    assert_eq!(bed.expect(op::DATA).1, b"abcd");
    // An inconsistent credit counts as no room.
    bed.send(
        Header {
            forwarded: 1000,
            ..small
        },
        &[],
    );
    assert!(bed.packet().is_none());
}

#[test]
fn a_host_that_does_not_read_holds_the_guest_back() {
    let bed = Bed::new();
    let (client, guest) = bed.connected(52);
    let data = vec![7; 4096];
    let mut sent = 0_u32;
    let mut forwarded = 0_u32;
    // As a guest that respects its credit.
    loop {
        assert!(sent < 64 << 20, "nothing holds it back");
        if sent - forwarded + 4096 > BUFFER_BYTES {
            let ask = Header {
                op: op::CREDIT_REQUEST,
                ..guest
            };
            bed.send(ask, &[]);
            forwarded = bed.expect(op::CREDIT_UPDATE).0.forwarded;
            if sent - forwarded + 4096 > BUFFER_BYTES {
                break;
            }
        }
        let header = Header {
            op: op::DATA,
            ..guest
        };
        bed.send(header, &data);
        sent += 4096;
        while let Some((header, _)) = bed.packet() {
            assert_eq!(header.op, op::CREDIT_UPDATE);
            forwarded = header.forwarded;
        }
    }
    // And one that does not.
    bed.send(
        Header {
            op: op::DATA,
            ..guest
        },
        &data,
    );
    bed.send(
        Header {
            op: op::DATA,
            ..guest
        },
        &data,
    );
    bed.expect(op::RESET);
    drop(client);
}

#[test]
fn what_is_not_meant_for_the_host_is_refused() {
    let bed = Bed::new();
    let good = first(1, 2, op::REQUEST);
    for bad in [
        Header {
            source_cid: 4,
            ..good
        },
        Header {
            target_cid: 1,
            ..good
        },
        Header {
            target_cid: u64::MAX,
            ..good
        },
        Header { kind: 2, ..good },
        Header {
            op: op::DATA,
            ..good
        },
        Header {
            op: op::RESPONSE,
            ..good
        },
        Header { op: 99, ..good },
    ] {
        bed.send(bad, &[]);
        let (refusal, _) = bed.expect(op::RESET);
        assert_eq!((refusal.source_port, refusal.target_port), (2, 1));
        bed.send(
            Header {
                op: op::RESET,
                ..bad
            },
            &[],
        );
        assert!(bed.packet().is_none());
    }
    // A length that is not there.
    let header = Header { length: 5, ..good };
    let memory = &bed.driver.memory;
    memory
        .write_slice(&header.to_bytes(), GuestAddress(SENT))
        .unwrap();
    bed.driver.offer(1, 0, &[(SENT, 48, false)]);
    bed.driver.serve(1);
    assert!(bed.packet().is_none());
}

#[test]
fn a_guest_that_takes_no_refusals_is_held_back_and_keep_serving() {
    let bed = Bed::new();
    let mut sent = 0_u16;
    // Without reading what arrives: its 32 buffers fill, and then the refusals.
    while bed.driver.used(1) == sent {
        assert!(sent < 1000, "nothing holds it back");
        let header = first(u32::from(sent), 1, op::DATA).to_bytes();
        bed.driver
            .memory
            .write_slice(&header, GuestAddress(SENT))
            .unwrap();
        bed.driver.offer(1, 0, &[(SENT, 44, false)]);
        bed.driver.serve(1);
        if bed.driver.used(1) == sent {
            break;
        }
        sent += 1;
    }
    let mut refused = 0;
    while bed.packet().is_some() {
        refused += 1;
        bed.driver.serve(1);
    }
    assert_eq!(refused, sent + 1);
}

#[test]
fn a_reset_of_the_device_ends_all_connections() {
    let bed = Bed::new();
    let (client, _) = bed.connected(52);
    bed.driver.set(0x70, 0);
    assert_eq!(rest(client), b"");
}

#[test]
fn the_loop_wakes_for_clients_and_for_answers() {
    let bed = Bed::new();
    let mut manager = EventManager::<QueueServer>::new().unwrap();
    manager.add_subscriber(QueueServer::new(Arc::clone(&bed.driver.transport)));
    while manager.run_with_timeout(0).unwrap() > 0 {}
    let mut next = |count: u16| {
        while bed.driver.used(0) < count {
            assert!(
                manager.run_with_timeout(5000).unwrap() > 0,
                "nothing wakes it"
            );
        }
    };
    let mut client = bed.client("52");
    next(1);
    let (request, _) = bed.expect(op::REQUEST);
    let guest = answer(&request);
    let offer = |header: Header, data: &[u8]| {
        let length = u32::try_from(data.len()).unwrap();
        let bytes = Header { length, ..header }.to_bytes();
        bed.driver
            .memory
            .write_slice(&bytes, GuestAddress(SENT))
            .unwrap();
        bed.driver
            .memory
            .write_slice(data, GuestAddress(SENT + 44))
            .unwrap();
        bed.driver.offer(1, 0, &[(SENT, 44 + length, false)]);
        bed.driver.notify(1);
    };
    offer(
        Header {
            op: op::RESPONSE,
            ..guest
        },
        &[],
    );
    // The refusal of another packet arrives by the loop as well, although no socket is ready.
    while bed.driver.used(1) < 1 {
        assert!(manager.run_with_timeout(5000).unwrap() > 0);
    }
    offer(first(9, 9, op::DATA), &[]);
    let mut next = |count: u16| {
        while bed.driver.used(0) < count {
            assert!(
                manager.run_with_timeout(5000).unwrap() > 0,
                "nothing wakes it"
            );
        }
    };
    next(2);
    bed.expect(op::RESET);
    client.write_all(b"x").unwrap();
    next(3);
    assert_eq!(bed.expect(op::DATA).1, b"x");
}

#[test]
fn the_socket_is_ours_and_goes_with_us() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v.sock");
    let refused = |path: &Path| {
        let text = HostSocket::listen("vsock", path).unwrap_err().to_string();
        assert!(text.contains(&path.display().to_string()), "{text}");
        text
    };
    let one = HostSocket::listen("vsock", &path).unwrap();
    assert!(refused(&path).contains("is in use"));
    drop(one);
    assert!(!path.exists());
    // The socket of a killed process.
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(HostSocket::listen("vsock", &path).unwrap());
    std::fs::write(&path, "precious").unwrap();
    assert!(refused(&path).contains("not a socket"));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    assert!(refused(&directory.path().join("absent/v.sock")).contains("directory that exists"));
    let long = directory.path().join("x".repeat(100));
    assert!(refused(&long).contains("96 is the limit"));
}

proptest! {
    #[test]
    fn no_packets_make_the_device_panic_or_hang(
        packets in proptest::collection::vec(
            (
                prop_oneof![Just(CID), any::<u64>()],
                prop_oneof![Just(HOST_CID), any::<u64>()],
                (0_u32..3, 0_u32..3),
                prop_oneof![Just(TYPE_STREAM), any::<u16>()],
                0_u16..10,
                prop_oneof![0_u32..4, any::<u32>()],
                any::<(u32, u32)>(),
                0_usize..3000,
            ),
            1..60,
        ),
    ) {
        let bed = Bed::new();
        let listeners = [0, 1].map(|port| bed.listener(port));
        let clients = [0, 1].map(|port| bed.client(&port.to_string()));
        for (source_cid, target_cid, (guest, host), kind, op, flags, (buffer, forwarded), length) in packets {
            let header = Header {
                source_cid,
                target_cid,
                source_port: guest,
                target_port: host,
                kind,
                op,
                flags,
                buffer,
                forwarded,
                length: 0,
            };
            bed.send(header, &vec![1; length]);
            while bed.packet().is_some() {}
        }
        drop((listeners, clients));
        while bed.packet().is_some() {}
        prop_assert_eq!(bed.driver.get(0x70), STARTED);
    }

    #[test]
    fn no_ring_makes_the_device_panic_or_hang(
        descriptors in proptest::collection::vec(
            (
                prop_oneof![SENT..SENT + 0x1000, 0..2 * SECOND_PART, any::<u64>()],
                prop_oneof![0_u32..5000, any::<u32>()],
                0_u32..16,
                prop_oneof![0_u16..16, any::<u16>()],
            ),
            16,
        ),
        heads in proptest::collection::vec(prop_oneof![0_u16..16, any::<u16>()], 0..16),
        queue in 0_u32..3,
    ) {
        let bed = Bed::new();
        let _client = bed.client("52");
        bed.driver.start(VERSION_1);
        for (at, (address, bytes, flags, next)) in (0..).zip(descriptors) {
            bed.driver.descriptor(queue, at, address, bytes, flags, next);
        }
        for head in &heads {
            bed.driver.make_available(queue, *head);
        }
        for queue in 0..3 {
            bed.driver.serve(queue);
        }
        let status = bed.driver.get(0x70);
        prop_assert!(status == STARTED || status == STARTED | 0x40, "{:#x}", status);
    }
}
