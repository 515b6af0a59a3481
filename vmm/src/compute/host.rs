//! A node that runs vCPUs of VMs, each VM in a process of its own.

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fabric_host::Seldom;
use memory_fabric::compute::{
    ClockRate, ComputeEnd, ComputeLease, ComputeRequest, ControlError, ControlStream, CpuLender,
    Ending, ErrorMessage, FrameKind, NodeClock, Refusal,
};
use memory_fabric::fabric::{DONORS_MAX, check_authorities};

use crate::machine::{HostClock, time_stamp};

use super::child::{Event, ProcessError, VmProcess};
use super::protocol::{Connect, RdmaOfNode};

/// This program's file, also when it was replaced.
const PROGRAM: &str = "/proc/self/exe";
/// How long the primary may take to learn where all nodes listen.
const TABLE_TIME_MAX: Duration = Duration::from_secs(30);
/// How long the process of a VM may take to end when the VM has ended or the primary is gone.
pub(super) const END_TIME_MAX: Duration = Duration::from_secs(10);

/// Clients can start and end processes in a loop, and ask for what is refused as often as they
/// connect.
static LENT: Seldom = Seldom::notices();
static RETURNED: Seldom = Seldom::notices();
static FAILED: Seldom = Seldom::notices();
static REFUSED: Seldom = Seldom::notices();

/// The CPUs that a node lends.
#[derive(Debug)]
pub struct CpuHost {
    cpus: u8,
    program: PathBuf,
    rdma: RdmaOfNode,
    clock: Option<HostClock>,
    lent: Mutex<u8>,
}

/// CPUs that a VM has. Dropping it returns them.
struct Taken<'a> {
    host: &'a CpuHost,
    cpus: u8,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.host.lent() -= self.cpus;
    }
}

impl CpuHost {
    /// A host that lends so many vCPUs, whose memory may travel by RDMA as `rdma` allows.
    #[must_use]
    pub fn new(cpus: u8, rdma: RdmaOfNode) -> Self {
        Self {
            cpus,
            rdma,
            clock: HostClock::of_this_host().ok(),
            program: PROGRAM.into(),
            lent: Mutex::default(),
        }
    }

    fn lent(&self) -> std::sync::MutexGuard<'_, u8> {
        // Changed in single steps.
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, cpus: u8) -> Result<Taken<'_>, String> {
        let mut lent = self.lent();
        let free = self.cpus - *lent;
        if cpus > free {
            let all = self.cpus;
            return Err(format!(
                "{cpus} vCPUs asked, {free} of {all} are free; ask for fewer, wait for another VM to \
                 end, or raise --cpus of the node"
            ));
        }
        *lent += cpus;
        Ok(Taken { host: self, cpus })
    }

    /// Starts the process, and lets the primary know where it listens.
    fn start(
        &self,
        control: &mut ControlStream,
        request: &ComputeRequest,
    ) -> Result<Result<VmProcess, String>, ControlError> {
        let address = control.local()?.ip();
        // What the VM has shown here, its other nodes have to show each other.
        let secured = control.identity().is_some();
        let process = VmProcess::start(&self.program, request, address, secured, &self.rdma);
        let mut process = match process {
            Ok(process) => process,
            Err(error) => return Ok(Err(describe(error))),
        };
        control.send(FrameKind::ComputePorts, &process.ports())?;
        let connect = match receive_table(control, secured)? {
            Ok(received) => received,
            Err(text) => return Ok(Err(text)),
        };
        let Connect { table, leases, .. } = &connect;
        let (named, nodes) = (table.0.len(), request.nodes);
        if named != usize::from(nodes) {
            return Ok(Err(format!("{named} of {nodes} nodes are named")));
        }
        let lent = table.0.get(usize::from(request.me));
        let lent = lent.map_or(0, |member| member.lent_bytes);
        let granted = leases.iter().map(|lease| lease.grant.bytes);
        if let Err(text) = check_lent(lent, granted, request.lent_bytes) {
            return Ok(Err(text));
        }
        let connected = process.connect(&connect);
        Ok(connected.map(|()| process).map_err(describe))
    }
}

/// Checks what a process is to use: `lent` counts what donors have granted as well, and this node has
/// reserved so many bytes of its own.
fn check_lent(lent: u64, granted: impl Iterator<Item = u64>, reserved: u64) -> Result<(), String> {
    let granted = granted.fold(0, u64::saturating_add);
    let own = lent.saturating_sub(granted);
    if own > reserved {
        return Err(format!(
            "{own} bytes of this node's memory are named, {reserved} were asked for; the primary has to \
             name what it has asked for"
        ));
    }
    Ok(())
}

/// Receives where all nodes listen, and before that the leases for this one. On a `secured`
/// connection these are at donors with certificates, and on another one not.
fn receive_table(
    control: &mut ControlStream,
    secured: bool,
) -> Result<Result<Connect, String>, ControlError> {
    let until = Instant::now() + TABLE_TIME_MAX;
    let (mut leases, mut authorities) = (Vec::new(), Vec::new());
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let (frame, payload) = control.receive(left)?;
        match frame.kind {
            FrameKind::ComputeLease if leases.len() == DONORS_MAX => {
                return Ok(Err(format!(
                    "more than {DONORS_MAX} leases are given, which is the limit"
                )));
            }
            FrameKind::ComputeLease => {
                let lease: ComputeLease = control.decode(frame.kind, &payload)?;
                if let Err(error) = lease.check() {
                    return Ok(Err(format!("a lease at {}: {error}", lease.address)));
                }
                if lease.name.is_some() != secured {
                    let (names, has) = match secured {
                        true => ("no name", "certificates"),
                        false => ("a name", "none"),
                    };
                    return Ok(Err(format!(
                        "a lease at {} comes with {names} to compare with a certificate of the \
                         donor, and this connection has {has}",
                        lease.address
                    )));
                }
                leases.push(lease);
            }
            FrameKind::ComputeAuthority => {
                authorities.push(control.decode(frame.kind, &payload)?);
                if let Err(text) = check_authorities(&authorities) {
                    return Ok(Err(text));
                }
            }
            FrameKind::ComputeTable => {
                let table = control.decode(frame.kind, &payload)?;
                return Ok(Ok(Connect {
                    table,
                    leases,
                    authorities,
                }));
            }
            kind => return Ok(Err(format!("{kind:?} is not expected here"))),
        }
    }
}

impl CpuLender for CpuHost {
    fn clock(&self) -> NodeClock {
        let rate = self.clock.map(|clock| ClockRate {
            khz: clock.khz,
            scales: clock.scales,
        });
        NodeClock {
            rate,
            cpus: self.cpus,
            free: self.cpus - *self.lent(),
            // Last, so that it is the newest.
            ticks: time_stamp(),
        }
    }

    fn serve(
        &self,
        control: &mut ControlStream,
        request: &ComputeRequest,
        ending: &Ending,
    ) -> Result<(), ControlError> {
        let (vm, cpus, peer) = (&request.name, request.cpus, control.peer());
        let _taken = match self.take(cpus) {
            Ok(taken) => taken,
            Err(text) => return refuse(control, Refusal::NoCpus, text),
        };
        let mut process = match self.start(control, request)? {
            Ok(process) => process,
            Err(text) => return refuse(control, Refusal::Busy, text),
        };
        match LENT.pass(Instant::now()) {
            Some(unreported) => tracing::info!(%peer, vm, cpus, unreported, "vCPUs lent"),
            None => tracing::debug!(%peer, vm, cpus, "vCPUs lent"),
        }
        // The primary sends nothing more: its connection ends with the VM.
        let stream = control.socket().map(|stream| stream.as_fd());
        let others: Vec<_> = stream.into_iter().chain([ending.fd()]).collect();
        let event = process.wait(&others, None);
        if let Some(reason) = ending.reason() {
            // At once: it may not use this node any more.
            drop(process);
            tracing::warn!(%peer, vm, cpus, "vCPUs taken back: {reason}");
            let reason = reason.to_owned();
            return control.send(FrameKind::ComputeEnd, &ComputeEnd { reason });
        }
        let end = process.end(Instant::now() + END_TIME_MAX);
        drop(process);
        if end.reason.is_empty() {
            match RETURNED.pass(Instant::now()) {
                Some(unreported) => tracing::info!(%peer, vm, cpus, unreported, "vCPUs returned"),
                None => tracing::debug!(%peer, vm, cpus, "vCPUs returned"),
            }
        } else {
            match FAILED.pass(Instant::now()) {
                Some(unreported) => {
                    tracing::warn!(%peer, vm, cpus, unreported, "vCPUs returned: {}", end.reason);
                }
                None => tracing::debug!(%peer, vm, cpus, "vCPUs returned: {}", end.reason),
            }
        }
        match event {
            Ok(Event::Process) => control.send(FrameKind::ComputeEnd, &end),
            _ => Ok(()),
        }
    }
}

fn refuse(control: &mut ControlStream, refusal: Refusal, text: String) -> Result<(), ControlError> {
    let peer = control.peer();
    match REFUSED.pass(Instant::now()) {
        Some(unreported) => tracing::info!(%peer, text, unreported, "refused"),
        None => tracing::debug!(%peer, text, "refused"),
    }
    control.send(FrameKind::Error, &ErrorMessage { refusal, text })
}

fn describe(error: ProcessError) -> String {
    format!("{:#}", anyhow::Error::new(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_gets_no_more_memory_than_was_asked_for() {
        let check = |lent, granted: &[u64]| check_lent(lent, granted.iter().copied(), 8 << 20);
        assert_eq!(check(8 << 20, &[]), Ok(()));
        assert_eq!(check(28 << 20, &[16 << 20, 4 << 20]), Ok(()));
        let refused = check(1 << 40, &[]).expect_err("1 TiB");
        assert!(refused.contains("8388608 were asked for"), "{refused}");
        assert!(check(29 << 20, &[20 << 20]).is_err());
        assert_eq!(check(u64::MAX, &[u64::MAX, 1]), Ok(()));
    }

    #[test]
    fn no_more_cpus_are_lent_than_there_are() {
        let host = CpuHost::new(4, RdmaOfNode::Off);
        let first = host.take(3).expect("free");
        let refused = host.take(2).err().expect("only one is left");
        assert!(
            refused.contains("2 vCPUs asked, 1 of 4 are free"),
            "{refused}"
        );
        let _second = host.take(1).expect("free");
        drop(first);
        assert!(host.take(4).is_err() && host.take(3).is_ok());
    }
}
