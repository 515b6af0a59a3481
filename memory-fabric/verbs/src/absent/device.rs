//! RDMA devices, which do not exist in this build.

#[path = "../device/port.rs"]
mod port;
#[path = "../device/route.rs"]
mod route;

pub use port::{Gid, GidEntry, GidKind, LinkLayer, Mtu, PortSummary};
pub use route::{DeviceChoice, Route};

use crate::RdmaError;
use crate::resources::DeviceUsage;
use crate::settings::Settings;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;

/// An open device.
#[derive(Debug)]
pub struct Device(Infallible);

impl Device {
    /// Fails, since there is no device.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn open_all() -> Result<Vec<Arc<Self>>, RdmaError> {
        Err(RdmaError::LeftOut)
    }

    /// Fails, since there is no device.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn for_peer(_: &Settings, _: IpAddr) -> Result<(Arc<Self>, Route), RdmaError> {
        Err(RdmaError::LeftOut)
    }

    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self.0 {}
    }

    /// Returns whether memory can be registered without being pinned.
    #[must_use]
    pub fn pages_on_demand(&self) -> bool {
        match self.0 {}
    }

    /// Returns whether the device was removed.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        match self.0 {}
    }

    /// Returns any type: no value of this type exists.
    pub(super) fn absurd<T>(&self) -> T {
        match self.0 {}
    }
}

/// Returns an empty list.
#[must_use]
pub fn usage() -> Vec<DeviceUsage> {
    Vec::new()
}

/// Fails, since there is no device.
///
/// # Errors
///
/// Always.
pub fn summaries() -> Result<Vec<PortSummary>, RdmaError> {
    Err(RdmaError::LeftOut)
}
