//! How a CPU receives interrupts from other threads.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::message::{DeliveryMode, Message, Trigger};
use crate::vectors::Vectors;

/// An event for one CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// An interrupt with a vector.
    Interrupt {
        /// Its vector.
        vector: u8,
        /// How it was triggered.
        trigger: Trigger,
    },
    /// A non-maskable interrupt.
    Nmi,
    /// Reset, and wait for [`Startup`](Self::Startup).
    Init,
    /// Begin in real mode at the start of page `page`, if the CPU waits for that.
    Startup {
        /// The number of the page.
        page: u8,
    },
}

impl Event {
    /// What a message does at each CPU that it is for; `None` for SMI and for an interrupt of an
    /// 8259, neither of which a machine has.
    #[must_use]
    pub fn of(message: &Message) -> Option<Self> {
        Some(match message.mode {
            DeliveryMode::Fixed | DeliveryMode::LowestPriority => Self::Interrupt {
                vector: message.vector,
                trigger: message.trigger,
            },
            DeliveryMode::Nmi => Self::Nmi,
            DeliveryMode::Init => Self::Init,
            DeliveryMode::Startup => Self::Startup {
                page: message.vector,
            },
            DeliveryMode::Smi | DeliveryMode::ExtInt => return None,
        })
    }
}

/// What was posted since the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Posted {
    /// Vectors triggered by an edge.
    pub edge: Vectors,
    /// Vectors triggered by a level.
    pub level: Vectors,
    /// A non-maskable interrupt.
    pub nmi: bool,
    /// An INIT. It comes before `startup` and `nmi`: older ones were dropped when it was posted.
    pub init: bool,
    /// The page of a start-up message.
    pub startup: Option<u8>,
}

impl Posted {
    /// Both, where `newer` was posted after all of these.
    #[must_use]
    pub fn then(self, newer: Self) -> Self {
        let both = |a: Vectors, b: Vectors| {
            let mut words = a.0;
            for (word, more) in words.iter_mut().zip(b.0) {
                *word |= more;
            }
            Vectors(words)
        };
        // An INIT drops what was signalled before it.
        let older = if newer.init { Self::default() } else { self };
        Self {
            edge: both(self.edge, newer.edge),
            level: both(self.level, newer.level),
            nmi: older.nmi || newer.nmi,
            init: self.init || newer.init,
            startup: newer.startup.or(older.startup),
        }
    }
}

const NMI: u32 = 1 << 0;
const INIT: u32 = 1 << 1;
const STARTUP: u32 = 1 << 2;
const PAGE_SHIFT: u32 = 8;
const PAGE: u32 = 0xff << PAGE_SHIFT;

/// Events for one CPU that its thread has not yet taken. Posting needs no lock.
#[derive(Debug, Default)]
pub struct Inbox {
    edge: [AtomicU32; 8],
    level: [AtomicU32; 8],
    signals: AtomicU32,
    /// Something was posted that the owner has not looked for. Set after what was posted and
    /// cleared before it is taken, both by read-modify-writes with acquire and release: a poster
    /// that finds it set is seen by the look that clears it.
    notified: AtomicBool,
}

impl Inbox {
    /// Adds an event; true when the owner must be woken, because it does not know of any yet.
    #[must_use]
    pub fn post(&self, event: Event) -> bool {
        match event {
            Event::Interrupt { vector, trigger } => {
                let vectors = match trigger {
                    Trigger::Edge => &self.edge,
                    Trigger::Level => &self.level,
                };
                let bit = 1 << (vector % 32);
                vectors[usize::from(vector / 32)].fetch_or(bit, Ordering::Release);
            }
            Event::Nmi => {
                self.signals.fetch_or(NMI, Ordering::Release);
            }
            Event::Init => self.signals.store(INIT, Ordering::Release),
            Event::Startup { page } => {
                let page = u32::from(page) << PAGE_SHIFT;
                let changed = |signals: u32| Some(signals & !PAGE | STARTUP | page);
                let _ = self
                    .signals
                    .fetch_update(Ordering::AcqRel, Ordering::Acquire, changed);
            }
        }
        !self.notified.swap(true, Ordering::AcqRel)
    }

    /// Takes all events, if there are any.
    pub fn take(&self) -> Option<Posted> {
        if !self.notified.load(Ordering::Relaxed) || !self.notified.swap(false, Ordering::AcqRel) {
            return None;
        }
        let all = |vectors: &[AtomicU32; 8]| {
            let mut taken = Vectors::default();
            for (word, posted) in taken.0.iter_mut().zip(vectors) {
                if posted.load(Ordering::Relaxed) != 0 {
                    *word = posted.swap(0, Ordering::AcqRel);
                }
            }
            taken
        };
        let (edge, level) = (all(&self.edge), all(&self.level));
        let signals = self.signals.swap(0, Ordering::AcqRel);
        let page = u8::try_from((signals & PAGE) >> PAGE_SHIFT).unwrap_or(0);
        Some(Posted {
            edge,
            level,
            nmi: signals & NMI != 0,
            init: signals & INIT != 0,
            startup: (signals & STARTUP != 0).then_some(page),
        })
    }

    /// Whether [`take`](Self::take) would give something.
    #[must_use]
    pub fn has_events(&self) -> bool {
        self.notified.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    fn edge(vector: u8) -> Event {
        Event::Interrupt {
            vector,
            trigger: Trigger::Edge,
        }
    }

    #[test]
    fn the_owner_is_woken_once_until_it_looks() {
        let inbox = Inbox::default();
        assert_eq!(inbox.take(), None);
        assert!(inbox.post(edge(0x31)));
        assert!(!inbox.post(edge(0xff)));
        assert!(!inbox.post(Event::Interrupt {
            vector: 0x31,
            trigger: Trigger::Level,
        }));
        let posted = inbox.take().unwrap();
        assert!(posted.edge.contains(0x31) && posted.edge.contains(0xff));
        assert!(posted.level.contains(0x31) && !posted.level.contains(0xff));
        assert_eq!(inbox.take(), None);
        assert!(inbox.post(Event::Nmi));
        assert!(inbox.take().unwrap().nmi);
    }

    #[test]
    fn an_init_drops_what_was_signalled_before() {
        let inbox = Inbox::default();
        let _ = inbox.post(Event::Startup { page: 7 });
        let _ = inbox.post(Event::Nmi);
        let _ = inbox.post(Event::Init);
        let posted = inbox.take().unwrap();
        assert!(posted.init && !posted.nmi && posted.startup.is_none());
        let _ = inbox.post(Event::Init);
        let _ = inbox.post(Event::Startup { page: 0xfe });
        let _ = inbox.post(Event::Startup { page: 0x41 });
        let posted = inbox.take().unwrap();
        assert!(posted.init);
        assert_eq!(posted.startup, Some(0x41), "the last page");
    }

    #[test]
    fn what_is_posted_later_comes_later_when_both_are_taken_together() {
        let orders: [&[Event]; 3] = [
            &[Event::Nmi, edge(0x31)],
            &[Event::Init, Event::Startup { page: 7 }],
            &[Event::Startup { page: 9 }, edge(0x77), Event::Nmi],
        ];
        let posted = |events: &[&Event]| {
            let inbox = Inbox::default();
            for event in events {
                let _ = inbox.post(**event);
            }
            inbox.take().unwrap()
        };
        for older in orders {
            for newer in orders {
                let together = posted(&older.iter().chain(newer).collect::<Vec<_>>());
                let older = posted(&older.iter().collect::<Vec<_>>());
                let newer = posted(&newer.iter().collect::<Vec<_>>());
                assert_eq!(older.then(newer), together);
            }
        }
    }

    #[test]
    fn nothing_is_lost_between_threads() {
        const ROUNDS: u32 = 2000;
        let inbox = Arc::new(Inbox::default());
        let (sender, wakes) = std::sync::mpsc::channel();
        let posters: Vec<_> = (0..2_u8)
            .map(|poster| {
                let (inbox, sender) = (Arc::clone(&inbox), sender.clone());
                thread::spawn(move || {
                    for round in 0..ROUNDS {
                        let vector = u8::try_from(round % 100).unwrap() + 20 + 100 * poster;
                        if inbox.post(edge(vector)) {
                            sender.send(()).unwrap();
                        }
                        // Until it was taken.
                        let word = &inbox.edge[usize::from(vector / 32)];
                        while word.load(Ordering::Acquire) >> (vector % 32) & 1 != 0 {
                            thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        drop(sender);
        let mut taken = 0;
        // Only a wake-up makes the owner look: a lost one hangs the poster.
        while let Ok(()) = wakes.recv_timeout(std::time::Duration::from_secs(60)) {
            let posted = inbox.take().unwrap_or_default();
            taken += posted
                .edge
                .0
                .iter()
                .map(|word| word.count_ones())
                .sum::<u32>();
        }
        assert_eq!(taken, 2 * ROUNDS);
        posters
            .into_iter()
            .for_each(|poster| poster.join().unwrap());
    }
}
