//! `ssi-hv report`: which report to show, and where.

use std::path::PathBuf;

use clap::Args;

/// The flags of `ssi-hv report`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct ReportConfig {
    /// A report of `ssi-hv run --report FILE`, or the output of `ssi-hv bench transport --json`
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Page to write; - for stdout [default: FILE with .html instead of its suffix]
    #[arg(short, long, value_name = "HTML")]
    pub output: Option<PathBuf>,
}

impl ReportConfig {
    /// The path of the page; `None` for stdout.
    #[must_use]
    pub fn page(&self) -> Option<PathBuf> {
        match &self.output {
            Some(path) if path.as_os_str() == "-" => None,
            Some(path) => Some(path.clone()),
            None => Some(self.file.with_extension("html")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_beside_the_report_unless_it_is_said_where() {
        let page = |output: Option<&str>| {
            let config = ReportConfig {
                file: "a/out.json".into(),
                output: output.map(PathBuf::from),
            };
            config.page()
        };
        assert_eq!(page(None), Some("a/out.html".into()));
        assert_eq!(page(Some("b.html")), Some("b.html".into()));
        assert_eq!(page(Some("-")), None);
    }
}
