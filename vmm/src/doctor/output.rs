//! Output of findings: a table for users, JSON for scripts.

use std::fmt::Write;

use super::{Finding, Status, is_ready};

/// Longest wrapped line: longer ones are hard to read.
const WIDTH_MAX: usize = 100;
/// Narrowest column of details to which wrapping makes sense.
const DETAIL_WIDTH_MIN: usize = 20;

/// Style of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Style {
    /// Whether it has colours.
    pub colour: bool,
    /// Number of columns to wrap to; each finding is on one line when `None`.
    pub width: Option<usize>,
}

/// Formats a line for each finding, with its command below, and a summary.
#[must_use]
pub fn table(findings: &[Finding], style: Style) -> String {
    let name_width = findings
        .iter()
        .map(|finding| finding.check.len())
        .max()
        .unwrap_or_default();
    let indent = "warning".len() + 2 + name_width + 2;
    let mut text = String::new();
    for finding in findings {
        let status = painted(
            style,
            colour_of(finding.status),
            &format!("{:7}", word(finding.status)),
        );
        let mut lines = wrapped(&finding.detail, style.width, indent).into_iter();
        let first = lines.next().unwrap_or_default();
        push_line(
            &mut text,
            &format!("{status}  {:name_width$}  {first}", finding.check),
        );
        for line in lines {
            push_line(&mut text, &format!("{:indent$}{line}", ""));
        }
        // Never wrapped, so that it can be copied.
        if let Some(remedy) = &finding.remedy {
            let command = painted(style, BOLD, remedy);
            push_line(&mut text, &format!("{:9}$ {command}", ""));
        }
    }
    text.push('\n');
    push_line(&mut text, &summary(findings, style));
    text
}

/// Formats the findings as an array of `{check, status, detail, remedy}`.
///
/// # Errors
///
/// Fails when the findings cannot be serialized, which does not happen.
pub fn json(findings: &[Finding]) -> Result<String, serde_json::Error> {
    Ok(serde_json::to_string_pretty(findings)? + "\n")
}

fn summary(findings: &[Finding], style: Style) -> String {
    let warnings = findings
        .iter()
        .filter(|finding| finding.status == Status::Warning)
        .count();
    let missing: Vec<_> = findings
        .iter()
        .filter(|finding| finding.status == Status::Missing)
        .map(|finding| finding.check)
        .collect();
    if is_ready(findings) {
        let ready = painted(style, colour_of(Status::Ok), "This host is ready");
        match warnings {
            0 => format!("{ready} for `ssi-hv run`."),
            1 => format!("{ready} for `ssi-hv run`, with 1 warning."),
            more => format!("{ready} for `ssi-hv run`, with {more} warnings."),
        }
    } else {
        let not = painted(style, colour_of(Status::Missing), "This host is not ready");
        format!("{not} for `ssi-hv run`; fix: {}.", missing.join(", "))
    }
}

const fn word(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Warning => "warning",
        Status::Missing => "missing",
    }
}

/// SGR parameters of ECMA-48, section 8.3.117.
const BOLD: &str = "1";

const fn colour_of(status: Status) -> &'static str {
    match status {
        Status::Ok => "32",
        Status::Warning => "33",
        Status::Missing => "1;31",
    }
}

fn painted(style: Style, sgr: &str, text: &str) -> String {
    if style.colour {
        format!("\x1b[{sgr}m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

fn push_line(text: &mut String, line: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{}", line.trim_end());
}

/// Wraps the text into lines that fit to the right of `indent`.
fn wrapped(text: &str, width: Option<usize>, indent: usize) -> Vec<String> {
    let Some(width) = width else {
        return vec![text.to_owned()];
    };
    let room = width
        .min(WIDTH_MAX)
        .saturating_sub(indent)
        .max(DETAIL_WIDTH_MIN);
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= room => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Vec<Finding> {
        vec![
            Finding::ok("kernel", "Linux 6.18"),
            Finding::warning(
                "locked memory",
                "a few words that are longer than one line has room for",
            ),
            Finding::missing("kvm", "no /dev/kvm").remedy("sudo modprobe kvm-amd"),
        ]
    }

    #[test]
    fn a_pipe_gets_one_line_a_finding_and_no_colour() {
        let expected = "\
ok       kernel         Linux 6.18
warning  locked memory  a few words that are longer than one line has room for
missing  kvm            no /dev/kvm
         $ sudo modprobe kvm-amd

This host is not ready for `ssi-hv run`; fix: kvm.
";
        assert_eq!(table(&findings(), Style::default()), expected);
    }

    #[test]
    fn a_terminal_gets_lines_that_fit() {
        let style = Style {
            colour: false,
            width: Some(60),
        };
        let text = table(&findings(), style);
        assert!(text.lines().all(|line| line.len() <= 60), "{text}");
        assert!(
            text.contains("\n                        line has"),
            "{text}"
        );
    }

    #[test]
    fn a_terminal_that_is_very_narrow_still_gets_words() {
        let style = Style {
            colour: false,
            width: Some(1),
        };
        assert!(table(&findings(), style).contains("a few words that are"));
    }

    #[test]
    fn colours_surround_the_words_and_nothing_else() {
        let style = Style {
            colour: true,
            width: None,
        };
        let text = table(&findings(), style);
        assert!(
            text.starts_with("\x1b[32mok     \x1b[0m  kernel"),
            "{text:?}"
        );
        assert_eq!(text.matches("\x1b[0m").count(), 5);
    }

    #[test]
    fn json_has_the_four_fields_of_each_finding() {
        let text = json(&findings()).expect("is JSON");
        let value: serde_json::Value = serde_json::from_str(&text).expect("is JSON");
        assert_eq!(
            value[2],
            serde_json::json!({
                "check": "kvm",
                "status": "missing",
                "detail": "no /dev/kvm",
                "remedy": "sudo modprobe kvm-amd",
            })
        );
        assert_eq!(value[0]["remedy"], serde_json::Value::Null);
    }

    #[test]
    fn a_host_with_only_warnings_is_ready() {
        let text = table(&findings()[..2], Style::default());
        assert!(
            text.ends_with("This host is ready for `ssi-hv run`, with 1 warning.\n"),
            "{text}"
        );
    }
}
