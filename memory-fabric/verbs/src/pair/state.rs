//! States of queue pairs.

use super::super::abi::ibv_qp_state;

/// The used states of a queue pair.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PairState {
    /// Newly created.
    Reset,
    /// It has its port and rights.
    Init,
    /// It knows the peer, and answers its requests.
    ReadyToReceive,
    /// It also sends requests.
    ReadyToSend,
    /// It failed or was ended: outstanding requests complete with an error.
    Error,
}

impl PairState {
    /// Returns whether a transition between two states is valid.
    #[must_use]
    pub fn may_become(self, next: Self) -> bool {
        use PairState::*;
        matches!(
            (self, next),
            (Reset, Init) | (Init, ReadyToReceive) | (ReadyToReceive, ReadyToSend) | (_, Error)
        )
    }

    pub(super) fn to_verbs(self) -> ibv_qp_state::Type {
        match self {
            Self::Reset => ibv_qp_state::IBV_QPS_RESET,
            Self::Init => ibv_qp_state::IBV_QPS_INIT,
            Self::ReadyToReceive => ibv_qp_state::IBV_QPS_RTR,
            Self::ReadyToSend => ibv_qp_state::IBV_QPS_RTS,
            Self::Error => ibv_qp_state::IBV_QPS_ERR,
        }
    }
}
