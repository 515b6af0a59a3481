//! The bodies of requests to the control socket, and of its answers.

use serde::{Deserialize, Serialize};

use crate::report::{DrainUsed, RebalanceUsed};
use crate::status::VmState;

/// Why a request is refused, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RefusalCode {
    /// The request is malformed: its body, or a body or query where none is expected.
    Malformed,
    /// The client is of another user.
    Forbidden,
    /// The path does not exist.
    UnknownPath,
    /// The path has other methods.
    UnknownMethod,
    /// The request did not arrive in time.
    Slow,
    /// Its body is larger than 4096 bytes.
    TooLarge,
    /// Another change is in progress, or too many requests are waiting. A retry may succeed.
    Busy,
    /// The request does not fit the state of the VM, or how it was started.
    State,
    /// The answer could not be produced.
    Failed,
    /// The named donor does not lend.
    Donor,
    /// The VM has no memory yet.
    Starting,
    /// The request was started and did not complete in time.
    Late,
}

impl RefusalCode {
    /// All codes.
    pub const ALL: [Self; 12] = [
        Self::Malformed,
        Self::Forbidden,
        Self::UnknownPath,
        Self::UnknownMethod,
        Self::Slow,
        Self::TooLarge,
        Self::Busy,
        Self::State,
        Self::Failed,
        Self::Donor,
        Self::Starting,
        Self::Late,
    ];

    /// The codes with which any request can be refused.
    pub const COMMON: [Self; 7] = [
        Self::Malformed,
        Self::Forbidden,
        Self::UnknownMethod,
        Self::Slow,
        Self::TooLarge,
        Self::Busy,
        Self::Failed,
    ];

    /// The HTTP status code.
    #[must_use]
    pub const fn status(self) -> u16 {
        match self {
            Self::Malformed => 400,
            Self::Forbidden => 403,
            Self::UnknownPath => 404,
            Self::UnknownMethod => 405,
            Self::Slow => 408,
            Self::Busy | Self::State => 409,
            Self::TooLarge => 413,
            Self::Failed => 500,
            Self::Donor => 502,
            Self::Starting => 503,
            Self::Late => 504,
        }
    }
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Refusal {
    /// For programs.
    pub code: RefusalCode,
    /// For people, one line.
    pub text: String,
}

impl Refusal {
    /// Creates a refusal.
    pub fn new(code: RefusalCode, text: impl Into<String>) -> Self {
        Self {
            code,
            text: text.into(),
        }
    }
}

/// The body of a refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ErrorBody {
    /// The reason.
    pub error: Refusal,
}

/// The state of a VM after a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StateBody {
    /// The state.
    pub state: VmState,
}

/// The member of a cluster whose use of a node is to end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct EvictTarget {
    /// The member, as ROLE/NAME.
    pub identity: String,
}

/// What an eviction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct EvictBody {
    /// Leases of the member.
    pub leases: u64,
    /// Their memory.
    pub bytes: u64,
    /// Its other connections, besides those of the leases.
    pub connections: u64,
}

/// Credentials and rules that were read again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ReloadBody {
    /// Connections that were closed, since the new files do not confirm their certificates, or name
    /// their members in no rule.
    pub closed: u64,
    /// Leases that were ended, of members that no rule names any more.
    pub leases: u64,
    /// Their memory.
    pub bytes: u64,
    /// The rules that are in force; null if the node has none, and every member may use all.
    pub rules: Option<u64>,
    /// The last second of the new certificate's validity, since 1970.
    pub not_after: i64,
}

/// The requested size of the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BalloonTarget {
    /// Memory that the guest should give up, in whole pages of 4096 bytes.
    pub target_bytes: u64,
}

/// The balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct BalloonBody {
    /// Bytes that the guest was asked to give up.
    pub target_bytes: u64,
    /// Bytes that the guest has reported to have given up; it follows asynchronously.
    pub actual_bytes: u64,
}

/// Where a vCPU is to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct MoveTarget {
    /// The vCPU.
    pub cpu: u32,
    /// The node: `primary`, or its number or address in the status.
    pub node: String,
}

/// Where a vCPU runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct MoveBody {
    /// The vCPU.
    pub cpu: u32,
    /// The number of the node in the status; 0 is the primary.
    pub node: u32,
    /// The address of the node; `null` for the primary.
    pub address: Option<String>,
}

/// The donor that is to be drained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct DrainTarget {
    /// The donor: its number or address in the status.
    pub node: String,
    /// The donors, `HOST:PORT[,name=NAME][,zone=ZONE][,fingerprint=HEX]`, that get its memory;
    /// new ones join. Without any, the other donors of the VM get it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub to: Vec<String>,
}

/// Donors that are drained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DrainBody {
    /// The id of a donor for whose memory others are being asked for room; `null` when there is
    /// none.
    pub preparing: Option<u32>,
    /// Why the last request was refused after that; `null` when it was not.
    pub error: Option<String>,
    /// The last donor whose memory began to move; `null` when there was none.
    pub drain: Option<DrainUsed>,
    /// The number of changes to any of these fields except `moved_bytes`; the parameter `seen`
    /// takes it.
    pub changes: u64,
}

/// What is to happen to the memory at donors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RebalanceTarget {
    /// The donors, `HOST:PORT[,memory=SIZE][,name=NAME][,zone=ZONE][,fingerprint=HEX]`, that join
    /// before memory moves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub add: Vec<String>,
    /// Whether a rebalancing ends instead, after the part that is moving.
    #[serde(default)]
    pub stop: bool,
}

/// Memory that moves to donors with less than their share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RebalanceBody {
    /// Whether donors are being asked for memory.
    pub preparing: bool,
    /// Why the last request was refused after that; `null` when it was not.
    pub error: Option<String>,
    /// The last rebalancing; `null` when there was none.
    pub rebalance: Option<RebalanceUsed>,
    /// The number of changes to any of these fields, or those of drains, except `moved_bytes`; the
    /// parameter `seen` takes it.
    pub changes: u64,
}

/// The requested memory of a guest beyond that of its start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct HotplugTarget {
    /// The total, in whole blocks; 0 removes all of it.
    pub requested_bytes: u64,
    /// The donor, `HOST:PORT[,name=NAME][,fingerprint=HEX]`, that joins and lends what is
    /// missing. Without one, the compute node provides the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub donor: Option<String>,
}

/// The memory of a guest beyond that of its start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HotplugBody {
    /// The limit.
    pub max_bytes: u64,
    /// The size of a block, its unit.
    pub block_bytes: u64,
    /// Bytes that the guest was asked to use.
    pub requested_bytes: u64,
    /// Bytes that are plugged; the guest follows asynchronously.
    pub plugged_bytes: u64,
    /// A donor that is joining; `null` when there is none.
    pub joining: Option<String>,
    /// Why the last named donor has not joined; `null` when it has, or when memory was requested
    /// without a donor since.
    pub error: Option<String>,
    /// The number of changes to any of these fields; the parameter `seen` takes it.
    pub changes: u64,
}
