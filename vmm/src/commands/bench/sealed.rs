//! Remote faults with sealed pages, beside those without: the same memory twice, in turns.

use std::time::Duration;

use anyhow::Result;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{Fabric, Sealing};
use memory_fabric::stats::Summary;
use serde::Serialize;
use ssi_hv::report::Percentiles;

use super::fault::{self, Beside, Round, Tally, start_donors, start_fabric};
use super::members::Members;
use super::placement::Placement;
use super::view::View;
use super::{FaultBench, Series, median, micros, percentiles};
use crate::cli::bench::BenchFaultConfig;

/// What sealing adds, measured in turns with the same memory without it.
#[derive(Debug, Serialize)]
pub(super) struct SealedBench {
    /// Accesses to sealed memory that waited for a page.
    pub(super) faults: u64,
    pub(super) latency_us: Percentiles,
    /// CPU time of this process, VM and donor, for each fault, without sealing.
    pub(super) plain_cpu_us: f64,
    pub(super) cpu_us: f64,
    /// Medians over the rounds of what it is with sealing divided by what it is without.
    pub(super) ratio_p50: f64,
    pub(super) ratio_p99: f64,
    pub(super) ratio_cpu: f64,
}

/// Measures remote faults, with `--seal` those of sealed pages in turns with them.
pub(super) fn measure(config: &BenchFaultConfig) -> Result<FaultBench> {
    if !config.seal {
        return fault::measure(config, None);
    }
    let mut sealed = Sealed::start(config)?;
    let mut result = fault::measure(config, Some(&mut sealed))?;
    let (of_sealed, tally) = sealed.finish();
    result.sealed = Some(of_sealed);
    result.verified_bytes += tally.verified.into_inner();
    result.corrupt_bytes += tally.corrupt.into_inner();
    Ok(result)
}

/// Memory whose pages are sealed for its donors.
struct Sealed {
    config: BenchFaultConfig,
    view: View,
    tally: Tally,
    series: Series,
    plain: Series,
    cpu_us: Vec<f64>,
    plain_cpu_us: Vec<f64>,
    fabric: Fabric,
    // Dropped after the fabric, which needs them until its end.
    _donors: Vec<Donor>,
}

impl Sealed {
    fn start(config: &BenchFaultConfig) -> Result<Self> {
        let members = config.tls.then(Members::create).transpose()?;
        let members = members.as_ref();
        let placement = Placement::new()?;
        placement.others()?;
        let donors = start_donors(config, members)?;
        placement.pager()?;
        let fabric = start_fabric(config, &donors, members, Sealing::On)?;
        placement.everywhere()?;
        let view = View::of(&fabric);
        view.fill();
        Ok(Self {
            config: config.clone(),
            view,
            tally: Tally::default(),
            series: Series::default(),
            plain: Series::default(),
            cpu_us: Vec::new(),
            plain_cpu_us: Vec::new(),
            fabric,
            _donors: donors,
        })
    }

    /// Ends it, and returns the result, with its tally.
    fn finish(self) -> (SealedBench, Tally) {
        let stats = std::sync::Arc::clone(self.fabric.stats());
        self.fabric.shutdown();
        assert!(stats.sealing.opened.get() > 0, "pages were sealed");
        let ratio = |of: fn(&Summary) -> Duration| {
            let rounds = self.series.rounds.iter().zip(&self.plain.rounds);
            median(
                rounds
                    .map(|(sealed, plain)| micros(of(sealed)) / micros(of(plain)))
                    .collect(),
            )
        };
        let cpu = self.cpu_us.iter().zip(&self.plain_cpu_us);
        let all = self.series.all.summary();
        let result = SealedBench {
            faults: all.count,
            latency_us: percentiles(&all),
            ratio_p50: ratio(|summary| summary.p50),
            ratio_p99: ratio(|summary| summary.p99),
            ratio_cpu: median(cpu.map(|(sealed, plain)| sealed / plain).collect()),
            plain_cpu_us: median(self.plain_cpu_us.clone()),
            cpu_us: median(self.cpu_us.clone()),
        };
        (result, self.tally)
    }
}

impl Beside for Sealed {
    /// Which of the two is first alternates.
    fn round(&mut self, round: u32, plain: &mut dyn FnMut() -> Result<Round>) -> Result<Round> {
        let sealed = || Round::of(&self.config, &self.view, round, &self.tally);
        let (plain, sealed) = if round.is_multiple_of(2) {
            (plain()?, sealed()?)
        } else {
            let sealed = sealed()?;
            (plain()?, sealed)
        };
        self.series.add(&sealed.times);
        self.plain.add(&plain.times);
        self.cpu_us.push(sealed.cpu_us);
        self.plain_cpu_us.push(plain.cpu_us);
        Ok(plain)
    }
}
