//! The status of a running VM or node: its types, how the fabric fills them, and how they are drawn.

pub mod observed;
pub mod screen;

pub use ssi_hv_api::status::*;

#[cfg(test)]
mod tests;
