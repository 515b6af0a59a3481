//! The primary's side: one receiving thread a node, and one for its accesses to devices.

use std::convert::Infallible;
use std::sync::mpsc::{self, Receiver as Accesses, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ssi_hv_nodes::{Access, Link, LinkError, Message, NodeNumber, Receiver, Space, Start};

use super::remote::from_message;
use super::seats::Seats;
use super::serve::Board;
use super::{Connections, Mover, Nodes};
use crate::error::MachineError;
use crate::irqchip::InterruptController;
use crate::lifecycle::ending::STOP_TIME_MAX;
use crate::lifecycle::shared::Shared;
use crate::sys::time_stamp;

/// How long a node may take to greet and to create its vCPUs.
const START_TIME_MAX: Duration = Duration::from_secs(30);

/// The other nodes of a machine. Dropping it ends the connections.
#[derive(Debug)]
pub(crate) struct Primary {
    nodes: Arc<Nodes>,
    threads: Vec<JoinHandle<()>>,
    /// Held by each thread that carries out accesses, and by this until its end.
    carries: Option<mpsc::Sender<Infallible>>,
    carriers_end: mpsc::Receiver<Infallible>,
    mover: Arc<Mover>,
}

impl Primary {
    /// Starts the threads, and the vCPUs of the other nodes. When it returns, all are in their place.
    pub fn start(
        connections: Connections,
        interrupts: &InterruptController,
        shared: &Arc<Shared>,
        start: &Start,
        seats: &Arc<Seats>,
    ) -> Result<Self, MachineError> {
        let Connections {
            nodes,
            receivers,
            lent,
            late,
        } = connections;
        let InterruptController::User(chip) = interrupts else {
            let reason = "KVM's interrupt controllers do not reach other hosts".to_owned();
            return Err(MachineError::Nodes { reason });
        };
        let board = Board {
            nodes: Arc::clone(&nodes),
            chip: Arc::clone(chip),
            seats: Arc::clone(seats),
            shared: Arc::clone(shared),
        };
        let mover = Mover::new(Arc::clone(&nodes), Arc::clone(seats), lent, late);
        let (carries, carriers_end) = mpsc::channel();
        let mut primary = Self {
            nodes,
            threads: Vec::new(),
            carries: Some(carries),
            carriers_end,
            mover: Arc::new(mover),
        };
        let count = receivers.len();
        let (started, starts) = mpsc::channel();
        for receiver in receivers {
            let node = Node {
                board: board.clone(),
                shared: Arc::clone(shared),
                started: Mutex::new(Some(started.clone())),
            };
            primary.spawn(node, receiver, start)?;
        }
        drop(started);
        for _ in 0..count {
            // Each thread reports, or ends with an error of the run.
            if starts.recv().is_err() {
                let end = shared.control.take_end().and_then(Result::err);
                return Err(end.unwrap_or_else(|| MachineError::Nodes {
                    reason: "the run has ended before its start".to_owned(),
                }));
            }
        }
        Ok(primary)
    }

    /// Moves vCPUs.
    pub fn mover(&self) -> Arc<Mover> {
        Arc::clone(&self.mover)
    }

    fn spawn(
        &mut self,
        node: Node,
        mut receiver: Receiver,
        start: &Start,
    ) -> Result<(), MachineError> {
        let peer = receiver.link().peer();
        // A vCPU has one access at a time, and each may be on that node.
        let (sender, accesses) = mpsc::sync_channel(start.owners.len());
        let of_thread = Arc::clone(&node.shared);
        let link = Arc::clone(receiver.link());
        let carries = self.carries.clone();
        let io = thread::Builder::new()
            .name(format!("node{peer}-io"))
            .spawn(move || {
                carry_out(&link, &accesses, &of_thread);
                drop(carries);
            });
        io.map_err(MachineError::host("start a thread"))?;
        let start = start.clone();
        // It ends with its last vCPU, as a thread of a vCPU does.
        node.shared.control.vcpu_starts();
        let thread = thread::Builder::new()
            .name(format!("node{peer}"))
            .spawn(move || node.run(&mut receiver, start, &sender));
        self.threads
            .push(thread.map_err(MachineError::host("start a thread"))?);
        Ok(())
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        self.nodes.moves.end();
        for link in &self.nodes.links {
            link.close();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        // Of the others, one may be in a device that does not come to an end: it is left behind, as
        // the threads of devices are.
        drop(self.carries.take());
        let _ = self.carriers_end.recv_timeout(STOP_TIME_MAX);
    }
}

/// One other node, as its receiving thread serves it.
struct Node {
    board: Board,
    shared: Arc<Shared>,
    /// Told when the node has its vCPUs; dropped when it will not have them.
    started: Mutex<Option<mpsc::Sender<NodeNumber>>>,
}

/// Counts a node out, once.
struct Member<'a> {
    shared: &'a Shared,
    is_there: bool,
}

impl Member<'_> {
    fn left(&mut self) {
        if std::mem::take(&mut self.is_there) {
            self.shared.control.vcpu_ended();
        }
    }
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        self.left();
    }
}

impl Node {
    fn run(self, receiver: &mut Receiver, start: Start, accesses: &SyncSender<(u32, Access)>) {
        let control = &self.shared.control;
        let mut member = Member {
            shared: &self.shared,
            is_there: true,
        };
        let link = Arc::clone(receiver.link());
        let peer = link.peer();
        let error = match Self::start(receiver, start) {
            Ok(()) => {
                let started = self.started.lock().ok().and_then(|mut slot| slot.take());
                if let Some(started) = started {
                    // The machine may have been given up.
                    let _ = started.send(peer);
                }
                receiver.expects_life();
                self.board.serve(receiver, |message| {
                    match message {
                        Message::EndOfInterrupt { vector } => {
                            self.board.chip.end_of_interrupt(vector);
                        }
                        Message::Access { call, access } => {
                            return accesses
                                .try_send((call, access))
                                .map_err(|_| Message::Access { call, access });
                        }
                        Message::Report(report) => {
                            if let Some(observer) = &self.board.nodes.observer {
                                observer.reported(peer, report);
                            }
                        }
                        Message::ClockAsk { number } => {
                            let ticks = time_stamp();
                            link.send(&Message::ClockAnswer { number, ticks });
                        }
                        Message::Arrived { cpu } if self.board.nodes.is_of(peer, cpu) => {
                            self.board.nodes.moves.arrived(cpu);
                        }
                        Message::Paused { number } => control.node_parked(number),
                        Message::End(end) => {
                            control.end(from_message(end, peer, self.board.nodes.me))
                        }
                        Message::Ended => member.left(),
                        message => return Err(message),
                    }
                    Ok(())
                })
            }
            Err(StartError::Link(error)) => error,
            Err(StartError::Failed(end)) => {
                control.end(from_message(end, peer, self.board.nodes.me));
                return;
            }
        };
        // Without effect if the run has ended.
        control.end(Err(error.into()));
        self.board.nodes.moves.end();
        link.end_calls();
    }

    /// Greets the node, and waits until it has its vCPUs.
    fn start(receiver: &mut Receiver, start: Start) -> Result<(), StartError> {
        let until = Instant::now() + START_TIME_MAX;
        receiver.greet(until)?;
        receiver.link().send(&Message::Start(start));
        match receiver.next(Some(until))? {
            Some(Message::Started) => Ok(()),
            Some(Message::End(end)) => Err(StartError::Failed(end)),
            Some(message) => Err(receiver
                .broken(format!("it must not send {message:?}"))
                .into()),
            None => Err(StartError::Link(LinkError::Silent {
                peer: receiver.link().peer(),
                time: START_TIME_MAX,
            })),
        }
    }
}

/// Why a node does not start.
enum StartError {
    Link(LinkError),
    Failed(ssi_hv_nodes::End),
}

impl From<LinkError> for StartError {
    fn from(error: LinkError) -> Self {
        Self::Link(error)
    }
}

/// An access of a node to a device, which may panic.
struct AtWork<'a> {
    shared: &'a Shared,
    of: NodeNumber,
}

impl<'a> AtWork<'a> {
    fn begin(shared: &'a Shared, of: NodeNumber) -> Self {
        shared.control.device_thread_starts();
        Self { shared, of }
    }
}

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        let control = &self.shared.control;
        if thread::panicking() {
            // The vCPU would wait for its answer for ever.
            let device = format!("that a vCPU of node {} has accessed", self.of);
            control.end(Err(MachineError::DevicePanicked { device }));
        }
        control.device_thread_ended();
    }
}

/// Carries out the accesses of a node to devices, in order. A device may wait, for a reader of the
/// console or a disk, and interrupts must not wait with it.
fn carry_out(link: &Link, accesses: &Accesses<(u32, Access)>, shared: &Shared) {
    while let Ok((call, access)) = accesses.recv() {
        if shared.control.has_ended() {
            // No vCPU waits for an answer any more.
            continue;
        }
        // The end of the run waits for it, within limits.
        let at_work = AtWork::begin(shared, link.peer());
        let bus = match access.space {
            Space::Ports => &shared.ports,
            Space::Memory => &shared.mmio,
        };
        let mut data = access.write.unwrap_or_default();
        let bytes = &mut data[..usize::from(access.len.min(8))];
        if access.write.is_some() {
            bus.write(access.address, bytes);
        } else {
            bus.read(access.address, bytes);
        }
        drop(at_work);
        // A guest that has switched itself off does not run on: its vCPU gets no answer.
        match shared.events.get() {
            Some(event) => shared.control.end(Ok(event.into())),
            None => link.send(&Message::Answer { call, data }),
        }
    }
}
