//! The difference between the time stamp counters of two hosts.
//!
//! One side asks, the other answers with its counter. The exchange with the shortest round trip is
//! the best: the other counter was read between the two readings of this one, so that the middle of
//! them is wrong by no more than half of that round trip (F. Cristian, Probabilistic clock
//! synchronization, 1989).

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use crate::error::MachineError;
use crate::sys::time_stamp;

/// Exchanges, of which the best counts.
const EXCHANGES: u8 = 64;
/// How long all of them may take.
const TIME_MAX: Duration = Duration::from_secs(10);

/// How two hosts' counters differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockDifference {
    /// What to add to this host's counter to get that of the other one.
    pub ticks: u64,
    /// By how much that may be wrong.
    pub error_max: u64,
}

/// Measures how the counter of the host at the other end, which runs [`serve_clock`], differs from
/// this host's. Reads of the stream have to time out.
///
/// # Errors
///
/// When the connection fails, or all takes longer than 10 s.
pub fn measure_clock(stream: impl Read + Write) -> Result<ClockDifference, MachineError> {
    measure(stream, time_stamp).map_err(failed)
}

/// Answers the questions of [`measure_clock`].
///
/// # Errors
///
/// As that.
pub fn serve_clock(stream: impl Read + Write) -> Result<(), MachineError> {
    serve(stream, time_stamp).map_err(failed)
}

fn failed(source: io::Error) -> MachineError {
    MachineError::host("compare the time stamp counters of two hosts")(source)
}

fn measure(mut stream: impl Read + Write, now: impl Fn() -> u64) -> io::Result<ClockDifference> {
    let until = Instant::now() + TIME_MAX;
    let mut best: Option<ClockDifference> = None;
    for number in 0..EXCHANGES {
        let before = now();
        stream.write_all(&[number])?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        let round_trip = now().wrapping_sub(before);
        let middle = before.wrapping_add(round_trip / 2);
        let found = ClockDifference {
            ticks: u64::from_le_bytes(answer).wrapping_sub(middle),
            error_max: round_trip.div_ceil(2),
        };
        if best.is_none_or(|best| found.error_max < best.error_max) {
            best = Some(found);
        }
        if Instant::now() > until {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    best.ok_or_else(|| io::Error::other("nothing was measured"))
}

fn serve(mut stream: impl Read + Write, now: impl Fn() -> u64) -> io::Result<()> {
    let until = Instant::now() + TIME_MAX;
    for number in 0..EXCHANGES {
        let mut question = [0];
        stream.read_exact(&mut question)?;
        let answer = now();
        if question != [number] {
            return Err(io::Error::other("the other node does not ask for the time"));
        }
        stream.write_all(&answer.to_le_bytes())?;
        if Instant::now() > until {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    #[test]
    fn the_difference_is_found_within_the_error_that_is_given() {
        const AHEAD: u64 = 1 << 50;
        for ahead in [0, AHEAD, AHEAD.wrapping_neg()] {
            let (asks, answers) = UnixStream::pair().unwrap();
            let other = thread::spawn(move || serve(answers, || time_stamp().wrapping_add(ahead)));
            let found = measure(asks, time_stamp).unwrap();
            other.join().unwrap().unwrap();
            let wrong = found.ticks.wrapping_sub(ahead).cast_signed().unsigned_abs();
            assert!(wrong <= found.error_max, "{found:?}, {wrong} wrong");
        }
    }

    #[test]
    fn a_node_that_sends_something_else_is_refused() {
        let (mut asks, answers) = UnixStream::pair().unwrap();
        asks.write_all(&[7]).unwrap();
        assert!(serve_clock(answers).is_err());
        let (asks, answers) = UnixStream::pair().unwrap();
        drop(answers);
        assert!(measure_clock(asks).is_err());
    }
}
