//! The terminal of a bar, with the cursor after it.

use std::io;

use console::Term;
use indicatif::TermLike;

/// Standard error, on which the rest of the bar's line stays free. The bar's crate would fill it
/// with spaces, so that typed text, such as the `^C` of Ctrl-C, would start another line, and the
/// bar would remain.
#[derive(Debug)]
pub struct FreeLine(Term);

impl FreeLine {
    /// Returns the terminal on stderr.
    #[must_use]
    pub fn stderr() -> Self {
        Self(Term::buffered_stderr())
    }
}

impl TermLike for FreeLine {
    fn width(&self) -> u16 {
        TermLike::width(&self.0)
    }

    fn height(&self) -> u16 {
        TermLike::height(&self.0)
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.0.move_cursor_up(n)
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.0.move_cursor_down(n)
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.0.move_cursor_right(n)
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.0.move_cursor_left(n)
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.0.write_line(text)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        if is_filling(text) {
            return Ok(());
        }
        self.0.write_str(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.0.clear_line()
    }

    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Returns whether this is not a part of a bar: the line was cleared before.
fn is_filling(text: &str) -> bool {
    text.bytes().all(|byte| byte == b' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_spaces_are_left_out() {
        assert!(is_filling("") && is_filling("   "));
        assert!(!is_filling("rounds [=>   ] 1/2 0s  "));
    }
}
