//! The vCPUs that a node has, or could have: it has a KVM vCPU and a thread for each vCPU of the
//! machine that was ever there. KVM keeps a vCPU until the end of its VM, so the thread of one that
//! has left waits for it to come back.

use std::sync::Arc;
use std::thread;

use kvm_ioctls::VmFd;
use ssi_hv_nodes::NodeNumber;

use super::Nodes;
use super::seat::Seat;
use super::time::NodeTime;
use crate::error::MachineError;
use crate::irqchip::InterruptController;
use crate::lifecycle::kick::Kick;
use crate::lifecycle::shared::Shared;
use crate::vcpu::model::CpuModel;
use crate::vcpu::state::HostFacts;
use crate::vcpu::{Vcpu, tsc};

/// What a node creates vCPUs of.
#[derive(Debug)]
pub(crate) struct Maker {
    pub model: CpuModel,
    pub vm: Arc<VmFd>,
    pub interrupts: InterruptController,
    /// CPUs of the host, one per vCPU in order.
    pub pinning: Vec<u32>,
    /// The clock of all vCPUs: the offset is that from the counter of the primary's host.
    pub clock: tsc::Clock,
    pub host: HostFacts,
    pub time: Arc<NodeTime>,
}

impl Maker {
    fn create(&self, cpu: u8, seat: Arc<Seat>, is_away: bool) -> Result<Vcpu, MachineError> {
        let (vm, interrupts) = (&self.vm, &self.interrupts);
        let vcpu = self.model.create_vcpu(vm, interrupts, cpu, &self.pinning)?;
        let added = self.time.newest();
        let scales = self.time.counter().scales();
        self.clock.moved_by(added).set(&vcpu.fd, scales)?;
        Ok(Vcpu {
            added,
            seat: Some(seat),
            is_away,
            ..vcpu
        })
    }
}

/// The places of all vCPUs of a machine on this node.
#[derive(Debug)]
pub(crate) struct Seats {
    maker: Arc<Maker>,
    seats: Vec<Arc<Seat>>,
}

impl Seats {
    /// The places of the vCPUs that are kicked by `kicks`, in order.
    pub fn new(maker: Maker, nodes: &Arc<Nodes>, kicks: &[Arc<Kick>]) -> Self {
        let seat = |kick: &Arc<Kick>| {
            let (nodes, time) = (Arc::clone(nodes), Arc::clone(&maker.time));
            Arc::new(Seat::new(nodes, maker.host.clone(), time, Arc::clone(kick)))
        };
        Self {
            seats: kicks.iter().map(seat).collect(),
            maker: Arc::new(maker),
        }
    }

    /// Returns the time of all vCPUs.
    pub fn clock(&self) -> tsc::Clock {
        self.maker.clock
    }

    /// Creates the vCPUs that begin on this node.
    pub fn vcpus(&self) -> Result<Vec<Vcpu>, MachineError> {
        let all = (0..).zip(&self.seats);
        let here = all.filter(|(cpu, seat)| seat.nodes().is_here(*cpu));
        here.map(|(cpu, seat)| {
            seat.has_thread_now();
            self.maker.create(cpu, Arc::clone(seat), false)
        })
        .collect()
    }

    /// Gives a vCPU that has come from another node to its thread, which is started if there is none.
    pub fn arrive(&self, cpu: u8, state: Vec<u8>, shared: &Arc<Shared>) {
        let Some(seat) = self.seats.get(usize::from(cpu)) else {
            return;
        };
        seat.arrive(state);
        if seat.has_thread_now() {
            return;
        }
        let (seat, maker) = (Arc::clone(seat), Arc::clone(&self.maker));
        let of_thread = Arc::clone(shared);
        // The receiving thread, which delivers interrupts, does not wait for KVM.
        let create = move || {
            let started = maker
                .create(cpu, seat, true)
                .and_then(|vcpu| vcpu.spawn(Arc::clone(&of_thread)));
            if let Err(error) = started {
                of_thread.control.end(Err(error));
            }
            of_thread.control.vcpu_ended();
        };
        shared.control.vcpu_starts();
        let thread = thread::Builder::new().name(format!("new-vcpu{cpu}"));
        if let Err(error) = thread.spawn(create) {
            let error = MachineError::host("start the thread of a vCPU")(error);
            shared.control.end(Err(error));
            shared.control.vcpu_ended();
        }
    }

    /// Orders a vCPU of this node to go to another one. Returns false if it is not here, or there is
    /// no such node.
    pub fn order(&self, cpu: u8, to: NodeNumber) -> bool {
        let seat = self.seats.get(usize::from(cpu));
        seat.is_some_and(|seat| seat.order(cpu, to))
    }
}
