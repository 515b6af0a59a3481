//! What a node and the process of a VM on it send each other over pipes: one JSON value per line.

use std::io::{self, BufRead, Write};
use std::net::IpAddr;

use memory_fabric::compute::{ComputeEnd, ComputePorts, ComputeRequest, ComputeTable};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Longest line, bytes.
pub const LINE_BYTES_MAX: usize = 4096;

/// The first line to the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setup {
    /// What the primary asked for.
    pub request: ComputeRequest,
    /// Where to listen.
    pub address: IpAddr,
}

/// The second line to the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Connect(pub ComputeTable);

/// The lines of the process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessMessage {
    /// It listens on these ports.
    Listening(ComputePorts),
    /// It ends.
    Ended(ComputeEnd),
}

/// Writes a line.
pub fn send_line(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    // In one call, so that it arrives as a whole.
    to.write_all(&line)?;
    to.flush()
}

/// Reads a line.
pub fn receive_line<T: DeserializeOwned>(from: impl BufRead) -> io::Result<T> {
    let mut line = Vec::new();
    io::Read::take(from, LINE_BYTES_MAX as u64).read_until(b'\n', &mut line)?;
    Ok(serde_json::from_slice(&line)?)
}
