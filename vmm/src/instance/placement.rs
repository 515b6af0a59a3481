//! Where the memory of a VM is, for clients.

use memory_fabric::fabric::{DonorPlacement, DonorUse};
use memory_fabric::page::PAGE_SHIFT;

use super::vm::BootedVm;
use crate::status::placement::{DonorPlaced, Held, PlacementStatus};

/// Returns the places of a VM's memory as of now.
pub fn placement(booted: &BootedVm) -> PlacementStatus {
    let view = &booted.view;
    let found = view.placement();
    // Memory that hosts share has no home: what of it has its place at a donor is counted there.
    let home_here_pages = match booted.nodes {
        Some(_) => 0,
        None => view.plan().home_here_pages,
    };
    let replicas = view.replicas();
    PlacementStatus {
        copies: match &replicas {
            Some(all) if all.layout.is_none() => 2,
            _ => 1,
        },
        home_here_bytes: home_here_pages << PAGE_SHIFT,
        donors: found.donors.iter().map(donor).collect(),
        held: found
            .held
            .into_iter()
            .map(|(nodes, bytes)| Held {
                nodes: nodes.into_iter().map(|node| node.0.into()).collect(),
                bytes,
            })
            .collect(),
        degraded_bytes: replicas.as_ref().map_or(0, |all| all.degraded_bytes),
        in_one_zone_bytes: replicas.as_ref().map_or(0, |all| all.in_one_zone_bytes),
        moved_by_heat_bytes: found.moved_by_heat_bytes,
    }
}

fn donor(donor: &DonorPlacement) -> DonorPlaced {
    let state = match donor.usage {
        DonorUse::InUse => "in-use",
        DonorUse::Out => "out",
        DonorUse::Left => "left",
    };
    DonorPlaced {
        node: donor.id.0.into(),
        address: donor.address.map(|address| address.to_string()),
        zone: donor.zone.clone(),
        state: state.to_owned(),
        tier: donor.link.map(|(tier, _)| tier.name().to_owned()),
        page_us: donor.link.map(|(_, latency)| latency.as_secs_f64() * 1e6),
        lent_bytes: donor.lent_bytes,
        home_bytes: donor.home_bytes,
        copy_bytes: donor.copy_bytes,
        free_bytes: donor.free_bytes,
        hot_bytes: donor.hot_bytes,
        cold_bytes: donor
            .hot_bytes
            .map(|hot| donor.home_bytes.saturating_sub(hot)),
    }
}
