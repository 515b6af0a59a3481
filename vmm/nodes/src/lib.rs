//! Messages between the compute nodes of a VM about its vCPUs, and the connections that carry them.
//! The guest's memory has connections of its own.
//!
//! Two nodes have one [`Link`]. Any thread sends on it directly, without waiting and without another
//! thread in between: an interrupt for a remote vCPU costs its sender one system call. One thread of
//! each node receives, with a [`Receiver`].
//!
//! What is queued while a peer does not read is bounded: interrupts for a vCPU are merged, as its
//! local APIC would merge them, and everything else waits for its answer or comes once.

mod calls;
mod codec;
mod link;
mod message;
pub mod place;
mod receiver;
mod stream;

pub use codec::{
    FRAME_BYTES_MAX, Malformed, REPORT_BYTES_MAX, TEXT_BYTES_MAX, VCPU_STATE_BYTES_MAX,
};
pub use link::{Barrier, Link, LinkConfig, VmId};
pub use message::{Access, CpuidEntry, Data, End, Message, NodeNumber, Space, Start};
pub use receiver::{LinkError, Receiver};
pub use stream::Stream;

/// The version of the messages. Nodes with different ones do not run a VM together.
pub const VERSION: u16 = 5;
