//! `ssi-hv bench clients`.

use clap::Args;
use memory_fabric::donor::pool::LEASES_MAX;
use ssi_hv::config::validation::{ValidationError, check_range};

use super::BENCH_SECONDS_MAX;

// It is below 2^32.
#[allow(clippy::cast_possible_truncation)]
const CLIENTS_MAX: u32 = LEASES_MAX as u32;

/// The configuration of `ssi-hv bench clients`.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct BenchClientsConfig {
    /// Clients, each with a lease
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub clients: u32,

    /// Over mutual TLS
    #[arg(long)]
    pub tls: bool,

    /// How long all renew, once all are connected
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub seconds: u32,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl BenchClientsConfig {
    /// Validates the values.
    ///
    /// # Errors
    ///
    /// Returns what is wrong, with its limit and remedy.
    pub fn validate(&self) -> Result<(), ValidationError> {
        check_range("--clients", self.clients, 1, CLIENTS_MAX)?;
        check_range("--seconds", self.seconds, 1, BENCH_SECONDS_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_clients_have_the_limit_of_leases() {
        let of = |clients| {
            let config = BenchClientsConfig {
                clients,
                tls: false,
                seconds: 1,
                json: false,
            };
            config.validate().map_err(|error| error.to_string())
        };
        assert_eq!(of(1), Ok(()));
        assert_eq!(of(32_768), Ok(()));
        for refused in [0, 32_769] {
            let text = of(refused).expect_err("outside");
            assert!(
                text.contains("--clients") && text.contains("32768"),
                "{text}"
            );
        }
    }
}
