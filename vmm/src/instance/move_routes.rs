//! The route that moves a vCPU: `POST /v1/move`.

use std::sync::Arc;

use super::vm::Instance;
use crate::control_socket::protocol::{MoveBody, MoveTarget, Refusal, RefusalCode};
use crate::control_socket::route::{Answer, answer};
use crate::machine::MoveError;

/// Moves a vCPU to a node, and answers when it runs there.
pub fn move_vcpu(instance: &Arc<Instance>, body: &[u8]) -> Answer {
    let malformed = |text: String| Refusal::new(RefusalCode::Malformed, text);
    let target: MoveTarget = serde_json::from_slice(body).map_err(|error| {
        malformed(format!(
            "not {{\"cpu\": NUMBER, \"node\": \"NODE\"}}: {error}"
        ))
    })?;
    let MoveTarget { cpu, node } = target;
    let booted = instance.booted()?;
    let machine = booted.machine()?;
    let seen = booted
        .nodes
        .as_ref()
        .ok_or_else(|| refusal(MoveError::OneNode))?;
    let place = seen.place_of(&node).ok_or_else(|| {
        malformed(format!(
            "there is no node {node:?}: the VM has {}",
            seen.names().join(", ")
        ))
    })?;
    machine.move_vcpu(cpu, place).map_err(refusal)?;
    let body = MoveBody {
        cpu,
        node: place,
        address: seen.address_of(place),
    };
    answer(200, &body)
}

fn refusal(error: MoveError) -> Refusal {
    let code = match error {
        MoveError::NoCpu { .. } | MoveError::NoNode { .. } => RefusalCode::Malformed,
        MoveError::Late { .. } => RefusalCode::Late,
        MoveError::OneNode
        | MoveError::NoCpuLent { .. }
        | MoveError::Moves { .. }
        | MoveError::Paused
        | MoveError::Ended => RefusalCode::State,
    };
    Refusal::new(code, error.to_string())
}
