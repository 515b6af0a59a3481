//! The status of a running VM or node: its types, their conversion from the fabric, and their
//! display.

pub mod observed;
pub mod screen;

pub use ssi_hv_api::status::*;

#[cfg(test)]
mod tests;
