//! What is said on the socket beside answers, and its limits.

use std::time::Duration;

pub use ssi_hv_api::body::{
    BalloonBody, BalloonTarget, ErrorBody, HotplugBody, HotplugTarget, Refusal, RefusalCode,
    StateBody,
};

/// What all paths begin with: the version of the interface.
pub const PREFIX: &str = "/v1/";

/// The longest head of a request that is read: a path and some headers. The least that hyper takes.
pub const HEAD_BYTES_MAX: usize = 8192;

/// The longest body of a request: a few numbers.
pub const BODY_BYTES_MAX: usize = 4096;

/// The longest answer that a client takes. A heat map has about 160 KiB.
pub const ANSWER_BYTES_MAX: usize = 4 << 20;

/// How long a client may take to send the head of its request, and how long to send the body.
pub const REQUEST_TIME_MAX: Duration = Duration::from_secs(2);

/// How long a pause waits for vCPUs and devices to stop. A vCPU that waits for a page cannot be
/// stopped before it comes, which over a bad network takes a while.
pub const PAUSE_TIME_MAX: Duration = Duration::from_secs(5);

/// How long a connection may take in all: for its request, for what it asks, and to take the answer.
pub const CONNECTION_TIME_MAX: Duration = Duration::from_secs(12);

/// How long a request may wait for something to change: its connection has time left for the rest.
pub const CHANGE_WAIT_TIME_MAX: Duration = Duration::from_secs(8);

/// Requests that wait at once: most connections are left to who wants an answer now.
pub const WAITS_MAX: usize = 16;

/// Connections at once. Others wait in the kernel until one of these ends.
pub const CONNECTIONS_MAX: usize = 64;
