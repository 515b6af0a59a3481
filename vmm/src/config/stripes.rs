//! The value of `--redundancy`.

use std::fmt;
use std::str::FromStr;

use memory_fabric::fabric::{Layout, LayoutError};

use super::text::serde_as_text;

/// Stripes as they are named on the command line.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StripesArg(pub Layout);

/// A text that names no stripes.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("`{0}` is no stripe: {1}")]
pub struct StripesArgError(String, LayoutError);

impl FromStr for StripesArg {
    type Err = StripesArgError;

    fn from_str(text: &str) -> Result<Self, StripesArgError> {
        let layout = text.parse();
        layout
            .map(Self)
            .map_err(|error| StripesArgError(text.to_owned(), error))
    }
}

impl fmt::Display for StripesArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

serde_as_text!(StripesArg);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_are_named_as_sums_and_other_texts_refused_with_what_is_possible() {
        let error = "3+1".parse::<StripesArg>().expect_err("three").to_string();
        assert!(
            error.contains("`3+1`") && error.contains("2, 4 or 8"),
            "{error}"
        );
    }
}
