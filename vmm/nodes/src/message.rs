//! Messages between nodes.

use ssi_hv_irqchip::{Event, Routing};

/// Names a compute node in its VM.
pub type NodeNumber = u8;

/// The bytes of one access, of which its length says how many count.
pub type Data = [u8; 8];

/// The address space of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// I/O ports.
    Ports,
    /// Guest-physical addresses.
    Memory,
}

/// An access of a vCPU to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Where the address is.
    pub space: Space,
    /// The first address.
    pub address: u64,
    /// How many bytes, 1 to 8.
    pub len: u8,
    /// What is written; `None` for a read.
    pub write: Option<Data>,
}

/// One entry of what the guest's CPUs report by CPUID.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "as in kvm_cpuid_entry2")]
pub struct CpuidEntry {
    pub function: u32,
    pub index: u32,
    pub flags: u32,
    pub eax: u32,
    pub ebx: u32,
    pub ecx: u32,
    pub edx: u32,
}

/// What a node needs to know to run its vCPUs of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// The node of each vCPU.
    pub owners: Vec<NodeNumber>,
    /// Bytes of the guest's memory, without what may be added.
    pub memory_bytes: u64,
    /// Bytes that may be added.
    pub hotplug_bytes: u64,
    /// How fast the guest's TSC counts.
    pub tsc_khz: u32,
    /// What is added to the TSC of the primary's host.
    pub tsc_offset: u64,
    /// The primary's host is emulated.
    pub emulated: bool,
    /// Bits of an APIC id that distinguish the cores of a package.
    pub package_id_bits: u8,
    /// What KVM on the primary's host supports, of which the CPUs are made.
    pub cpuid: Vec<CpuidEntry>,
}

/// How the run of a VM ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest has switched itself off.
    Shutdown,
    /// The guest has asked for a restart.
    Reboot,
    /// It was stopped.
    Stopped,
    /// The guest cannot go on.
    Crash(String),
    /// A host cannot go on.
    Failed(String),
    /// Guest memory is lost with a donor.
    DonorLost(String),
    /// The sender has lost another node.
    NodeLost {
        /// The node.
        node: NodeNumber,
        /// How it was lost.
        reason: String,
    },
}

/// A message from one compute node of a VM to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first of each side.
    Hello {
        /// [`VERSION`](crate::VERSION) of the sender.
        version: u16,
        /// The VM.
        vm: crate::VmId,
        /// The sender.
        node: NodeNumber,
    },
    /// An event for a vCPU of the receiver.
    Event {
        /// The vCPU.
        cpu: u8,
        /// What it gets.
        event: Event,
    },
    /// The local APIC of a vCPU of the sender has changed. Answered, so that no node learns of the
    /// change from the guest's memory before.
    Routing {
        /// Names the answer.
        call: u32,
        /// The vCPU.
        cpu: u8,
        /// What others must know to send to it.
        routing: Routing,
    },
    /// A vCPU has ended a level-triggered interrupt. To the primary.
    EndOfInterrupt {
        /// Its vector.
        vector: u8,
    },
    /// A vCPU of the sender accesses a device. To the primary, which answers it.
    Access {
        /// Names the answer.
        call: u32,
        /// The access.
        access: Access,
    },
    /// Answers [`Routing`](Self::Routing), [`Access`](Self::Access) and [`Moved`](Self::Moved).
    Answer {
        /// The call.
        call: u32,
        /// What was read, if anything.
        data: Data,
    },
    /// From the primary: create the vCPUs of the receiver.
    Start(Start),
    /// They are there, and wait for their start.
    Started,
    /// From the primary: no vCPU may run.
    Pause {
        /// Names the answer.
        number: u32,
    },
    /// Answers [`Pause`](Self::Pause): none runs.
    Paused {
        /// The number in the request.
        number: u32,
    },
    /// From the primary: vCPUs may run again.
    Resume,
    /// From the primary, to the owner of a vCPU: give it to another node.
    Move {
        /// The vCPU.
        cpu: u8,
        /// Its new owner.
        to: NodeNumber,
    },
    /// From the owner of a vCPU, first to its new owner and then to all: events for it go there.
    /// Answered, so that no event comes to the old owner afterwards.
    Moved {
        /// Names the answer.
        call: u32,
        /// The vCPU.
        cpu: u8,
        /// Its new owner.
        to: NodeNumber,
    },
    /// From the old owner of a vCPU to the new one: its state, in a form that the programs of both
    /// know, with the events that the old one has got for it.
    Vcpu {
        /// The vCPU.
        cpu: u8,
        /// At most [`VCPU_STATE_BYTES_MAX`](crate::VCPU_STATE_BYTES_MAX).
        state: Vec<u8>,
    },
    /// To the primary: a vCPU that came from another node runs on the sender.
    Arrived {
        /// The vCPU.
        cpu: u8,
    },
    /// The run has ended, or, to the primary, the sender's part of it.
    End(End),
    /// No vCPU of the sender will touch the guest's memory any more.
    Ended,
    /// The sender lives.
    Alive,
    /// To the primary, about once in a second and at the end: what the sender's part of the VM does,
    /// in a form that the programs of both know.
    Report(Vec<u8>),
    /// To the primary: what does your time stamp counter say?
    ClockAsk {
        /// Names the answer.
        number: u32,
    },
    /// Answers [`ClockAsk`](Self::ClockAsk).
    ClockAnswer {
        /// The number in the question.
        number: u32,
        /// The counter of the sender's host.
        ticks: u64,
    },
}
