//! vCPUs that a node lends beside memory.

use super::connection::Connection;
use super::refuse::refuse;
use crate::control::{ControlError, ControlStream};
use crate::wire::{ComputeRequest, Refusal};
use std::fmt::Debug;

/// Runs vCPUs of VMs on this node.
pub trait CpuLender: Debug + Send + Sync {
    /// Serves a request until the VM has no vCPU here any more. Its values were checked, and what
    /// it lends is reserved meanwhile. The connection is by TCP.
    ///
    /// # Errors
    ///
    /// When the connection breaks.
    fn serve(
        &self,
        control: &mut ControlStream,
        request: &ComputeRequest,
    ) -> Result<(), ControlError>;
}

impl Connection<'_> {
    pub(super) fn compute(
        &self,
        mut control: ControlStream,
        mut request: ComputeRequest,
    ) -> Result<(), ControlError> {
        let Some(lender) = &self.served.cpus else {
            let text = "this node lends memory only; start it with --cpus".to_owned();
            return refuse(&mut control, Refusal::NoCpus, text);
        };
        if let Err(error) = request.check() {
            return refuse(&mut control, Refusal::Malformed, error.to_string());
        }
        if !control.is_tcp() {
            let text = "vCPUs are lent by TCP without certificates alone, so far: start this node \
                        without --credentials"
                .to_owned();
            return refuse(&mut control, Refusal::Malformed, text);
        }
        let reserved = match self.served.pool.reserve(request.lent_bytes) {
            Ok(reserved) => reserved,
            Err(error) => return refuse(&mut control, Refusal::NoMemory, error.to_string()),
        };
        if let Err(full) = self.place.establish() {
            return refuse(&mut control, Refusal::Busy, full.to_string());
        }
        // It is logged.
        request.name.retain(|c| !c.is_control());
        let served = lender.serve(&mut control, &request);
        drop(reserved);
        served
    }
}
