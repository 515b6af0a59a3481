//! How pages travel to each donor, and why, for clients.

use std::sync::PoisonError;

use memory_fabric::fabric::PathKind;
use memory_fabric::link::path::PathStats;
use memory_fabric::link::rdma::RdmaStats;
use memory_fabric::rdma::{LaneEnds, LinkLayer, Waiting};

use super::links::path_used;
use super::vm::{BootedVm, Instance};
use crate::config::Choice as _;
use crate::status::transport::{DonorTransport, PolicyUsed, RdmaEnds, TransportStatus};

/// Returns the transports of a VM as of now.
pub fn transport(instance: &Instance, booted: &BootedVm) -> TransportStatus {
    let view = &booted.view;
    let nodes = view.nodes().into_iter().skip(1);
    let donors = nodes.zip(view.paths()).zip(view.rdma());
    let donors = donors.filter_map(|((node, path), rdma)| {
        let address = node.address?.to_string();
        let path = path?;
        Some(donor(node.id.0.into(), address, &path, rdma.as_deref()))
    });
    TransportStatus {
        asked: instance.config.transport.word().to_owned(),
        selected: booted.transport.clone(),
        donors: donors.collect(),
    }
}

fn donor(node: u32, address: String, path: &PathStats, rdma: Option<&RdmaStats>) -> DonorTransport {
    let policy = path.policy();
    let rest_ms = policy.compression_rest_max.as_millis();
    let by_rdma = rdma.is_some_and(RdmaStats::is_connected);
    // RDMA is set up over TCP.
    let streams = match path.selection.faults {
        PathKind::Udp => PathKind::Udp,
        _ => PathKind::Tcp,
    };
    DonorTransport {
        node,
        address,
        faults_now: if by_rdma { PathKind::Rdma } else { streams }
            .name()
            .to_owned(),
        reason: path.reason.text(),
        rdma_refusal: path.refusal.clone(),
        path: path_used(path),
        policy: PolicyUsed {
            window_pages: policy.window_pages,
            run_pages: policy.run_pages,
            in_flight_pages: policy.in_flight_pages,
            compression_first_pages: policy.compression_first_pages,
            compression_rest_ms_max: u64::try_from(rest_ms).unwrap_or(u64::MAX),
        },
        rdma: rdma.and_then(|rdma| {
            // Written as a whole when a connection is made.
            let ends = rdma.ends.lock().unwrap_or_else(PoisonError::into_inner);
            ends.as_ref().map(rdma_ends)
        }),
    }
}

fn rdma_ends(ends: &LaneEnds) -> RdmaEnds {
    let link = match ends.here.link {
        LinkLayer::Ethernet => "ethernet",
        LinkLayer::InfiniBand => "infiniband",
    };
    RdmaEnds {
        device: ends.here.device.clone(),
        port: ends.here.port,
        link: link.to_owned(),
        gid_index: ends.here.gid_index,
        gid: ends.here.gid.to_ip().to_string(),
        donor_gid: ends.there.gid.to_ip().to_string(),
        lid: ends.here.lid,
        donor_lid: ends.there.lid,
        mtu_bytes: ends.mtu_bytes,
        partition_index: ends.here.partition_index,
        service_level: ends.here.service_level,
        traffic_class: ends.here.traffic_class,
        depth: ends.depth,
        timeout_exponent: ends.retries.timeout_exponent,
        retries: ends.retries.count,
        polls: ends.waiting == Waiting::Poll,
        reads_answered: ends.there.reads_answered,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use memory_fabric::Measured;
    use memory_fabric::link::path::{Reason, Selection};

    use super::*;

    fn measured(page_us: u64, stream_bytes_per_second: f64) -> Measured {
        Measured {
            small: Duration::from_micros(page_us / 2),
            page: Duration::from_micros(page_us),
            stream_bytes_per_second,
        }
    }

    #[test]
    fn a_donor_without_rdma_has_its_tier_and_why() {
        let tcp = measured(150, 1e9);
        let path = PathStats::new(
            Selection::all(PathKind::Tcp),
            (PathKind::Tcp, Some(tcp)),
            None,
            tcp.page,
        );
        let path = path.because(Reason::NoRdma, Some("no device there".to_owned()));
        let found = donor(1, "10.0.0.2:7700".to_owned(), &path, None);
        assert_eq!((found.faults_now.as_str(), found.rdma), ("tcp", None));
        assert_eq!(found.rdma_refusal.as_deref(), Some("no device there"));
        assert_eq!(found.path.tier, "fast-tcp");
        assert_eq!(found.policy.window_pages, 128);
        path.set_tier(memory_fabric::fabric::Tier::Slow);
        let slow = donor(1, String::new(), &path, None);
        assert_eq!(
            (slow.path.tier.as_str(), slow.policy.window_pages),
            ("slow", 256)
        );
    }

    #[test]
    fn a_donor_by_udp_is_named_as_that_even_if_it_was_not_measured() {
        let udp = measured(300, 1e8);
        let path = PathStats::new(
            Selection::all(PathKind::Udp),
            (PathKind::Udp, None),
            None,
            udp.page,
        );
        let found = donor(2, String::new(), &path, None);
        assert_eq!(found.faults_now, "udp");
        assert_eq!(found.reason, Reason::Asked.text());
    }
}
