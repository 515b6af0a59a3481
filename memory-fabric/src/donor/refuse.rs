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

/// Tells a peer what is wrong with its frame, if it is the frame that is wrong.
pub(super) fn refuse_malformed(
    control: &mut ControlStream,
    error: ControlError,
) -> Result<(), ControlError> {
    match error {
        ControlError::Protocol(_, wire) => refuse(control, Refusal::Malformed, wire.to_string()),
        other => Err(other),
    }
}
