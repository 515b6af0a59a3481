//! Why a run cannot start, or ends without a result.

use std::error::Error as StdError;
use std::io;
use std::path::PathBuf;

use ssi_hv_sandbox::{PrivilegeError, SandboxError};
use thiserror::Error;

use super::console_file::ConsoleError;
use crate::size::ByteSize;

/// Why a run cannot start, or ends without a result. Errors of the machine, of the fabric and of
/// devices have types of their own.
#[derive(Debug, Error)]
pub enum RunError {
    /// A call to the host failed.
    #[error("cannot {action}")]
    Host {
        /// The requested action.
        action: &'static str,
        /// The host's error.
        source: io::Error,
    },
    /// The file of `--console` cannot be used.
    #[error(transparent)]
    Console(#[from] ConsoleError),
    /// The pipe of `--end-with-fd` cannot be watched.
    #[error("cannot watch --end-with-fd {fd}")]
    EndWithFd {
        /// The descriptor.
        fd: u32,
        /// The host's error.
        source: io::Error,
    },
    /// The process of the VM cannot be restricted.
    #[error(
        "cannot restrict this process to what the VM needs; --sandbox off starts it unrestricted"
    )]
    Sandbox(#[source] SandboxError),
    /// The process cannot become another user.
    #[error(transparent)]
    Privileges(#[from] PrivilegeError),
    /// The user cannot create a file that is created later.
    #[error(
        "{flag} {}: the user {user} of --user cannot create it; give the user its directory",
        path.display()
    )]
    NotForUser {
        /// The flag that names it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// The user.
        user: String,
        /// The host's error.
        source: io::Error,
    },
    /// The guest's memory exceeds the addresses that the fabric supports.
    #[error("guest memory is above the limit of 16 TiB")]
    MemoryTooHigh,
    /// A range of the guest's memory is not in the fabric, which is a bug.
    #[error("guest memory at {address:#x} is not in the fabric")]
    MemoryNotInFabric {
        /// Start of the range.
        address: u64,
    },
    /// The guest's memory cannot be described to KVM and the devices, which is a bug.
    #[error("cannot use guest memory")]
    Memory(#[source] Box<dyn StdError + Send + Sync>),
    /// Another node of the VM cannot be used.
    #[error("{name}")]
    Node {
        /// The node, as messages name it.
        name: String,
        /// Why not.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// Nodes with vCPUs and donors lend too little.
    #[error(
        "guest memory of {memory}{with_added} is more than --local-memory {local}, the {by_nodes} of --node and \
         the {by_donors} that --donor lends{in_copies}; raise --local-memory or memory= of a node by {missing}, \
         add a donor, or have one lend more"
    )]
    DonorsLendTooLittle {
        /// The guest's memory, with what may be added.
        memory: ByteSize,
        /// That it contains what may be added, if it does.
        with_added: &'static str,
        /// What this host lends.
        local: ByteSize,
        /// What the nodes lend.
        by_nodes: ByteSize,
        /// What the donors lend, or can hold in two copies.
        by_donors: ByteSize,
        /// That they are two copies, if they are.
        in_copies: &'static str,
        /// What is missing.
        missing: ByteSize,
    },
    /// The guest crashed.
    #[error("the guest crashed: {0}")]
    Crash(String),
    /// The supervisor has ended the run for this reason.
    #[error("{0}")]
    Ended(String),
    /// The guest has no shell to run a command.
    #[error(
        "the guest could not run --exec: {0}; the initial RAM disk needs a /bin/sh that runs there: \
         omit --initrd to use the busybox of this host"
    )]
    CommandNotRun(String),
    /// The output of a command cannot be written.
    #[error("what the command wrote cannot be passed on to {0}; the guest was stopped")]
    OutputLost(String),
    /// Another program of the guest writes to the port of the command's output.
    #[error(
        "the second serial port carries {0}, which is not of the init of --exec; leave ttyS1 to it, \
         in --cmdline and in the command"
    )]
    OutputGarbled(String),
    /// The guest ended without the result of a command.
    #[error("{end}; {console}")]
    NoResult {
        /// How the guest ended.
        end: String,
        /// What its console says.
        console: String,
    },
}

impl RunError {
    /// Returns a function that converts the error of a call to the host.
    pub fn host(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Host { action, source }
    }

    /// Converts an error of the description of guest memory.
    pub fn memory(error: impl StdError + Send + Sync + 'static) -> Self {
        Self::Memory(Box::new(error))
    }
}
