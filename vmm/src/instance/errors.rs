//! The errors of a run, in bounded memory: donors may disconnect and return for weeks.

use std::collections::VecDeque;

/// Number of the first errors that are kept, and of the newest.
const KEPT: usize = 50;

/// The errors of a run, one line each.
#[derive(Clone, Debug, Default)]
pub struct Errors {
    total: u64,
    first: Vec<String>,
    newest: VecDeque<String>,
}

impl Errors {
    /// Adds an error; when there are too many, drops one between the first and the newest.
    pub fn push(&mut self, error: String) {
        self.total += 1;
        if self.first.len() < KEPT {
            self.first.push(error);
            return;
        }
        self.newest.push_back(error);
        if self.newest.len() > KEPT {
            self.newest.pop_front();
        }
    }

    /// Returns the total number.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the kept errors, the oldest first, with a line that replaces the others.
    pub fn lines(self) -> Vec<String> {
        let kept = (self.first.len() + self.newest.len()) as u64;
        let mut lines = self.first;
        if kept < self.total {
            lines.push(format!("({} errors more)", self.total - kept));
        }
        lines.extend(self.newest);
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_and_the_newest_are_kept_and_all_are_counted() {
        let mut errors = Errors::default();
        for number in 0..100 {
            errors.push(number.to_string());
        }
        assert_eq!(errors.clone().lines().len(), 100);
        for number in 100..1000 {
            errors.push(number.to_string());
        }
        assert_eq!(errors.total(), 1000);
        let lines = errors.lines();
        assert_eq!(lines.len(), 101);
        assert_eq!((lines[0].as_str(), lines[49].as_str()), ("0", "49"));
        assert_eq!(lines[50], "(900 errors more)");
        assert_eq!((lines[51].as_str(), lines[100].as_str()), ("950", "999"));
    }
}
