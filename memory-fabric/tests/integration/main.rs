//! All integration tests of the fabric in one binary: what they share is compiled and linked once.
//!
//! `scripts/test` runs the tests of each module here in a process of their own, and those that
//! measure alone.

mod compression;
mod compression_pays;
mod conformance;
mod discard;
mod donor_shrinks;
mod eviction;
mod faults;
mod hostile_client;
mod hotplug;
mod huge_pages;
mod links;
mod prefetch;
mod pressure;
mod race;
mod race_ahead;
mod udp;
