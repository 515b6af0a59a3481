//! All integration tests of the monitor in one binary, so that shared code is compiled and linked
//! once.
//!
//! `scripts/test` runs the tests of each module in a separate process.

mod bench;
mod cli;
mod control;
mod devices;
mod drain;
mod exec;
mod finish;
mod flood;
mod hotplug;
mod insecure;
mod linking;
mod membership;
mod metrics;
mod node;
mod nodes;
mod pki;
mod poison;
mod privileges;
mod prometheus;
mod replicas;
mod running;
mod sandbox;
mod status;
mod streams;
mod support;
mod survivors;
mod terminal;
mod tiny_guest;
mod top;
mod up;
