//! `ssi-hv man`.

use std::fs;

use anyhow::Context as _;
use ssi_hv::exit::ExitCode;

use super::{Failure, print};
use crate::cli::generate::{self, ManConfig};

/// Writes a man page for each command.
pub fn man(config: &ManConfig) -> Result<ExitCode, Failure> {
    let directory = &config.directory;
    let written = fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(generate::command(), directory));
    written.with_context(|| {
        format!(
            "cannot write man pages to {}; name a directory that you may write to",
            directory.display()
        )
    })?;
    let page = directory.join("ssi-hv.1");
    print(&format!("man {}\n", page.display()))?;
    Ok(ExitCode::Success)
}
