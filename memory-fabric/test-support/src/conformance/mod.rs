//! The cases that every transport passes, and the leases over which it does.

pub mod cases;
pub mod remote;
