//! Memory on donors in this process, for one measurement.

use std::net::SocketAddr;

use anyhow::Result;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{Compression, Fabric, Sealing, TransportKind};
use memory_fabric::stats::PagerStats;
use ssi_hv::size::ByteSize;

use super::fault::{start_donors, start_fabric};
use super::placement::Placement;
use super::view::View;
use crate::cli::bench::BenchFaultConfig;

/// A fabric and its donors. The view must not be accessed after the drop.
#[derive(Debug)]
pub(super) struct Bed {
    // Dropped before the donors, which it needs until its end.
    fabric: Fabric,
    pub(super) view: View,
    donors: Vec<Donor>,
}

impl Bed {
    /// Creates memory of which `local` may be resident at once, or all of it without donors. With a
    /// placement the pager has CPUs of its own, and the calling thread those of the others.
    pub(super) fn start(
        memory: ByteSize,
        local: ByteSize,
        donors: u32,
        placement: Option<&Placement>,
    ) -> Result<Self> {
        let config = BenchFaultConfig {
            memory,
            local_memory: local,
            threads: 1,
            donors: Some(donors),
            replicas: 1,
            redundancy: None,
            transport: TransportKind::Tcp,
            tls: false,
            seal: false,
            checksum: false,
            compression: Compression::Auto,
            seconds: 1,
            faults: None,
            json: false,
        };
        placement.map_or(Ok(()), Placement::others)?;
        let donors = start_donors(&config, None)?;
        placement.map_or(Ok(()), Placement::pager)?;
        let fabric = start_fabric(&config, &donors, None, Sealing::Off)?;
        placement.map_or(Ok(()), Placement::others)?;
        Ok(Self {
            view: View::of(&fabric),
            fabric,
            donors,
        })
    }

    /// Returns the donors' addresses.
    pub(super) fn donors(&self) -> impl Iterator<Item = SocketAddr> {
        self.donors.iter().map(Donor::address)
    }

    /// Returns the pager's counters.
    pub(super) fn stats(&self) -> &PagerStats {
        self.fabric.stats()
    }

    /// Returns the number of pages fetched from the donors so far.
    pub(super) fn pages_fetched(&self) -> u64 {
        let donors = self.stats().donors.iter();
        donors.map(|donor| donor.pages_fetched.get()).sum()
    }
}
