//! Metrics: what `--metrics` and the control socket answer.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::anyhow;
use memory_fabric::stats::{Histogram, LocalStages, PagerStats};
use ssi_hv::control_socket::route::{Answer, Route, Service, text};
use ssi_hv::control_socket::server::Server;
use ssi_hv::metrics::{self, CONTENT_TYPE, FaultTimes};

use super::Failure;
use super::node;
use super::observe::Watched;
use super::timeline::distribution;

/// What `run --metrics` answers.
pub const OF_VM: &[Route<Arc<Watched>>] = &[Route::look("/metrics", of_vm)];

/// What `node --metrics` answers.
pub const OF_NODE: &[Route<node::Watched>] = &[Route::look("/metrics", of_node)];

/// Answers on an address, if there is one. The server ends when it is dropped.
pub fn serve<S: Send + Sync>(
    address: Option<SocketAddr>,
    service: Service<S>,
) -> Result<Option<(Server, SocketAddr)>, Failure> {
    let Some(address) = address else {
        return Ok(None);
    };
    let server = Server::start_on("metrics", address, service);
    server.map(Some).map_err(|error| {
        anyhow!(error)
            .context(format!(
                "cannot listen on --metrics {address}; name another address or port"
            ))
            .into()
    })
}

/// The metrics of a VM now. Huge pages are not counted: that takes time, and a scrape comes again
/// and again.
pub fn of_vm(watched: &Arc<Watched>, _: &[u8]) -> Answer {
    let Some(paged) = watched.paged.get() else {
        let uptime_s = watched.started.elapsed().as_secs_f64();
        return text(CONTENT_TYPE, metrics::starting(uptime_s));
    };
    let status = watched.status_with(&paged, false);
    let times = fault_times(paged.view.stats());
    text(CONTENT_TYPE, metrics::vm(&status, &times))
}

/// The metrics of a node now.
pub fn of_node(watched: &node::Watched, _: &[u8]) -> Answer {
    text(CONTENT_TYPE, metrics::node(&watched.status()))
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
