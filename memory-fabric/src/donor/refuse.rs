//! Refusals with their reasons.

use crate::control::{ControlError, ControlStream};
use crate::donor::pool::SessionRefused;
use crate::link::describe;
use crate::wire::{ErrorMessage, FrameKind, Refusal, TrafficClass};
use fabric_host::Seldom;
use std::time::Instant;

/// Peers can ask for what is refused as often as they connect.
static NOTICES: Seldom = Seldom::notices();

/// Refuses the peer's request.
pub(super) fn refuse(
    control: &mut ControlStream,
    refusal: Refusal,
    text: String,
) -> Result<(), ControlError> {
    let peer = control.peer();
    match NOTICES.pass(Instant::now()) {
        Some(unreported) => tracing::info!(%peer, text, unreported, "refused"),
        None => tracing::debug!(%peer, text, "refused"),
    }
    control.send(FrameKind::Error, &ErrorMessage { refusal, text })
}

/// What a VM is told whose lease does not exist.
pub(super) const UNKNOWN_LEASE: &str = "no such lease: it ended, or the node was started again";

/// Refuses a request for a lease that does not exist.
pub(super) fn refuse_unknown(control: &mut ControlStream) -> Result<(), ControlError> {
    refuse(control, Refusal::UnknownLease, UNKNOWN_LEASE.to_owned())
}

/// Refuses a connection that cannot replace the previous one.
pub(super) fn refuse_session(
    control: &mut ControlStream,
    class: TrafficClass,
    error: &SessionRefused,
) -> Result<(), ControlError> {
    let refusal = match error {
        SessionRefused::Busy(_) => Refusal::Busy,
        SessionRefused::StaleEpoch { .. } => Refusal::StaleEpoch,
    };
    let cause = describe(error);
    refuse(
        control,
        refusal,
        format!("no {class:?} connection: {cause}"),
    )
}

/// Reports a malformed frame to the peer that sent it.
pub(super) fn refuse_malformed(
    control: &mut ControlStream,
    error: ControlError,
) -> Result<(), ControlError> {
    match error {
        ControlError::Protocol(_, wire) => refuse(control, Refusal::Malformed, wire.to_string()),
        other => Err(other),
    }
}
