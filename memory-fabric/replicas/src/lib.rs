//! Two copies of each block of a guest's memory on different donors, so that the loss of one donor
//! loses nothing; or [stripes](stripe), which need less memory and survive the loss of two.
//!
//! [`placement`] chooses the places, [`copies`] knows which copies may be read, and
//! [`transport::ReplicatedTransport`] is one [`PageTransport`](fabric_transport::PageTransport)
//! over those of all donors. The pager uses it as the transport of a single donor whose loan is as
//! large as the guest needs, so that without replicas nothing of this runs. [`set`] connects the
//! three with the links to the donors.

mod answers;
pub mod copies;
mod gather;
mod member;
pub mod placement;
mod repair;
pub mod set;
pub mod stripe;
pub mod transport;

pub use copies::{Copies, DONORS_MAX, LeaveError, SLOTS_MAX};
pub use placement::{Place, Placement, StripePlacement, capacity, stripe_capacity, zones};
pub use set::{
    Check, LeaveEvent, LeaveObserver, Loss, Newcomer, ReplicaEvent, ReplicaObserver, ReplicaSet,
    Traffic,
};
pub use stripe::{Layout, LayoutError};
pub use transport::{ReplicatedTransport, Role};
