//! Flags that choose one of a few words.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How pages travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// The best one that both ends have
    #[default]
    Auto,
    /// TCP
    Tcp,
    /// A donor inside this process, for tests
    Loopback,
    /// Pages read by RDMA verbs, or nothing
    Rdma,
    /// Pages that are waited for by RDMA verbs, all else by TCP
    Hybrid,
    /// QUIC over UDP
    Udp,
}

/// What the guest is told about where its memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Numa {
    /// One NUMA node: the host caches
    #[default]
    Flat,
    /// Each node of the cluster is a NUMA node of the guest
    Expose,
}

/// Which pages back memory that is at home here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// Huge ones, where the kernel gives them
    #[default]
    Auto,
    /// Pages of 4 KiB only
    Off,
}

/// Whether something is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// It is
    On,
    /// It is not
    Off,
}

/// What becomes of a run whose guest asks for a reboot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum OnReboot {
    /// It ends, with an exit code of its own
    #[default]
    Exit,
    /// The guest is booted again
    Restart,
}

/// Whether pages are fetched before they are asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Prefetching {
    /// Where a pattern is seen in what the guest touches
    #[default]
    Auto,
    /// Never
    Off,
}

/// Whether pages are compressed on the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// On each connection while that was measured to pay
    #[default]
    Auto,
    /// Always
    On,
    /// Never
    Off,
}
