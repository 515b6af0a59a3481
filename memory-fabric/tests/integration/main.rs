//! All integration tests of the fabric in one binary, so that shared code is compiled and linked
//! once.
//!
//! `scripts/test` runs the tests of each module in a separate process, and those that measure time
//! alone.

mod capture;
mod compression;
mod compression_pays;
mod conformance;
mod discard;
mod donor_shrinks;
mod drain;
mod drain_replicas;
mod ending;
mod epochs;
mod eviction;
mod faults;
mod fingerprints;
mod floods;
mod hostile_client;
mod hotplug;
mod huge_pages;
mod join_replicas;
mod links;
mod placing;
mod placing_target;
mod poison;
mod prefetch;
mod pressure;
mod race;
mod race_ahead;
mod rebalance;
mod rebalance_blocks;
mod replicas;
mod resting;
mod sealed;
mod sealed_stripes;
mod stripes;
mod tls;
mod udp;
mod udp_last_answer;
