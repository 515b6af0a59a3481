//! Remote faults of sealed pages, under TLS, or with copies or stripes, beside those of plain memory:
//! the same memory twice, in turns.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use memory_fabric::donor::server::Donor;
use memory_fabric::fabric::{Fabric, Redundancy, Sealing};
use memory_fabric::stats::{PagerStats, Summary};
use serde::Serialize;
use ssi_hv::report::Percentiles;

use super::fault::{self, Beside, Round, Tally, start_donors, start_fabric};
use super::members::Members;
use super::placement::Placement;
use super::view::View;
use super::write_back::WriteBack;
use super::{FaultBench, Series, median, micros, percentiles};
use crate::cli::bench::BenchFaultConfig;

/// What protecting pages or keeping several copies adds, measured in turns with plain memory.
#[derive(Debug, Serialize)]
pub(super) struct BesideBench {
    /// Accesses to this memory that waited for a page.
    pub(super) faults: u64,
    pub(super) latency_us: Percentiles,
    /// CPU time of this process, VM and donors, for each fault of plain memory.
    pub(super) plain_cpu_us: f64,
    pub(super) cpu_us: f64,
    /// Medians over the rounds of what it is here divided by what it is with plain memory.
    pub(super) ratio_p50: f64,
    pub(super) ratio_p99: f64,
    pub(super) ratio_cpu: f64,
}

/// What copies or stripes add.
#[derive(Debug, Serialize)]
pub(super) struct RedundantBench {
    /// K+M; `null` with two copies.
    pub(super) stripes: Option<String>,
    #[serde(flatten)]
    pub(super) faults: BesideBench,
    pub(super) write_back: WriteBack,
    /// Bytes for each page that is written back, divided by those with one copy.
    pub(super) ratio_write_back_bytes: f64,
}

impl RedundantBench {
    /// Returns what this memory is called.
    pub(super) fn name(&self) -> String {
        match &self.stripes {
            Some(stripes) => stripes.clone(),
            None => "2 copies".to_owned(),
        }
    }
}

/// Measures remote faults. In turns with them it measures those of memory with copies or stripes with
/// `--replicas` or `--redundancy`, of sealed pages with `--seal`, else those under TLS with `--tls`;
/// with the last two, all connections are under TLS.
pub(super) fn measure(config: &BenchFaultConfig) -> Result<FaultBench> {
    let redundancy = config.redundancy();
    let plain = BenchFaultConfig {
        tls: config.tls && config.seal,
        // One copy is on as many donors.
        donors: Some(config.donor_count()),
        replicas: 1,
        redundancy: None,
        ..config.clone()
    };
    if !config.seal && !config.tls && redundancy == Redundancy::None {
        return fault::measure(&plain, None);
    }
    let mut other = Other::start(config)?;
    let mut result = fault::measure(&plain, Some(&mut other))?;
    let (beside, tally, stats) = other.finish();
    match redundancy {
        Redundancy::Copies | Redundancy::Stripes(_) => {
            let write_back = WriteBack::of(&stats, redundancy);
            let (ours, plain) = (write_back.bytes_per_page, result.write_back.bytes_per_page);
            result.redundant = Some(RedundantBench {
                stripes: config.redundancy.map(|stripes| stripes.to_string()),
                faults: beside,
                write_back,
                ratio_write_back_bytes: ours / plain,
            });
        }
        Redundancy::None if config.seal => result.sealed = Some(beside),
        Redundancy::None => result.tls = Some(beside),
    }
    result.verified_bytes += tally.verified.into_inner();
    result.corrupt_bytes += tally.corrupt.into_inner();
    Ok(result)
}

/// Memory whose pages are sealed for its donors, travel under TLS, or have copies or pieces on several
/// donors.
struct Other {
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

impl Other {
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

    /// Ends it, and returns the result, with its tally and the pager's counters.
    fn finish(self) -> (BesideBench, Tally, Arc<PagerStats>) {
        let stats = Arc::clone(self.fabric.stats());
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
        let result = BesideBench {
            faults: all.count,
            latency_us: percentiles(&all),
            ratio_p50: ratio(|summary| summary.p50),
            ratio_p99: ratio(|summary| summary.p99),
            ratio_cpu: median(cpu.map(|(ours, plain)| ours / plain).collect()),
            plain_cpu_us: median(self.plain_cpu_us.clone()),
            cpu_us: median(self.cpu_us.clone()),
        };
        (result, self.tally, stats)
    }
}

impl Beside for Other {
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
