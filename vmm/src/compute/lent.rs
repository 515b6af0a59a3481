//! vCPUs of a VM on another node, as its primary holds them.

use std::net::SocketAddr;
use std::time::Duration;

use fabric_identity::CertificateDer;
use memory_fabric::compute::{
    CONTROL_TIMEOUT, Carrier, ComputeEnd, ComputeMember, ComputePorts, ComputeRequest,
    ComputeTable, ControlError, ControlStream, FrameKind, member,
};
use memory_fabric::fabric::NodeLeases;

use super::host::END_TIME_MAX;

/// How long a node may take to start the process of a VM.
const START_TIME_MAX: Duration = Duration::from_secs(15);

/// vCPUs of a VM on another node. Dropping it ends the VM's process there.
#[derive(Debug)]
pub struct LentCpus(ControlStream);

impl LentCpus {
    /// Asks a node for vCPUs and memory. Returns them with the VM's process there as the other nodes
    /// know it.
    ///
    /// # Errors
    ///
    /// When the node is absent, refuses or breaks the protocol.
    pub fn ask(
        address: SocketAddr,
        carrier: &Carrier,
        request: &ComputeRequest,
    ) -> Result<(Self, ComputeMember), ControlError> {
        let mut control = ControlStream::connect_by(address, carrier)?;
        let (question, answer) = (FrameKind::Compute, FrameKind::ComputePorts);
        let ports: ComputePorts = control.call_within(START_TIME_MAX, question, request, answer)?;
        Ok((
            Self(control),
            member(address.ip(), ports, request.lent_bytes),
        ))
    }

    /// The certificate that the node has shown, and those between it and the authority.
    #[must_use]
    pub fn chain(&self) -> Option<Vec<CertificateDer<'static>>> {
        self.0.chain().map(<[_]>::to_vec)
    }

    /// Lets the VM's process take over these leases, and connect to the other nodes.
    ///
    /// # Errors
    ///
    /// When the connection breaks.
    pub fn connect(
        &mut self,
        table: &ComputeTable,
        leases: &NodeLeases,
    ) -> Result<(), ControlError> {
        for authority in leases.authorities() {
            self.0.send(FrameKind::ComputeAuthority, authority)?;
        }
        for lease in leases.messages() {
            self.0.send(FrameKind::ComputeLease, lease)?;
        }
        self.0.send(FrameKind::ComputeTable, table)
    }

    /// Waits for the end of the VM's process, which follows that of the VM. Returns why it ended, if
    /// not with the VM.
    #[must_use]
    pub fn end(self) -> Option<String> {
        self.end_within(END_TIME_MAX + CONTROL_TIMEOUT)
    }

    /// Like [`end`](Self::end), for at most `time`.
    #[must_use]
    pub fn end_within(mut self, time: Duration) -> Option<String> {
        let gone = || Some("its connection to `ssi-hv node` has ended".to_owned());
        let end: ComputeEnd = match self.0.receive(time) {
            Ok((frame, payload)) if frame.kind == FrameKind::ComputeEnd => {
                match self.0.decode(frame.kind, &payload) {
                    Ok(end) => end,
                    Err(_) => return gone(),
                }
            }
            Err(ControlError::Refused { text, .. }) => return Some(text),
            _ => return gone(),
        };
        let reason: String = end.reason.chars().filter(|c| !c.is_control()).collect();
        (!reason.is_empty()).then_some(reason)
    }
}
