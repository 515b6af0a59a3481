//! `ssi-hv report`.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, anyhow, ensure};
use serde_json::Value;
use ssi_hv::exit::ExitCode;
use ssi_hv::report::SCHEMA;

use super::{Failure, print};
use crate::cli::report::ReportConfig;

/// Size limit of the file: a report has some kilobytes, and a wrong name may refer to a disk image.
const REPORT_BYTES_MAX: u64 = 16 << 20;

/// Renders a report, or a comparison of transports, as a page.
pub fn report(config: &ReportConfig) -> Result<ExitCode, Failure> {
    let html = read(&config.file).map_err(|error| Failure::new(ExitCode::Usage, error))?;
    match config.page() {
        None => print(&html)?,
        Some(path) if are_same(&path, &config.file) => {
            let error = anyhow!(
                "the page would replace the report {}; name another file with -o",
                path.display()
            );
            return Err(Failure::new(ExitCode::Usage, error));
        }
        Some(path) => {
            std::fs::write(&path, html).with_context(|| {
                format!(
                    "cannot write {}; name a file in a directory that exists, has room and that you may write to",
                    path.display()
                )
            })?;
            print(&format!("{}\n", path.display()))?;
        }
    }
    Ok(ExitCode::Success)
}

/// Whether two names are those of one file.
fn are_same(one: &Path, other: &Path) -> bool {
    let file = |path: &Path| {
        let found = path.metadata().ok()?;
        Some((found.dev(), found.ino()))
    };
    let (one, other) = (file(one), file(other));
    one.is_some() && one == other
}

/// Reads the file and returns its page.
fn read(path: &Path) -> anyhow::Result<String> {
    let name = path.display();
    let read = || {
        let mut bytes = Vec::new();
        File::open(path)?
            .take(REPORT_BYTES_MAX + 1)
            .read_to_end(&mut bytes)?;
        Ok::<_, std::io::Error>(bytes)
    };
    let bytes = read().with_context(|| {
        format!("cannot read {name}; name a report that `ssi-hv run --report FILE` wrote")
    })?;
    ensure!(
        bytes.len() as u64 <= REPORT_BYTES_MAX,
        "{name} has more than {REPORT_BYTES_MAX} bytes, the limit of a report; name one that `ssi-hv run --report FILE` wrote"
    );
    let value: Value =
        serde_json::from_slice(&bytes).with_context(|| format!("{name} is not JSON"))?;
    let schema = value.get("schema").and_then(Value::as_u64);
    let schema = schema.with_context(|| {
        format!("{name} is no report: it has no `schema`; name one that `ssi-hv run --report FILE` wrote")
    })?;
    ensure!(
        schema == u64::from(SCHEMA),
        "{name} has schema {schema}, this build reads {SCHEMA}; use the ssi-hv that wrote it"
    );
    if value.get("transports").is_some() {
        let bench = serde_json::from_value(value).with_context(|| {
            format!(
                "{name} is no comparison; name one that `ssi-hv bench transport --json` printed"
            )
        })?;
        return Ok(ssi_hv_html::render_transports(&bench));
    }
    let report = serde_json::from_value(value).with_context(|| {
        format!("{name} is no report of a run; name one that `ssi-hv run --report FILE` wrote")
    })?;
    Ok(ssi_hv_html::render(&report))
}
