//! A faulty network for UDP only: a proxy between VMs and a donor.

use super::Random;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// The fault to inject into datagrams of both directions.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Weather {
    /// None.
    Fair,
    /// This percentage is lost.
    Loss(usize),
    /// Every fourth is sent twice.
    Duplication,
    /// Every fourth is delayed by some milliseconds, after later ones.
    Reordering,
    /// All are delayed by a millisecond.
    Delay,
    /// Every twentieth is cut in half.
    Truncation,
    /// Every twentieth has a flipped bit and follows an invalid packet.
    Garbage,
    /// After a number of datagrams the first VM's connection that reaches it carries nothing more.
    Silence,
}

/// Datagrams of a connection before its silence.
const SILENT_AFTER: u32 = 100;
const LATE: Duration = Duration::from_millis(3);
const DELAY: Duration = Duration::from_millis(1);
/// Interval at which threads check for the end.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

pub struct UdpProxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    done: AtomicU32,
    clients: AtomicU32,
    /// What passed, once that is asked for.
    captured: OnceLock<Arc<Mutex<Vec<u8>>>>,
    orders: Mutex<Orders>,
}

/// Faults that a test asked for, in addition to the weather.
#[derive(Debug, Default)]
struct Orders {
    /// Lengths of a donor's datagram that is to be lost.
    lose: Option<Range<usize>>,
    /// Lengths of the donor's datagram after which those of VMs are withheld.
    withhold_after: Option<Range<usize>>,
    withholding: bool,
}

/// One VM's connection: the socket to the donor, and the VM's address.
struct Path {
    client: SocketAddr,
    donor: UdpSocket,
    passed: u32,
    silent: bool,
}

/// A datagram in transit: arrival time, sequence number, path, whether it goes to the donor, and
/// bytes.
type Late = (Instant, u64, usize, bool, Vec<u8>);

struct Network {
    listen: UdpSocket,
    donor: SocketAddr,
    weather: Weather,
    paths: Vec<Path>,
    late: BinaryHeap<Reverse<Late>>,
    /// Datagrams of VMs that are withheld, with their paths.
    withheld: Vec<(usize, Vec<u8>)>,
    sent: u64,
    random: Random,
    silenced: bool,
    shared: Arc<Shared>,
}

impl UdpProxy {
    pub fn new(donor: SocketAddr, weather: Weather) -> Self {
        let listen = UdpSocket::bind(("127.0.0.1", 0)).expect("a free port");
        listen.set_nonblocking(true).expect("a socket");
        let address = listen.local_addr().expect("bound");
        let shared = Arc::new(Shared::default());
        let network = Network {
            listen,
            donor,
            weather,
            paths: Vec::new(),
            late: BinaryHeap::new(),
            withheld: Vec::new(),
            sent: 0,
            random: Random(7),
            silenced: false,
            shared: Arc::clone(&shared),
        };
        std::thread::spawn(move || network.run());
        Self { address, shared }
    }

    /// Returns all bytes of the datagrams that pass from now on, in either direction.
    pub fn captured(&self) -> Arc<Mutex<Vec<u8>>> {
        Arc::clone(self.shared.captured.get_or_init(Arc::default))
    }

    /// Loses the donor's next datagram with such a length.
    pub fn lose_next(&self, bytes: Range<usize>) {
        self.orders().lose = Some(bytes);
    }

    /// Withholds all datagrams of VMs after the donor's next one with such a length.
    pub fn withhold_after(&self, bytes: Range<usize>) {
        self.orders().withhold_after = Some(bytes);
    }

    /// Withholds all datagrams of VMs from now on.
    pub fn withhold(&self) {
        self.orders().withholding = true;
    }

    /// Returns how many sockets of VMs have sent something.
    pub fn clients(&self) -> u32 {
        self.shared.clients.load(Ordering::SeqCst)
    }

    /// Returns whether datagrams of VMs are withheld now.
    pub fn is_withholding(&self) -> bool {
        self.orders().withholding
    }

    /// Passes on, within a tenth of a second, what was withheld.
    pub fn release(&self) {
        self.orders().withholding = false;
    }

    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.shared.orders.lock().expect("no panic")
    }

    /// Returns how many faults were injected.
    pub fn mischief_done(&self) -> u32 {
        self.shared.done.load(Ordering::SeqCst)
    }
}

impl Drop for UdpProxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
    }
}

impl Network {
    fn run(mut self) {
        let mut buffer = vec![0; 1 << 16];
        while !self.shared.stop.load(Ordering::SeqCst) {
            self.sleep();
            self.pass_withheld();
            while let Ok((count, client)) = self.listen.recv_from(&mut buffer) {
                let path = self.path_of(client);
                self.pass(path, true, buffer[..count].to_vec());
            }
            for path in 0..self.paths.len() {
                while let Some(count) = received(self.paths[path].donor.recv(&mut buffer)) {
                    self.pass(path, false, buffer[..count].to_vec());
                }
            }
            while self
                .late
                .peek()
                .is_some_and(|Reverse(next)| next.0 <= Instant::now())
            {
                let Reverse((_, _, path, to_donor, bytes)) = self.late.pop().expect("just seen");
                self.deliver(path, to_donor, &bytes);
            }
        }
    }

    fn sleep(&self) {
        let sockets = self.paths.iter().map(|path| &path.donor);
        let mut fds: Vec<_> = sockets
            .chain([&self.listen])
            .map(|socket| libc::pollfd {
                fd: socket.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        let due = self.late.peek().map_or(LOOK_INTERVAL, |Reverse(next)| {
            next.0
                .saturating_duration_since(Instant::now())
                .min(LOOK_INTERVAL)
        });
        let time = libc::timespec {
            tv_sec: 0,
            tv_nsec: due.subsec_nanos().into(),
        };
        // SAFETY: pointer and count describe one vector, and the timeout outlives the call.
        unsafe {
            libc::ppoll(
                fds.as_mut_ptr(),
                fds.len() as libc::nfds_t,
                &time,
                std::ptr::null(),
            )
        };
    }

    fn path_of(&mut self, client: SocketAddr) -> usize {
        if let Some(known) = self.paths.iter().position(|path| path.client == client) {
            return known;
        }
        let donor = UdpSocket::bind(("127.0.0.1", 0)).expect("a free port");
        donor.connect(self.donor).expect("a donor");
        donor.set_nonblocking(true).expect("a socket");
        self.shared.clients.fetch_add(1, Ordering::SeqCst);
        self.paths.push(Path {
            client,
            donor,
            passed: 0,
            silent: false,
        });
        self.paths.len() - 1
    }

    fn pass(&mut self, path: usize, to_donor: bool, mut bytes: Vec<u8>) {
        if let Some(captured) = self.shared.captured.get() {
            captured.lock().unwrap().extend_from_slice(&bytes);
        }
        if self.is_ordered(path, to_donor, &bytes) {
            self.shared.done.fetch_add(1, Ordering::SeqCst);
            return;
        }
        let now = Instant::now();
        let chance = self.random.below(100);
        self.paths[path].passed += 1;
        if self.weather == Weather::Silence
            && !self.silenced
            && self.paths[path].passed > SILENT_AFTER
        {
            self.silenced = true;
            self.paths[path].silent = true;
        }
        let harmed = match self.weather {
            Weather::Fair => false,
            Weather::Loss(share) => chance < share,
            Weather::Duplication | Weather::Reordering => chance < 25,
            Weather::Delay => true,
            Weather::Truncation | Weather::Garbage => chance < 5,
            Weather::Silence => self.paths[path].silent,
        };
        if !harmed {
            return self.deliver(path, to_donor, &bytes);
        }
        self.shared.done.fetch_add(1, Ordering::SeqCst);
        match self.weather {
            Weather::Fair | Weather::Loss(_) | Weather::Silence => {}
            Weather::Duplication => {
                self.deliver(path, to_donor, &bytes);
                self.deliver(path, to_donor, &bytes);
            }
            Weather::Reordering => self.delay(now + LATE, path, to_donor, bytes),
            Weather::Delay => self.delay(now + DELAY, path, to_donor, bytes),
            Weather::Truncation => self.deliver(path, to_donor, &bytes[..bytes.len() / 2]),
            Weather::Garbage => {
                let words = (0..160).map(|_| self.random.next().to_le_bytes());
                let noise: Vec<u8> = words.flatten().collect();
                self.deliver(path, to_donor, &noise);
                let place = self.random.below(bytes.len());
                bytes[place] ^= 0x10;
                self.deliver(path, to_donor, &bytes);
            }
        }
    }

    /// Returns whether a datagram is lost or withheld because a test asked for that.
    fn is_ordered(&mut self, path: usize, to_donor: bool, bytes: &[u8]) -> bool {
        let mut orders = self.shared.orders.lock().expect("no panic");
        let of = |lengths: &mut Option<Range<usize>>| {
            lengths
                .take_if(|lengths| lengths.contains(&bytes.len()))
                .is_some()
        };
        if to_donor {
            if orders.withholding {
                self.withheld.push((path, bytes.to_vec()));
            }
            return orders.withholding;
        }
        if of(&mut orders.withhold_after) {
            orders.withholding = true;
        }
        of(&mut orders.lose)
    }

    fn pass_withheld(&mut self) {
        if self.withheld.is_empty() || self.shared.orders.lock().expect("no panic").withholding {
            return;
        }
        for (path, bytes) in std::mem::take(&mut self.withheld) {
            self.deliver(path, true, &bytes);
        }
    }

    fn delay(&mut self, until: Instant, path: usize, to_donor: bool, bytes: Vec<u8>) {
        self.sent += 1;
        self.late
            .push(Reverse((until, self.sent, path, to_donor, bytes)));
    }

    fn deliver(&self, path: usize, to_donor: bool, bytes: &[u8]) {
        let path = &self.paths[path];
        // What a socket does not accept is lost, as on any network.
        let _ = if to_donor {
            path.donor.send(bytes)
        } else {
            self.listen.send_to(bytes, path.client)
        };
    }
}

/// Returns the number of bytes received, if any.
fn received(result: io::Result<usize>) -> Option<usize> {
    result.ok()
}
