//! Why something with RDMA failed.

use crate::device::LinkLayer;
use crate::pair::PairState;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

/// Why something with RDMA failed.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// This build has no part for it.
    #[error("this build of ssi-hv has no RDMA; build it with the cargo feature `rdma`")]
    LeftOut,
    /// libibverbs is not there.
    #[error(
        "libibverbs.so.1 cannot be loaded; install it (apt install libibverbs1 ibverbs-providers)"
    )]
    NoLibrary,
    /// libibverbs is there, and lacks a function.
    #[error("libibverbs.so.1 has no function {0}; install a newer one (apt install libibverbs1)")]
    NoFunction(&'static str),
    /// There is no adapter.
    #[error(
        "this host has no RDMA device; `ssi-hv doctor` has the command that makes one of a network card"
    )]
    NoDevice,
    /// None of that name.
    #[error("no RDMA device is called {wanted}; there are: {there}")]
    UnknownDevice {
        /// The name.
        wanted: String,
        /// Those that are there.
        there: String,
    },
    /// None leads to the peer.
    #[error(
        "no active port of an RDMA device has the address {address}, by which the other node is reached; seen: {seen}"
    )]
    NoRoute {
        /// The address of this node.
        address: IpAddr,
        /// What ports there are.
        seen: String,
    },
    /// A verb failed.
    #[error("{verb} failed on {on}")]
    Verb {
        /// The verb.
        verb: &'static str,
        /// Device, queue pair and peer, as far as they are known.
        on: String,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// Memory could not be registered.
    #[error(
        "cannot register {bytes} bytes with {device}; raise the limit of locked memory (`ulimit -l unlimited`)"
    )]
    Register {
        /// How much.
        bytes: usize,
        /// The device.
        device: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// More than a device takes in one piece.
    #[error(
        "cannot register {bytes} bytes with {device}, {limit} is the limit; lease less from one donor (--donor HOST:PORT,memory=SIZE)"
    )]
    RegionTooLarge {
        /// How much.
        bytes: usize,
        /// The device.
        device: String,
        /// How much it takes.
        limit: u64,
    },
    /// All that there may be of something are in use.
    #[error("{in_use} of {limit} {what} of {of} are in use; {remedy}")]
    Exhausted {
        /// Of what.
        what: &'static str,
        /// Whose.
        of: String,
        /// How many are in use.
        in_use: u64,
        /// How many there may be.
        limit: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// A request failed.
    #[error("{verb} failed on {on}: {status} (status {code}, vendor error {vendor:#x})")]
    Completion {
        /// The verb: READ or WRITE.
        verb: &'static str,
        /// Queue pair and peer.
        on: String,
        /// The status in words.
        status: String,
        /// The status.
        code: u32,
        /// What the adapter adds.
        vendor: u32,
    },
    /// A completion of nothing.
    #[error("{on} completed request {id}, which is not outstanding")]
    Unasked {
        /// Queue pair and peer.
        on: String,
        /// The number that it repeated.
        id: u64,
    },
    /// Nothing completed.
    #[error("nothing completed on {on} for {} ms", .waited.as_millis())]
    Stalled {
        /// Queue pair and peer.
        on: String,
        /// For how long.
        waited: Duration,
    },
    /// The lane has to be let go of.
    #[error("{0} is over: its device is being removed, or the other node has ended it")]
    CalledBack(String),
    /// A state that a queue pair cannot go to from where it is.
    #[error("{on} is {from:?} and cannot become {to:?}")]
    State {
        /// Queue pair and peer.
        on: String,
        /// Where it is.
        from: PairState,
        /// Where it was to go.
        to: PairState,
    },
    /// What the peer said makes no sense.
    #[error("the other node's {what} is {value}, {allowed}")]
    Peer {
        /// Of which value.
        what: &'static str,
        /// What it is.
        value: u64,
        /// What it may be.
        allowed: &'static str,
    },
    /// The two ends have different networks.
    #[error("this end is {ours:?}, the other {theirs:?}")]
    Mismatch {
        /// Here.
        ours: LinkLayer,
        /// There.
        theirs: LinkLayer,
    },
    /// The system refused something.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
}

/// The result of a call that returns 0, an error number, or -1 and `errno`.
#[cfg(feature = "libibverbs")]
pub(crate) fn check(verb: &'static str, on: &str, result: libc::c_int) -> Result<(), RdmaError> {
    let source = match result {
        0 => return Ok(()),
        number if number > 0 => io::Error::from_raw_os_error(number),
        _ => io::Error::last_os_error(),
    };
    Err(failed(verb, on, source))
}

#[cfg(feature = "libibverbs")]
pub(crate) fn failed(verb: &'static str, on: &str, source: io::Error) -> RdmaError {
    RdmaError::Verb {
        verb,
        on: on.to_owned(),
        source,
    }
}
