//! `ssi-hv bench fault`: remote faults, and beside them those of other memory.

use clap::Args;
use memory_fabric::fabric::{Compression, Redundancy, TransportKind};
use ssi_hv::config::stripes::StripesArg;
use ssi_hv::config::validation::{ValidationError, check_range, check_size};
use ssi_hv::config::{CPUS_MAX, GUEST_MEMORY_MAX, LOCAL_MEMORY_MIN, REPLICAS_MAX, RedundancyError};
use ssi_hv::size::ByteSize;

use super::{BENCH_SECONDS_MAX, check_most};
use crate::cli::words;

/// Limit of threads that touch memory: as many as a guest has vCPUs.
const BENCH_THREADS_MAX: u32 = CPUS_MAX as u32;
/// Limit of donors, all of which run on this host: as many as the largest stripe has pieces.
const BENCH_DONORS_MAX: u32 = 10;
/// Minimum memory: fewer pages than this are resident again before they can be evicted.
const BENCH_MEMORY_MIN: ByteSize = ByteSize::from_mib(1);

/// The configuration of `ssi-hv bench fault`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct BenchFaultConfig {
    /// Memory that is touched
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    pub memory: ByteSize,

    /// How much of it may be local
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub local_memory: ByteSize,

    /// Threads that touch it
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads: u32,

    /// Donors that lend it, in this process; default: 1, or as many as needed
    #[arg(long, value_name = "N")]
    pub donors: Option<u32>,

    /// With 2, measure the same with two copies of each page beside one, in turns
    #[arg(long, value_name = "N", default_value_t = 1, hide_default_value = true)]
    pub replicas: u32,

    /// Measure the same with pages in K pieces and M of parity beside one copy, in turns
    #[arg(long, value_name = "K+M")]
    pub redundancy: Option<StripesArg>,

    /// How pages travel
    #[arg(
        long,
        value_name = "KIND",
        value_parser = words::<TransportKind>(),
        default_value = "auto",
        hide_possible_values = true,
        help = "auto, tcp, udp or loopback; rdma and hybrid need a second host"
    )]
    pub transport: TransportKind,

    /// Measure the same under mutual TLS beside it, in turns; with --seal all is under TLS
    #[arg(long)]
    pub tls: bool,

    /// Measure the same with sealed pages beside it, in turns
    #[arg(long)]
    pub seal: bool,

    /// Protect each page in transit with a CRC-32C
    #[arg(long)]
    pub checksum: bool,

    /// Compress pages on the network
    #[arg(
        long,
        value_name = "WHEN",
        value_parser = words::<Compression>(),
        default_value = "auto",
        hide_possible_values = true,
        help = "Compress pages: auto, on or off"
    )]
    pub compression: Compression,

    /// How long to measure
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    pub seconds: u32,

    /// Stop after this many remote faults instead
    #[arg(long, value_name = "COUNT", conflicts_with = "seconds")]
    pub faults: Option<u64>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl BenchFaultConfig {
    /// Validates the combination of values.
    ///
    /// # Errors
    ///
    /// Returns the first invalid value, with its limit and remedy.
    pub fn validate(&self) -> Result<(), ValidationError> {
        check_size("--memory", self.memory, BENCH_MEMORY_MIN)?;
        check_size("--local-memory", self.local_memory, LOCAL_MEMORY_MIN)?;
        check_range("--threads", self.threads, 1, BENCH_THREADS_MAX)?;
        check_range("--seconds", self.seconds, 1, BENCH_SECONDS_MAX)?;
        match self.transport {
            TransportKind::Rdma => return Err(ValidationError::BenchByRdma("rdma")),
            TransportKind::Hybrid => return Err(ValidationError::BenchByRdma("hybrid")),
            TransportKind::Auto
            | TransportKind::Tcp
            | TransportKind::Udp
            | TransportKind::Loopback => {}
        }
        if self.tls && matches!(self.transport, TransportKind::Udp | TransportKind::Loopback) {
            return Err(ValidationError::BenchTls);
        }
        if self.seal && self.transport == TransportKind::Loopback {
            return Err(ValidationError::BenchSeal);
        }
        if self.seal && self.compression != Compression::Off {
            return Err(ValidationError::BenchSealCompressed);
        }
        self.check_redundancy()?;
        check_most("--memory", self.memory, GUEST_MEMORY_MAX)?;
        if self.local_memory >= self.memory {
            return Err(ValidationError::NothingRemote {
                local: self.local_memory,
                memory: self.memory,
            });
        }
        if self.faults == Some(0) {
            return Err(ValidationError::OutOfRange {
                flag: "--faults",
                value: 0,
                min: 1,
                max: u64::MAX,
            });
        }
        Ok(())
    }

    /// Returns what makes up for the loss of a donor in the memory that is measured beside one copy.
    pub fn redundancy(&self) -> Redundancy {
        match (self.redundancy, self.replicas) {
            (Some(stripes), _) => Redundancy::Stripes(stripes.0),
            (None, 2..) => Redundancy::Copies,
            (None, _) => Redundancy::None,
        }
    }

    /// Returns the number of donors of each memory: those that are asked for, else as many as needed.
    pub fn donor_count(&self) -> u32 {
        self.donors.unwrap_or_else(|| self.donors_needed())
    }

    /// Copies, and pieces, are on different donors.
    fn donors_needed(&self) -> u32 {
        match self.redundancy {
            Some(stripes) => u32::try_from(stripes.0.pieces()).unwrap_or(u32::MAX),
            None => self.replicas,
        }
    }

    /// Checks the copies or stripes, and that there are donors for them.
    fn check_redundancy(&self) -> Result<(), ValidationError> {
        let replicas = self.replicas;
        check_range("--replicas", replicas, 1, REPLICAS_MAX)?;
        let layout = self.redundancy.map(|stripes| stripes.0);
        let what = match (layout, replicas) {
            (None, 1) => None,
            (None, _) => Some(format!("--replicas {replicas}")),
            (Some(layout), 1) => Some(format!("--redundancy {layout}")),
            (Some(layout), _) => return Err(RedundancyError::Both(layout, replicas).into()),
        };
        let given = [
            (self.tls, "--tls"),
            (self.seal, "--seal"),
            (
                self.transport == TransportKind::Loopback,
                "--transport loopback",
            ),
        ];
        let flag = given.into_iter().find(|(is_given, _)| *is_given);
        if let (Some(what), Some((_, flag))) = (what, flag) {
            return Err(ValidationError::BenchRedundancy { what, flag });
        }
        if let (Some(layout), Compression::On) = (layout, self.compression) {
            let flag = "--compression on";
            return Err(RedundancyError::NotWithStripes { layout, flag }.into());
        }
        check_range("--donors", self.donor_count(), 1, BENCH_DONORS_MAX)?;
        let count = self.donor_count() as usize;
        let more = "raise --donors";
        match layout {
            Some(layout) if count < layout.pieces() => Err(RedundancyError::TooFewForStripes {
                layout,
                pieces: layout.pieces(),
                count,
                more,
            }
            .into()),
            None if count < replicas as usize => Err(RedundancyError::TooFewForReplicas {
                replicas,
                count,
                more,
            }
            .into()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        fault: BenchFaultConfig,
    }

    fn fault(arguments: &str) -> BenchFaultConfig {
        let words = std::iter::once("fault").chain(arguments.split_whitespace());
        Line::try_parse_from(words).expect("well-formed").fault
    }

    #[test]
    fn there_are_as_many_donors_as_copies_or_pieces_if_none_are_asked_for() {
        for (arguments, donors) in [
            ("", 1),
            ("--donors 3", 3),
            ("--replicas 2", 2),
            ("--replicas 2 --donors 4", 4),
            ("--redundancy 4+2", 6),
            ("--redundancy 8+2", 10),
        ] {
            let config = fault(arguments);
            config.validate().expect(arguments);
            assert_eq!(config.donor_count(), donors, "{arguments}");
        }
        assert_eq!(fault("").redundancy(), Redundancy::None);
        assert_eq!(fault("--replicas 2").redundancy(), Redundancy::Copies);
        let layout = "2+1".parse().expect("possible");
        let striped = fault("--redundancy 2+1").redundancy();
        assert_eq!(striped, Redundancy::Stripes(layout));
    }

    #[test]
    fn what_is_not_measured_beside_one_copy_is_refused_by_its_flag() {
        for (arguments, part) in [
            ("--replicas 3", "--replicas 3 is outside 1 to 2"),
            ("--replicas 2 --redundancy 2+1", "exclude each other"),
            ("--replicas 2 --donors 1", "given is 1; raise --donors, or"),
            ("--redundancy 4+2 --donors 5", "4+2 needs 6 donors"),
            ("--redundancy 4+2 --donors 5", "given is 5; raise --donors"),
            ("--redundancy 4+2 --compression on", "--compression on"),
            ("--replicas 2 --tls", "remove --tls"),
            ("--redundancy 2+1 --seal --compression off", "remove --seal"),
            (
                "--replicas 2 --transport loopback",
                "remove --transport loopback",
            ),
            ("--donors 11", "--donors 11 is outside 1 to 10"),
        ] {
            let error = fault(arguments).validate().expect_err(arguments);
            let text = error.to_string();
            assert!(text.contains(part), "{arguments}: {text}");
        }
    }
}
