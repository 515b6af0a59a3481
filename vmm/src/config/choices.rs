//! Flags that choose one of a few words.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How pages travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// The best that both ends support, as measured
    #[default]
    Auto,
    /// TCP
    Tcp,
    /// A donor inside this process, for tests
    Loopback,
    /// RDMA verbs in both directions; fails without RDMA
    Rdma,
    /// RDMA verbs for pages that a vCPU waits for, TCP for all others
    Hybrid,
    /// QUIC over UDP, encrypted
    Udp,
}

/// What the guest sees of where its memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Numa {
    /// One NUMA node; remote memory is cached locally
    #[default]
    Flat,
    /// Each node of the cluster is a NUMA node of the guest
    Expose,
}

/// Which pages back memory with its home here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// Huge pages, where the kernel provides them
    #[default]
    Auto,
    /// Pages of 4 KiB only
    Off,
}

/// Whether a device or feature is enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// Enabled
    On,
    /// Disabled
    Off,
}

/// What a reboot of the guest does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum OnReboot {
    /// The run ends, with its own exit code
    #[default]
    Exit,
    /// The guest is booted again
    Restart,
}

/// Whether pages are fetched before they are touched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Prefetching {
    /// When the guest's faults follow a pattern
    #[default]
    Auto,
    /// Never
    Off,
}

/// Whether pages are compressed on the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// On each connection while measurements show a gain
    #[default]
    Auto,
    /// Always
    On,
    /// Never
    Off,
}
