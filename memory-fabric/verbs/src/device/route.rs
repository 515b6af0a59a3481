//! Selection of the device, port and address that reach a peer.

use super::Device;
use super::port::{Gid, GidEntry, GidKind, LinkLayer, Mtu, PortSummary};
use crate::RdmaError;
use std::net::IpAddr;

/// The device to use.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum DeviceChoice {
    /// The one with the address from which the peer is reached.
    #[default]
    Automatic,
    /// The one with this name.
    Named(String),
    /// None.
    None,
}

impl DeviceChoice {
    /// Checks that a named device exists.
    ///
    /// # Errors
    ///
    /// Fails when it does not, or there is no device.
    pub fn check(&self) -> Result<(), RdmaError> {
        let Self::Named(name) = self else {
            return Ok(());
        };
        let devices = Device::open_all()?;
        if devices.iter().any(|device| device.name() == name) {
            return Ok(());
        }
        if devices.is_empty() {
            return Err(RdmaError::NoDevice);
        }
        let there: Vec<_> = devices.iter().map(|device| device.name()).collect();
        Err(RdmaError::UnknownDevice {
            wanted: name.clone(),
            there: there.join(", "),
        })
    }
}

/// The port and the address to use.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Route {
    /// The device.
    pub device: String,
    /// Its port.
    pub port: u8,
    /// Index of `gid` in the port's table.
    pub gid_index: u8,
    /// The address.
    pub gid: Gid,
    /// The kind of network.
    pub link: LinkLayer,
    /// The port's local identifier.
    pub lid: u16,
    /// The largest payload of a packet.
    pub mtu: Mtu,
}

impl Route {
    /// Selects from `ports` for a peer that is reached from the address `local`.
    ///
    /// An Ethernet port must have that address, preferably of RoCE version 2. On InfiniBand the
    /// address of the peer may belong to another network, so any active port is accepted. A port of
    /// a named device is accepted with its first address in any case.
    ///
    /// # Errors
    ///
    /// Fails when there is no such port.
    pub fn choose(
        ports: &[PortSummary],
        choice: &DeviceChoice,
        local: IpAddr,
    ) -> Result<Self, RdmaError> {
        let named = match choice {
            DeviceChoice::None => return Err(RdmaError::NoDevice),
            DeviceChoice::Automatic => None,
            DeviceChoice::Named(name) => Some(name),
        };
        if ports.is_empty() {
            return Err(RdmaError::NoDevice);
        }
        let candidates: Vec<&PortSummary> = ports
            .iter()
            .filter(|port| named.is_none_or(|name| *name == port.device))
            .collect();
        if candidates.is_empty() {
            let mut there: Vec<_> = ports.iter().map(|port| port.device.as_str()).collect();
            there.dedup();
            return Err(RdmaError::UnknownDevice {
                wanted: named.cloned().unwrap_or_default(),
                there: there.join(", "),
            });
        }
        let usable = || candidates.iter().filter(|port| port.active && port.usable);
        let wanted = Gid::from_ip(local.to_canonical());
        let ethernet = |kind, any: bool| {
            usable()
                .filter(|port| port.link == LinkLayer::Ethernet)
                .find_map(|port| {
                    let mut gids = port.gids.iter();
                    let entry = gids.find(|gid| gid.kind == kind && (any || gid.gid == wanted))?;
                    Some(Self::over(port, entry))
                })
        };
        let infiniband = || {
            let mut ports = usable().filter(|port| port.link == LinkLayer::InfiniBand);
            ports.find_map(|port| Some(Self::over(port, port.gids.first()?)))
        };
        ethernet(GidKind::RoceV2, false)
            .or_else(|| ethernet(GidKind::RoceV1, false))
            .or_else(infiniband)
            .or_else(|| named.and_then(|_| ethernet(GidKind::RoceV2, true)))
            .ok_or_else(|| {
                let seen: Vec<_> = candidates.iter().map(ToString::to_string).collect();
                RdmaError::NoRoute {
                    address: local,
                    seen: seen.join("; "),
                }
            })
    }

    fn over(port: &PortSummary, entry: &GidEntry) -> Self {
        Self {
            device: port.device.clone(),
            port: port.port,
            gid_index: entry.index,
            gid: entry.gid,
            link: port.link,
            lid: port.lid,
            mtu: port.mtu,
        }
    }
}
