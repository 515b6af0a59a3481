//! Events of `ssi-hv up`: from its processes, and signals.
//!
//! Lines arrive in the order in which they were written, and the output of a process precedes its
//! end. The number of queued lines is bounded: if no one takes them, as while stderr of this
//! process is full, a process that writes more is blocked by its pipe. Ends and signals are few,
//! and never wait.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Limit of queued lines of all processes: with lines of 4 KiB, 1 MiB.
const LINES_MAX: usize = 256;

/// An event of a process, or of this one.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// A line of its standard output.
    Said(usize, String),
    /// A line of its standard error.
    Complained(usize, String),
    /// It has ended and can be reaped.
    Ended(usize),
    /// This process received a signal.
    Signal(i32),
    /// The deadline has passed.
    Late,
}

impl Event {
    fn is_line(&self) -> bool {
        matches!(self, Self::Said(..) | Self::Complained(..))
    }
}

/// Creates a queue of events.
pub fn queue() -> (EventSender, EventReceiver) {
    let shared = Arc::<Shared>::default();
    (EventSender(Arc::clone(&shared)), EventReceiver(shared))
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    came: Condvar,
    /// Signalled when a line has room.
    room: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<Event>,
    lines: usize,
    /// The receiver was dropped.
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sending end.
#[derive(Clone, Debug)]
pub struct EventSender(Arc<Shared>);

impl EventSender {
    /// Sends an event. A line waits for room. Returns false if the receiver was dropped.
    pub fn send(&self, event: Event) -> bool {
        let mut queue = self.0.lock();
        if event.is_line() {
            while queue.lines >= LINES_MAX && !queue.closed {
                let woken = self.0.room.wait(queue);
                queue = woken.unwrap_or_else(PoisonError::into_inner);
            }
        }
        if queue.closed {
            return false;
        }
        queue.lines += usize::from(event.is_line());
        match event {
            Event::Signal(_) => queue.events.push_front(event),
            _ => queue.events.push_back(event),
        }
        self.0.came.notify_one();
        true
    }
}

/// The receiving end. Dropping it unblocks all senders.
#[derive(Debug)]
pub struct EventReceiver(Arc<Shared>);

impl EventReceiver {
    /// Returns the next event before `deadline`; otherwise [`Event::Late`], even if lines are
    /// queued.
    pub fn next(&self, deadline: Option<Instant>) -> Event {
        let mut queue = self.0.lock();
        loop {
            let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if is_late && queue.events.front().is_none_or(Event::is_line) {
                return Event::Late;
            }
            if let Some(event) = queue.events.pop_front() {
                if event.is_line() {
                    queue.lines -= 1;
                    self.0.room.notify_one();
                }
                return event;
            }
            queue = match deadline {
                None => {
                    let woken = self.0.came.wait(queue);
                    woken.unwrap_or_else(PoisonError::into_inner)
                }
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    let woken = self.0.came.wait_timeout(queue, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.room.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// Timeout of each step, far longer than on the most loaded host.
    const LIMIT: Duration = Duration::from_secs(60);

    fn line(number: usize) -> Event {
        Event::Complained(0, number.to_string())
    }

    #[test]
    fn who_says_more_than_is_taken_waits_and_ends_and_signals_do_not() {
        let (sender, receiver) = queue();
        let said = AtomicUsize::new(0);
        let deadline = Instant::now() + LIMIT;
        let total = 4 * LINES_MAX;
        thread::scope(|scope| {
            // If this fails, the senders must not stay blocked.
            let receiver = receiver;
            scope.spawn(|| {
                for number in 0..total {
                    assert!(sender.send(line(number)));
                    said.fetch_add(1, Ordering::SeqCst);
                }
                assert!(sender.send(Event::Ended(0)));
            });
            while said.load(Ordering::SeqCst) < LINES_MAX {
                assert!(Instant::now() < deadline);
                thread::yield_now();
            }
            assert!(sender.send(Event::Ended(1)));
            assert!(sender.send(Event::Signal(2)));
            assert_eq!(receiver.next(Some(deadline)), Event::Signal(2));
            let (mut taken, mut ends) = (0, Vec::new());
            while ends.len() < 2 {
                assert!(said.load(Ordering::SeqCst) <= taken + LINES_MAX);
                match receiver.next(Some(deadline)) {
                    Event::Ended(index) => ends.push((index, taken)),
                    event => {
                        assert_eq!(event, line(taken));
                        taken += 1;
                    }
                }
            }
            // In order of arrival: the last line of a process precedes its end.
            assert_eq!(ends, [(1, LINES_MAX), (0, total)]);
        });
    }

    #[test]
    fn lines_do_not_put_a_deadline_off() {
        let (sender, receiver) = queue();
        let over = Some(Instant::now());
        assert_eq!(receiver.next(over), Event::Late);
        assert!(sender.send(Event::Ended(0)) && sender.send(line(1)));
        assert_eq!(receiver.next(over), Event::Ended(0));
        assert_eq!(receiver.next(over), Event::Late);
        let later = Some(Instant::now() + LIMIT);
        assert_eq!(receiver.next(later), line(1));
    }

    #[test]
    fn who_waits_for_room_stops_waiting_when_nobody_listens_any_more() {
        let (sender, receiver) = queue();
        thread::scope(|scope| {
            let sent = scope.spawn(|| {
                (0..=LINES_MAX)
                    .take_while(|&number| sender.send(line(number)))
                    .count()
            });
            let deadline = Instant::now() + LIMIT;
            while sender.0.lock().lines < LINES_MAX && Instant::now() < deadline {
                thread::yield_now();
            }
            drop(receiver);
            assert_eq!(sent.join().expect("it ends"), LINES_MAX);
        });
        assert!(!sender.send(Event::Ended(0)));
    }
}
