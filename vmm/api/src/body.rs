//! The bodies of requests to the control socket, and of its answers.

use serde::{Deserialize, Serialize};

use crate::status::VmState;

/// Why a request is not answered, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RefusalCode {
    /// The request makes no sense: its body, or something where nothing is expected.
    Malformed,
    /// There is no such path.
    UnknownPath,
    /// The path is there, for other methods.
    UnknownMethod,
    /// The request did not come in time.
    Slow,
    /// Its body is larger than 4096 bytes.
    TooLarge,
    /// Something else is being changed, or too much is asked at once. Later it may work.
    Busy,
    /// It does not fit what the VM is doing, or how it was started.
    State,
    /// Answering failed.
    Failed,
    /// A donor that was named does not lend.
    Donor,
    /// The VM has no memory yet.
    Starting,
    /// It was begun, and has not come to its end in time.
    Late,
}

impl RefusalCode {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Malformed,
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

    /// What any request can be refused for.
    pub const COMMON: [Self; 6] = [
        Self::Malformed,
        Self::UnknownMethod,
        Self::Slow,
        Self::TooLarge,
        Self::Busy,
        Self::Failed,
    ];

    /// The status code of HTTP that goes with it.
    #[must_use]
    pub const fn status(self) -> u16 {
        match self {
            Self::Malformed => 400,
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

/// Why a request is not answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Refusal {
    /// For programs.
    pub code: RefusalCode,
    /// For people, one line.
    pub text: String,
}

impl Refusal {
    /// A refusal.
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
    /// Why.
    pub error: Refusal,
}

/// What a VM is doing after a request was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StateBody {
    /// What it is doing.
    pub state: VmState,
}

/// How large the balloon is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BalloonTarget {
    /// Memory that the guest is to give up, in whole pages of 4096 bytes.
    pub target_bytes: u64,
}

/// The balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct BalloonBody {
    /// What the guest was asked to give up.
    pub target_bytes: u64,
    /// What it says to have given up; the guest follows in its own time.
    pub actual_bytes: u64,
}

/// How much memory a guest is to have beyond that of its start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct HotplugTarget {
    /// So much in all, in whole blocks; 0 takes all of it back.
    pub requested_bytes: u64,
    /// The donor, `HOST:PORT[,fingerprint=HEX]`, that is to join and lend what is missing to that.
    /// Without one it is memory of the compute node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub donor: Option<String>,
}

/// The memory of a guest beyond that of its start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HotplugBody {
    /// The most that there can be of it.
    pub max_bytes: u64,
    /// What it is counted in.
    pub block_bytes: u64,
    /// What the guest was asked to have.
    pub requested_bytes: u64,
    /// What it has; the guest follows in its own time.
    pub plugged_bytes: u64,
    /// A donor that was asked to join, and has not yet; `null` when there is none.
    pub joining: Option<String>,
    /// Why the donor that was asked last has not joined; `null` when it has, or when memory was
    /// asked for without one since.
    pub error: Option<String>,
    /// How often any of this has changed; the parameter `seen` takes it.
    pub changes: u64,
}
