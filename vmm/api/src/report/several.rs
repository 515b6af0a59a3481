//! Parts of the report of VMs whose vCPUs are on several nodes: their time, and what moves them.

use serde::{Deserialize, Serialize};

/// How the time of a node's vCPUs follows that of node 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct NodeClock {
    /// The estimated difference of the hosts' time stamp counters, in microseconds: what is added to
    /// the counter of this node's host, at the rate of node 0's, to get that of node 0.
    pub offset_us: f64,
    /// How far the time of the vCPUs may be from that of node 0, in microseconds: the error of the
    /// estimate, and what is not corrected yet.
    pub error_us_max: f64,
    /// How much faster the counter of node 0 is, in millionths; `null` until two comparisons agree.
    pub rate_ppm: Option<f64>,
    /// By how much that may be wrong if the rates have not changed.
    pub rate_ppm_error_max: Option<f64>,
    /// Whether KVM scales the counter, because the hosts' nominal rates differ.
    pub scaled: bool,
    /// How often the time of all vCPUs was corrected at once.
    pub steps: u64,
    /// The sum of these steps, in microseconds; steps back are negative.
    pub steps_us: f64,
}

/// What decides on which node a vCPU runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PolicyKind {
    /// Commands, and `from=` of `--node`.
    #[default]
    Static,
    /// Also from where the pages come that it waits for.
    Follow,
}

impl PolicyKind {
    /// Its name in the report.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Follow => "follow",
        }
    }
}

/// `--vcpu-policy`, and what it did since the guest was booted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct PolicyUsed {
    /// The policy.
    pub kind: PolicyKind,
    /// How many moves it made; those by command and `from=` do not count.
    pub moves: u64,
    /// How many moves did not take place, for instance because the VM was paused.
    pub moves_failed: u64,
    /// Why each vCPU stays where it is; empty with `static`.
    pub vcpus: Vec<VcpuStays>,
}

/// Why the policy does not move a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VcpuStays {
    /// The vCPU.
    pub cpu: u32,
    /// How often the policy ordered it to move: each time it stays for twice as long.
    pub moves: u32,
    /// How long it waited for pages of other nodes in the last 5 s, in milliseconds.
    pub waited_ms: f64,
    /// The reason.
    pub reason: StayReason,
    /// How long it stays at least, in seconds; `null` unless the reason is `moved`.
    pub stays_s: Option<f64>,
}

/// A reason for which a vCPU stays on its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum StayReason {
    /// The policy has moved it lately.
    Moved,
    /// It is not watched for 5 s yet since a vCPU moved, or its node does not report.
    Watched,
    /// It waited for no other node for 500 ms of them.
    Little,
    /// It waited for no other node for 67 of 100 parts of that time.
    Spread,
    /// The node for which it did runs as many vCPUs as it may, and none that idles could leave it.
    Full,
}

impl StayReason {
    /// Describes it in few words.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Moved => "moved",
            Self::Watched => "watched",
            Self::Little => "waits little",
            Self::Spread => "pages of several nodes",
            Self::Full => "no room",
        }
    }
}
