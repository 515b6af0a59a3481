//! Metrics of a VM: what `--metrics` and the control socket answer.

use std::sync::Arc;

use memory_fabric::stats::{Histogram, LocalStages, PagerStats};
use ssi_hv_metrics::{CONTENT_TYPE, DonorTimes, FaultTimes, NodeTimes};

use super::observe;
use super::timeline::distribution;
use super::vm::{BootedVm, Instance};
use crate::control_socket::route::{Answer, Route, text};

/// Requests to `run --metrics`.
pub const OF_VM: &[Route<Arc<Instance>>] = &[Route::look("/metrics", of_vm)];

/// Returns the current metrics of a VM. Huge pages are not counted, since that takes long and
/// scrapes are frequent.
pub fn of_vm(instance: &Arc<Instance>, _: &[u8]) -> Answer {
    let Ok(booted) = instance.booted() else {
        let uptime_s = instance.started.elapsed().as_secs_f64();
        return text(CONTENT_TYPE, ssi_hv_metrics::starting(uptime_s));
    };
    let status = observe::status_with(instance, &booted, false);
    let times = fault_times(booted.view.stats());
    let donors = donor_times(&booted);
    let nodes = node_times(&booted);
    let metrics = ssi_hv_metrics::vm(&status, &times, &donors, &nodes);
    text(CONTENT_TYPE, metrics)
}

/// Returns the times of each donor.
fn donor_times(booted: &BootedVm) -> Vec<DonorTimes> {
    let donors = booted.view.nodes().into_iter().skip(1);
    let donors = donors.zip(booted.view.stats().donors.iter());
    let times = donors.zip(booted.view.rdma());
    let times = times.map(|((donor, stats), rdma)| DonorTimes {
        node: donor.id.0.into(),
        fetch: distribution(&stats.fetch),
        write: rdma.map_or_else(Vec::new, |rdma| distribution(&rdma.write)),
    });
    times.collect()
}

fn node_times(booted: &BootedVm) -> Vec<NodeTimes> {
    let Some(reported) = booted.reported(false) else {
        return Vec::new();
    };
    let times = reported.requests.into_iter().zip(reported.holds);
    let times = (0..).zip(times).zip(reported.ring_writes);
    let times = times.map(|((node, (requests, holds)), ring_writes)| NodeTimes {
        node,
        requests,
        holds,
        ring_writes,
    });
    times.collect()
}

fn fault_times(stats: &PagerStats) -> Vec<FaultTimes> {
    let of = |kind, stage, histogram: &Histogram| FaultTimes {
        kind,
        stage,
        times: distribution(histogram),
    };
    let local = |kind, stages: &LocalStages| {
        [
            of(kind, Some("queue"), &stages.queue),
            of(kind, Some("install"), &stages.install),
        ]
    };
    let mut all = vec![
        of("remote", None, &stats.remote),
        of("zero", None, &stats.zero),
        of("minor", None, &stats.minor),
        of("write_protect", None, &stats.write_protect),
        of("remote", Some("queue"), &stats.queue),
        of("remote", Some("fetch"), &stats.fetch),
        of("remote", Some("install"), &stats.install),
    ];
    all.extend(local("zero", &stats.zero_stages));
    all.extend(local("minor", &stats.minor_stages));
    all
}
