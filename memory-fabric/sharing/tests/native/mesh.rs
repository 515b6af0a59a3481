//! Nodes of one process, each with a memory of its own, connected by queues.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use crossbeam_channel::{Receiver as Queue, Sender, unbounded};
use fabric_coherence::{Member, MemberSet};
use fabric_pages::guest_memory::GuestMemory;
use fabric_pages::page::PageBytes;
use fabric_peers::{PeerError, PeerMessage, Peers, Receiver};
use fabric_sharing::{
    Config, Failure, FailureObserver, Homes, LOCAL_PAGES_MIN, Layout, SharedMemory,
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

type Item = (Member, PeerMessage, Option<Box<PageBytes>>);

/// One node's end of the queues.
pub struct Mesh {
    me: Member,
    arrived: Queue<Item>,
    wake: Arc<EventFd>,
    others: Vec<(Sender<Item>, Arc<EventFd>)>,
    touched: Vec<bool>,
}

impl Mesh {
    /// The ends of `count` nodes.
    pub fn new(count: u8) -> Vec<Self> {
        let ends: Vec<_> = (0..count)
            .map(|_| {
                let (sender, queue) = unbounded();
                let wake = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).expect("an eventfd");
                (sender, queue, Arc::new(wake))
            })
            .collect();
        let others = ends
            .iter()
            .map(|(sender, _, wake)| (sender.clone(), Arc::clone(wake)));
        let others: Vec<_> = others.collect();
        let ends = (0..).zip(ends);
        ends.map(|(place, (_, arrived, wake))| Self {
            me: member(place),
            arrived,
            wake,
            others: others.clone(),
            touched: vec![false; usize::from(count)],
        })
        .collect()
    }
}

impl Peers for Mesh {
    fn send(&mut self, to: Member, message: PeerMessage, bytes: Option<&PageBytes>) {
        assert_eq!(bytes.is_some(), message.has_page(), "{message:?}");
        let (sender, _) = &self.others[to.index()];
        let item = (self.me, message, bytes.map(|bytes| Box::new(*bytes)));
        // A node that has ended gets nothing.
        let _ = sender.send(item);
        self.touched[to.index()] = true;
    }

    fn flush(&mut self) {
        for (touched, (_, wake)) in self.touched.iter_mut().zip(&self.others) {
            if std::mem::take(touched) {
                wake.write(1).expect("an eventfd");
            }
        }
    }

    fn receive(&mut self, receiver: &mut Receiver<'_>) -> Result<bool, PeerError> {
        let mut any = false;
        // Cleared before the queue is read, so that nothing that comes after it is missed.
        if !self.arrived.is_empty() {
            let _ = self.wake.read();
        }
        while let Ok((from, message, bytes)) = self.arrived.try_recv() {
            any = true;
            receiver(from, message, bytes.as_deref());
        }
        Ok(any)
    }

    fn poll_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }
}

pub fn member(place: u8) -> Member {
    Member::at(place).expect("at most 16")
}

/// Blocks that each node lends when it may hold all of the memory.
pub const ALL: usize = usize::MAX;

/// A node of `count` that each lend `lent` of the memory's blocks.
pub fn config(me: u8, count: u8, blocks: usize, lent: usize) -> Config {
    let members = (0..count).map(member);
    let members = members.fold(MemberSet::EMPTY, MemberSet::with);
    let mut config = Config::new(member(me), members);
    if lent != ALL {
        let loans = vec![lent as u64; count.into()];
        let homes = Homes::in_proportion(&loans, std::slice::from_ref(&(0..blocks)), Layout::Mixed);
        config.homes = Some(homes.expect("enough is lent"));
        config.local_pages = lent * 512 + LOCAL_PAGES_MIN;
    }
    config
}

/// Starts `count` nodes that share a memory of `blocks` blocks and lend `lent` of them each.
pub fn nodes(count: u8, blocks: usize, lent: usize) -> Vec<SharedMemory> {
    nodes_with(count, blocks, |place| config(place, count, blocks, lent))
}

/// Starts `count` nodes that share a memory of `blocks` blocks, each with the configuration of its
/// place.
pub fn nodes_with(count: u8, blocks: usize, config: impl Fn(u8) -> Config) -> Vec<SharedMemory> {
    nodes_that_fail(count, blocks, config, |place| {
        Box::new(move |failure: Failure, losses| {
            eprintln!(
                "node {place}: {}, {losses:?}",
                fabric_host::describe(&failure)
            );
            // Threads that wait for a page would wait for ever.
            std::process::abort();
        })
    })
}

/// The same with what learns of the failure of each node.
pub fn nodes_that_fail(
    count: u8,
    blocks: usize,
    config: impl Fn(u8) -> Config,
    failed: impl Fn(u8) -> FailureObserver,
) -> Vec<SharedMemory> {
    let nodes = (0..count).zip(Mesh::new(count)).map(|(place, mesh)| {
        let memory = Arc::new(GuestMemory::new(blocks << 21).expect("memory"));
        SharedMemory::start(config(place), memory, mesh, failed(place)).expect("a node")
    });
    nodes.collect()
}
