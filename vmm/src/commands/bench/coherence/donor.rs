//! Pages that nodes keep at a donor, fetched by their home and by another node.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, bail, ensure};
use fabric_coherence::Member;
use fabric_sharing::{Homes, Layout};
use memory_fabric::BLOCK_BYTES;
use memory_fabric::donor::server::Donor;
use memory_fabric::page::PAGE_SIZE;

use super::floor::SAMPLES;
use super::nodes::{Carrier, Nodes, Shared};
use super::protocol::{Answer, Command, Counters, Exchange, Pages, UsedDonor};
use super::{BLOCK, Transaction, compared, histogram, times};
use crate::commands::bench::{ROUNDS, Series, fault};

/// Blocks that a node with a lease lends. It keeps as many of those whose home it is, the first ones,
/// and their pages leave it no more room than for copies.
const LOCAL_BLOCKS: u64 = 4;
/// Blocks that each other node lends.
const OTHERS_BLOCKS: u64 = 2;
/// Nodes with a lease at the donor: the first ones.
const LESSEES: usize = 2;
/// Blocks that the donor lends each of them, in which a round reads two at most; the last of them are
/// what the node has copies of at first.
const LENT_BLOCKS: u64 = 2 * ROUNDS as u64 + 4;

/// Who reads pages, and where these have their home.
struct Fetch {
    name: &'static str,
    node: usize,
    home: usize,
    floor: Exchange,
}

const FETCHES: [Fetch; 3] = [
    Fetch {
        name: "from its home, node 0",
        node: 0,
        home: 0,
        floor: Exchange::Fetch,
    },
    Fetch {
        name: "from node 1, by its home",
        node: 1,
        home: 0,
        floor: Exchange::Relay,
    },
    Fetch {
        name: "from its home, node 1",
        node: 1,
        home: 1,
        floor: Exchange::Fetch,
    },
];

/// The nodes, and what was measured.
pub(super) struct AtDonor {
    nodes: Nodes,
    // Ends after the nodes, which use it.
    donor: Donor,
    /// Where node 1 is helped with bare exchanges.
    far: SocketAddr,
    /// By home: blocks that are at the donor and were not read since.
    blocks: [Vec<usize>; LESSEES],
    /// By fetch: pages, and bare exchanges.
    series: [(Series, Series); FETCHES.len()],
    pub(super) verified_bytes: u64,
    pub(super) corrupt_bytes: u64,
}

impl AtDonor {
    /// Starts a donor in this process, and nodes of which the first ones use it, each with a lease of
    /// its own. Fills their pages.
    pub(super) fn start(nodes: u8, carrier: Carrier) -> Result<Self> {
        let lessees = LESSEES as u64;
        // The floors lease a page each.
        let donor = Donor::start(&fault::donor((lessees * LENT_BLOCKS + 1) * BLOCK_BYTES))?;
        let mut lent = vec![OTHERS_BLOCKS; nodes.into()];
        lent[..LESSEES].fill(LOCAL_BLOCKS + LENT_BLOCKS);
        let blocks = usize::try_from(lent.iter().sum::<u64>())?;
        let homes = Homes::in_proportion(&lent, std::slice::from_ref(&(0..blocks)), Layout::Mixed)?;
        let used = UsedDonor {
            address: donor.address(),
            lent_bytes: LENT_BLOCKS * BLOCK_BYTES,
            local_bytes: LOCAL_BLOCKS * BLOCK_BYTES,
        };
        let shared = Shared {
            blocks: u32::try_from(blocks)?,
            lent_bytes: lent.iter().map(|blocks| blocks * BLOCK_BYTES).collect(),
            carrier,
            donors: vec![used; LESSEES],
        };
        let mut nodes = Nodes::start(&shared)?;
        let mut at_donor = [const { Vec::new() }; LESSEES];
        for (node, at_donor) in at_donor.iter_mut().enumerate() {
            let member = u8::try_from(node).ok().and_then(Member::at);
            let of_it: Vec<usize> = homes.blocks_at(member.context("no such node")?).collect();
            for block in &of_it {
                nodes.ask(node, &Command::Fill(pages(*block, 0, BLOCK)))?;
            }
            let kept = usize::try_from(LOCAL_BLOCKS)?;
            // The next one is taken from the end.
            *at_donor = of_it.into_iter().skip(kept).rev().collect();
        }
        let address = donor.address();
        let Answer::Listening(far) = nodes.ask(0, &Command::FloorServe(Some(address)))? else {
            bail!("node 0 serves no floor");
        };
        Ok(Self {
            nodes,
            donor,
            far,
            blocks: at_donor,
            series: Default::default(),
            verified_bytes: 0,
            corrupt_bytes: 0,
        })
    }

    /// Measures pages that no other round measures.
    pub(super) fn round(&mut self) -> Result<()> {
        for (place, fetch) in FETCHES.iter().enumerate() {
            let (node, what) = (fetch.node, fetch.floor);
            let far = match what {
                Exchange::Relay => self.far,
                _ => self.donor.address(),
            };
            let floor = self.nodes.ask(node, &Command::Floor { far, what })?;
            self.series[place].1.add(&times(floor)?);
            let block = self.blocks[fetch.home].pop();
            let block = block.context("too few blocks at the donor")?;
            // The block of a home is split when another node uses it.
            self.compare(node, pages(block, SAMPLES, BLOCK - SAMPLES))?;
            let before = self.fetched(fetch.home)?;
            let times = self.compare(node, pages(block, 0, SAMPLES))?;
            self.series[place].0.add(&histogram(times));
            let came = self.fetched(fetch.home)? - before;
            ensure!(
                came == SAMPLES as u64,
                "{came} of {SAMPLES} pages that node {node} read came from the donor of node {}",
                fetch.home
            );
        }
        Ok(())
    }

    /// Has a node read pages. Returns the time of each access.
    fn compare(&mut self, node: usize, pages: Pages) -> Result<Vec<u64>> {
        let answer = self.nodes.ask(node, &Command::Compare(pages))?;
        let Answer::Compared {
            times,
            corrupt_bytes,
        } = answer
        else {
            bail!("node {node} compared nothing: {answer:?}");
        };
        self.verified_bytes += (pages.count * PAGE_SIZE) as u64;
        self.corrupt_bytes += corrupt_bytes;
        Ok(times)
    }

    /// Pages that a home got from the donor so far.
    fn fetched(&mut self, home: usize) -> Result<u64> {
        match self.nodes.ask(home, &Command::Stats)? {
            Answer::Stats(Counters { from_depot, .. }) => Ok(from_depot),
            other => bail!("node {home} has no counters: {other:?}"),
        }
    }

    /// What each node's fetches took.
    pub(super) fn transactions(&self) -> Vec<Transaction> {
        let series = FETCHES.iter().zip(&self.series);
        series
            .map(|(fetch, series)| compared(fetch.name, series))
            .collect()
    }
}

fn pages(block: usize, first: usize, count: usize) -> Pages {
    Pages {
        first: block * BLOCK + first,
        step: 1,
        count,
    }
}
