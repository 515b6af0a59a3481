//! What the program and the nodes that it starts say to each other: one JSON value a line.

use std::io::{BufRead, Write};
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result};
use memory_fabric::compute::{ComputePorts, ComputeTable, VmSecret};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The first line to a node.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Setup {
    /// The node's place among all.
    pub(super) me: u8,
    /// The CPUs on which it runs.
    pub(super) cpus: Vec<usize>,
    /// Size of the shared memory, blocks of 2 MiB.
    pub(super) blocks: u32,
    /// Lets the nodes recognise each other.
    pub(super) secret: VmSecret,
    /// Whether connections are under TLS.
    pub(super) tls: bool,
    /// The address of the RDMA device by which memory travels; `None` for TCP.
    pub(super) rdma: Option<IpAddr>,
    /// The donor of this node.
    pub(super) donor: Option<UsedDonor>,
}

/// A donor that stores pages of a node.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct UsedDonor {
    pub(super) address: SocketAddr,
    /// What it lends.
    pub(super) lent_bytes: u64,
    /// What the node lends itself.
    pub(super) local_bytes: u64,
}

/// Pages `first`, `first + step`, ..., `count` of them.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Pages {
    pub(super) first: usize,
    pub(super) step: usize,
    pub(super) count: usize,
}

impl Pages {
    pub(super) fn iter(self) -> impl Iterator<Item = usize> {
        (0..self.count).map(move |place| self.first + place * self.step)
    }
}

/// What a bare exchange has to do on the far end.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(super) enum Exchange {
    /// Unmap the page, and send it.
    Write,
    /// Write-protect the page, and send it.
    Read,
    /// Unmap the page.
    Upgrade,
    /// Fetch the page from the donor, and send it.
    Relay,
    /// Send the page, as a donor does: the far end is one.
    Fetch,
    /// Nothing: no other node takes part.
    Local,
}

/// What threads of all nodes do at once.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(super) enum Work {
    /// Increments one counter.
    PingPong,
    /// Reads a page of counters, then increments all of them, page by page.
    Migratory,
    /// The first node fills pages in order, the others read them as they are filled.
    ProducerConsumer,
    /// Reads random pages; one access in 1,000 writes.
    ReadMostly,
    /// Each node increments a counter of its own, all in one page.
    FalseSharing,
    /// Each node increments counters in pages that no other node uses.
    Private,
}

impl Work {
    pub(super) const ALL: [Self; 6] = [
        Self::PingPong,
        Self::Migratory,
        Self::ProducerConsumer,
        Self::ReadMostly,
        Self::FalseSharing,
        Self::Private,
    ];
}

/// A line to a node after the first.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum Request {
    /// To be done when all before it is done.
    Do(Command),
    /// The node is about to be killed, and others before it: it reports nothing from now on.
    /// Answered at once, whatever it does.
    Hush,
}

/// What a node is asked to do.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum Command {
    /// Connect to these nodes.
    Connect(ComputeTable),
    /// Read or write a word of each page.
    Touch { pages: Pages, write: bool },
    /// Fill pages with what is compared later.
    Fill(Pages),
    /// Read each page, and compare it.
    Compare(Pages),
    /// Add the counters of these pages.
    Sum(Pages),
    /// Work for some milliseconds on the memory from this page on.
    Work {
        what: Work,
        first: usize,
        milliseconds: u64,
    },
    /// Answer bare exchanges, with the help of this donor.
    FloorServe(Option<SocketAddr>),
    /// Measure bare exchanges with the node or the donor at this address.
    Floor { far: SocketAddr, what: Exchange },
    /// Counters of the engine, and CPU time.
    Stats,
}

/// Counters of a node.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(super) struct Counters {
    pub(super) transfers: u64,
    pub(super) reads: u64,
    pub(super) writes: u64,
    pub(super) upgrades: u64,
    pub(super) invalidated: u64,
    pub(super) holds: u64,
    pub(super) early: u64,
    pub(super) from_depot: u64,
    pub(super) cpu_us: u64,
}

impl Counters {
    /// Pages that were asked for.
    pub(super) const fn requests(&self) -> u64 {
        self.reads + self.writes + self.upgrades
    }
}

/// What a node answers.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) enum Answer {
    /// Where other nodes connect to it.
    Ports(ComputePorts),
    /// Where it answers bare exchanges.
    Listening(SocketAddr),
    /// It did what was asked.
    Done,
    /// Nanoseconds of each access.
    Times(Vec<u64>),
    /// The same, and the number of bytes that were wrong.
    Compared { times: Vec<u64>, corrupt_bytes: u64 },
    /// A sum, or what was done.
    Count(u64),
    /// Its counters.
    Stats(Counters),
    /// It reports nothing any more.
    Hushed,
}

/// Writes a line.
pub(super) fn say(to: &mut impl Write, value: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    to.write_all(&line)?;
    Ok(to.flush()?)
}

/// Reads a line; `None` when the other process has ended.
pub(super) fn hear<T: DeserializeOwned>(from: &mut impl BufRead) -> Result<Option<T>> {
    let mut line = String::new();
    if from.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let heard = serde_json::from_str(&line);
    Ok(Some(
        heard.with_context(|| format!("cannot understand {line:?}"))?,
    ))
}
