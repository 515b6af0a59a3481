//! The cases that every transport passes, and the leases on which they run.

pub mod cases;
mod pieces;
pub mod remote;
pub mod tenants;
