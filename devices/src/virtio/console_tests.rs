//! Tests of the data between guest and client.

use std::path::PathBuf;
use std::time::Duration;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::test_driver::{Driver, PART_BYTES, STARTED};

/// Where the guest has its output.
const WRITTEN: u64 = 0x10_0000;
/// Where the guest has room for input.
const ROOM: u64 = 0x20_0000;

struct Bed {
    driver: Driver<Console>,
    directory: tempfile::TempDir,
    _socket: HostSocket,
}

impl Bed {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = HostSocket::listen("console", &directory.path().join("c")).unwrap();
        let driver = Driver::of(Console::new(&socket).unwrap());
        driver.start(driver.offered());
        assert_eq!((driver.get(8), driver.get(0x70)), (3, STARTED));
        Self {
            driver,
            directory,
            _socket: socket,
        }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("c")
    }

    fn client(&self) -> UnixStream {
        let client = UnixStream::connect(self.path()).unwrap();
        let limit = Some(Duration::from_secs(30));
        client.set_read_timeout(limit).unwrap();
        client
    }

    /// Serves the device as the loop does when the sockets are ready.
    fn attend(&self) {
        self.driver.serve(0);
        self.driver.serve(1);
    }

    /// Writes as the guest, over two descriptors.
    fn write(&self, bytes: &[u8]) {
        let before = self.driver.used(1);
        let memory = &self.driver.memory;
        memory.write_slice(bytes, GuestAddress(WRITTEN)).unwrap();
        let length = u32::try_from(bytes.len()).unwrap();
        let first = length / 3;
        let rest = (WRITTEN + u64::from(first), length - first, false);
        self.driver.offer(1, 0, &[(WRITTEN, first, false), rest]);
        self.driver.serve(1);
        assert_eq!(self.driver.used(1), before.wrapping_add(1), "at once");
    }

    /// Offers this much room to the device; returns what the device put there.
    fn offer_room(&self, bytes: u32) {
        self.driver.offer(0, 0, &[(ROOM, bytes, true)]);
        self.driver.serve(0);
    }

    fn got(&self) -> Vec<u8> {
        let (_, written) = self.driver.last_used(0);
        let mut bytes = vec![0; usize::try_from(written).unwrap()];
        let memory = &self.driver.memory;
        memory.read_slice(&mut bytes, GuestAddress(ROOM)).unwrap();
        bytes
    }
}

fn read(mut client: &UnixStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    client.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn what_the_guest_writes_is_read_by_the_client_and_kept_for_one_to_come() {
    let bed = Bed::new();
    bed.write(b"early ");
    let client = bed.client();
    bed.attend();
    assert_eq!(read(&client, 6), b"early ");
    bed.write(b"and late");
    assert_eq!(read(&client, 8), b"and late");
}

#[test]
fn what_the_client_types_is_read_by_the_guest_as_far_as_it_has_room() {
    let bed = Bed::new();
    let mut client = bed.client();
    bed.attend();
    bed.offer_room(4);
    assert_eq!(bed.driver.used(0), 0, "nothing was typed");
    client.write_all(b"typed").unwrap();
    bed.attend();
    assert_eq!(bed.got(), b"type");
    bed.offer_room(100);
    assert_eq!((bed.got(), bed.driver.used(0)), (b"d".to_vec(), 2));
}

#[test]
fn a_client_that_reads_nothing_holds_up_nobody_and_finds_the_newest() {
    let bed = Bed::new();
    let client = bed.client();
    bed.attend();
    let mut written = Vec::new();
    for round in 0..200_u8 {
        let bytes = vec![round; 8192];
        bed.write(&bytes);
        written.extend(bytes);
    }
    client.set_nonblocking(true).unwrap();
    let mut all = Vec::new();
    loop {
        let mut bytes = [0; 8192];
        match (&client).read(&mut bytes) {
            Ok(count) => all.extend(&bytes[..count]),
            Err(error) if is_later(&error) => {
                let before = all.len();
                bed.attend();
                let mut one = [0];
                match (&client).read(&mut one) {
                    Ok(_) => all.push(one[0]),
                    Err(_) => assert_eq!(before, all.len()),
                }
                if before == all.len() {
                    break;
                }
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(all.len() < written.len(), "a limit holds");
    assert!(all.ends_with(&written[written.len() - CONSOLE_KEPT_BYTES_MAX..]));
}

#[test]
fn one_client_at_a_time_is_served_and_what_it_typed_before_it_went_arrives() {
    let bed = Bed::new();
    let mut first = bed.client();
    let mut second = bed.client();
    second.write_all(b"second").unwrap();
    first.write_all(b"first").unwrap();
    bed.attend();
    bed.write(b"for the first");
    assert_eq!(read(&first, 13), b"for the first");
    drop(first);
    bed.write(b"for the second");
    for wanted in [b"first".as_slice(), b"second"] {
        bed.offer_room(100);
        assert_eq!(bed.got(), wanted);
    }
    bed.attend();
    assert_eq!(read(&second, 14), b"for the second");
}

#[test]
fn a_client_that_has_typed_all_still_reads() {
    let bed = Bed::new();
    let mut client = bed.client();
    client.write_all(b"all").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    bed.offer_room(100);
    assert_eq!(bed.got(), b"all");
    bed.offer_room(100);
    bed.write(b"answer");
    assert_eq!(read(&client, 6), b"answer");
    assert_eq!(bed.driver.used(0), 1);
}

#[test]
fn the_sockets_have_an_event_when_something_is_to_be_done() {
    let bed = Bed::new();
    let loop_of_device = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let fd = bed.driver.device.events().unwrap();
    let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
    epoll::add(&loop_of_device, fd, epoll::EventData::new_u64(0), flags).unwrap();
    let happens = |what: &str| {
        let mut events = [MaybeUninit::uninit()];
        let limit = Timespec {
            tv_sec: 10,
            tv_nsec: 0,
        };
        let (events, _) = epoll::wait(&loop_of_device, &mut events, Some(&limit)).unwrap();
        assert_eq!(events.len(), 1, "{what}");
        bed.attend();
    };
    let mut client = bed.client();
    happens("a client");
    bed.offer_room(100);
    client.write_all(b"x").unwrap();
    happens("it types");
    assert_eq!(bed.got(), b"x");
    bed.offer_room(100);
    client.write_all(b"z").unwrap();
    bed.write(b"the guest writes before the event is taken");
    happens("it has typed meanwhile");
    assert_eq!(bed.got(), b"z");
    for _ in 0..200 {
        bed.write(&[7; 8192]);
    }
    client.set_nonblocking(true).unwrap();
    let mut bytes = [0; 8192];
    while client.read(&mut bytes).is_ok() {}
    happens("it reads");
    let mut next = bed.client();
    drop(client);
    happens("it goes");
    next.write_all(b"y").unwrap();
    bed.offer_room(100);
    assert_eq!(bed.got(), b"y");
}

#[test]
fn buffers_outside_of_memory_come_back_empty() {
    let bed = Bed::new();
    let mut client = bed.client();
    client.write_all(b"typed").unwrap();
    bed.attend();
    for room in [
        (PART_BYTES, 10, true),
        (u64::MAX - 3, 10, true),
        (ROOM, 10, false),
    ] {
        bed.driver.offer(0, 0, &[room]);
        bed.driver.serve(0);
        assert_eq!(bed.driver.last_used(0), (0, 0), "{room:x?}");
    }
    bed.offer_room(10);
    assert_eq!(bed.got(), b"typed");
    bed.driver.offer(1, 0, &[(PART_BYTES - 4, 8, false)]);
    bed.driver.serve(1);
    bed.write(b"!");
    assert_eq!(read(&client, 1), b"!");
}

proptest! {
    #[test]
    fn bytes_pass_in_their_order_both_ways(
        steps in proptest::collection::vec((0_u8..4, 1_u32..6000), 1..60),
    ) {
        let bed = Bed::new();
        let mut client = bed.client();
        let (mut typed, mut got, mut written, mut seen) = (vec![], vec![], vec![], vec![]);
        let mut next = 0_u8;
        let mut used = 0;
        for (what, count) in steps {
            let mut bytes = || -> Vec<u8> {
                (0..count).map(|_| { next = next.wrapping_add(1); next }).collect()
            };
            match what {
                0 if typed.len() - got.len() < 50_000 => {
                    let bytes = bytes();
                    client.write_all(&bytes).unwrap();
                    typed.extend(bytes);
                    bed.driver.serve(0);
                }
                1 if written.len() - seen.len() < 50_000 => {
                    let bytes = bytes();
                    bed.write(&bytes);
                    written.extend(bytes);
                }
                2 => {
                    let there = written.len() - seen.len();
                    bed.attend();
                    seen.extend(read(&client, there));
                }
                _ if typed.len() > got.len() && bed.driver.used(0) == used => {
                    bed.offer_room(count);
                    used = used.wrapping_add(1);
                    prop_assert_eq!(bed.driver.used(0), used);
                    got.extend(bed.got());
                }
                _ => {}
            }
        }
        prop_assert!(typed.starts_with(&got));
        prop_assert!(written.starts_with(&seen));
    }
}

#[test]
fn a_client_that_has_gone_makes_room_for_the_next_where_the_guest_reads_nothing() {
    let bed = Bed::new();
    let mut client = bed.client();
    bed.attend();
    for typed in [b"a", b"b"] {
        bed.offer_room(1);
        client.write_all(typed).unwrap();
        bed.attend();
        assert_eq!(bed.got(), typed);
    }
    drop(client);
    bed.attend();
    bed.write(b"for the next");
    let next = bed.client();
    bed.attend();
    assert_eq!(read(&next, 12), b"for the next");
}
