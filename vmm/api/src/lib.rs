//! The data that `ssi-hv` exposes to programs: the report of a run, the status of running
//! processes, the bodies of requests to the control socket and of their answers, and exit codes.
//!
//! Everything here is plain data with serde, and depends on no other crate of the workspace; the
//! types are filled and displayed elsewhere. The published schemas in `docs/` are generated from
//! them.

pub mod bench;
pub mod body;
pub mod exit;
#[cfg(any(test, feature = "fixtures"))]
pub mod fixtures;
pub mod name;
pub mod report;
pub mod size;
pub mod status;

#[cfg(test)]
mod schemas;
