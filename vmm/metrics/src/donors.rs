//! Times of the requests to each donor, and its part in RDMA.

use super::families::{Families, Labels};
use ssi_hv_api::report::{Distribution, RdmaUsed};
use ssi_hv_api::status::NodeNow;

/// Durations of the requests to one donor.
#[derive(Clone, Debug, PartialEq)]
pub struct DonorTimes {
    /// The donor.
    pub node: u32,
    /// From the request for a page that a vCPU waits for until its answer.
    pub fetch: Distribution,
    /// From posting an RDMA WRITE of a page until its completion.
    pub write: Distribution,
}

pub(super) fn add_times(all: &mut Families, donors: &[DonorTimes]) {
    for (name, help, times) in [
        (
            "ssi_hv_donor_fetch_seconds",
            "How long pages took that vCPUs waited for, from the request until the answer.",
            (|of| &of.fetch) as fn(&DonorTimes) -> &Distribution,
        ),
        (
            "ssi_hv_donor_rdma_write_seconds",
            "How long RDMA WRITEs of pages took, from posting them until their completion.",
            |of| &of.write,
        ),
    ] {
        let of_each = donors.iter().filter(|of| !times(of).is_empty());
        all.histograms(
            name,
            help,
            of_each.map(|of| (vec![("node", of.node.to_string())], times(of))),
        );
    }
}

pub(super) fn add_rdma(all: &mut Families, donors: &[&NodeNow]) {
    for (name, help, value) in [
        (
            "ssi_hv_donor_rdma_pages_read_total",
            "Pages fetched by RDMA READ.",
            (|rdma| rdma.pages_read) as fn(&RdmaUsed) -> u64,
        ),
        (
            "ssi_hv_donor_rdma_pages_written_total",
            "Pages written back by RDMA WRITE.",
            |rdma| rdma.pages_written,
        ),
        (
            "ssi_hv_donor_rdma_connections_total",
            "RDMA connections made.",
            |rdma| rdma.connections,
        ),
        (
            "ssi_hv_donor_rdma_failures_total",
            "Of these, connections that failed: pages continued over TCP.",
            |rdma| rdma.failures,
        ),
    ] {
        let samples = each(donors, move |now| now.node.rdma.as_ref().map(value));
        all.counters(name, help, samples);
    }
}

/// Creates a sample for each donor that has this value.
pub(super) fn each<'a, T>(
    donors: &'a [&NodeNow],
    value: impl Fn(&NodeNow) -> Option<T> + 'a,
) -> impl Iterator<Item = (Labels, T)> + 'a {
    donors
        .iter()
        .filter_map(move |now| Some((vec![node_label(now)], value(now)?)))
}

pub(super) fn node_label(now: &NodeNow) -> (&'static str, String) {
    ("node", now.node.id.to_string())
}
