//! Refusals, which say why.

use crate::control::{ControlError, ControlStream};
use crate::wire::{ErrorMessage, FrameKind, Refusal};

/// Refuses the peer's request.
pub(super) fn refuse(
    control: &mut ControlStream,
    refusal: Refusal,
    text: String,
) -> Result<(), ControlError> {
    tracing::info!(peer = %control.peer(), text, "refused");
    control.send(FrameKind::Error, &ErrorMessage { refusal, text })
}

/// Refuses a request for a lease that does not exist.
pub(super) fn refuse_unknown(control: &mut ControlStream) -> Result<(), ControlError> {
    let text = "no such lease: it ended, or the node was started again".to_owned();
    refuse(control, Refusal::UnknownLease, text)
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
