//! Messages on the socket other than answers, and their limits.

use std::time::Duration;

pub use ssi_hv_api::body::{
    BalloonBody, BalloonTarget, DrainBody, DrainTarget, ErrorBody, EvictBody, EvictTarget,
    HotplugBody, HotplugTarget, MoveBody, MoveTarget, RebalanceBody, RebalanceTarget, Refusal,
    RefusalCode, ReloadBody, StateBody,
};

/// Prefix of all paths: the version of the interface.
pub const PREFIX: &str = "/v1/";

/// Limit of a request's head: a path and some headers. It is the minimum that hyper accepts.
pub const HEAD_BYTES_MAX: usize = 8192;

/// Limit of a request's body: a few numbers.
pub const BODY_BYTES_MAX: usize = 4096;

/// Limit of an answer, enforced by the client. A heat map has about 160 KiB.
pub const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Timeout for the head of a request, and for its body.
pub const REQUEST_TIME_MAX: Duration = Duration::from_secs(2);

/// Timeout for pausing vCPUs and devices. A vCPU that waits for a page cannot be paused before the
/// page arrives, which can take long over a bad network.
pub const PAUSE_TIME_MAX: Duration = Duration::from_secs(5);

/// Total time of a connection: request, execution and answer.
pub const CONNECTION_TIME_MAX: Duration = Duration::from_secs(12);

/// Longest wait of a request for a change, which leaves its connection time for the rest.
pub const CHANGE_WAIT_TIME_MAX: Duration = Duration::from_secs(8);
const _: () = assert!(
    CHANGE_WAIT_TIME_MAX.as_secs() + REQUEST_TIME_MAX.as_secs() < CONNECTION_TIME_MAX.as_secs()
);

/// Limit of waiting requests, which leaves most connections to requests that do not wait.
pub const WAITS_MAX: usize = 16;

/// Limit of connections. Others wait in the kernel's queue.
pub const CONNECTIONS_MAX: usize = 64;
