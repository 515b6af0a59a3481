//! Suggestions for misspelled words.

/// Minimum likeness of two words for a suggestion, from 0 to 1.
const LIKENESS_MIN: f64 = 0.8;

/// Returns the candidate that is most like `word`, if its likeness suffices.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (strsim::jaro_winkler(word, candidate), candidate))
        .filter(|(likeness, _)| *likeness > LIKENESS_MIN)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, candidate)| candidate)
}

/// Adds a suggestion to a message of serde about an unknown word.
pub fn with_suggestion(message: String) -> String {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let suggestion = match quoted.next() {
        Some(word) if message.starts_with("unknown variant") => nearest(word, quoted),
        _ => None,
    };
    match suggestion {
        Some(suggestion) => format!("{message}; did you mean `{suggestion}`?"),
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_is_nearly_right_is_found() {
        let words = ["rdma", "tcp", "udp"];
        assert_eq!(nearest("rmda", words), Some("rdma"));
        assert_eq!(nearest("carrier-pigeon", words), None);
    }

    #[test]
    fn a_message_names_what_was_meant_if_that_is_known() {
        let text = "unknown variant `rmda`, expected one of `auto`, `rdma`";
        assert_eq!(
            with_suggestion(text.into()),
            format!("{text}; did you mean `rdma`?")
        );
        for other in [
            "unknown variant `x`, expected `on` or `off`",
            "invalid `a` `ab`",
        ] {
            assert_eq!(with_suggestion(other.into()), other);
        }
    }
}
