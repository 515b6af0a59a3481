//! Memory on donors of this process, for one measurement.

use anyhow::Result;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{Compression, Fabric, TransportKind};
use memory_fabric::stats::PagerStats;
use ssi_hv::cli::bench::BenchFaultConfig;
use ssi_hv::size::ByteSize;

use super::fault::{View, start_donors, start_fabric};

/// A fabric and its donors. Nothing may touch the view once it is dropped.
#[derive(Debug)]
pub(super) struct Bed {
    // Before the donors, which must be there until it has ended.
    fabric: Fabric,
    pub(super) view: View,
    _donors: Vec<Donor>,
}

impl Bed {
    /// Memory of which `local` may be resident at once, or all of it with no donor.
    pub(super) fn start(memory: ByteSize, local: ByteSize, donors: u32) -> Result<Self> {
        let config = BenchFaultConfig {
            memory,
            local_memory: local,
            threads: 1,
            donors,
            transport: TransportKind::Tcp,
            checksum: false,
            compression: Compression::Auto,
            seconds: 1,
            faults: None,
            json: false,
        };
        let donors = start_donors(&config)?;
        let fabric = start_fabric(&config, &donors)?;
        Ok(Self {
            view: View::of(&fabric),
            fabric,
            _donors: donors,
        })
    }

    /// What the pager counts.
    pub(super) fn stats(&self) -> &PagerStats {
        self.fabric.stats()
    }

    /// Pages that have come from the donors until now.
    pub(super) fn pages_fetched(&self) -> u64 {
        let donors = self.stats().donors.iter();
        donors.map(|donor| donor.pages_fetched.get()).sum()
    }
}
