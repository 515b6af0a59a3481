//! The machine monitor of SSI-HV: one KVM guest whose memory the fabric spreads over nodes.

pub mod cli;
pub mod cluster;
pub mod config;
pub mod doctor;
pub mod exec;
pub mod forced_end;
pub mod host;
pub mod logging;
pub mod memory_speed;
pub mod open_files;
pub mod progress;
pub mod report;
pub mod status;
pub mod top;

pub use ssi_hv_api::{exit, size};
pub use ssi_hv_control as control_socket;
pub use ssi_hv_machine as machine;
pub use ssi_hv_metrics as metrics;
