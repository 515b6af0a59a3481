use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ssi_hv_irqchip::{Event, Trigger};

use crate::codec::REPORT_BYTES_MAX;
use crate::link::QUEUED_BYTES_MAX;
use crate::{Link, LinkConfig, LinkError, Message, Receiver, Stream};

const SILENCE_MAX: Duration = Duration::from_secs(10);

fn config(me: u8, silence_max: Duration) -> LinkConfig {
    LinkConfig {
        vm: [7; 16],
        me,
        peer: 1 - me,
        silence_max,
    }
}

/// Both ends of a connection, that have not greeted.
fn pair(silence_max: Duration) -> [Receiver; 2] {
    let (one, other) = UnixStream::pair().unwrap();
    [(0, one), (1, other)].map(|(me, stream)| {
        let (_, receiver) = Link::new(config(me, silence_max), Box::new(stream)).unwrap();
        receiver
    })
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn greeted(silence_max: Duration) -> [Receiver; 2] {
    let mut ends = pair(silence_max);
    ends.iter_mut().for_each(|end| end.greet(soon()).unwrap());
    ends
}

fn next(receiver: &mut Receiver) -> Message {
    receiver.next(Some(soon())).unwrap().expect("a message")
}

const fn edge(vector: u8) -> Event {
    Event::Interrupt {
        vector,
        trigger: Trigger::Edge,
    }
}

#[test]
fn a_node_of_another_vm_or_number_is_refused() {
    for wrong in [
        LinkConfig {
            vm: [8; 16],
            ..config(1, SILENCE_MAX)
        },
        LinkConfig {
            me: 2,
            ..config(1, SILENCE_MAX)
        },
    ] {
        let (one, other) = UnixStream::pair().unwrap();
        let (_, mut receiver) = Link::new(config(0, SILENCE_MAX), Box::new(one)).unwrap();
        let _other = Link::new(wrong, Box::new(other)).unwrap();
        let error = receiver.greet(soon()).unwrap_err();
        assert!(
            matches!(error, LinkError::Broken { peer: 1, .. }),
            "{error}"
        );
    }
}

/// Counts writes.
#[derive(Debug)]
struct Counting {
    stream: UnixStream,
    writes: Arc<AtomicUsize>,
}

impl Stream for Counting {
    fn prepare(&self) -> io::Result<()> {
        self.stream.prepare()
    }

    fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        Stream::read(&self.stream, bytes)
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.writes.fetch_add(1, Ordering::SeqCst);
        Stream::write(&self.stream, bytes)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn close(&self) {
        Stream::close(&self.stream);
    }
}

#[test]
fn an_event_for_several_vcpus_is_sent_at_once() {
    let (one, other) = UnixStream::pair().unwrap();
    let writes = Arc::new(AtomicUsize::new(0));
    let counting = Counting {
        stream: one,
        writes: Arc::clone(&writes),
    };
    let (link, _sender) = Link::new(config(0, SILENCE_MAX), Box::new(counting)).unwrap();
    let (_, mut receiver) = Link::new(config(1, SILENCE_MAX), Box::new(other)).unwrap();
    receiver.greet(soon()).unwrap();
    let before = writes.load(Ordering::SeqCst);
    link.post([].into_iter(), edge(0x40));
    assert_eq!(writes.load(Ordering::SeqCst), before, "nobody is meant");
    link.post([3, 5, 64].into_iter(), edge(0x40));
    assert_eq!(writes.load(Ordering::SeqCst), before + 1);
    let event = edge(0x40);
    for cpu in [3, 5, 64] {
        assert_eq!(next(&mut receiver), Message::Event { cpu, event });
    }
}

#[test]
fn an_event_that_nobody_reads_is_merged_and_nothing_is_lost() {
    let [sender, mut receiver] = greeted(SILENCE_MAX);
    let link = sender.link();
    // Until the connection takes no more, and then as many again.
    let mut posted = 0_u32;
    while !link.is_queued() {
        link.post([3].into_iter(), edge(0x40));
        posted += 1;
    }
    for _ in 0..posted {
        link.post([3].into_iter(), edge(0x40));
        link.post([3].into_iter(), edge(0x41));
        link.post([4].into_iter(), Event::Nmi);
    }
    link.post([4].into_iter(), Event::Init);
    link.post([4].into_iter(), Event::Startup { page: 9 });
    link.send(&Message::Resume);
    let queued = link.queued_bytes();
    assert!(queued < 100, "{queued} bytes wait");
    let flusher = thread::spawn(move || {
        let mut sender = sender;
        // Ends when the peer closes.
        while sender.next(None).is_ok() {}
    });
    let (mut seen, mut others) = (0, Vec::new());
    while others.len() < 4 {
        match next(&mut receiver) {
            Message::Event {
                cpu: 3,
                event: Event::Interrupt { vector: 0x40, .. },
            } => seen += 1,
            message => others.push(message),
        }
    }
    assert!(seen == posted || seen == posted + 1, "{seen} of {posted}");
    // The NMI came before the INIT, which drops it.
    let of_cpu_4: Vec<_> = others
        .iter()
        .filter(|message| matches!(message, Message::Event { cpu: 4, .. }))
        .collect();
    let due = [Event::Init, Event::Startup { page: 9 }];
    assert_eq!(
        of_cpu_4,
        due.map(|event| Message::Event { cpu: 4, event }).each_ref()
    );
    assert!(others.contains(&Message::Resume));
    receiver.link().close();
    flusher.join().unwrap();
}

#[test]
fn a_message_comes_after_the_events_that_were_posted_before_it() {
    let [sender, mut receiver] = greeted(SILENCE_MAX);
    let link = sender.link();
    while !link.is_queued() {
        link.post([3].into_iter(), edge(0x40));
    }
    // As while a vCPU moves: its old node may take no event after the answer.
    link.post([4].into_iter(), edge(0x55));
    let answer = Message::Answer {
        call: 7,
        data: [5; 8],
    };
    link.send(&answer);
    link.post([4].into_iter(), edge(0x56));
    let flusher = thread::spawn(move || {
        let mut sender = sender;
        // Ends when the peer closes.
        while sender.next(None).is_ok() {}
    });
    let of_cpu_3 = |message: &Message| matches!(message, Message::Event { cpu: 3, .. });
    let seen = std::iter::repeat_with(|| next(&mut receiver));
    let seen: Vec<_> = seen.filter(|message| !of_cpu_3(message)).take(3).collect();
    let event = |vector| Message::Event {
        cpu: 4,
        event: edge(vector),
    };
    assert_eq!(seen, [event(0x55), answer, event(0x56)]);
    receiver.link().close();
    flusher.join().unwrap();
}

#[test]
fn calls_are_answered_until_the_link_ends() {
    let [mut asks, mut answers] = greeted(SILENCE_MAX);
    let link = asks.link().clone();
    let caller = thread::spawn(move || {
        let message = |number| Message::Pause { number };
        (link.call(message), link.call(message))
    });
    let Message::Pause { number } = next(&mut answers) else {
        panic!("not the call")
    };
    let (call, data) = (number, [5; 8]);
    answers.link().send(&Message::Answer { call, data });
    assert_eq!(next(&mut asks), Message::Answer { call, data });
    assert!(asks.link().answer(call, data));
    assert!(!asks.link().answer(call, data), "nobody waits");
    next(&mut answers);
    asks.link().close();
    assert_eq!(caller.join().unwrap(), (Some([5; 8]), None));
    let error = answers.next(Some(soon())).unwrap_err();
    assert!(matches!(error, LinkError::Closed(0)), "{error}");
}

#[test]
fn a_peer_that_lives_is_heard_and_one_that_does_not_is_lost() {
    // A machine with other work can keep a thread waiting for longer than the shorter ones.
    let silences = [400, 1600, 6400].map(Duration::from_millis);
    let heard = silences.into_iter().find_map(|silence| {
        let [mut one, mut other] = greeted(silence);
        let until = Instant::now() + 3 * silence;
        let lives = thread::spawn(move || other.next(Some(until)).map(|none| (none, other)));
        let of_other = one.next(Some(until));
        let (of_one, silent) = lives.join().unwrap().ok()?;
        assert!(of_one.is_none(), "only signs of life");
        assert!(of_other.ok()?.is_none(), "only signs of life");
        Some((one, silent))
    });
    let (mut one, _silent) = heard.expect("signs of life");
    let error = one.next(Some(soon())).unwrap_err();
    assert!(
        matches!(error, LinkError::Silent { peer: 1, .. }),
        "{error}"
    );
}

#[test]
fn a_peer_that_has_greeted_may_load_the_guest_before_it_is_heard() {
    let silence = Duration::from_millis(50);
    let [mut one, _loads] = greeted(silence);
    let waited = one.next(Some(Instant::now() + 3 * silence));
    assert!(matches!(waited, Ok(None)), "{waited:?}");
    one.expects_life();
    let error = one.next(Some(soon())).unwrap_err();
    assert!(
        matches!(error, LinkError::Silent { peer: 1, .. }),
        "{error}"
    );
}

/// A connection that takes all bytes, and sends none before it may.
#[derive(Debug)]
struct Holding {
    stream: UnixStream,
    held: Mutex<Vec<u8>>,
    may_send: Arc<AtomicBool>,
}

impl Stream for Holding {
    fn prepare(&self) -> io::Result<()> {
        self.stream.set_nonblocking(true)
    }

    fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.read(bytes)
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.held.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&self) -> bool {
        let mut held = self.held.lock().unwrap();
        if self.may_send.load(Ordering::SeqCst) {
            (&self.stream).write_all(&held).unwrap();
            held.clear();
        }
        !held.is_empty()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn close(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

#[test]
fn what_a_connection_has_taken_is_sent_when_it_may() {
    let (one, other) = UnixStream::pair().unwrap();
    let may_send = Arc::new(AtomicBool::new(true));
    let holding = Holding {
        stream: one,
        held: Mutex::default(),
        may_send: Arc::clone(&may_send),
    };
    let (_, mut sender) = Link::new(config(0, SILENCE_MAX), Box::new(holding)).unwrap();
    let (_, mut receiver) = Link::new(config(1, SILENCE_MAX), Box::new(other)).unwrap();
    sender.greet(soon()).unwrap();
    receiver.greet(soon()).unwrap();
    may_send.store(false, Ordering::SeqCst);
    let link = sender.link().clone();
    let flusher = thread::spawn(move || while sender.next(None).is_ok() {});
    link.post([3].into_iter(), edge(0x40));
    assert!(
        !link.send_if_read(&Message::Pause { number: 1 }),
        "it waits"
    );
    let shortly = Instant::now() + Duration::from_millis(100);
    assert_eq!(receiver.next(Some(shortly)).unwrap(), None);
    may_send.store(true, Ordering::SeqCst);
    let event = edge(0x40);
    assert_eq!(next(&mut receiver), Message::Event { cpu: 3, event });
    receiver.link().close();
    flusher.join().unwrap();
}

#[test]
fn a_peer_that_does_not_read_does_not_fill_the_memory_of_this_node() {
    let [mut one, _other] = greeted(SILENCE_MAX);
    let report = Message::Report(vec![0; REPORT_BYTES_MAX]);
    for _ in 0..2 * QUEUED_BYTES_MAX / REPORT_BYTES_MAX {
        one.link().send(&report);
    }
    assert!(one.link().queued_bytes() <= QUEUED_BYTES_MAX + 2 * REPORT_BYTES_MAX);
    let error = one.next(Some(soon())).unwrap_err();
    assert!(error.to_string().contains("does not read"), "{error}");
}
