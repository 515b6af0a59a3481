//! The machine monitor of SSI-HV: one KVM guest whose memory the fabric spreads over nodes.

pub mod cluster;
pub mod compute;
pub mod config;
pub mod core_dumps;
pub mod credentials;
pub mod doctor;
mod exec;
pub mod failure;
pub mod forced_end;
pub mod host;
pub mod instance;
mod intervals;
pub mod lifeline;
pub mod logging;
pub mod membership;
mod memory_speed;
pub mod metrics;
pub mod node;
pub mod open_files;
pub mod progress;
pub mod readable;
pub mod report;
pub mod signals;
pub mod status;
pub mod stderr;
pub mod top;
pub mod version;

pub use ssi_hv_api::{exit, size};
pub use ssi_hv_control as control_socket;
pub use ssi_hv_machine as machine;
