//! Selection of the device, port and address that reach a peer.

use super::Device;
use super::port::{Gid, GidEntry, GidKind, LinkLayer, Mtu, PortSummary};
use crate::RdmaError;
use crate::settings::Settings;
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
    /// Index of the partition in the port's table.
    pub partition_index: u16,
    /// The service level.
    pub service_level: u8,
    /// The traffic class, on Ethernet.
    pub traffic_class: u8,
}

impl Route {
    /// Selects from `ports` for a peer that is reached from the address `local`, and applies the
    /// settings of the port and the address; the partition remains the first one.
    ///
    /// # Errors
    ///
    /// Fails when there is no such port, or a setting does not fit it.
    pub fn choose(
        ports: &[PortSummary],
        settings: &Settings,
        local: IpAddr,
    ) -> Result<Self, RdmaError> {
        let of_number: Vec<_> = ports
            .iter()
            .filter(|port| settings.port.is_none_or(|number| number == port.port))
            .cloned()
            .collect();
        if let (Some(number), true, false) = (settings.port, of_number.is_empty(), ports.is_empty())
        {
            return Err(RdmaError::Setting {
                given: format!("port={number}"),
                limit: format!("there are: {}", shown(ports)),
            });
        }
        let mut route = match settings.gid_index {
            None => Self::by_address(&of_number, &settings.device, local)?,
            Some(index) => Self::by_index(&of_number, &settings.device, local, index)?,
        };
        if let Some(mtu) = settings.mtu {
            if mtu > route.mtu {
                return Err(RdmaError::Setting {
                    given: format!("mtu={}", mtu.bytes()),
                    limit: format!(
                        "{} is the limit of {} port {}; raise the MTU of its network interface",
                        route.mtu.bytes(),
                        route.device,
                        route.port
                    ),
                });
            }
            route.mtu = mtu;
        }
        route.service_level = settings.service_level;
        route.traffic_class = settings.traffic_class;
        Ok(route)
    }

    /// Takes the port that has the address `local`, or the first usable one, and an entry of its
    /// table.
    fn by_index(
        ports: &[PortSummary],
        choice: &DeviceChoice,
        local: IpAddr,
        index: u8,
    ) -> Result<Self, RdmaError> {
        let found = Self::by_address(ports, choice, local);
        let usable = |port: &&PortSummary| {
            let named = match choice {
                DeviceChoice::Named(name) => *name == port.device,
                DeviceChoice::Automatic | DeviceChoice::None => true,
            };
            let same = found.as_ref().map_or(true, |route| {
                (&route.device, route.port) == (&port.device, port.port)
            });
            named && same && port.active && port.usable
        };
        let Some(port) = ports.iter().find(usable) else {
            return found;
        };
        let mut entries = port.gids.iter();
        let entry = entries.find(|entry| entry.index == index);
        let entry = entry.ok_or_else(|| {
            let there = port.gids.iter().map(|entry| {
                let kind = match entry.kind {
                    GidKind::InfiniBand => "InfiniBand",
                    GidKind::RoceV1 => "RoCE v1",
                    GidKind::RoceV2 => "RoCE v2",
                };
                format!("{} ({}, {kind})", entry.index, entry.gid.to_ip())
            });
            let there: Vec<_> = there.collect();
            RdmaError::Setting {
                given: format!("gid-index={index}"),
                limit: format!(
                    "{} port {} has: {}",
                    port.device,
                    port.port,
                    there.join(", ")
                ),
            }
        })?;
        Ok(Self::over(port, entry))
    }

    /// Selects from `ports` for a peer that is reached from the address `local`.
    ///
    /// An Ethernet port must have that address, preferably of RoCE version 2. On InfiniBand the
    /// address of the peer may belong to another network, so any active port is accepted. A port of
    /// a named device is accepted with its first address in any case.
    ///
    /// # Errors
    ///
    /// Fails when there is no such port.
    fn by_address(
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
            .ok_or_else(|| RdmaError::NoRoute {
                address: local,
                seen: shown(candidates.iter().copied()),
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
            partition_index: 0,
            service_level: 0,
            traffic_class: 0,
        }
    }
}

fn shown<'a>(ports: impl IntoIterator<Item = &'a PortSummary>) -> String {
    let ports: Vec<_> = ports.into_iter().map(ToString::to_string).collect();
    ports.join("; ")
}
