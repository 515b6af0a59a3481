//! Errors of RDMA operations.

use crate::device::LinkLayer;
use crate::pair::PairState;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

/// Why an RDMA operation failed.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// This build has no RDMA support.
    #[error("this build of ssi-hv has no RDMA; build it with the cargo feature `rdma`")]
    LeftOut,
    /// libibverbs is missing.
    #[error(
        "libibverbs.so.1 cannot be loaded; install it (apt install libibverbs1 ibverbs-providers)"
    )]
    NoLibrary,
    /// libibverbs lacks a function.
    #[error("libibverbs.so.1 has no function {0}; install a newer one (apt install libibverbs1)")]
    NoFunction(&'static str),
    /// This host has no RDMA device.
    #[error(
        "this host has no RDMA device; `ssi-hv doctor` has the command that makes one of a network card"
    )]
    NoDevice,
    /// No device has that name.
    #[error("no RDMA device is called {wanted}; there are: {there}")]
    UnknownDevice {
        /// The name.
        wanted: String,
        /// The existing devices.
        there: String,
    },
    /// No device reaches the peer.
    #[error(
        "no active port of an RDMA device has the address {address}, by which the other node is reached; seen: {seen}"
    )]
    NoRoute {
        /// The address of this node.
        address: IpAddr,
        /// The existing ports.
        seen: String,
    },
    /// A setting does not fit the device.
    #[error("--rdma {given} does not fit this host: {limit}")]
    Setting {
        /// The setting, as it is given.
        given: String,
        /// What fits.
        limit: String,
    },
    /// A verb failed.
    #[error("{verb} failed on {on}")]
    Verb {
        /// The verb.
        verb: &'static str,
        /// Device, queue pair and peer, as far as known.
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
        /// Size of the memory.
        bytes: usize,
        /// The device.
        device: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The memory exceeds the size limit of a region.
    #[error(
        "cannot register {bytes} bytes with {device}, {limit} is the limit; lease less from one donor (--donor HOST:PORT,memory=SIZE)"
    )]
    RegionTooLarge {
        /// Size of the memory.
        bytes: usize,
        /// The device.
        device: String,
        /// The device's limit.
        limit: u64,
    },
    /// All of a limited resource are in use.
    #[error("{in_use} of {limit} {what} of {of} are in use; {remedy}")]
    Exhausted {
        /// The resource.
        what: &'static str,
        /// Its owner.
        of: String,
        /// Number in use.
        in_use: u64,
        /// The limit.
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
        /// Description of the status.
        status: String,
        /// The status code.
        code: u32,
        /// The vendor-specific error code.
        vendor: u32,
    },
    /// A completion that belongs to no request.
    #[error("{on} completed request {id}, which is not outstanding")]
    Unasked {
        /// Queue pair and peer.
        on: String,
        /// Its id.
        id: u64,
    },
    /// No request completed in time.
    #[error("nothing completed on {on} for {} ms", .waited.as_millis())]
    Stalled {
        /// Queue pair and peer.
        on: String,
        /// Time since the last completion.
        waited: Duration,
    },
    /// The lane must be closed.
    #[error("{0} is over: its device is being removed, or the other node has ended it")]
    CalledBack(String),
    /// An invalid state transition.
    #[error("{on} is {from:?} and cannot become {to:?}")]
    State {
        /// Queue pair and peer.
        on: String,
        /// The current state.
        from: PairState,
        /// The requested state.
        to: PairState,
    },
    /// A peer sent an invalid value.
    #[error("the other node's {what} is {value}, {allowed}")]
    Peer {
        /// Name of the value.
        what: &'static str,
        /// What it is.
        value: u64,
        /// The allowed values.
        allowed: &'static str,
    },
    /// The other end's port is not known to be that of the peer.
    #[error(
        "the other end's RDMA port has the address {port}, and {peer} is connected by TCP; if the port is \
         its own, name it here: peers={port} of --rdma, or gids={port} of the --allow of a member"
    )]
    Stranger {
        /// The address of the port.
        port: IpAddr,
        /// The address of the peer.
        peer: IpAddr,
    },
    /// The two ends have different kinds of networks.
    #[error("this end is {ours:?}, the other {theirs:?}")]
    Mismatch {
        /// The local kind.
        ours: LinkLayer,
        /// The peer's kind.
        theirs: LinkLayer,
    },
    /// A system call failed.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
}

/// Converts the result of a call that returns 0, an error number, or -1 with `errno`.
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
