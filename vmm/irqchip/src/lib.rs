//! Interrupt controllers of a PC in user space: a local APIC for each vCPU, and an I/O APIC.
//!
//! Both are plain data. They make no system call, know no clock, no thread and no KVM: an access
//! comes in with the time at which it happened, and what follows from it goes out as a [`Message`]
//! or as an [`Effect`]. A message is turned into the vCPUs that it is for by [`targets`], and its
//! event goes to the [`Inbox`] of each that is on this host, or to the host that runs it.
//!
//! ```text
//! ICR write      -> LocalApic::write -> Effect::Send(Message) -+
//! line or EOI    -> IoApic           -> Message ---------------+-> targets -> Inbox::post
//!                                                                              |
//! KVM_INTERRUPT  <- LocalApic::acknowledge <- LocalApic::accept <- Inbox::take +
//! ```
//!
//! Sources: Intel SDM volume 3A, chapter 11 (local APIC), with the numbers of its sections; the
//! 82093AA data sheet (I/O APIC).

mod inbox;
mod ioapic;
mod local;
mod message;
mod routing;
mod saved;
mod vectors;

pub use inbox::{Event, Inbox, Posted};
pub use ioapic::{IOAPIC_LEN, IoApic, PINS};
pub use local::access::{FIRST_MSR, InvalidAccess, LAST_MSR, PAGE_LEN};
pub use local::{Effect, LocalApic, Mode};
pub use message::{DeliveryMode, Destination, Message, Trigger};
pub use routing::{CPUS_MAX, Routing, TargetSet, targets};
pub use saved::{InvalidState, IoApicState, LocalApicState, STATE_VERSION};
pub use vectors::Vectors;
