//! The sending side of the connection between two nodes.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use ssi_hv_irqchip::{CPUS_MAX, Event, Inbox, Posted, Trigger};

use crate::calls::Calls;
use crate::codec::encode;
use crate::message::{Data, Message, NodeNumber};
use crate::receiver::Receiver;
use crate::stream::Stream;

/// Names a VM, so that nodes of different ones do not talk to each other.
pub type VmId = [u8; 16];

/// What a thread waits for before a vCPU acts on another node other than through the guest's memory:
/// until other nodes see what the vCPU stored before.
pub trait Barrier: std::fmt::Debug + Send + Sync {
    /// Waits.
    fn wait(&self);
}

/// Most bytes that wait for a peer that does not read: far more than a correct one leaves unread.
pub(crate) const QUEUED_BYTES_MAX: usize = 16 << 20;

/// What a link is made with.
#[derive(Clone, Copy, Debug)]
pub struct LinkConfig {
    /// The VM.
    pub vm: VmId,
    /// This node.
    pub me: NodeNumber,
    /// The node at the other end.
    pub peer: NodeNumber,
    /// A peer that is silent for so long is lost.
    pub silence_max: Duration,
}

/// What waits while the peer does not read.
#[derive(Debug)]
pub(crate) struct Queue {
    /// Frames, the first of which may have been sent in part.
    bytes: Vec<u8>,
    /// vCPUs with events in their inboxes.
    cpus: Vec<u8>,
    pub(crate) sent_at: Instant,
    frame: Vec<u8>,
}

/// The connection to another node. Sending does not wait.
#[derive(Debug)]
pub struct Link {
    pub(crate) config: LinkConfig,
    pub(crate) stream: Box<dyn Stream>,
    queue: Mutex<Queue>,
    /// Readable when the receiving thread has to look at the queue.
    wake: OwnedFd,
    /// Events for vCPUs of the peer that wait behind the queue.
    inboxes: Box<[Inbox]>,
    calls: Calls,
    closed: AtomicBool,
    /// Too much waits for the peer.
    flooded: AtomicBool,
    barrier: OnceLock<Arc<dyn Barrier>>,
}

impl Link {
    /// The two sides of a connection. Greets the peer.
    ///
    /// # Errors
    /// When the host refuses a descriptor, or a property of the connection.
    pub fn new(config: LinkConfig, stream: Box<dyn Stream>) -> io::Result<(Arc<Self>, Receiver)> {
        stream.prepare()?;
        let link = Arc::new(Self {
            config,
            stream,
            queue: Mutex::new(Queue {
                bytes: Vec::new(),
                cpus: Vec::new(),
                sent_at: Instant::now(),
                frame: Vec::new(),
            }),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            inboxes: (0..CPUS_MAX).map(|_| Inbox::default()).collect(),
            calls: Calls::default(),
            closed: AtomicBool::new(false),
            flooded: AtomicBool::new(false),
            barrier: OnceLock::new(),
        });
        // Before anything else: from now on any thread may send.
        link.send(&Message::Hello {
            version: crate::VERSION,
            vm: config.vm,
            node: config.me,
        });
        let receiver = Receiver::new(Arc::clone(&link));
        Ok((link, receiver))
    }

    /// The node at the other end.
    #[must_use]
    pub fn peer(&self) -> NodeNumber {
        self.config.peer
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Queue> {
        // Bytes are appended and removed in single calls.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on, what vCPUs cause waits for `barrier`. The first one stays.
    pub fn set_barrier(&self, barrier: Arc<dyn Barrier>) {
        let _ = self.barrier.set(barrier);
    }

    /// Waits until the peer sees what vCPUs of this node have stored.
    pub fn wait_for_barrier(&self) {
        if let Some(barrier) = self.barrier.get() {
            barrier.wait();
        }
    }

    /// Sends a message, after all that was sent or posted before.
    pub fn send(&self, message: &Message) {
        if matches!(
            message,
            Message::EndOfInterrupt { .. } | Message::Vcpu { .. }
        ) {
            self.wait_for_barrier();
        }
        let mut queue = self.lock();
        if !queue.bytes.is_empty() {
            self.append_waiting(&mut queue);
        }
        self.send_locked(&mut queue, message);
    }

    /// Sends a message that may be left out; returns false, without sending it, while the peer does
    /// not read what was sent before.
    pub fn send_if_read(&self, message: &Message) -> bool {
        let mut queue = self.lock();
        let may_send = queue.bytes.is_empty() && !self.stream.flush();
        if may_send {
            self.send_locked(&mut queue, message);
        }
        may_send
    }

    fn send_locked(&self, queue: &mut Queue, message: &Message) {
        queue.frame.clear();
        encode(message, &mut queue.frame);
        self.send_frames(queue);
    }

    /// Sends the frames of the queue's buffer.
    fn send_frames(&self, queue: &mut Queue) {
        let Queue { bytes, frame, .. } = queue;
        let sent = if bytes.is_empty() {
            self.write(frame)
        } else {
            0
        };
        if sent > 0 {
            queue.sent_at = Instant::now();
        }
        if sent < queue.frame.len() {
            if queue.bytes.len() > QUEUED_BYTES_MAX {
                // What a peer causes by messages that it sends, and does not read.
                self.flooded.store(true, Ordering::Release);
                self.close();
                return;
            }
            queue.bytes.extend(&queue.frame[sent..]);
            self.wake();
        } else if self.stream.flush() {
            // The receiving thread sends the rest of it.
            self.wake();
        }
    }

    /// Makes the receiving thread look at the link.
    fn wake(&self) {
        // A full counter is readable as well.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Readable when the receiving thread has to look at the link.
    pub(crate) fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    /// How many bytes the connection takes. What it does not take because it has ended stays until
    /// the receiving thread finds that out.
    fn write(&self, bytes: &[u8]) -> usize {
        let mut sent = 0;
        while sent < bytes.len() {
            match self.stream.write(&bytes[sent..]) {
                Ok(more) => sent += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        sent
    }

    /// Sends an event to vCPUs of the peer, with one system call. While the peer does not read, events
    /// are merged as its local APICs would merge them. The caller has
    /// [waited](Self::wait_for_barrier) for what vCPUs stored before.
    pub fn post(&self, cpus: impl Iterator<Item = u8>, event: Event) {
        let mut cpus = cpus.peekable();
        if cpus.peek().is_none() {
            return;
        }
        let mut queue = self.lock();
        if !queue.bytes.is_empty() {
            let waiting = cpus.filter(|cpu| self.inboxes[usize::from(*cpu)].post(event));
            queue.cpus.extend(waiting);
            return;
        }
        queue.frame.clear();
        for cpu in cpus {
            encode(&Message::Event { cpu, event }, &mut queue.frame);
        }
        self.send_frames(&mut queue);
    }

    /// Sends what is queued, as far as the peer reads. Returns whether something is left.
    pub(crate) fn flush(&self) -> bool {
        let mut queue = self.lock();
        if self.stream.flush() {
            return true;
        }
        loop {
            let sent = self.write(&queue.bytes);
            if sent > 0 {
                queue.sent_at = Instant::now();
            }
            queue.bytes.drain(..sent);
            if !queue.bytes.is_empty() {
                return true;
            }
            self.append_waiting(&mut queue);
            if queue.bytes.is_empty() {
                return self.stream.flush();
            }
        }
    }

    /// Appends the events that wait behind the queue to it.
    fn append_waiting(&self, queue: &mut Queue) {
        while let Some(cpu) = queue.cpus.pop() {
            let posted = self.inboxes[usize::from(cpu)].take().unwrap_or_default();
            for event in events(&posted) {
                encode(&Message::Event { cpu, event }, &mut queue.bytes);
            }
        }
    }

    /// Sends the message that `with` makes of the name of a call, and waits for its answer; `None`
    /// when the link ends before.
    pub fn call(&self, with: impl FnOnce(u32) -> Message) -> Option<Data> {
        self.wait_for_barrier();
        self.calls.call(|call| self.send(&with(call)))
    }

    /// Takes the answer to a call; false if nobody asked.
    #[must_use]
    pub fn answer(&self, call: u32, data: Data) -> bool {
        self.calls.answer(call, data)
    }

    /// Ends all calls: waiting threads get no answer.
    pub fn end_calls(&self) {
        self.calls.close();
    }

    /// Ends the connection. The peer gets what the connection has taken.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.calls.close();
        self.stream.close();
        self.wake();
    }

    pub(crate) fn is_flooded(&self) -> bool {
        self.flooded.load(Ordering::Acquire)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// What was posted, in an order that has the same effect.
fn events(posted: &Posted) -> Vec<Event> {
    let mut events = Vec::new();
    events.extend(posted.init.then_some(Event::Init));
    events.extend(posted.startup.map(|page| Event::Startup { page }));
    events.extend(posted.nmi.then_some(Event::Nmi));
    for vector in 0..=u8::MAX {
        for (vectors, trigger) in [(posted.edge, Trigger::Edge), (posted.level, Trigger::Level)] {
            let event = Event::Interrupt { vector, trigger };
            events.extend(vectors.contains(vector).then_some(event));
        }
    }
    events
}

#[cfg(test)]
impl Link {
    pub(crate) fn is_queued(&self) -> bool {
        !self.lock().bytes.is_empty()
    }

    pub(crate) fn queued_bytes(&self) -> usize {
        self.lock().bytes.len()
    }
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
