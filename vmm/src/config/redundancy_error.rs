//! Why memory on donors cannot have the redundancy that is asked for.

use fabric_identity::Name;
use memory_fabric::fabric::Layout;

use super::address::HostPort;
use crate::size::ByteSize;

/// Why memory on donors cannot have the redundancy that is asked for.
#[derive(Debug, thiserror::Error)]
pub enum RedundancyError {
    /// Copies on different donors need as many donors.
    #[error(
        "--replicas {replicas} needs {replicas} donors, each for one copy of a page; the number given is {count}; {more}, or remove --replicas"
    )]
    TooFewForReplicas {
        /// Number of copies.
        replicas: u32,
        /// Number of donors.
        count: usize,
        /// How the command is given more.
        more: &'static str,
    },
    /// Pieces on different donors need as many donors.
    #[error(
        "--redundancy {layout} needs {pieces} donors, each for one piece of a page; the number given is {count}; {more}, or use fewer pieces"
    )]
    TooFewForStripes {
        /// The stripes.
        layout: Layout,
        /// Pieces of a stripe.
        pieces: usize,
        /// Number of donors.
        count: usize,
        /// How the command is given more.
        more: &'static str,
    },
    /// Two kinds at once.
    #[error("--redundancy {0} and --replicas {1} exclude each other; remove one of them")]
    Both(Layout, u32),
    /// Something has one copy.
    #[error(
        "--replicas {replicas} is for memory that is there from the start and that the guest sees as one; remove {flag}, or --replicas"
    )]
    NotWithReplicas {
        /// Number of copies.
        replicas: u32,
        /// What was given beside it.
        flag: &'static str,
    },
    /// Stripes are less general than copies.
    #[error(
        "--redundancy {layout} is for memory that is there from the start, that the guest sees as one, and that donors lend over TCP or UDP to a guest on one host; remove {flag}, or use --replicas 2 if that has it"
    )]
    NotWithStripes {
        /// The stripes.
        layout: Layout,
        /// What was given beside it.
        flag: &'static str,
    },
    /// A zone where there is one copy.
    #[error("donor {0} has zone={1}, which only two copies use; add --replicas 2, or remove zone=")]
    ZoneWithoutReplicas(HostPort, Name),
    /// The donors are asked for less than two copies, or stripes, need.
    #[error(
        "the guest's {memory} is more than --local-memory {local} and the {held} of which the donors can hold {what}, on different ones, with what they are asked for; raise their memory= or --local-memory, or lower --memory"
    )]
    DonorsTooSmall {
        /// The guest's memory.
        memory: ByteSize,
        /// Local memory.
        local: ByteSize,
        /// Memory that the donors can hold.
        held: ByteSize,
        /// In what form.
        what: &'static str,
    },
}
