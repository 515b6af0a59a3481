//! The end of a guest's unobserved console, for errors.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// Size of the retained part: a panic with its registers and stack is a few kilobytes.
pub const TAIL_BYTES_MAX: usize = 32 << 10;
/// Longest line that is quoted.
const LINE_CHARS_MAX: usize = 160;
/// First words of a kernel panic.
const PANIC: &str = "Kernel panic - not syncing";

/// Keeps the last [`TAIL_BYTES_MAX`] bytes that were written. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Tail(Arc<Mutex<VecDeque<u8>>>);

impl Write for Tail {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(bytes);
        let over = kept.len().saturating_sub(TAIL_BYTES_MAX);
        kept.drain(..over);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Tail {
    /// Returns the last lines, at most `count`, without control characters.
    #[must_use]
    pub fn lines(&self, count: usize) -> Vec<String> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = kept.iter().copied().collect();
        drop(kept);
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<String> = text
            .lines()
            .map(|line| line.chars().filter(|c| !c.is_control()))
            .map(|line| line.take(LINE_CHARS_MAX).collect::<String>())
            .filter(|line| !line.trim().is_empty())
            .collect();
        lines[lines.len().saturating_sub(count)..].to_vec()
    }

    /// Returns the line of a kernel panic, if there is one.
    #[must_use]
    pub fn panic(&self) -> Option<String> {
        let lines = self.lines(usize::MAX);
        let panic = lines.iter().find(|line| line.contains(PANIC))?;
        Some(without_time(panic))
    }

    /// Returns the most informative line: that of a panic, otherwise the last one.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        self.panic()
            .or_else(|| Some(without_time(self.lines(1).first()?)))
    }
}

/// Returns a line of a kernel's log without the preceding time stamp.
fn without_time(line: &str) -> String {
    let text = match line.split_once("] ") {
        Some((time, text)) if time.starts_with('[') => text,
        _ => line,
    };
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail(text: &str) -> Tail {
        let mut tail = Tail::default();
        tail.write_all(text.as_bytes()).expect("never fails");
        tail
    }

    #[test]
    fn a_panic_is_found_before_what_follows_it() {
        let text = "[    1.0] x\r\n[    2.5] Kernel panic - not syncing: \x1b[1mboom\r\n[    2.6] CPU: 0\r\n\r\n";
        let tail = tail(text);
        let reason = tail.reason().expect("a line");
        assert_eq!(reason, "Kernel panic - not syncing: [1mboom");
        assert_eq!(tail.panic().as_ref(), Some(&reason));
        assert_eq!(tail.lines(1), ["[    2.6] CPU: 0"]);
    }

    #[test]
    fn the_last_line_is_the_reason_where_nothing_panicked() {
        assert_eq!(tail("a\nb\n").reason().expect("a line"), "b");
        assert_eq!(tail("a\nb\n").panic(), None);
        assert_eq!(tail("\n \n").reason(), None);
    }

    #[test]
    fn only_the_end_is_kept() {
        let mut tail = tail(&"x".repeat(TAIL_BYTES_MAX));
        tail.write_all(b"\nend").expect("never fails");
        assert_eq!(tail.0.lock().expect("a lock").len(), TAIL_BYTES_MAX);
        assert_eq!(tail.lines(1), ["end"]);
        assert!(
            tail.lines(9)
                .iter()
                .all(|line| line.chars().count() <= LINE_CHARS_MAX)
        );
    }
}
