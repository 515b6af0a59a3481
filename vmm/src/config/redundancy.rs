//! What makes up for the loss of a donor: copies of pages, or stripes.

use memory_fabric::fabric::{Compression, Layout, Redundancy, TransportKind};

use super::REPLICAS_MAX;
use super::choice::{Numa, Switch};
use super::redundancy_error::RedundancyError;
use super::settings::RunSettings;
use super::validation::{ValidationError, check_range};

/// How `run` is given more donors.
const MORE_DONORS: &str = "add --donor";

impl RunSettings {
    /// Returns what makes up for the loss of a donor, if the settings agree with that.
    pub(super) fn checked_redundancy(&self) -> Result<Redundancy, ValidationError> {
        let replicas = self.replicas;
        check_range("--replicas", replicas, 1, REPLICAS_MAX)?;
        let layout = self.redundancy.map(|stripes| stripes.0);
        match (layout, replicas) {
            (None, 1) => {
                self.check_no_zone()?;
                Ok(Redundancy::None)
            }
            (None, _) => {
                self.check_copies()?;
                Ok(Redundancy::Copies)
            }
            (Some(layout), 1) => {
                self.check_stripes(layout)?;
                Ok(Redundancy::Stripes(layout))
            }
            (Some(layout), _) => Err(RedundancyError::Both(layout, replicas).into()),
        }
    }

    fn check_no_zone(&self) -> Result<(), RedundancyError> {
        let zones = self.donors.iter();
        let mut zones = zones.filter_map(|donor| Some((donor, donor.zone.clone()?)));
        match zones.next() {
            Some((donor, zone)) => {
                let address = donor.address.clone();
                Err(RedundancyError::ZoneWithoutReplicas(address, zone))
            }
            None => Ok(()),
        }
    }

    /// Copies are on different donors, and those of memory that is there from the start.
    fn check_copies(&self) -> Result<(), RedundancyError> {
        let (replicas, count) = (self.replicas, self.donors.len());
        if count < replicas as usize {
            return Err(RedundancyError::TooFewForReplicas {
                replicas,
                count,
                more: MORE_DONORS,
            });
        }
        let given = [
            (self.hotplug_memory.is_some(), "--hotplug-memory"),
            // Each NUMA node is the memory of one donor.
            (self.numa == Numa::Expose, "--numa expose"),
        ];
        match given.into_iter().find(|(is_given, _)| *is_given) {
            Some((_, flag)) => Err(RedundancyError::NotWithReplicas { replicas, flag }),
            None => Ok(()),
        }
    }

    /// The same of pieces, which do not move either, and travel by streams.
    fn check_stripes(&self, layout: Layout) -> Result<(), RedundancyError> {
        self.check_no_zone()?;
        let given = [
            (self.hotplug_memory.is_some(), "--hotplug-memory"),
            (self.numa == Numa::Expose, "--numa expose"),
            (!self.nodes.is_empty(), "--node"),
            (self.drain_failing == Switch::On, "--drain-failing on"),
            (self.transport == TransportKind::Rdma, "--transport rdma"),
            (
                self.transport == TransportKind::Hybrid,
                "--transport hybrid",
            ),
            (
                self.transport == TransportKind::Loopback,
                "--transport loopback",
            ),
            (self.rdma.is_some(), "--rdma"),
            // Pieces travel as they are.
            (self.compression == Compression::On, "--compression on"),
        ];
        if let Some((_, flag)) = given.into_iter().find(|(is_given, _)| *is_given) {
            return Err(RedundancyError::NotWithStripes { layout, flag });
        }
        let (pieces, count) = (layout.pieces(), self.donors.len());
        if count < pieces {
            return Err(RedundancyError::TooFewForStripes {
                layout,
                pieces,
                count,
                more: MORE_DONORS,
            });
        }
        Ok(())
    }

    /// What the donors of the guest hold is not one copy of each page.
    pub(super) fn redundancy_flag(&self) -> Option<&'static str> {
        match (self.replicas, self.redundancy) {
            (_, Some(_)) => Some("--redundancy"),
            (2.., None) => Some("--replicas 2"),
            (_, None) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::ByteSize;

    fn settings(donors: usize) -> RunSettings {
        let donor = |at: usize| format!("127.0.0.1:{}", 7000 + at);
        RunSettings {
            redundancy: Some("4+2".parse().expect("possible")),
            donors: (0..donors)
                .map(|at| donor(at).parse().expect("a donor"))
                .collect(),
            ..RunSettings::default()
        }
    }

    #[test]
    fn stripes_need_a_donor_for_each_piece() {
        let layout: Layout = "4+2".parse().expect("possible");
        for donors in [6, 9] {
            let found = settings(donors).checked_redundancy().expect("enough");
            assert_eq!(found, Redundancy::Stripes(layout));
        }
        let error = settings(5).checked_redundancy().expect_err("too few");
        let text = error.to_string();
        assert!(
            text.contains("4+2 needs 6 donors") && text.contains("given is 5; add --donor, or"),
            "{text}"
        );
    }

    #[test]
    fn what_stripes_cannot_have_is_refused_by_its_flag() {
        let refused = |change: fn(&mut RunSettings)| {
            let mut settings = settings(6);
            change(&mut settings);
            let error = settings.checked_redundancy().expect_err("refused");
            error.to_string()
        };
        for (flag, text) in [
            ("--replicas 2", refused(|run| run.replicas = 2)),
            ("--numa expose", refused(|run| run.numa = Numa::Expose)),
            (
                "--hotplug-memory",
                refused(|run| run.hotplug_memory = Some(ByteSize::from_mib(2))),
            ),
            (
                "--drain-failing on",
                refused(|run| run.drain_failing = Switch::On),
            ),
            (
                "--transport rdma",
                refused(|run| run.transport = TransportKind::Rdma),
            ),
            (
                "--transport loopback",
                refused(|run| run.transport = TransportKind::Loopback),
            ),
            (
                "--node",
                refused(|run| run.nodes = vec!["10.0.0.1:7000,cpus=1".parse().expect("a node")]),
            ),
            (
                "zone=",
                refused(|run| run.donors[0] = "127.0.0.1:1,zone=a".parse().expect("a donor")),
            ),
        ] {
            assert!(text.contains(flag), "{flag}: {text}");
        }
    }
}
