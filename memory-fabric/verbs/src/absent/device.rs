//! RDMA devices, of which there is none.

#[path = "../device/port.rs"]
mod port;
#[path = "../device/route.rs"]
mod route;

pub use port::{Gid, GidEntry, GidKind, LinkLayer, Mtu, PortSummary};
pub use route::{DeviceChoice, Route};

use crate::RdmaError;
use crate::resources::DeviceUsage;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;

/// An open device.
#[derive(Debug)]
pub struct Device(Infallible);

impl Device {
    /// Opens every device of this host.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn open_all() -> Result<Vec<Arc<Self>>, RdmaError> {
        Err(RdmaError::LeftOut)
    }

    /// Opens the device that leads to a peer.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn for_peer(_: &DeviceChoice, _: IpAddr) -> Result<(Arc<Self>, Route), RdmaError> {
        Err(RdmaError::LeftOut)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self.0 {}
    }

    /// Whether memory can be registered without being pinned.
    #[must_use]
    pub fn pages_on_demand(&self) -> bool {
        match self.0 {}
    }

    /// Whether the device was removed.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        match self.0 {}
    }

    /// Any value: there is no call of this.
    pub(super) fn absurd<T>(&self) -> T {
        match self.0 {}
    }
}

/// What this process uses of each device that it has open.
#[must_use]
pub fn usage() -> Vec<DeviceUsage> {
    Vec::new()
}

/// Every port of every device of this host.
///
/// # Errors
///
/// Always.
pub fn summaries() -> Result<Vec<PortSummary>, RdmaError> {
    Err(RdmaError::LeftOut)
}
