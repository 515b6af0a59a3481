//! Pausing, resuming and ending a running machine.

pub(crate) mod control;
pub(crate) mod ending;
pub(crate) mod handle;
pub(crate) mod kick;
pub(crate) mod shared;
