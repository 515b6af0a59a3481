//! The commands, one file each, and shared functions.

pub mod bench;
pub mod control;
pub mod doctor;
pub mod drain;
pub mod evict;
mod follow;
pub mod man;
pub mod moving;
pub mod node;
pub mod nodes;
pub mod pki;
pub mod plug;
pub mod rebalance;
pub mod report;
pub mod status;
pub mod top;
pub mod up;

use std::io::{self, Write};

pub use ssi_hv::failure::Failure;

/// Prints to stdout. A reader that closed the pipe is not an error.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(anyhow::Error::new(error)
            .context("cannot write to stdout")
            .into()),
        _ => Ok(()),
    }
}
