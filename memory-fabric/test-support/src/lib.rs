//! Support for tests of the fabric: a fabric with real donors, threads that access it as vCPUs do,
//! networks that disturb it, and the conformance cases of transports.

#![allow(
    missing_docs,
    missing_debug_implementations,
    clippy::should_implement_trait,
    reason = "fixtures of tests"
)]

pub mod conformance;
pub mod delay;
mod fabric;
pub mod flood;
pub mod hostile;
mod process;
pub mod proxy;
mod threads;
pub mod throttle;
pub mod traffic;
pub mod udp_proxy;

pub use fabric::*;
pub use process::in_own_process;
pub use threads::run_beside;
