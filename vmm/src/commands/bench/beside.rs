//! Remote faults with sealed pages or under TLS, beside those without: the same memory twice, in
//! turns.

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

/// What protecting pages adds, measured in turns with the same memory without it.
#[derive(Debug, Serialize)]
pub(super) struct ProtectedBench {
    /// Accesses to protected memory that waited for a page.
    pub(super) faults: u64,
    pub(super) latency_us: Percentiles,
    /// CPU time of this process, VM and donor, for each fault, without protection.
    pub(super) plain_cpu_us: f64,
    pub(super) cpu_us: f64,
    /// Medians over the rounds of what it is with protection divided by what it is without.
    pub(super) ratio_p50: f64,
    pub(super) ratio_p99: f64,
    pub(super) ratio_cpu: f64,
}

/// Measures remote faults. In turns with them it measures those of sealed pages with `--seal`, else
/// those under TLS with `--tls`; with both, all connections are under TLS.
pub(super) fn measure(config: &BenchFaultConfig) -> Result<FaultBench> {
    let plain = BenchFaultConfig {
        tls: config.tls && config.seal,
        ..config.clone()
    };
    if !config.seal && !config.tls {
        return fault::measure(&plain, None);
    }
    let mut protected = Protected::start(config)?;
    let mut result = fault::measure(&plain, Some(&mut protected))?;
    let (of_protected, tally) = protected.finish();
    let place = if config.seal {
        &mut result.sealed
    } else {
        &mut result.tls
    };
    *place = Some(of_protected);
    result.verified_bytes += tally.verified.into_inner();
    result.corrupt_bytes += tally.corrupt.into_inner();
    Ok(result)
}

/// Memory whose pages are sealed for its donors, or travel under TLS.
struct Protected {
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
    /// Their files, which are read again while it runs.
    _members: Option<Members>,
}

impl Protected {
    fn start(config: &BenchFaultConfig) -> Result<Self> {
        let held = config.tls.then(Members::create).transpose()?;
        let members = held.as_ref();
        let placement = Placement::new()?;
        placement.others()?;
        let donors = start_donors(config, members)?;
        placement.pager()?;
        let seal = if config.seal {
            Sealing::On
        } else {
            Sealing::Off
        };
        let fabric = start_fabric(config, &donors, members, seal)?;
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
            _members: held,
        })
    }

    /// Ends it, and returns the result, with its tally.
    fn finish(self) -> (ProtectedBench, Tally) {
        let stats = std::sync::Arc::clone(self.fabric.stats());
        self.fabric.shutdown();
        let sealed = stats.sealing.opened.get() > 0;
        assert_eq!(sealed, self.config.seal, "whether pages were sealed");
        let ratio = |of: fn(&Summary) -> Duration| {
            let rounds = self.series.rounds.iter().zip(&self.plain.rounds);
            median(
                rounds
                    .map(|(ours, plain)| micros(of(ours)) / micros(of(plain)))
                    .collect(),
            )
        };
        let cpu = self.cpu_us.iter().zip(&self.plain_cpu_us);
        let all = self.series.all.summary();
        let result = ProtectedBench {
            faults: all.count,
            latency_us: percentiles(&all),
            ratio_p50: ratio(|summary| summary.p50),
            ratio_p99: ratio(|summary| summary.p99),
            ratio_cpu: median(cpu.map(|(ours, plain)| ours / plain).collect()),
            plain_cpu_us: median(self.plain_cpu_us.clone()),
            cpu_us: median(self.cpu_us.clone()),
        };
        (result, self.tally)
    }
}

impl Beside for Protected {
    /// Which of the two is first alternates.
    fn round(&mut self, round: u32, plain: &mut dyn FnMut() -> Result<Round>) -> Result<Round> {
        let ours = || Round::of(&self.config, &self.view, round, &self.tally);
        let (plain, ours) = if round.is_multiple_of(2) {
            (plain()?, ours()?)
        } else {
            let ours = ours()?;
            (plain()?, ours)
        };
        self.series.add(&ours.times);
        self.plain.add(&plain.times);
        self.cpu_us.push(ours.cpu_us);
        self.plain_cpu_us.push(plain.cpu_us);
        Ok(plain)
    }
}
