//! Whether time goes back from one CPU to another: messages that carry the time at which they were
//! sent, by the counter of the CPU and by the clock of the kernel.

use super::cells::{Cells, at};
use super::team::Deadline;

/// So many messages are enough for a run.
pub const MESSAGES_MAX: u64 = 200_000;

/// Cells of the page: the number of the last message, and when it was sent.
const NUMBER: usize = 0;
const TICKS: usize = 1;
const CLOCK: usize = 2;

/// The time on one CPU: of its counter, in ticks, and of the kernel's clock, in ns.
pub type Now = [u64; 2];

/// What one CPU received.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Messages.
    pub messages: u64,
    /// Those that came before they were sent: by the counter, and by the clock.
    pub early: [u64; 2],
    /// Ticks that the fastest message took, of those that were not early.
    pub shortest: u64,
}

/// Sends so many messages to and fro as CPU 0 or 1 of two, until the deadline.
pub fn exchange(
    cells: &impl Cells,
    page: usize,
    role: usize,
    now: impl Fn() -> Now,
    messages: u64,
    deadline: &Deadline,
) -> Seen {
    let mut seen = Seen {
        messages: 0,
        early: [0; 2],
        shortest: u64::MAX,
    };
    for number in 1..=messages {
        // CPU 0 sends the odd ones.
        if number % 2 == u64::from(role == 0) {
            let sent = now();
            cells.store(at(page, TICKS), sent[0]);
            cells.store(at(page, CLOCK), sent[1]);
            cells.store(at(page, NUMBER), number);
            continue;
        }
        if !deadline.wait(|| cells.load(at(page, NUMBER)) >= number) {
            break;
        }
        let sent = [TICKS, CLOCK].map(|cell| cells.load(at(page, cell)));
        let received = now();
        seen.messages += 1;
        for ((early, sent), received) in seen.early.iter_mut().zip(sent).zip(received) {
            *early += u64::from(received < sent);
        }
        if let Some(ticks) = received[0].checked_sub(sent[0]) {
            seen.shortest = seen.shortest.min(ticks);
        }
    }
    seen
}
