//! The report of a run: its types, and writing it to a file.

mod file;

pub use file::{REPORT_TIME_MAX, ReportError, ReportFile};
pub use ssi_hv_api::report::*;
